"""Measures training steps over two hosts (tools/hosts.sh, needs root): how much of the communication is hidden.

Usage: python3 bench/hosts_step.py [--case CASE]... [--rounds N] [--json FILE]
The cases: tp      TP 2 over the hosts, a wire on which the step's bytes travel as long as its compute takes
           tp10    more layers and tokens and a vocabulary, on a wire so fast that about a tenth of a serial step is communication
           dp_tp   DP 2 over the hosts, TP 2 in each (4 ranks): the gradients, which travel half as long as the step computes
Columns: the step; the same without overlap; over the process group's collectives; without transfers. Comm: the share of a serial step beyond the
last. Hidden: the share of that which overlap hides.
"""
import json
import tempfile

from hosts import arguments, keep, on_hosts

MODEL = "--num-attention-heads 16 --lr 1e-4".split()
TP = "--tensor-model-parallel-size 2 --sequence-parallel --use-coc".split()
BYTES = "--vocab-size 256".split()
WIDE = "--hidden-size 2048 --ffn-hidden-size 5632".split()
DEEP = "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816".split()
SHORT = "--seq-length 512 --micro-batch-size 2".split()
LONG = "--seq-length 1024 --micro-batch-size 2".split()
DP = "--overlap-grad-reduce --ddp-bucket-size 1000000".split()
# Ranks of a host, flags, the seconds on the wire of one second of compute.
CASES = {"tp": (1, [*BYTES, *WIDE, "--num-layers", "2", *SHORT, *TP], 1),
         "tp10": (1, [*WIDE, "--vocab-size", "8192", "--num-layers", "4", *LONG, *TP], 0.17),
         "dp_tp": (2, BYTES + DEEP + SHORT + TP + DP, 0.5)}


def bytes_of_step(ranks, flags):
    """What host 0 sends, from the difference of two runs, in both or none of which a step was run again to measure it (after 2)."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as text, tempfile.TemporaryDirectory() as folder:
        text.write(b"warp and weft " * 4000)
        text.flush()
        sent = [on_hosts(None, ranks, "train", *MODEL, *serial(flags), "--data-path", text.name, "--split", "9,1", "--eval-iters", 0,
                         "--output-dir", f"{folder}/{count}", "--train-iters", count)[1] for count in (2, 3)]
    return sent[1] - sent[0]


def serial(flags):
    return [flag for flag in flags if flag != "--use-coc"]


def bench(ranks, flags, rate, rounds):
    return json.loads(on_hosts(rate, ranks, "bench", "step", *MODEL, *flags, "--train-iters", rounds, "--json")[0])


def main():
    args = arguments("--case", CASES).parse_args()
    print(f"{'':<6} {'MB/step':>8} {'Mbit/s':>7} {'step s':>7} {'serial':>7} {'gloo':>7} {'no comm':>7}  gloo/step  gain over serial   comm  hidden")
    for case in args.case or CASES:
        ranks, flags, ratio = CASES[case]
        sent = bytes_of_step(ranks, flags)
        rate = sent * 8 / (bench(ranks, serial(flags), None, 3)["no_comm_step_s"] * ratio)
        line = bench(ranks, flags, rate, args.rounds)
        line |= {"case": case, "rate_bits_per_s": rate, "bytes_per_step": sent}
        times = [line[key] for key in ("step_s", "serial_step_s", "serial_gloo_step_s", "no_comm_step_s")]
        hidden = "-" if line["hidden_by_steps"] is None else f"{line['hidden_by_steps']:.1%}"
        print(f"{case:<6} {1e-6 * sent:>8.1f} {1e-6 * rate:>7.0f} {times[0]:>7.3f} {times[1]:>7.3f} {times[2]:>7.3f} {times[3]:>7.3f}  "
              f"{times[2] / times[0]:>9.2f}  {1 - times[0] / times[1]:>15.1%}  {1 - times[3] / times[1]:>5.1%}  {hidden:>6}", flush=True)
        keep(args.json, line)


if __name__ == "__main__":
    main()
