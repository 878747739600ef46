"""Writes what transformers' LlamaForCausalLM gives for tiny random models: weights, tokens, logits, loss, gradients.

Usage: llama_reference.py DIRECTORY. Each case is NAME.json (sizes and the tensors' places) and NAME.bin (their values).
"""

import json
import pathlib
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CASES = {
    # grouped queries, a vocabulary and a feed-forward layer that divide by neither 2 nor 4
    "grouped": dict(hidden=48, layers=3, ffn=91, heads=8, groups=4, head_dim=6, vocab=131, tied=False, s=20, b=2),
    "tied": dict(hidden=32, layers=2, ffn=64, heads=4, groups=4, head_dim=8, vocab=64, tied=True, s=16, b=1),
}


def write_case(directory, name, case):
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=case["hidden"], num_hidden_layers=case["layers"], intermediate_size=case["ffn"],
        num_attention_heads=case["heads"], num_key_value_heads=case["groups"], head_dim=case["head_dim"],
        vocab_size=case["vocab"], tie_word_embeddings=case["tied"], initializer_range=0.2, rms_norm_eps=1e-5,
        max_position_embeddings=case["s"], attn_implementation="sdpa")
    model = LlamaForCausalLM(config)
    for key, parameter in model.named_parameters():
        if "norm" in key:  # ones would hide a weight that is left out
            parameter.data.uniform_(0.5, 1.5)
    tokens, labels = torch.randint(0, case["vocab"], (2, case["s"], case["b"]))
    logits = model(tokens.t()).logits.transpose(0, 1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()

    tensors = {"tokens": tokens, "labels": labels, "logits": logits, "loss": loss}
    for key, parameter in model.named_parameters():
        tensors["weight." + key] = parameter
        tensors["grad." + key] = parameter.grad
    entries, offset = {}, 0
    with open(directory / f"{name}.bin", "wb") as data:
        for key, tensor in tensors.items():
            values = tensor.detach().contiguous().numpy().tobytes()
            entries[key] = dict(shape=list(tensor.shape), dtype=str(tensor.dtype), offset=offset)
            offset += data.write(values)
    (directory / f"{name}.json").write_text(json.dumps(dict(case=case, tensors=entries)))


directory = pathlib.Path(sys.argv[1])
directory.mkdir(parents=True, exist_ok=True)
for name, case in CASES.items():
    write_case(directory, name, case)
