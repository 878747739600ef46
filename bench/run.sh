#!/usr/bin/env bash
# The standing measurements: every op at its shapes, one training step; one JSON line a case, into bench/results.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p bench/results
out=bench/results/standing_$(nproc)cores_$(date +%Y%m).jsonl
: >"$out.new"
measure() {
  echo "braid bench $*" >&2
  build/braid bench "$@" --nproc 2 --json | tee -a "$out.new"
}
for op in all_gather_matmul matmul_reduce_scatter matmul_all_reduce; do
  for m in 16 1024 4096; do
    measure ops --op "$op" --m "$m" --n 1024 --k 1024 --dtype f32
  done
done
measure step --hidden-size 512 --num-layers 4 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 \
  --global-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel --use-coc --coc-fused-kernel
mv "$out.new" "$out"
echo "The results lie in $out."
