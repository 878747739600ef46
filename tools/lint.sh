#!/usr/bin/env bash
# Formats the C++ sources and checks the habits that no compiler sees. Same command for people and CI.
# Usage: tools/lint.sh [dry]     dry: changes nothing, fails where formatting is missing
set -euo pipefail
cd "$(dirname "$0")/.."

# Every room includes only itself and rooms before it.
rooms=(core comm ops layers train generate cli)
max_lines=500
max_columns=120  # of comments; code is at 100

mapfile -t files < <(git ls-files --cached --others --exclude-standard | while read -r f; do [ -f "$f" ] && echo "$f"; done)
of_type() { printf '%s\n' "${files[@]}" | grep -E "$1" || true; }
mapfile -t sources < <(of_type '\.(h|cpp)$')
mapfile -t models < <(of_type '\.pml$')
mapfile -t texts < <(of_type '(\.(h|cpp|pml|sh|cmake|py|supp|txt|md)|/run|Makefile|\.gitignore|\.clang-format)$')
mapfile -t code < <(of_type '(\.(h|cpp|pml|sh|cmake|py)|/run|Makefile)$')
failed=0
complain() { echo "lint: $*" >&2; failed=1; }

if [ "${1:-}" = dry ]; then
  clang-format --dry-run -Werror "${sources[@]}" || failed=1
else
  clang-format -i "${sources[@]}"
fi

while IFS=: read -r file line _; do complain "$file:$line: not ASCII"; done < <(LC_ALL=C grep -nHP '[^\x00-\x7F]' "${texts[@]}" || true)
while IFS=: read -r file line _; do complain "$file:$line: longer than $max_columns columns"; done \
  < <(grep -nHE "^.{$((max_columns + 1)),}" "${sources[@]}" "${models[@]}" || true)

for file in "${code[@]}"; do
  lines=$(wc -l <"$file")
  [ "$lines" -lt "$max_lines" ] || complain "$file: $lines lines, expected less than $max_lines"
  first=$(sed -n '1{/^#!/d};p;q' "$file")
  [ -n "$first" ] || first=$(sed -n 2p "$file")
  [[ $first =~ ^(//|#|\"\"\")\ ?[^\ ] ]] || complain "$file: does not begin with a comment that says its purpose"
done

example=examples/all_gather_matmul.cpp
sed -n '/^```cpp$/,/^```$/p' README.md | sed '1d;$d' | cmp -s - "$example" || complain "README.md: does not show $example as it is"

for ((i = 0; i < ${#rooms[@]}; i++)); do
  below=("${rooms[@]:i+1}")
  [ ${#below[@]} -gt 0 ] || continue
  pattern="#include [<\"]braid/($(IFS='|'; echo "${below[*]}"))/"
  while IFS=: read -r file line text; do
    complain "$file:$line: room ${rooms[i]} includes a room below it: ${text#*include }"
  done < <(printf '%s\n' "${sources[@]}" | { grep "^src/braid/${rooms[i]}/" || true; } | xargs -r grep -nHE "$pattern" || true)
done

[ $failed = 0 ] && echo "lint: ok"
exit $failed
