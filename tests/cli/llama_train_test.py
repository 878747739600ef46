# Ten steps of `braid train` from transformers' weights give the losses and weights of torch.optim.AdamW on transformers'
# Llama; the checkpoint that it writes loads in transformers and gives the validation loss that braid reported.
# Usage: llama_train_test.py BRAID
import json
import math
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

torch.set_num_threads(1)
SEQ, MICRO, GLOBAL, ITERS, WARMUP, LR, MIN_LR, CLIP, DECAY, SEED = 32, 2, 8, 10, 3, 5e-3, 5e-4, 0.5, 0.1, 77
BETAS, EPS = (0.9, 0.95), 1e-8


class Part:
    """The order and the sequences of docs/data.md."""

    def __init__(self, text, begin, end):
        self.tokens = torch.tensor(list(text[begin:end]))
        self.count = (end - begin - 1) // SEQ

    def batch(self, first, count):
        rows = []
        for sample in range(first, first + count):
            epoch = sample // self.count
            mixed = (SEED + 0x9E3779B97F4A7C15 * epoch) % 2**64
            generator = torch.Generator().manual_seed(mixed ^ (mixed >> 32))
            i = torch.randperm(self.count, generator=generator)[sample % self.count]
            rows.append(self.tokens[i * SEQ : (i + 1) * SEQ + 1])
        rows = torch.stack(rows)
        return rows[:, :-1], rows[:, 1:]


def loss_of(model, batch):
    tokens, labels = batch
    return torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())


def train_with_torch(model, data):
    decays = [p for n, p in model.named_parameters() if "norm" not in n]
    others = [p for n, p in model.named_parameters() if "norm" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0}], lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for iteration in range(ITERS):
        if iteration <= WARMUP:
            lr = LR * iteration / WARMUP
        else:
            share = (iteration - WARMUP) / (ITERS - WARMUP)
            lr = MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = loss_of(model, data.batch(iteration * GLOBAL, GLOBAL))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def close(a, b, tolerance):
    return abs(a - b) <= tolerance * abs(b)


def check(braid, folder, text, tied, groups, flags):
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=groups, max_position_embeddings=SEQ, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        initializer_range=0.1, bos_token_id=None, eos_token_id=None))
    plain = os.path.join(folder, "plain")
    model.save_pretrained(plain)
    out = os.path.join(folder, "run")
    command = (
        [braid, "train", "--load", plain, "--output-dir", out, "--data-path", os.path.join(folder, "text.txt")]
        + f"--num-layers 2 --hidden-size 64 --ffn-hidden-size 112 --num-attention-heads 4 --num-query-groups {groups} "
          f"--seq-length {SEQ} --micro-batch-size {MICRO} --global-batch-size {GLOBAL} --train-iters {ITERS} --lr {LR} "
          f"--min-lr {MIN_LR} --lr-decay-style cosine --lr-warmup-iters {WARMUP} --weight-decay {DECAY} "
          f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPS} --clip-grad {CLIP} --seed {SEED} "
          f"--split 9,1 --eval-iters 2".split()
        + ([] if tied else ["--untie-embeddings-and-output-weights"]) + flags)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with open(os.path.join(out, "metrics.jsonl")) as file:
        metrics = [json.loads(line) for line in file]
    assert [line["iteration"] for line in metrics] == list(range(1, ITERS + 1)), metrics

    train_end = round(len(text) * 0.9)
    losses, norms = train_with_torch(model, Part(text, 0, train_end))
    assert losses[-1] < 0.9 * losses[0] and max(norms) > CLIP, (losses, norms)
    worst = max(abs(line["loss"] - loss) / loss for line, loss in zip(metrics, losses))
    worst_norm = max(abs(line["grad_norm"] - norm) / norm for line, norm in zip(metrics, norms))
    assert worst < 1e-4 and worst_norm < 1e-3, (worst, worst_norm, losses, metrics)

    trained = AutoModelForCausalLM.from_pretrained(os.path.join(out, "checkpoint"), dtype="auto").eval()
    model.eval()
    difference = max((a - b).abs().max().item() for a, b in zip(trained.parameters(), model.parameters(), strict=True))
    assert difference < 1e-3, difference  # AdamW moves a weight by lr even where its gradient is noise
    validation = Part(text, train_end, len(text))
    with torch.no_grad():
        tokens = validation.batch(0, 2 * GLOBAL)
        loss = loss_of(trained, tokens).item()
        logits, expected = trained(tokens[0]).logits, model(tokens[0]).logits
    assert close(metrics[-1]["validation_loss"], loss, 1e-5), (metrics[-1], loss)
    spread = (logits - expected).abs().max() / expected.abs().max()
    assert spread < 1e-3, spread
    print(f"tied {tied}, {groups} groups, {' '.join(flags) or 'one rank'}: loss within {worst:.1e}, gradient norm "
          f"{worst_norm:.1e}, weights {difference:.1e}, validation {abs(metrics[-1]['validation_loss'] / loss - 1):.1e}, "
          f"logits {spread:.1e}")


text = b"".join(b"%d braids weave %d threads, each one %s; " % (i, i * i % 97, b"ab" if i % 3 else b"ba") for i in range(1500))
for tied, groups, flags in (
    (False, 4, []),
    (True, 2, "--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel --use-coc --coc-fused-kernel".split()),
    (False, 2, "--nproc 4 --tensor-model-parallel-size 2 --use-coc --coc-parallel-num 3".split()),
):
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "text.txt"), "wb") as file:
            file.write(text)
        check(sys.argv[1], folder, text, tied, groups, flags)
