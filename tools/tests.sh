#!/usr/bin/env bash
# Runs all tests and fails if any fails. Usage: tests.sh [PYTEST_OPTION…]
#
# Most Python tests judge times, so they run one after the other, and much of that time they wait. Meanwhile, at a lower
# priority, the C++ tests are compiled and those Python tests run that only compute. The C++ tests judge times as well:
# they run at the end, alone.
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

in_the_background() {
  renice -n 10 -p "$BASHPID" >/dev/null
  tools/cpp_tests.sh "" "" --gtest_filter=-'*' # compiles; what goes wrong is seen when they run
  run_pytest -o cache_dir=.pytest_cache/only_compute "$@" "${only_compute[@]}"
}

output=$(mktemp)
in_the_background "$@" >"$output" 2>&1 &
background=$!
trap 'kill "$background" 2>/dev/null; rm -f "$output"' EXIT

failed=0
run_pytest "$@" tests/python tests/integration "${only_compute[@]/#/--ignore=}" || failed=1
wait "$background" || failed=1
cat "$output"
tools/cpp_tests.sh || failed=1
exit "$failed"
