#!/usr/bin/env bash
# Builds and runs the core's C++ tests. Usage: cpp_tests.sh BUILD_DIR [SANITIZERS [TEST_ARGUMENT…]]
set -euo pipefail
build=$1
sanitize=${2:-}
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

type=Release
[ -z "$sanitize" ] || type=RelWithDebInfo
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE="$type" -DPOSEIDON_PYTHON=OFF -DPOSEIDON_TESTS=ON \
  -DPOSEIDON_SANITIZE="$sanitize" -DCMAKE_PREFIX_PATH="$prefix/usr" >/dev/null
cmake --build "$build"
"$build/poseidon_tests" --gtest_brief=1 "$@"
