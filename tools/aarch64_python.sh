#!/usr/bin/env bash
# Makes the wheel for aarch64 in an emulated Debian 12 with tools/wheels.sh, the same command as elsewhere, and tries it:
# the Python tests that need no framework, and jobs of which one rank is there and one is here. As root, with
# debootstrap, qemu-user-static with binfmt_misc, g++-12-aarch64-linux-gnu, and .venv (`make test` makes it). The
# compiler is this machine's, which compiles for the other. About 20 minutes on two cores, the first time 5 more.
#
# TORCH=2.9.1 HERE=PYTHON tools/aarch64_python.sh also runs tests of PyTorch's adapter there with this version of torch
# from PyPI. HERE is an interpreter on this machine with the same version and Poseidon: ranks compare their versions.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != mounted ]; then exec unshare --mount "tools/${0##*/}" mounted; fi
root=$PWD/build/aarch64/root
triple=aarch64-linux-gnu

if [ ! -e "$root/made" ]; then
  rm -rf "$root"
  debootstrap --arch=arm64 --variant=minbase \
    --include=python3-dev,python3-venv,libssl-dev,libstdc++-12-dev,make,git,iproute2 bookworm "$root" >/dev/null
  cp -L /usr/bin/$triple-{g++-12,gcc-12,ar,ranlib,strip,ld,as,nm} "$root/usr/bin/"
  [ -e "$root/lib64" ] || ln -s usr/lib64 "$root/lib64"
  touch "$root/made"
fi
# The compiler is run by this machine's C library.
for folder in /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib/gcc-cross /usr/$triple; do
  mkdir -p "$root$folder"
  mount --bind "$folder" "$root$folder"
done
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"

there() { chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/usr/bin:/bin:/usr/sbin \
  CXX=$triple-g++-12 AR=$triple-ar PIP_DISABLE_PIP_VERSION_CHECK=1 "$@"; }
in_source() { there sh -c 'cd /src && exec "$@"' sh "$@"; }

# What is built stays, so that a second run compiles only what has changed.
mkdir -p "$root/src"
find "$root/src" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -C "$root/src"
there git config --global --add safe.directory /src
in_source git init -q
in_source git add -A
in_source tools/wheels.sh python3

there python3 -m venv --clear /venv
there sh -c '/venv/bin/pip install -q /src/dist/*.whl pytest pytest-rerunfailures hypothesis nanobind'
# Tests of one framework each, of benchmarks, and of several hosts, whose programs train with PyTorch; of this
# repository's files; of a C++ program, which needs GoogleTest. And the emulator has no rtnetlink for a testbed.
tests=$(grep -L 'torch\|jax\|tensorflow\|keras' tests/python/test_*.py | grep -v 'test_\(torch\|bench\|hosts\)_\|test_hosts.py' |
  grep -v 'feature_pairs\|local_sgd_recovery\|watch_strangers\|check_thread_comments\|cpp_library\|release_files')
in_source /venv/bin/python -m pytest -o addopts= -p no:cacheprovider -q --reruns 1 -k 'not testbed' $tests
.venv/bin/python bench/mixed_jobs.py --jobs 100 --other "chroot $root /venv/bin/python /src/bench/mixed_jobs.py"

if [ -n "${TORCH:-}" ]; then
  there sh -c "/venv/bin/pip install -q torch==$TORCH expecttest"
  torch_tests=$(printf 'tests/python/test_torch_%s.py ' training gradients class overlap server_update ddp replicas)
  in_source /venv/bin/python -m pytest -o addopts= -p no:cacheprovider -q --reruns 1 $torch_tests
  "$HERE" bench/mixed_jobs.py --framework torch --jobs 40 \
    --other "chroot $root /venv/bin/python /src/bench/mixed_jobs.py"
fi
echo "aarch64: all passed"
