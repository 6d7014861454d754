#!/usr/bin/env bash
# Runs all tests and fails if any fails. Usage: tests.sh [PYTEST_OPTION…]
#
# Many tests judge times. The Python ones of them run one after the other, and much of that time they wait. Meanwhile, at
# lower priorities, those Python tests run that judge none, in two lanes, and the C++ tests are compiled, which then run
# at once: most of them wait in virtual time. What others have written, tests/torch_ddp, tests/torch_backend and
# tests/frameworks, has a command of its own, make test-frameworks. So have the tests of the benchmarks, make test-bench.
set -uo pipefail
cd "$(dirname "$0")/.."
# Where it is set, each of the many processes that tests start would compile what it imports of this tree.
unset PYTHONDONTWRITEBYTECODE

# Files whose tests judge no times, or with much patience as those of hosts, which wait most of the time. They take turns in going to one lane or the other,
# and this order makes both about as long.
judge_no_times=(
  tests/python/test_bare_systems.py
  tests/python/test_checkpoints.py
  tests/python/test_cpp_library.py
  tests/python/test_examples.py
  tests/python/test_local_sgd*.py
  tests/python/test_plan_{agrees,script}.py
  tests/python/test_feature_pairs.py
  tests/python/test_hosts*.py
  tests/python/test_planner*.py
  tests/python/test_process_limits.py
  tests/python/test_torch_{backend{,_random},sharded,shards{,_misuse,_random}}.py
  tests/python/test_torch_growth.py
  tests/python/test_torch_{buffers,class,drop_in,error_feedback,linear_forward,lossy,memory,powersgd_hook}.py
  tests/python/test_torch_{collectives,gradients,groups,nested_backward,never_silent,optimizer_kinds,properties}.py
  tests/python/test_torch_{compiled*,random_optimizers,reused_memory_random}.py
  tests/python/test_torch_overlap{,_clipping,_frameworks,_loops,_models,_random,_surroundings}.py
  tests/python/test_torch_recovery{,_lossy,_misuse,_servers,_state}.py
  tests/python/test_torch_{second_optimizer,server_*,small_groups,weights_elsewhere}.py
  tests/python/test_{exchange,torch}_random_jobs.py
)

# Status 5 says that there was no such test, as with --last-failed where none has failed.
# A test that fails once may have met the load that the others make: it runs once more, and both are told ("RERUN").
# What does not hold fails twice.
run_pytest() {
  .venv/bin/python -m pytest --reruns 1 -rR "$@"
  local status=$?
  [ "$status" -eq 5 ] || return "$status"
}

run_cpp() {
  # What goes wrong while compiling is seen again when the tests run.
  nice -n 15 tools/cpp_tests.sh "" "" --gtest_filter=-'*' >/dev/null 2>&1
  tools/cpp_tests.sh
}

# Every second file, from that of the lane's number on.
run_beside() {
  local lane=$1 files=()
  shift
  renice -n 10 -p "$BASHPID" >/dev/null
  export TEST_PATIENCE=4
  for ((i = lane; i < ${#judge_no_times[@]}; i += 2)); do files+=("${judge_no_times[i]}"); done
  run_pytest -o cache_dir=".pytest_cache/judge_no_times_$lane" "$@" "${files[@]}"
}

outputs=$(mktemp -d)
run_cpp >"$outputs/cpp" 2>&1 &
others=($!)
for lane in 0 1; do
  run_beside "$lane" "$@" >"$outputs/lane_$lane" 2>&1 &
  others+=($!)
done
trap 'kill "${others[@]}" 2>/dev/null; rm -rf "$outputs"' EXIT

failed=0
run_pytest "$@" tests/python tests/integration "${judge_no_times[@]/#/--ignore=}" \
  --ignore-glob='*/test_bench_*.py' || failed=1
for other in "${others[@]}"; do wait "$other" || failed=1; done
cat "$outputs"/*
exit "$failed"
