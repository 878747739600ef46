# Commands on hosts that tools/hosts.sh makes, and small training runs for them.
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import uuid

HOSTS = os.path.join(os.path.dirname(__file__), "..", "..", "tools", "hosts.sh")
MARK = "BRAID_TEST_OF_HOSTS"  # in the environment of all processes of a test
# What `braid launch` is told on each host.
LAUNCH = "launch --nnodes $NNODES --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"


def namespaces_kept_by_mounts():
    """Those that tools/hosts.sh makes, where others see them: they would outlive its processes."""
    with open("/proc/self/mountinfo") as file:
        return set(re.findall(r" (/run/netns/host\d+) .* nsfs ", file.read()))


KEPT_BEFORE = namespaces_kept_by_mounts()


def skip_where_there_are_none():
    probe = subprocess.run([HOSTS, "1", "true"], capture_output=True, text=True)
    if probe.returncode == 77:
        print(f"skipped: {probe.stderr.strip()}")
        sys.exit(77)
    assert probe.returncode == 0, probe


class Run:
    """A shell's command on each of the hosts."""

    def __init__(self, num_hosts, command, flags=(), **environment):
        self.num_hosts = num_hosts
        self.mark = uuid.uuid4().hex
        self.begin = time.monotonic()
        # Each host says its exit code.
        script = f"( {command}\n)\necho \"exit code $?\" >&2"
        self.process = subprocess.Popen(
            [HOSTS, *flags, str(num_hosts), "bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment, MARK: self.mark})

    def wait(self, limit=60):
        """Sets codes, out, err and sent, each by host; nothing may be left behind."""
        out, err = self.process.communicate(timeout=limit)
        self.seconds = time.monotonic() - self.begin
        lines = [["".join(re.findall(rf"^\[{host}\] (.*\n)", text, re.M)) for host in range(self.num_hosts)] for text in (out, err)]
        self.out = lines[0]
        self.codes = [int(re.search(r"exit code (\d+)$", text).group(1)) if "exit code" in text else None for text in lines[1]]
        self.err = [re.sub(r"exit code \d+\n", "", text) for text in lines[1]]
        self.sent = [int(count) for count in re.findall(r"^host \d+ sent (\d+) bytes$", err, re.M)]
        self.expect_nothing_left()
        return self

    def processes(self):
        """Of those that run: by pid, their words and their variables."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words, variables = ([text.decode(errors="replace") for text in pathlib.Path("/proc", pid, name).read_bytes().split(b"\0")]
                                    for name in ("cmdline", "environ"))
            except OSError:  # it has ended
                continue
            if f"{MARK}={self.mark}" in variables:
                found[int(pid)] = words, dict(variable.split("=", 1) for variable in variables if "=" in variable)
        return found

    def expect_nothing_left(self, limit=3):
        deadline = time.monotonic() + limit
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.processes(), f"processes are left: {[words for words, _ in self.processes().values()]}"
        assert namespaces_kept_by_mounts() <= KEPT_BEFORE, namespaces_kept_by_mounts() - KEPT_BEFORE

    def expect(self, codes, *texts):
        """The exit code of all hosts, or of each; and a pattern that each one's errors match, with no more lines than it."""
        codes = codes if isinstance(codes, list) else [codes] * self.num_hosts
        assert self.codes == codes, (self.codes, self.err)
        for host, text in enumerate(texts if len(texts) > 1 else texts * self.num_hosts):
            assert re.fullmatch(text, self.err[host].rstrip("\n")), f"host {host} said:\n{self.err[host]}expected:\n{text}"


def run(num_hosts, command, flags=(), limit=60, **environment):
    return Run(num_hosts, command, flags, **environment).wait(limit)


class Folder:
    """Where runs of `braid train` find their text and leave their metrics."""

    def __init__(self, braid, path):
        self.braid, self.path = braid, path
        self.text = os.path.join(path, "text.txt")
        with open(self.text, "wb") as file:
            file.write(b"".join(b"%d hosts weave %d threads; " % (i, i * i % 97) for i in range(2000)))

    def train(self, name, flags=""):
        """The command of a run that takes a second, into a folder of this name."""
        return (f"{self.braid} train --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
                f"--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --data-path {self.text} --split 9,1 "
                f"--eval-iters 0 --output-dir {os.path.join(self.path, name)} {flags}")

    def launch(self, name, nproc, flags=""):
        return f"{self.braid} {LAUNCH} --nproc {nproc} -- {self.train(name, flags)}"

    def metrics(self, name):
        path = os.path.join(self.path, name, "metrics.jsonl")
        if not os.path.exists(path):
            return []
        with open(path) as file:
            return [json.loads(line) for line in file.read().split("\n")[:-1]]

    def wait_for_iterations(self, name, count, running):
        deadline = time.monotonic() + 30
        while len(self.metrics(name)) < count:
            assert running.process.poll() is None and time.monotonic() < deadline, running.process.communicate(timeout=20)
            time.sleep(0.02)
