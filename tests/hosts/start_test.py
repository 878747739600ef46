# Runs over several hosts, started by hand, by torchrun, and as srun and mpirun start them, reach the losses of one host.
# Usage: start_test.py BRAID
import os
import subprocess
import sys
import tempfile

import hosts

TP2 = "--tensor-model-parallel-size 2"
TP2_SEQUENCE = f"{TP2} --sequence-parallel --use-coc --coc-parallel-num 2"
TP4 = "--tensor-model-parallel-size 4 --use-coc --coc-parallel-num 2"
# Files that a host has at its own place.
BIND = "mount --bind {path}/$NODE_RANK.hosts /etc/hosts"


def same_losses(folder, name, reference):
    found, expected = folder.metrics(name), folder.metrics(reference)
    assert [line["iteration"] for line in found] == list(range(1, 7)), found
    worst = max(abs(a[key] / b[key] - 1) for a, b in zip(found, expected, strict=True) for key in ("loss", "grad_norm"))
    assert worst < 1e-5, (name, worst)
    return worst


def check(folder, name, reference, command, **environment):
    run = hosts.run(2, command, **environment)
    assert run.codes == [0, 0], (run.codes, run.err)
    worst = same_losses(folder, name, reference)
    assert min(run.sent) > 300_000, run.sent
    print(f"{name}: within {worst:.1e} of one host; {' and '.join(map(str, run.sent))} bytes sent; {run.seconds:.1f} s")
    return run


def main(braid):
    hosts.skip_where_there_are_none()
    with tempfile.TemporaryDirectory() as path:
        folder = hosts.Folder(braid, path)
        for name, nproc, flags in (("tp2", 2, TP2), ("tp2sp", 2, TP2_SEQUENCE), ("dp2", 2, ""), ("tp2dp2", 4, TP2), ("tp4", 4, TP4)):
            one = folder.train(name, f"--nproc {nproc} {flags}")
            subprocess.run(one.split(), check=True, stdout=subprocess.DEVNULL)
        # launch, by hand
        for name, nproc, flags in (("tp2", 1, TP2), ("tp2sp", 1, TP2_SEQUENCE), ("dp2", 1, ""), ("tp2dp2", 2, TP2), ("tp4", 2, TP4)):
            run = check(folder, f"launched_{name}", name, folder.launch(f"launched_{name}", nproc, flags))
            assert run.err == ["", ""], run.err  # nothing but what was asked for
        check(folder, "host_0_is_late", "tp2", f"[ $NODE_RANK = 1 ] || sleep 2; {folder.launch('host_0_is_late', 1, TP2)}")
        interface = folder.launch("interface", 1, TP2).replace("--nproc", "--interface eth0 --nproc")
        check(folder, "interface", "tp2", interface)
        # torchrun, and once more after a failure: the second attempt meets nothing of the first
        torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
        again = (f"{torchrun} --max-restarts 1 --nnodes 2 --nproc-per-node 1 --node-rank $NODE_RANK --master-addr $MASTER_ADDR "
                 f"--master-port $MASTER_PORT --no-python bash -c "
                 f"'{folder.train('torchrun', TP2)} && [ $TORCHELASTIC_RESTART_COUNT = 1 ]'")
        check(folder, "torchrun", "tp2", again)
        # Slurm: the first host's name stands for loopback there, as on Debian.
        for host in (0, 1):
            with open(os.path.join(path, f"{host}.hosts"), "w") as file:
                file.write(f"127.0.0.1 localhost\n127.0.1.1 node{host}\n10.77.0.{2 - host} node{1 - host}\n")
        slurm = ("export SLURM_PROCID=$NODE_RANK SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_NODEID=$NODE_RANK SLURM_JOB_ID=8 "
                 "SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_STEP_NODELIST=node[0-1]")
        check(folder, "srun", "tp2",
              f"{BIND.format(path=path)}; unset MASTER_ADDR MASTER_PORT; {slurm}; {folder.train('srun', TP2)}")
        mpi = ("export OMPI_COMM_WORLD_RANK=$NODE_RANK OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 "
               "OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_NAMESPACE=prterun-7@1")
        check(folder, "mpirun", "tp2", f"unset MASTER_PORT; {mpi}; {folder.train('mpirun', TP2)}")
        # the script's own end takes everything with it
        endless = hosts.Run(2, folder.launch("endless", 2, f"{TP2} --train-iters 1000000"))
        folder.wait_for_iterations("endless", 2, endless)
        assert len(endless.processes()) > 6, endless.processes()
        endless.process.kill()
        endless.process.wait()
        endless.expect_nothing_left(2)


main(sys.argv[1])
