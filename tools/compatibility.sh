#!/usr/bin/env bash
# Tests a wheel of dist/ with versions of torch: compatibility.sh PYTHON TORCH…, such as python3.12 2.4.1 2.13.0.
# Prints one line for each (docs/compatibility.md). Torch with what it needs has 3 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
tests=(test_torch_training.py test_torch_ddp.py test_torch_gradients.py test_torch_class.py test_torch_overlap.py
  test_torch_server_update.py test_exchange_api.py)

for torch in "${@:2}"; do
  venv=build/compatibility/venv
  rm -rf $venv && "$python" -m venv $venv
  pip() { $venv/bin/python -m pip --disable-pip-version-check -q "$@"; }
  pip install "torch==$torch" pytest pytest-rerunfailures hypothesis expecttest
  pip install --find-links dist --only-binary=:all: poseidon-dl
  if $venv/bin/python -m pytest -o addopts= -p no:cacheprovider "${tests[@]/#/tests/python/}" \
    >build/compatibility/output 2>&1; then
    result=$(tail -n 1 build/compatibility/output | tr -d =)
  else
    result="FAILED: $(grep -m 3 '^FAILED\|Error' build/compatibility/output | tr '\n' ' ')"
  fi
  echo "$("$python" --version), torch $torch: $result"
done
