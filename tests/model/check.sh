#!/usr/bin/env bash
# Checks the models of the shared memory's flags in all their states, and that every fault seeded in them is found.
# Usage: tests/model/check.sh [MODEL...]     without: all
set -euo pipefail
cd "$(dirname "$0")"
folder=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
failed=0

# run MODEL DEFINE...: compiles with $optimize; sets `states`, and `verdict` to holds, or to what is wrong.
run() {
  local model=$1
  shift
  states=0
  spin "$@" -a "$folder/$model.pml" >spin.log 2>&1 || { verdict="spin: $(head -n 1 spin.log)"; return; }
  gcc "$optimize" -w -DSAFETY -DMEMLIM=4000 -o pan pan.c
  ./pan -m100000 -w22 >pan.log 2>&1 || true
  states=$(sed -nE 's/^ *([0-9]+) states, stored.*/\1/p' pan.log)
  if grep -qE 'reached -DMEMLIM|out of memory|depth too small' pan.log; then
    verdict="search not complete"
  elif grep -qE 'errors: 0$' pan.log; then
    verdict=holds
  else
    verdict=$(sed -nE 's/^pan:[0-9]+: (assertion violated|invalid end state).*/\1/p' pan.log)
    [ -n "$verdict" ] || verdict="pan: $(head -n 1 pan.log)"
  fi
}

# check MODEL CONFIGURATION...: it holds in each, and each fault is found in one.
check() {
  local model=$1 configuration fault
  shift
  [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" $model "* ]] || return 0
  optimize=-O2
  for configuration in "$@"; do
    run "$model" $configuration
    printf '%-12s %-50s %9s states: %s\n' "$model" "${configuration//-D/}" "$states" "$verdict"
    [ "$verdict" = holds ] || failed=1
  done
  optimize=-O0  # found soon
  for fault in $(grep -ohE '\bFAULT_[A-Z_]+' "$folder/$model.pml" | sort -u); do
    for configuration in "$@"; do
      run "$model" $configuration "-D$fault"
      case $verdict in 'assertion violated' | 'invalid end state') break ;; esac
    done
    case $verdict in
    'assertion violated' | 'invalid end state')
      printf '%-12s %-50s %9s states: found (%s)\n' "$model" "$fault" "$states" "$verdict" ;;
    *)
      printf '%-12s %-50s %9s states: NOT FOUND\n' "$model" "$fault" "$states"
      failed=1 ;;
    esac
  done
}

wanted=("$@")
check flag '-DWAITERS=2'
check leases '-DRANKS=2 -DOLDEST_FIRST' '-DRANKS=2' '-DRANKS=3 -DOLDEST_FIRST -DENTRIES=2 -DOPERATIONS=3' \
  '-DRANKS=3 -DENTRIES=2 -DOPERATIONS=3'
check reduce '-DRANKS=2' '-DRANKS=3 -DENTRIES=1 -DOPERATIONS=2'
check ring '-DRANKS=2' '-DRANKS=3 -DENTRIES=1 -DOPERATIONS=2'
check two_shot '-DRANKS=2 -DKEEPS' '-DRANKS=2 -DOPERATIONS=5' '-DRANKS=3 -DOPERATIONS=3'
check loss '-DRANKS=2' '-DRANKS=3'
check disagreement '-DRANKS=2' '-DRANKS=2 -DRESULTS' '-DRANKS=2 -DDROPS' '-DRANKS=3 -DRESULTS' '-DRANKS=3 -DOPERATIONS=2'
[ $failed = 0 ] && echo "models: ok"
exit $failed
