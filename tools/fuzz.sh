#!/usr/bin/env bash
# Fuzzes every decoder for some seconds, from its corpus in the tree. Usage: fuzz.sh BUILD_DIR SECONDS
set -euo pipefail
build=$1
seconds=$2
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

# The newest: clang 14, the clang++ of Debian 12, cannot compile the views of its libstdc++.
clang=$(compgen -c clang++- | grep -E '^clang\+\+-[0-9]+$' | sort -V | tail -n 1 || true)
clang=${clang:-$(command -v clang++ || true)}
[ -n "$clang" ] || { echo "fuzzing needs clang 16 or later: apt-get install clang-16 libclang-rt-16-dev" >&2; exit 1; }
cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER="$clang" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPOSEIDON_PYTHON=OFF \
  -DPOSEIDON_FUZZ=ON -DPOSEIDON_SANITIZE=address,undefined,fuzzer-no-link >/dev/null
cmake --build "$build"
for source in tests/fuzz/*_fuzz.cc; do
  name=$(basename "$source" .cc)
  mkdir -p "$build/corpus/$name"
  "$build/$name" -max_total_time="$seconds" -print_final_stats=1 "$build/corpus/$name" "tests/fuzz/corpus/${name%_fuzz}"
done
