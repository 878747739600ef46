#!/usr/bin/env bash
# Installs what braid needs on Debian 12: packages with apt (as root or with sudo), PyTorch in the private .venv.
# Usage: tools/setup.sh [test]     test: also what the whole-model tests compare with, a model checker, and network namespaces
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ cmake ninja-build python3-venv clang-format libcli11-dev nlohmann-json3-dev
  libgtest-dev libgmock-dev libgloo-dev)
requirements=requirements.txt
if [ "${1:-}" = test ]; then
  packages+=(spin iproute2)
  requirements=requirements-test.txt
fi

installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
missing=()
for package in "${packages[@]}"; do
  grep -qxF "installed $package" <<<"$installed" || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  as_root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "setup: needs root or sudo to install: ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
  fi
  echo "setup: installing Debian packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# What is installed in .venv is remembered as a copy of the requirements.
wanted=$(cat requirements.txt "$requirements")
stamp=.venv/$requirements
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  [ -x .venv/bin/python ] || /usr/bin/python3 -m venv .venv
  echo "setup: installing into .venv: $(grep -hv '^#\|^-r' requirements.txt "$requirements" | sort -u | tr '\n' ' ')"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements"
  printf '%s\n' "$wanted" >"$stamp"
fi
