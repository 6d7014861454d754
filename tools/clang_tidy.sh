#!/usr/bin/env bash
# Runs clang-tidy over the core where it is installed. Usage: clang_tidy.sh VENV_BIN
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/$1:$PATH"

tidy=$(command -v clang-tidy || { compgen -c clang-tidy- | grep -v diff | sort -V | tail -n 1; } || true)
if [ -z "$tidy" ]; then
  echo "clang-tidy is not installed: skipped (apt-get install clang-tidy)" >&2
  exit 0
fi
cmake -S . -B build/tidy -G Ninja -DCMAKE_CXX_COMPILER=g++ -DPOSEIDON_PYTHON=OFF -DPOSEIDON_UNITY=OFF >/dev/null
find src -name '*.cc' -not -path 'src/bindings/*' -print0 | xargs -0 -P "$(nproc)" -n 4 "$tidy" -p build/tidy --quiet
