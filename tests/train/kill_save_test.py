# A run killed at any moment of its saves leaves a checkpoint that is whole, and the next run saves over the rest.
# Usage: kill_save_test.py WRITE_CHECKPOINT
import json
import os
import random
import subprocess
import sys
import tempfile
import time


def check_whole(folder):
    files = sorted(os.listdir(folder))
    assert files == ["config.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"], files
    for name in files:
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        if name.endswith(".json"):
            json.loads(data)
            continue
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + size])
        ends = [e["data_offsets"][1] for key, e in entries.items() if key != "__metadata__"]
        assert 8 + size + max(ends) == len(data), (folder, name)


random.seed(1)
with tempfile.TemporaryDirectory() as folder:
    num_killed_while_saving = 0
    pointer = os.path.join(folder, "latest_checkpointed_iteration.txt")
    for _ in range(12):
        run = subprocess.Popen([sys.argv[1], folder, "f32", "untied", "100000"])
        if os.path.exists(pointer):
            os.remove(pointer)  # so that its coming back shows that this run is saving
        while not os.path.exists(pointer):
            assert run.poll() is None, "the run ended"
            time.sleep(0.002)
        time.sleep(random.random() * 0.05)
        run.kill()
        run.wait()
        num_killed_while_saving += os.path.exists(os.path.join(folder, ".partial"))
        with open(pointer) as file:
            check_whole(os.path.join(folder, f"iter_{int(file.read()):07}"))
        check_whole(os.path.realpath(os.path.join(folder, "latest")))
        for name in os.listdir(folder):
            if name.startswith("iter_"):
                check_whole(os.path.join(folder, name))
    assert num_killed_while_saving > 0, "no kill hit a save"
    print(f"{num_killed_while_saving} of 12 kills hit a save")
    subprocess.run([sys.argv[1], folder, "f32", "untied"], check=True)
    assert not [name for name in os.listdir(folder) if name.startswith(".")], os.listdir(folder)
