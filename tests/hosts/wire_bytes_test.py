# What operations send between hosts, by the counters of the interfaces: each byte once, and nothing through memory.
# Usage: wire_bytes_test.py BRAID OPERATION
import sys

import hosts

ROWS, FEATURES, F32 = 1200, 256, 4  # of operation.cpp
REPEATS = 50


def check(braid, operation, num_hosts, ranks_of_host):
    command = f"{braid} {hosts.LAUNCH} --nproc {ranks_of_host} -- {operation} count {REPEATS}"
    run = hosts.run(num_hosts, command)
    assert run.codes == [0] * num_hosts, (run.codes, run.err)
    gather = ROWS * (num_hosts - 1) // num_hosts * FEATURES * F32  # a host's rows to each other one, or partials of theirs
    worst = 0.0
    for out in run.out:
        lines = [line.split() for line in out.splitlines()]
        assert len(lines) == 6, out
        for name, sent in lines:
            ratio = int(sent) / (REPEATS * gather * (2 if name.endswith("all_reduce") else 1))
            assert 1.0 < ratio < 1.05, (num_hosts, ranks_of_host, name, ratio)
            worst = max(worst, ratio)
    print(f"{num_hosts} hosts of {ranks_of_host}: at most {worst:.3f} of the fewest bytes")


def main(braid, operation):
    hosts.skip_where_there_are_none()
    for layout in ((2, 1), (2, 2), (3, 1)):
        check(braid, operation, *layout)


main(*sys.argv[1:])
