#!/usr/bin/env bash
# Installs braid into a folder of its own, builds the example against it, and runs it on two ranks.
# Usage: tests/install_test.sh BUILD_FOLDER
set -euo pipefail
examples=$(dirname "$0")/../examples
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
cmake --install "$1" --prefix "$prefix" >/dev/null
cmake -S "$examples" -B "$prefix/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build "$prefix/build"
"$prefix/bin/braid" launch --nproc 2 -- "$prefix/build/all_gather_matmul"
