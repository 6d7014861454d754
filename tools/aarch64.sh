#!/usr/bin/env bash
# Compiles the core for aarch64 with Debian's cross compiler, and runs its C++ tests of kernels, plans, wire format and
# servers in an emulator: aarch64.sh [FILTER]. Needs g++-aarch64-linux-gnu, qemu-user and libgtest-dev. Minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
# What waits for real time is left out: an emulator is too slow for it. So are tests that start themselves again.
filter=${1:-'*Kernel*:*Sum*:*Half*:*Wire*:*Plan*:*Checksum*:*Crc*:*Sha*:*Decode*:*Update*:*Lossless*:*Encod*:*Combin*:*Aggreg*:*Compress*:*Factor*:*Root*:*Digest*-InvariantDeathTest*'}
build=$PWD/build/aarch64
sysroot=/usr/aarch64-linux-gnu

cross=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
  -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++)
if [ ! -d "$build/gtest" ]; then
  cmake -S /usr/src/googletest -B "$build/googletest" "${cross[@]}" -DCMAKE_INSTALL_PREFIX="$build/gtest" >/dev/null
  cmake --build "$build/googletest" --target install >/dev/null
fi
cmake -S . -B "$build/core" "${cross[@]}" -DPOSEIDON_PYTHON=OFF -DPOSEIDON_UCX=OFF -DPOSEIDON_TLS=OFF \
  -DPOSEIDON_TESTS=ON -DGTest_ROOT="$build/gtest" >/dev/null
cmake --build "$build/core" --target poseidon_tests
qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static)
"$qemu" -L "$sysroot" -E LD_LIBRARY_PATH="$sysroot/lib" "$build/core/poseidon_tests" --gtest_brief=1 \
  --gtest_filter="$filter"
