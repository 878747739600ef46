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
    def rows_of(name, host):
        """That a host sends at least: its own to each other host, or partials of theirs."""
        if name == "broadcast":  # by rank 0
            return ROWS * (num_hosts - 1) if host == 0 else 0
        times = {"all_reduce": 2, "matmul_all_reduce": 2, "all_to_all": ranks_of_host}.get(name, 1)
        return times * ROWS * (num_hosts - 1) // num_hosts

    worst = 0.0
    for host, out in enumerate(run.out):
        lines = [line.split() for line in out.splitlines()]
        assert len(lines) == 9, out
        for name, sent in lines:
            fewest = REPEATS * rows_of(name, host) * FEATURES * F32
            if fewest == 0:
                assert int(sent) < 0.05 * REPEATS * ROWS * FEATURES * F32, (num_hosts, ranks_of_host, name, sent)
                continue
            ratio = int(sent) / fewest
            assert 1.0 < ratio < 1.05, (num_hosts, ranks_of_host, name, ratio)
            worst = max(worst, ratio)
    print(f"{num_hosts} hosts of {ranks_of_host}: at most {worst:.3f} of the fewest bytes")


def main(braid, operation):
    hosts.skip_where_there_are_none()
    for layout in ((2, 1), (2, 2), (3, 1)):
        check(braid, operation, *layout)


main(*sys.argv[1:])
