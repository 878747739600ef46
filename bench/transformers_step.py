"""Times a training step of transformers' Llama in eager PyTorch on one thread, beside `braid bench step` at TP 1.

Usage: bench/transformers_step.py [ROUNDS [BRAID]]    in turn, on one core; prints both medians and their ratio as JSON
"""
import json
import os
import statistics
import subprocess
import sys
import time

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
BRAID = sys.argv[2] if len(sys.argv) > 2 else "build/braid"
LAYERS, HIDDEN, FFN, HEADS, SEQ, VOCAB, STEPS = 4, 512, 1376, 8, 1024, 256, 5
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import torch  # noqa: E402: threads follow the affinity
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(1)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    num_key_value_heads=HEADS, max_position_embeddings=SEQ, tie_word_embeddings=True, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
tokens = torch.randint(VOCAB, (1, SEQ + 1))


def step():
    begin = time.perf_counter()
    optimizer.zero_grad()
    logits = model(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[0, 1:]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return time.perf_counter() - begin


def braid_step():
    words = [BRAID, "bench", "step", "--num-layers", LAYERS, "--hidden-size", HIDDEN, "--ffn-hidden-size", FFN,
             "--num-attention-heads", HEADS, "--seq-length", SEQ, "--vocab-size", VOCAB, "--micro-batch-size", 1,
             "--lr", 1e-3, "--train-iters", STEPS, "--json"]
    return json.loads(subprocess.run([str(w) for w in words], check=True, capture_output=True).stdout)["step_s"]


step()  # warms up
theirs, ours = [], []
for _ in range(ROUNDS):
    theirs.append(statistics.median(step() for _ in range(STEPS)))
    ours.append(braid_step())
theirs, ours = statistics.median(theirs), statistics.median(ours)
print(json.dumps({"hidden_size": HIDDEN, "num_layers": LAYERS, "seq_length": SEQ, "transformers_step_s": theirs,
                  "braid_step_s": ours, "braid_per_transformers": ours / theirs}))
