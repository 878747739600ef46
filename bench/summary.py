"""Prints result files of bench/run.sh as Markdown tables; of repeated cases the median.

Usage: bench/summary.py FILE...
"""
import json
import statistics
import sys


def table(head, rows):
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()


MODES = {"serial, Gloo": "serial_gloo", "serial": "serial", "fused": "fused", "auto": "auto"}


def ratios(cases):
    """Geometric means of the modes' times as multiples of the matmul alone, uncut, on every rank at once."""
    return [f"{statistics.geometric_mean(case[mode + '_s'] / case['gemm_s'] for case in cases):.2f}" for mode in MODES.values()]


def ops_tables(cases):
    """By operation, type and rows the means over all weights; then every case."""
    groups = {}
    for case in cases:
        groups.setdefault((case["op"], case["dtype"], case["m"]), []).append(case)
    table(["op", "type", "m", *MODES], [[op, dtype, str(m), *ratios(group)] for (op, dtype, m), group in groups.items()])
    table(["op", "type", "m", "n", "k", "matmul, ms", *MODES, "auto chose"],
          [[case["op"], case["dtype"], *(str(case[size]) for size in "mnk"), f"{1e3 * case['gemm_s']:.3f}", *ratios([case]),
            case["auto_mode"]] for case in cases])


def step_table(cases):
    repeats = {}
    for case in cases:
        mode = case["mode"] if case["shared_memory"] else case["mode"] + ", process group"
        repeats.setdefault((case["tensor_model_parallel_size"], mode), []).append(case)

    def median(key, name):
        return statistics.median(case[name] for case in repeats[key])

    whole = next((median(key, "step_s") for key in repeats if key[0] == 1), None)
    rows = []
    for key in repeats:
        times = [f"{1e3 * median(key, name):.0f}"
                 for name in ("step_s", "compute_s", "comm_s", "hidden_comm_s", "exposed_comm_s")]
        mode = key[1] if key[0] > 1 else "one core"
        rows.append([f"TP {key[0]}", mode, *times, f"{median(key, 'step_s') / whole:.2f}" if whole else "-"])
    table(["training step", "mode", "ms", "compute", "communication", "hidden", "exposed", "/ TP 1"], rows)


def main():
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            cases = [json.loads(line) for line in file]
        ops = [case for case in cases if "op" in case]
        steps = [case for case in cases if "step_s" in case]
        if ops:
            ops_tables(ops)
        if steps:
            step_table(steps)
        for case in cases:
            if "transformers_step_s" in case:
                table(["a step on one core", "ms"], [[name, f"{1e3 * case[name + '_step_s']:.0f}"]
                                                     for name in ("braid", "transformers")])


main()
