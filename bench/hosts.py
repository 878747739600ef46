"""Measures collective matmuls between hosts (tools/hosts.sh, needs root) at wires as fast as the matmul, slower and faster.

Usage: python3 bench/hosts.py [--op OP] [--k K]... [--wire RATIO]... [--rounds N] [--json FILE]
Each case is m = n = 2048, f32, 2 hosts of one rank, a core each. The rate of the wire is set so that what each host has to send takes
RATIO times as long as the rank's matmul, which is measured first. All columns are relative to the larger of the two.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
M = N = 2048
RANKS = 2
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
LAUNCH = 'exec "$0" launch --nproc {} --nnodes $NNODES --node-rank $NODE_RANK --master-addr $MASTER_ADDR -- "$0" "$@"'


def shape(op, k_of_rank):
    """n and k of the whole product, of which a rank multiplies 2048 x 2048 x k_of_rank."""
    return (N * RANKS, k_of_rank) if op == "all_gather_matmul" else (N, k_of_rank * RANKS)


def wire_bytes(op, k_of_rank):
    """What a host must send at least."""
    if op == "all_gather_matmul":
        return M // RANKS * k_of_rank * 4
    return M // RANKS * N * 4 * (2 if op == "matmul_all_reduce" else 1)


def on_hosts(rate, ranks_of_host, *words):
    """The standard output of host 0 and the bytes that it has sent; braid's words on two hosts, whose wire has a rate or no limit."""
    wire = ["--rate", f"{int(rate)}bit"] if rate else []
    run = subprocess.run([ROOT / "tools/hosts.sh", *wire, str(RANKS), "sh", "-c", LAUNCH.format(ranks_of_host), ROOT / "build/braid", *map(str, words)],
                         capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return "".join(re.findall(r"^\[0\] (.*\n)", run.stdout, re.M)), int(re.search(r"^host 0 sent (\d+)", run.stderr, re.M)[1])


def bench(op, k_of_rank, rate, rounds):
    n, k = shape(op, k_of_rank)
    out, _ = on_hosts(rate, 1, "bench", "ops", "--op", op, "--m", M, "--n", n, "--k", k, "--dtype", "f32", "--rounds", rounds, "--json")
    return json.loads(out)


def arguments(name, choices):
    """A parser of what all benches over hosts take; `name` of its choices may be given several times."""
    parser = argparse.ArgumentParser()
    parser.add_argument(name, action="append", choices=choices)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=argparse.FileType("a"))
    return parser


def keep(file, line):
    """Adds a line to the results, where they are asked for."""
    if file:
        file.write(json.dumps(line) + "\n")
        file.flush()


def main():
    parser = arguments("--op", OPS)
    parser.add_argument("--k", action="append", type=int)
    parser.add_argument("--wire", action="append", type=float)
    args = parser.parse_args()
    print(f"{'':<22} {'k':>5} {'wire':>5} {'gemm ms':>8} {'wire ms':>8} {'Mbit/s':>7}   auto serial  gloo  plan        cpu ms/MB")
    for op in args.op or OPS:
        for k in args.k or (2048, 1024):
            gemm = bench(op, k, None, 3)["gemm_s"]
            for ratio in args.wire or (0.25, 1, 4):
                rate = wire_bytes(op, k) * 8 / (gemm * ratio)
                line = bench(op, k, rate, args.rounds)
                line["rate_bits_per_s"] = rate
                line["wire_s"] = wire_bytes(op, k) * 8 / rate
                limit = max(line["gemm_s"], line["wire_s"])
                print(f"{op:<22} {k:>5} {ratio:>5} {1e3 * line['gemm_s']:>8.1f} {1e3 * line['wire_s']:>8.1f} {1e-6 * rate:>7.0f}  "
                      f"{0.5 * (line['auto_s'] + line['auto_again_s']) / limit:>5.2f} {line['serial_s'] / limit:>6.2f} "
                      f"{line['serial_gloo_s'] / limit:>5.2f}  {line['auto_mode']:<11} "
                      f"{1e3 * line['comm_cpu_s'] / (wire_bytes(op, k) / 2**20):>6.2f}", flush=True)
                keep(args.json, line)


if __name__ == "__main__":
    main()
