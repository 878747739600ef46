# Ranks that are killed or frozen, and wires that are cut, before, in and after operations: whoever is left ends in time and names who is lost.
# Usage: faults_test.py BRAID OPERATION [ROUNDS]
import glob
import os
import random
import re
import signal
import sys
import tempfile
import time

import hosts

TIMEOUT = 2
FORWARD_AND_BACKWARD = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul_backward")
SAYS = (r"\w+: group run rank {}: (?P<lost_>lost )?rank (?P<lost>\d+)( \(of the host with ranks (?P<behind>[\d, ]+)\))?"
        r"(?(lost_)| did not come within the time-out).*: (?P<elapsed>[\d.]+) s elapsed of at most")


class Ranks:
    """Ranks without a launcher that would end them, in an endless loop of one operation."""

    def __init__(self, program, operation, num_hosts, ranks_of_host, flags=(), timeout=TIMEOUT):
        self.folder = tempfile.TemporaryDirectory()
        self.operation, self.size, self.ranks_of_host = operation, num_hosts * ranks_of_host, ranks_of_host
        ready = os.path.join(self.folder.name, "ready")
        # Each says its code, as rank:code.
        one = (f"export RANK=$((NODE_RANK * {ranks_of_host} + LOCAL_RANK)) LOCAL_RANK; "
               f"{program} loop {operation} {timeout} {ready}; echo $RANK:$?")
        self.run = hosts.Run(num_hosts, f"export TORCH_CPP_LOG_LEVEL=ERROR WORLD_SIZE={self.size} LOCAL_WORLD_SIZE={ranks_of_host}; "
                             f"for LOCAL_RANK in $(seq 0 {ranks_of_host - 1}); do ( {one} ) & done; wait", flags)
        deadline = time.monotonic() + 30
        while len(glob.glob(ready + ".*")) < self.size:
            assert self.run.process.poll() is None and time.monotonic() < deadline, self.run.process.communicate(timeout=20)
            time.sleep(0.01)

    def pids(self):
        """Of the ranks that run, by rank."""
        return {int(variables["RANK"]): pid for pid, (words, variables) in self.run.processes().items() if "loop" in words}

    def wait_until_left(self, ranks, limit):
        """Only these run, within `limit` seconds; how long it took."""
        begin = time.monotonic()
        while set(self.pids()) - set(ranks):
            assert time.monotonic() - begin < limit, f"{self.operation}: {self.pids()} run after {limit} s"
            time.sleep(0.02)
        return time.monotonic() - begin

    def end(self):
        """What each rank said, and its exit code."""
        self.run.wait(20)
        codes = dict(map(int, line.split(":")) for out in self.run.out for line in out.splitlines() if re.fullmatch(r"\d+:\d+", line))
        self.folder.cleanup()
        return "".join(self.run.err), codes

    def host_of(self, rank):
        return rank // self.ranks_of_host

    def expect_blame(self, said, rank, lost, longest):
        """The line in which a rank says whom it lost."""
        line = re.search(SAYS.format(rank), said)
        assert line, f"{self.operation}: rank {rank} did not say whom it lost:\n{said}"
        assert int(line["lost"]) in lost, f"{self.operation}: rank {rank} blames {line['lost']}, not one of {lost}:\n{said}"
        first = int(line["lost"]) // self.ranks_of_host * self.ranks_of_host
        behind = ", ".join(map(str, range(first, first + self.ranks_of_host))) if self.ranks_of_host > 1 else None
        assert line["behind"] == behind, line[0]
        assert float(line["elapsed"]) <= longest, line[0]


def killed(program, operation, layout, victim):
    ranks = Ranks(program, operation, *layout, timeout=30)
    time.sleep(random.uniform(0, 0.05))
    os.kill(ranks.pids()[victim], signal.SIGKILL)
    seconds = ranks.wait_until_left([], limit=2)
    said, codes = ranks.end()
    for rank in set(range(ranks.size)) - {victim}:
        assert codes[rank] == 1, codes
        ranks.expect_blame(said, rank, [victim], 2)
    return seconds


def frozen(program, operation, layout, victim):
    ranks = Ranks(program, operation, *layout)
    time.sleep(random.uniform(0, 0.05))
    pid = ranks.pids()[victim]
    os.kill(pid, signal.SIGSTOP)
    seconds = ranks.wait_until_left([victim], limit=2 * TIMEOUT + 3)
    os.kill(pid, signal.SIGCONT)
    ranks.wait_until_left([], limit=2 * TIMEOUT + 3)
    said, codes = ranks.end()
    for rank in range(ranks.size):
        assert codes[rank] == 1, codes
        if rank != victim:
            ranks.expect_blame(said, rank, [victim], TIMEOUT + 1.5)
    return seconds


def cut(program, operation, layout, host):
    """Whoever is on the other side is lost."""
    ranks = Ranks(program, operation, *layout, flags=("--down", f"{host}:4"))
    seconds = ranks.wait_until_left([], limit=4 + 2 * TIMEOUT + 3) - 4
    said, codes = ranks.end()
    for rank in range(ranks.size):
        assert codes[rank] == 1, codes
        lost = [other for other in range(ranks.size) if (ranks.host_of(other) == host) != (ranks.host_of(rank) == host)]
        ranks.expect_blame(said, rank, lost, TIMEOUT + 1.5)
    return seconds


def main(_, program, rounds=1):
    hosts.skip_where_there_are_none()
    cases = [(fault, layout, victim) for fault in (killed, frozen) for layout, victims in (((2, 1), (0, 1)), ((2, 2), (1, 3)), ((3, 1), (1, 0)))
             for victim in victims] + [(cut, layout, host) for layout, host in (((2, 1), 0), ((2, 2), 0), ((2, 2), 1), ((3, 1), 1))]
    for i in range(int(rounds)):
        for number, (fault, layout, victim) in enumerate(cases):
            operation = FORWARD_AND_BACKWARD[(number + i) % len(FORWARD_AND_BACKWARD)]
            seconds = fault(program, operation, layout, victim)
            what = "wire of host" if fault is cut else "rank"
            print(f"{operation} on {layout[0]} hosts of {layout[1]}: {what} {victim} {fault.__name__}: {seconds:.1f} s", flush=True)


main(*sys.argv[1:])
