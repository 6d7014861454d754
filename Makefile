# make demo: set everything up and train. make test: all tests. make check: formatter, linter, types.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(shell find src include -name '*.cc' -o -name '*.h' -o -name '*.def') CMakeLists.txt pyproject.toml
comma := ,
CPP_FILES = $(shell git ls-files 'src/*.cc' 'src/*.h' 'include/*.h' 'tests/*.cc' 'tests/*.h' 'bench/*.cc')

.PHONY: demo test test-frameworks test-bench test-deploy docs lint-release check format cpp-test core-bench sanitize \
  sanitize-part fuzz clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python tools/check_structure.py
	$(BIN)/python tools/check_thread_comments.py
	tools/tests.sh

# What others have written: torch's tests of its own class, and programs with each framework, which are installed first.
# And the examples of the commands' help that take minutes.
test-frameworks: $(STAMP)
	$(BIN)/python -m pip --disable-pip-version-check -q install -c constraints.txt -r tests/frameworks/requirements.txt
	$(BIN)/python -m pip --disable-pip-version-check -q install --no-deps -r tests/frameworks/without_torchvision.txt
	SLOW_EXAMPLES=1 $(BIN)/python -m pytest tests/torch_ddp tests/torch_backend tests/frameworks tests/python/test_jax.py \
	  tests/python/test_jax_values.py tests/python/test_jax_recovery.py tests/python/test_tensorflow.py \
	  tests/python/test_tensorflow_factors.py tests/python/test_tensorflow_recovery.py \
	  tests/python/test_help_examples.py tests/python/test_examples.py

# The benchmarks measure what they say, on small inputs: minutes.
test-bench: $(STAMP)
	$(BIN)/python -m pytest tests/python/test_bench_*.py

# The service on a booted Debian without a compiler, and as a container. Needs root, debootstrap and buildah; minutes.
test-deploy: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/deploy

# The extension is rebuilt when its sources change; Python files are used where they lie.
$(STAMP): constraints.txt $(SOURCES)
	PYTHON="$(PYTHON)" tools/setup.sh $(VENV)
	touch $(STAMP)

# The documentation site of this version, in build/site/VERSION. It needs npm, and no build of Poseidon.
docs:
	tools/docs/build.sh

# The workflows, forms and CITATION.cff against their schemas, and the workflows' rights. It needs no build of Poseidon.
lint-release:
	tools/release/lint.sh

# TESTS: a filter, such as 'Simulation.*'.
cpp-test: $(STAMP)
	tools/cpp_tests.sh "" "" --gtest_filter='$(or $(TESTS),*)'

check: $(STAMP)
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/ruff format --check python tests bench examples tools
	$(BIN)/ruff check python tests bench examples tools
	$(BIN)/mypy
	$(BIN)/python tools/check_structure.py
	$(BIN)/python tools/check_thread_comments.py
	tools/clang_tidy.sh $(BIN)

format: $(STAMP)
	$(BIN)/clang-format -i $(CPP_FILES)
	$(BIN)/ruff format python tests bench examples tools
	$(BIN)/ruff check --fix-only python tests bench examples tools

# The coder and kernels against memory copy, TCP flows against blocking sockets. On a quiet machine.
core-bench: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/bench -G Ninja -DPOSEIDON_PYTHON=OFF -DPOSEIDON_BENCH=ON >/dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/bench
	build/bench/coder_bench
	build/bench/kernel_bench
	build/bench/shard_bench
	build/bench/transport_bench 1 1024 7
	build/bench/transport_bench 8 1024 7

# The core's tests under address+undefined and thread sanitizers (minutes; thread three times over).
sanitize: $(STAMP)
	tools/cpp_tests.sh address,undefined build/sanitize-address
	for time in 1 2 3; do tools/cpp_tests.sh thread build/sanitize-thread || exit $$?; done

# Loops, flows, clients, servers and the simulation under one of the two (SANITIZERS).
sanitize-part: $(STAMP)
	ROOMS="$(or $(ROOMS),base;bindings;client;server;transport)" tools/cpp_tests.sh $(or $(SANITIZERS),thread) \
	  build/sanitize-part-$(firstword $(subst $(comma), ,$(or $(SANITIZERS),thread)))

# Coverage-guided fuzzing of the decoders; needs clang. SECONDS each.
fuzz: $(STAMP)
	tools/fuzz.sh build/fuzz $(or $(SECONDS),60)

clean:
	rm -rf build report.html trace.json
