#!/usr/bin/env bash
# The standing measurements: the collective matmuls at their shapes, a training step, and transformers beside it; JSON lines, and a table of them.
# Usage: bench/run.sh [FOLDER [ROUNDS]]     FOLDER: where the results go (bench/results)
#                                           ROUNDS: of each case of the ops (21); a third as many steps, in 3 repeats
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-bench/results}
rounds=${2:-21}
mkdir -p "$folder"
cpu=$(sed -n '/^model name/{s/.*: //;s/([^)]*)//g;p;q}' /proc/cpuinfo | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9.\n' _)
name=${cpu%_}_$(nproc)cores_$(date +%Y%m).jsonl
first_core=$(taskset -cp $$ | sed 's/.*: //;s/[-,].*//')

# begin KIND; measure COMMAND...; finish: one JSON line a case, in a file that appears when it is whole.
begin() {
  out=$folder/$1_$name
  printf '{"command": "make bench", "commit": "%s", "rounds": %d}\n' "$(git describe --always --dirty)" "$rounds" >"$out.new"
}
measure() {
  echo "$*" >&2
  "$@" --json >>"$out.new"
}
finish() {
  mv "$out.new" "$out"
  results+=("$out")
}
results=()

begin ops
measure build/braid bench ops --sweep --rounds "$rounds"
finish

begin int8
measure taskset -c "$first_core" build/braid bench int8 --rounds "$rounds"
finish

begin step
step=(build/braid bench step --num-layers 4 --hidden-size 512 --ffn-hidden-size 1376 --num-attention-heads 8 --seq-length 1024
  --vocab-size 256 --micro-batch-size 1 --lr 1e-3 --train-iters $(((rounds + 2) / 3)))
split=(--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel)
for repeat in 1 2 3; do
  measure taskset -c "$first_core" "${step[@]}"
  measure env BRAID_SHARED_MEMORY=0 "${step[@]}" "${split[@]}"
  measure "${step[@]}" "${split[@]}"
  measure "${step[@]}" "${split[@]}" --use-coc --coc-parallel-num 4
  measure "${step[@]}" "${split[@]}" --use-coc --coc-fused-kernel
done
finish

begin transformers
echo "bench/transformers_step.py" >&2
.venv/bin/python bench/transformers_step.py 3 >>"$out.new"
finish

python3 bench/summary.py "${results[@]}"
echo "The results lie in ${results[*]}."
