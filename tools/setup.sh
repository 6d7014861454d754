#!/usr/bin/env bash
# Makes the virtual environment and installs Poseidon into it, ready to edit. Usage: setup.sh VENV
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

say_and_fail() {
  printf '%s\n' "$1" >&2
  exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  say_and_fail "Poseidon needs Python 3.10 or newer; set PYTHON=/path/to/python3.x"
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
  say_and_fail "Poseidon needs a C++20 compiler: on Debian and Ubuntu, apt-get install g++"

has_headers() {
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}
# Debian and Ubuntu keep venv and the headers in packages of their own.
if ! "$python" -c 'import ensurepip' 2>/dev/null || ! has_headers; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq python3-venv python3-dev >/dev/null
  else
    say_and_fail "Python's venv module or headers are missing: apt-get install python3-venv python3-dev"
  fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install -c constraints.txt "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.22,<4" ninja
# The core is compiled while the rest comes over the network and is unpacked, which one processor does.
# Building without isolation keeps build/ between runs: only what changed is compiled again.
pip install -c constraints.txt --no-build-isolation --no-deps -e . &
building=$!
trap 'kill "$building" 2>/dev/null || true' EXIT
pip install -c constraints.txt torch
wait "$building"
# What is installed of it stays: this adds what it needs.
pip install -c constraints.txt "poseidon-dl[torch,dev]"
