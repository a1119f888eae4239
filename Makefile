# Two commands on a fresh machine: `make demo` and `make test`. Everything they install goes into .venv and build/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard native/* native/*/*) CMakeLists.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-cuda lint format sanitize sanitize-store clean

# The demo model has 256 experts; only 40 % of them may be in memory, so that the others are really streamed.
demo: $(VENV)/.package
	$(BIN)/moeflux generate --slots 102 --max-tokens 220 --temperature 0.7 --seed 1

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto

# The GPU backend on a machine that has one; without, the same tests run in Triton's interpreter on smaller shapes.
test-cuda: $(VENV)/.test
	$(BIN)/python -m pytest tests/cuda

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The native tests under the address and undefined-behaviour sanitizers, in an environment of their own.
SANITIZE := .venv-sanitize
sanitize:
	$(PYTHON) -m venv $(SANITIZE)
	$(SANITIZE)/bin/python -m pip install --quiet --disable-pip-version-check pytest hypothesis .  \
	  --config-settings=cmake.define.MOEFLUX_SANITIZE=address,undefined --config-settings=build-dir=build/sanitize
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	$(SANITIZE)/bin/python -m pytest -q -p no:cacheprovider tests/backends tests/native tests/properties

# The expert store with many threads on it, under the thread sanitizer and under the address and undefined-behaviour ones.
STORE := native/memory.cpp $(wildcard native/store/*.cpp) native/tests/store_stress.cpp
sanitize-store:
	mkdir -p build
	for kind in thread address,undefined; do \
	  $(CXX) -std=c++20 -O1 -g -Wall -Wextra -fno-omit-frame-pointer -fsanitize=$$kind -pthread $(STORE) -o build/store_stress && \
	  TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/store_stress build/store_stress.bin \
	    || exit 1; \
	done

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("moeflux needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml $(NATIVE) | $(VENV)/bin/python
	@echo "installing moeflux into $(VENV) (builds the native module)"
	$(PIP) --editable .
	touch $@

# torch is installed by itself first, so that nothing else can choose another build of it.
$(VENV)/.test: $(VENV)/.package
	@echo "installing what the tests need into $(VENV)"
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/.lint: $(VENV)/.package
	$(PIP) --editable '.[lint]'
	touch $@

clean:
	rm -rf $(VENV) $(SANITIZE) build
