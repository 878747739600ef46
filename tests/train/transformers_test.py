# transformers reads a checkpoint that two ranks wrote: every tensor, and the logits, are those of the made-up weights.
# Usage: transformers_test.py WRITE_CHECKPOINT
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)


def made_up(name, shape, kind=0):
    """As whole_values() in toy_model.h."""
    total = 0
    for c in name.encode():
        total = (total * 31 + c) % 1000
    n = torch.Size(shape).numel()
    x = torch.sin(torch.arange(n, dtype=torch.float64) * 0.37 + 1.7 * (4 * total + kind) + 0.1)
    return x.reshape(shape).float() * 0.1


def check(writer, dtype, tied):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([writer, folder, dtype, tied], check=True)
        torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        config = LlamaConfig(
            vocab_size=10, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=tied == "tied",
            bos_token_id=None, eos_token_id=None)
        expected = LlamaForCausalLM(config).to(torch_dtype).eval()
        for name, parameter in expected.named_parameters():
            parameter.data.copy_(made_up(name, parameter.shape))
        tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
        for path in (folder, os.path.join(folder, "iter_0000020")):
            model, info = AutoModelForCausalLM.from_pretrained(
                path, torch_dtype="auto", local_files_only=True, output_loading_info=True)
            assert not any(info.values()), info
            assert model.dtype == torch_dtype, model.dtype
            for (name, a), (_, b) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
                assert torch.equal(a, b), name
            with torch.no_grad():
                assert torch.equal(model.eval()(tokens).logits, expected(tokens).logits)
        with safe_open(os.path.join(folder, "iter_0000020", "optimizer.safetensors"), "pt") as file:
            names = set(file.keys())
            prefixes = {"exp_avg": 1, "exp_avg_sq": 2} | ({"main": 3} if dtype == "bf16" else {})
            assert names == {f"{p}.{n}" for p in prefixes for n, _ in expected.named_parameters()}, names
            for prefix, kind in prefixes.items():
                for name, parameter in expected.named_parameters():
                    found = file.get_tensor(f"{prefix}.{name}")
                    assert torch.equal(found, made_up(name, parameter.shape, kind)), f"{prefix}.{name}"


for dtype in ("f32", "bf16"):
    for tied in ("untied", "tied"):
        check(sys.argv[1], dtype, tied)
print("transformers reads the checkpoints")
