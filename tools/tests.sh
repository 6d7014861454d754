#!/usr/bin/env bash
# Runs all tests and fails if any fails. Usage: tests.sh [PYTEST_OPTION…]
#
# Many tests judge times. They run one after the other, the Python ones, then the C++ ones, and much of that time they
# wait. Meanwhile, at lower priorities, the C++ tests are compiled, and those Python tests run that judge none.
set -uo pipefail
cd "$(dirname "$0")/.."

# Files whose tests judge no times and need no network of their own. Together they take about as long as the others.
judge_no_times=(
  tests/torch_ddp
  tests/frameworks
  tests/python/test_bare_systems.py
  tests/python/test_bench_accuracy.py
  tests/python/test_bench_scripts.py
  tests/python/test_bench_train.py
  tests/python/test_checkpoints.py
  tests/python/test_examples.py
  tests/python/test_local_sgd*.py
  tests/python/test_plan_script.py
  tests/python/test_process_limits.py
  tests/python/test_torch_{buffers,class,drop_in,error_feedback,linear_forward,lossy,memory,powersgd_hook}.py
  tests/python/test_torch_{recovery,recovery_lossy,recovery_servers}.py
  tests/python/test_torch_{second_optimizer,small_groups,weights_elsewhere}.py
  tests/python/test_{exchange,torch}_random_jobs.py
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

run_beside() {
  renice -n 10 -p "$BASHPID" >/dev/null
  run_pytest -o cache_dir=.pytest_cache/judge_no_times "$@" "${judge_no_times[@]}"
}

output=$(mktemp)
compile_cpp &
compiling=$!
run_beside "$@" >"$output" 2>&1 &
beside=$!
trap 'kill "$compiling" "$beside" 2>/dev/null; rm -f "$output"' EXIT

failed=0
run_pytest "$@" tests/python tests/integration "${judge_no_times[@]/#/--ignore=}" || failed=1
wait "$compiling"
tools/cpp_tests.sh || failed=1
wait "$beside" || failed=1
cat "$output"
exit "$failed"
