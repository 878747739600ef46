#!/usr/bin/env bash
# Trains the demo: a small decoder on the sources of Python's standard library (bytes as tokens), two ranks, into runs/demo.
set -euo pipefail
cd "$(dirname "$0")/.."

out=runs/demo
library=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
# The text: every module of the library, but nothing that pip or apt have installed beside it.
mkdir -p "$out/text"
find "$library" -name '*.py' -not -path '*-packages/*' -size -200k | LC_ALL=C sort | xargs -d '\n' cat >"$out/text/library.py.new"
mv "$out/text/library.py.new" "$out/text/library.py"

model=(--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 --seq-length 256
  --max-position-embeddings 256)
parallel=(--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel --use-coc --coc-fused-kernel)
schedule=(--micro-batch-size 4 --global-batch-size 4 --train-iters 1200 --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine
  --lr-warmup-iters 50 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --seed 1234)
output=(--data-path "$out/text/library.py" --split 95,5,0 --eval-interval 250 --eval-iters 20 --log-interval 50
  --output-dir "$out" --save "$out/checkpoint" --trace "$out/trace.json")
build/braid train "${model[@]}" "${parallel[@]}" "${schedule[@]}" "${output[@]}"
echo "The run lies in $out: metrics.jsonl, checkpoint/ (as transformers reads it), trace.json (opens in Perfetto)."
