#!/usr/bin/env bash
# Tries wheels of dist/ in a fresh Debian or Ubuntu that has Python and no compiler: try_wheel.sh SUITE, such as bookworm
# or, with MIRROR, noble. As root, with debootstrap. Two workers train examples/push_pull.py there, over TCP with TLS and
# over shared memory.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=$1
work=$PWD/build/wheels
root=$work/$suite

# Ubuntu's packages come from the mirror that MIRROR names. Debian does not have its keys, so only an https connection
# says who sends them. Older versions of debootstrap know later Ubuntus by the name of an earlier one.
bootstrap=(debootstrap --variant=minbase --include=python3,python3-venv)
if [ -n "${MIRROR:-}" ]; then
  bootstrap+=(--components=main,universe --no-check-gpg "$suite" "$root" "$MIRROR" /usr/share/debootstrap/scripts/jammy)
else
  bootstrap+=("$suite" "$root")
fi
if [ ! -x "$root/usr/bin/python3" ]; then
  "${bootstrap[@]}" >"$work/$suite.log" || { tail -n 3 "$work/$suite.log" >&2; exit 1; }
fi
in_root() { unshare --mount --pid --fork --root="$root" --mount-proc -- /usr/bin/env -i PATH=/venv/bin:/usr/bin:/bin "$@"; }
for compiler in cc c++ gcc g++ clang; do
  in_root sh -c "! command -v $compiler" || { echo "$suite has $compiler" >&2; exit 1; }
done
version=$(in_root python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# The root has no network: what the wheel needs is fetched here, for its Python and its C library.
rm -rf "$root/wheels" "$root/venv"
glibc=$(in_root python3 -c 'import os; print(os.confstr("CS_GNU_LIBC_VERSION").split(".")[1])')
platforms=(); for minor in $(seq "$glibc" -1 17); do platforms+=(--platform "manylinux_2_${minor}_$(uname -m)"); done
python3 -m pip download -q -d "$root/wheels" --find-links dist --only-binary=:all: --python-version "$version" \
  "${platforms[@]}" poseidon-dl tomli  # which Python 3.10 needs, and this machine's may not
cp examples/push_pull.py "$root/"
in_root python3 -m venv /venv
time in_root pip install -q --no-index --find-links /wheels poseidon-dl
in_root sh -c 'ls /wheels | grep poseidon; poseidon version'
in_root poseidon run -n 2 --transport tcp --tls on /push_pull.py
in_root sh -c 'mount -t tmpfs none /dev/shm && poseidon run -n 2 --transport shm /push_pull.py'
