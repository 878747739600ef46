# What goes wrong when runs over several hosts start: each is said in one line, on every host, within seconds.
# Usage: start_errors_test.py BRAID
import concurrent.futures
import os
import struct
import sys
import tempfile
import time

import hosts

TP2 = "--tensor-model-parallel-size 2"
TIMEOUT = "4"
# Of a rank that may be named: the ranks of other hosts may not have come to say the same before the run ended.
ERROR = r"braid: error: (rank \d \(pid \d+ on host \d\): )?"
STORE = r"braid: error: store of the run at "
# A program that is no store, and does not speak.
LISTENER = (f"{sys.executable} -c 'import socket, time; s = socket.create_server((\"\", 29500)); time.sleep(1000)' & "
            "until ss -ltn | grep -q 29500; do sleep 0.05; done; ")
ON = "[ $NODE_RANK = {} ] && "


def as_rank(command):
    """The command as a rank of a launcher that tells runs from each other by nothing."""
    return f"RANK=$NODE_RANK WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 {command}"


def with_other_build(program, path):
    """A copy of the program with another build-id."""
    with open(program, "rb") as file:
        data = bytearray(file.read())
    header = struct.pack("<III", 4, 20, 3) + b"GNU\0"
    assert data.count(header) == 1
    data[data.index(header) + len(header)] ^= 1
    with open(path, "wb") as file:
        file.write(data)
    os.chmod(path, 0o755)


def check(what, num_hosts, command, codes, *texts, within=6.0, **environment):
    run = hosts.run(num_hosts, command, BRAID_TIMEOUT_S=TIMEOUT, **environment)
    run.expect(codes, *texts)
    assert run.seconds < within, (what, run.seconds)
    print(f"{what}: {run.seconds:.1f} s")


def at_once(*checks):
    """They wait for somebody most of the time."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(check, *arguments, within=float(TIMEOUT) + 8) for arguments in checks]:
            done.result()


def wrong_addresses(folder):
    train = folder.launch("run", 1, TP2)
    unreached = r"{} can't be reached within 4 s: {}"
    hint = r"\. HINT: braid launch with --node-rank 0 on that host"
    missing = r"braid: error: host 1 of 2 \(--node-rank\) did not come to 10\.77\.0\.1:29500 within 4 s"
    at_once(
        *[(what, 2, f"{ON.format(1)} MASTER_ADDR={address}; {train}", 1, missing,
           unreached.format(STORE + address.replace(".", r"\.") + ":29500", why))
          for what, address, why in (("nobody has the address", "10.77.0.9", "(No route to host|Connection timed out)"),
                                     ("no route", "10.78.0.9", "Network is unreachable"),
                                     ("no such name", "nowhere.invalid", r"the name is not known \(.*\)"),
                                     ("nothing listens", "10.77.0.2", "Connection refused, nothing listens there" + hint))],
        ("all have a wrong address", 2, f"MASTER_ADDR=10.77.0.2; {train}", [2, 1],
         r"braid: error: --master-addr 10\.77\.0\.2 does not lead to this host, which has --node-rank 0: .*",
         unreached.format(STORE + r"10\.77\.0\.2:29500", ".*")),
        ("no store answers", 2, f"{ON.format(1)} {{ {LISTENER} MASTER_ADDR=127.0.0.1; }}; {train}", 1, missing,
         unreached.format(STORE + r"127\.0\.0\.1:29500", "what listens there is no store: .*")),
        ("the port is taken", 2, f"{ON.format(0)} {{ {LISTENER} }}; {train}", 1,
         r"braid: error: the run's store can't be hosted: can't listen on port 29500: Address already in use; "
         r"there is another program\. HINT: another port",
         unreached.format(STORE + r"10\.77\.0\.1:29500", "what listens there is no store: .*")),
        ("the port is taken, without a launcher of braid", 2,
         f"{ON.format(0)} {{ {LISTENER} }}; {as_rank(folder.train('run', TP2))}", 1,
         r"braid: error: the run's store can't be hosted: .* there is another program\. HINT: another port",
         STORE + r"10\.77\.0\.1:29500 \(rank 1\) can't be reached within 4 s: what listens there is no store: .*"),
        ("a host is missing", 2, f"NNODES=3; {train}", 1,
         r"braid: error: host 2 of 3 \(--node-rank\) did not come to 10\.77\.0\.1:29500 within 4 s"),
        ("a rank is missing", 3,
         f"{ON.format(2)} exit 0; {as_rank(folder.train('run', '--global-batch-size 6 --distributed-timeout-seconds 2')).replace('SIZE=2', 'SIZE=3', 1)}",
         [1, 1, 0], *["braid: error: rank 2 of 3 did not come within 2 s"] * 2, ""))
    check("an interface that is not there", 2, as_rank(f"BRAID_INTERFACE=eth7 {folder.train('run', TP2)}"), 2,
          "braid: error: BRAID_INTERFACE is 'eth7', which is no network interface and no address of this host")
    unreached_rank = r"braid: error: (rank \d: )?rank 0 can't reach rank 1 at 10\.88\.0\.2:\d+: {}\. HINT: another network by --interface or .*"
    other_network = ("ip link add d0 type veth peer name d1; ip addr add 10.88.0.$((NODE_RANK + 1))/32 dev d0; ip link set d0 up; "
                     "ip route add {} 10.88.0.0/24 {}; ")
    check("a network that is cut off", 2, other_network.format("blackhole", "") + train.replace("--nproc", "--interface d0 --nproc"), 1,
          unreached_rank.format("Invalid argument") + r"\n(.*\n)?braid: error: rank \d .* exited with code 1; the run has ended", within=10)
    check("a network that swallows all", 2,
          other_network.format("", "via 10.77.0.99 dev eth0") + "ip neigh add 10.77.0.99 lladdr 02:00:00:00:00:99 dev eth0; " +
          as_rank(f"BRAID_INTERFACE=d0 {folder.train('run', TP2)}"), 1, unreached_rank.format("Connection timed out"), within=10)
    check("ranks that are told to be on one host", 2,
          as_rank(folder.train("run", TP2)).replace("LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", "LOCAL_RANK=$NODE_RANK LOCAL_WORLD_SIZE=2"), 1,
          r"braid: error: rank 0 can't reach rank 1 at 127\.0\.0\.1:\d+: .*\. HINT: .*LOCAL_WORLD_SIZE.*", within=10)
    check("an interface that reaches nobody", 2, train.replace("--nproc", "--interface lo --nproc"), 2,
          "braid: error: --interface is 'lo', which other hosts can't reach, and --nnodes is 2")


def unlike_ranks(folder):
    train = folder.launch("run", 1, TP2)
    check("other numbers of ranks", 2, folder.launch("run", "$((1 + NODE_RANK))", TP2), 2,
          r"braid: error: --nproc of host 0 is 1, of host 1 \(10\.77\.0\.2\) 2")
    check("other flags", 2, f"{train} --lr 0.0$((1 + NODE_RANK))", 2, ERROR + "--lr of rank 0 is 0.01, of rank 1 0.02")
    other_text = os.path.join(folder.path, "other.txt")
    with open(other_text, "w") as file:
        file.write("less text; " * 1000)
    check("other data", 2, f"{ON.format(1)} DATA='--data-path {other_text}'; {train} $DATA", 2,
          ERROR + '--data-path of rank 0 is "[0-9]+ tokens", of rank 1 "11000 tokens"')
    check("no data on one host", 2, f"{ON.format(1)} mount -t tmpfs none {folder.path}; {train}", 2,
          rf"braid: error: rank 1 \(pid \d+ on host 1\): --data-path {folder.text}: no such file or folder")
    check("a trace of one host", 2, f"{ON.format(1)} TRACE=--trace; {train} $TRACE", 2,
          ERROR + '--trace of rank 0 is "none", of rank 1 "a file"')
    check("a tuner's file of one host", 2, f"{ON.format(0)} TUNER='--use-coc --tuner-file {folder.path}/tuner.json'; {train} --use-coc $TUNER", 2,
          ERROR + '--tuner-file of rank 0 is "a file", of rank 1 "none"')
    check("checkpoints for another run", 2, folder.launch("saved", 1, f"{TP2} --save-interval 3"), 0, "", within=20)
    load = f"{TP2} --load {folder.path}/saved/checkpoint/iter_000000$((3 + 3 * NODE_RANK))"
    differ = ERROR + r'--load of rank 0 is "iteration 3, hash [0-9a-f]{8}", of rank 1 "iteration 6, hash [0-9a-f]{8}"'
    check("another checkpoint on each host", 2, folder.launch("run", 1, load), 2, differ + "(; .*)?")
    other = os.path.join(folder.path, "other_braid")
    with_other_build(folder.braid, other)
    build = r'"0\.[0-9.]+ \(build [0-9a-f]{16}\)"'
    check("another launcher", 2, f"braid={folder.braid}; {ON.format(1)} braid={other}; {train.replace(folder.braid, '$braid', 1)}",
          2, rf"braid: error: braid of host 0 is {build}, of host 1 \(10\.77\.0\.2\) {build}")
    ranks = train.replace(f"-- {folder.braid}", "-- $braid")
    check("another program", 2, f"braid={folder.braid}; {ON.format(1)} braid={other}; {ranks}", 2,
          ERROR + rf"braid of rank 0 is {build}, of rank 1 {build}")
    # As mpirun starts it: rank 0 hosts the store, and stays until the other knows.
    check("another program, without a launcher of braid", 2,
          f"braid={folder.braid}; {ON.format(1)} braid={other}; " + as_rank(folder.train("run", TP2)).replace(folder.braid, "$braid"),
          2, rf"braid: error: braid of rank 0 is {build}, of rank 1 {build}")
    check("CPUs of other instruction sets", 2, f"{ON.format(1)} export ATEN_CPU_CAPABILITY=default; {folder.launch('cpus', 1, TP2)}", 0,
          r"braid: warning: ranks 0 and 1 have CPUs of other instruction sets \(AVX\w+, (DEFAULT|default)\): .*", "")


def two_runs(folder):
    endless = "--train-iters 1000000"
    first = folder.launch("run", 1, f"{TP2} {endless}").replace("--output-dir", "--log-interval 100000 --output-dir")
    second = folder.launch("second", 1, TP2)
    wait = f"until [ -s {folder.path}/run/metrics.jsonl ]; do sleep 0.05; done; "
    run_id = r"braid launch, pid \d+ on .*"
    check("two runs of braid launch", 2, f"{first} 2>/dev/null & {wait} {second}; code=$?; sleep 1; kill %1 2>/dev/null; wait; exit $code", 1,
          r"braid: error: the run's store can't be hosted: can't listen on port 29500: Address already in use; there is "
          rf"another run's store: {run_id}, 2 ranks\. HINT: another port",
          rf"{STORE}10\.77\.0\.1:29500 belongs to another run, which has begun with all its hosts: {run_id}, 2 ranks", within=9)
    os.remove(f"{folder.path}/run/metrics.jsonl")
    first, second = as_rank(folder.train("run", f"{TP2} {endless} --log-interval 100000")), as_rank(folder.train("second", TP2))
    check("two runs that nothing tells apart", 2, f"{first} 2>/dev/null & {wait} {second}; code=$?; sleep 1; kill %1 2>/dev/null; wait; exit $code", 1,
          r"braid: error: the run's store can't be hosted: .* there is another run's store: 2 ranks\. HINT: another port",
          rf"{STORE}10\.77\.0\.1:29500 \(rank 1\) belongs to another run, or to a program that ran before, or RANK is given twice: rank 1 is pid \d+ on .* there, "
          r"pid \d+ on .* here", within=9)


def lost_ranks(folder):
    endless = folder.launch("endless", 2, f"{TP2} --train-iters 1000000 --log-interval 100000")
    for what, victim, codes, texts in (
            ("a rank is killed", "RANK=3", [1, 1], [r"braid: error: rank 3 \(pid \d+ on host 1\) was killed by signal 9 \(Killed\); "
                                                    "the run has ended"] * 2),
            ("a launcher is killed", "NODE_RANK=1", [1, 137], [r"(braid: error: .*\n)*braid: error: lost host 1 \(10\.77\.0\.2\); "
                                                               "the run has ended", ".*Killed.*"]),
            ("host 0's launcher is killed", "NODE_RANK=0", [137, 1], [".*Killed.*", r"(braid: error: .*\n)*braid: error: lost host 0 "
                                                                      r"\(10\.77\.0\.1\); the run has ended"])):
        run = hosts.Run(2, endless, BRAID_TIMEOUT_S="60")
        folder.wait_for_iterations("endless", 2, run)
        pid = pid_of(run, victim, launcher=victim.startswith("NODE"))
        begin = time.monotonic()
        os.kill(pid, 9)
        run.wait(20).expect(codes, *texts)
        assert time.monotonic() - begin < 5, what
        print(f"{what}: {time.monotonic() - begin:.1f} s")
        os.remove(f"{folder.path}/endless/metrics.jsonl")


def pid_of(run, variable, launcher):
    name, value = variable.split("=")
    found = [pid for pid, (words, variables) in run.processes().items()
             if variables.get(name) == value and words[0].endswith("braid") and (words[1] == "launch") == launcher]
    assert len(found) == 1, found
    return found[0]


def main(braid):
    hosts.skip_where_there_are_none()
    with tempfile.TemporaryDirectory() as path:
        folder = hosts.Folder(braid, path)
        for part in (wrong_addresses, unlike_ranks, two_runs, lost_ranks):
            part(folder)


main(sys.argv[1])
