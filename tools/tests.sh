#!/usr/bin/env bash
# Runs all tests and fails if any fails. Usage: tests.sh [PYTEST_OPTION…]
#
# Most tests judge times. They run one after the other, the Python ones, then the C++ ones, and much of that time they
# wait. Meanwhile, at lower priorities, the C++ tests are compiled, and those Python tests run that only compute.
set -uo pipefail
cd "$(dirname "$0")/.."

only_compute=(
  tests/torch_ddp
  tests/frameworks
  tests/python/test_examples.py
  tests/python/test_torch_drop_in.py
  tests/python/test_torch_memory.py
)

# Status 5 says that there was no such test, as with --last-failed where none has failed.
run_pytest() {
  .venv/bin/python -m pytest "$@"
  local status=$?
  [ "$status" -eq 5 ] || return "$status"
}

compile_cpp() { # what goes wrong is seen again when the tests run
  renice -n 15 -p "$BASHPID" >/dev/null
  tools/cpp_tests.sh "" "" --gtest_filter=-'*' >/dev/null 2>&1
}

compute() {
  renice -n 10 -p "$BASHPID" >/dev/null
  run_pytest -o cache_dir=.pytest_cache/only_compute "$@" "${only_compute[@]}"
}

output=$(mktemp)
compile_cpp &
compiling=$!
compute "$@" >"$output" 2>&1 &
computing=$!
trap 'kill "$compiling" "$computing" 2>/dev/null; rm -f "$output"' EXIT

failed=0
run_pytest "$@" tests/python tests/integration "${only_compute[@]/#/--ignore=}" || failed=1
wait "$compiling"
tools/cpp_tests.sh || failed=1
wait "$computing" || failed=1
cat "$output"
exit "$failed"
