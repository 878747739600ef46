# `braid generate` gives the tokens of transformers' greedy generate in f32: from transformers' own checkpoints, whole and
# in shards, grouped queries, tied or not, and from one that `braid train` wrote; split over ranks, in batches of unequal
# prompts. Usage: llama_generate_test.py BRAID
import json
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

torch.set_num_threads(1)
disable_progress_bar()
NEW_TOKENS = 60
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [27], [200, 17, 9, 250, 8] * 6]


def generate(braid, folder, prompts, *flags):
    words = [braid, "generate", "--load", folder, "--max-new-tokens", str(NEW_TOKENS), "--json", *flags]
    for prompt in prompts:
        words += ["--prompt-tokens", ",".join(map(str, prompt))]
    lines = subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    lines = [json.loads(line) for line in lines]
    assert [line["prompt_tokens"] for line in lines] == prompts, lines
    return [line["tokens"] for line in lines]


def expected(folder, prompt, **more):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS, do_sample=False,
                             pad_token_id=0, **more)
    return out[0, len(prompt):].tolist()


def check(braid, folder, what):
    wanted = [expected(folder, prompt) for prompt in PROMPTS]
    assert len(set(sum(wanted, []))) > 15, wanted  # not one token again and again
    for ranks in (1, 2, 3):
        if ranks > 2 and what == "two groups":
            continue
        flags = ["--nproc", str(ranks), "--tensor-model-parallel-size", str(ranks)]
        assert generate(braid, folder, PROMPTS, *flags) == wanted, (what, ranks)
        assert generate(braid, folder, PROMPTS[2:], *flags) == wanted[2:], (what, ranks)
    end = wanted[0][20]
    assert generate(braid, folder, PROMPTS[:1], "--eos-token-id", str(end)) == \
        [expected(folder, PROMPTS[0], eos_token_id=end)], what
    for prompts in (PROMPTS[:1], PROMPTS) if what == "two groups" else ():  # as text: ids, streamed or not
        words = [braid, "generate", "--load", folder, "--max-new-tokens", str(NEW_TOKENS)]
        for prompt in prompts:
            words += ["--prompt-tokens", ",".join(map(str, prompt))]
        lines = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        assert [[int(id) for id in line.split(",")] for line in lines] == \
            [prompt + tokens for prompt, tokens in zip(prompts, wanted)], lines
    print(f"{what}: {NEW_TOKENS} tokens of {len(PROMPTS)} prompts are transformers'")


def random_llama(folder, shards=False, **sizes):
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=112, num_hidden_layers=3, max_position_embeddings=128, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, **sizes))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a weight that is left out
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **({"max_shard_size": "100KB"} if shards else {}))


braid = sys.argv[1]
with tempfile.TemporaryDirectory() as folder:
    def at(name):
        return os.path.join(folder, name)

    random_llama(at("grouped"), vocab_size=301, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    check(braid, at("grouped"), "two groups")
    random_llama(at("tied"), shards=True, vocab_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
                 rope_theta=500000.0, rms_norm_eps=1e-4, tie_word_embeddings=True)
    assert len(os.listdir(at("tied"))) > 4, os.listdir(at("tied"))
    check(braid, at("tied"), "tied, in shards")

    # What generation_config.json says, that file alone.
    greedy = expected(at("tied"), PROMPTS[0])
    for config, generation in (({"eos_token_id": greedy[5]}, {"eos_token_id": [greedy[30], greedy[15]]}),
                               ({"eos_token_id": greedy[5]}, {"do_sample": False})):
        for name, more in ("config.json", config), ("generation_config.json", generation):
            path = os.path.join(at("tied"), name)
            with open(path) as file:
                content = {**json.load(file), **more} if name == "config.json" else more
            with open(path, "w") as file:
                json.dump(content, file)
        assert generate(braid, at("tied"), PROMPTS[:1]) == [expected(at("tied"), PROMPTS[0])], generation
    print("ends are those of generation_config.json")

    with open(at("text.txt"), "wb") as file:
        file.write(b"".join(b"%d braids weave %d threads, each one %s; " % (i, i * i % 97, b"ab" if i % 3 else b"ba")
                            for i in range(1500)))
    subprocess.run(
        [braid, "train", "--data-path", at("text.txt"), "--output-dir", at("run")]
        + "--nproc 2 --tensor-model-parallel-size 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
          "--max-position-embeddings 128 --micro-batch-size 4 --train-iters 40 --lr 5e-3 --init-method-std 0.1 "
          "--split 1 --eval-iters 0".split(), check=True, stdout=subprocess.DEVNULL)
    check(braid, at("run/checkpoint"), "of braid train")
