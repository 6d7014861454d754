#!/usr/bin/env bash
# Builds and runs the core's C++ tests: beside the installed extension, whose core they share, or with sanitizers in a
# tree of their own. Usage: [ROOMS=ROOM;…] cpp_tests.sh [SANITIZERS BUILD_DIR [TEST_ARGUMENT…]]
# ROOMS: only these rooms' tests (and the simulation).
# Sanitized tests have checks (POSEIDON_CHECKS); the others have them if the extension was built with them.
# The tests run as several processes at once, because many of them wait. Sanitized tests compute: they run as one.
set -euo pipefail
sanitize=${1:-}
build=${2:-}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

# GoogleTest: the system's, or its Debian package unpacked below build/ (which needs no root).
prefix=$PWD/build/gtest
if [ ! -f /usr/include/gtest/gtest.h ] && [ ! -f "$prefix/usr/include/gtest/gtest.h" ]; then
  mkdir -p "$prefix"
  if [ "$(id -u)" = 0 ]; then apt-get update -qq || true; fi
  if ! (cd "$prefix" && apt-get download libgtest-dev >/dev/null && dpkg -x libgtest-dev_*.deb .); then
    echo "GoogleTest is not installed and its package cannot be had: C++ tests NOT run (apt-get install libgtest-dev)" >&2
    exit 0
  fi
fi

options=(-DPOSEIDON_TESTS=ON -DGTest_ROOT="$prefix/usr")
shards=4
if [ -z "$sanitize" ]; then
  build=$(ls -td build/cp3*/ | head -n 1)
else
  shards=$([ -n "${ROOMS:-}" ] && echo 2 || echo 1)
  # UCX is not built for sanitizers: they would report its own threads and memory.
  # Memory that the machine does not have is refused there, too, not reported.
  export ASAN_OPTIONS=allocator_may_return_null=1 TSAN_OPTIONS=allocator_may_return_null=1
  # -O1 and lines without variables: a sanitizer needs no more, and they are compiled in less time.
  options+=(-DPOSEIDON_PYTHON=OFF -DPOSEIDON_UCX=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPOSEIDON_SANITIZE="$sanitize")
  options+=(-DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DPOSEIDON_TEST_ROOMS="${ROOMS:-*}")
fi
cmake -S . -B "$build" -G Ninja "${options[@]}" >/dev/null
cmake --build "$build" --target poseidon_tests

logs=$(mktemp -d)
processes=()
trap 'kill "${processes[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
for ((shard = 0; shard < shards; shard++)); do
  GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "$build/poseidon_tests" --gtest_brief=1 "$@" \
    >"$logs/$shard" 2>&1 &
  processes+=($!)
done
failed=0
for ((shard = 0; shard < shards; shard++)); do
  status=0
  wait "${processes[shard]}" || status=$?
  cat "$logs/$shard"
  # As in tests.sh: what fails under the load that others make runs once more. A crash fails at once.
  names=$(sed -n 's/^\[  FAILED  \] \([^ ,]*\.[^ ,]*\).*/\1/p' "$logs/$shard" | sort -u | paste -sd:)
  if [ "$status" -ne 0 ] && [ -n "$names" ] && [ -z "$sanitize" ] && grep -q 'suites ran' "$logs/$shard"; then
    echo "RERUN $names"
    status=0
    "$build/poseidon_tests" --gtest_brief=1 --gtest_filter="$names" || status=$?
  fi
  [ "$status" -eq 0 ] || failed=$status
done
exit "$failed"
