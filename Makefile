# Two commands on a fresh machine: `make demo` and `make test`. Everything they install goes into .venv and build/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard native/* native/*/*) CMakeLists.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-cuda lint format sanitize sanitize-native soak soak-serve clients conformance agents test-agents clean

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

# Many threads on the expert store, and on machine and stream above it, under the thread sanitizer and under the address and
# undefined-behaviour ones.
SANITIZED := $(CXX) -std=c++20 -O1 -g -Wall -Wextra -fno-omit-frame-pointer -ffp-contract=off -pthread
STORE := native/check.cpp native/memory.cpp native/process.cpp $(wildcard native/store/*.cpp)
FORWARD := $(STORE) $(addprefix native/,experts.cpp layer.cpp machine.cpp mixers.cpp pool.cpp stream.cpp isa/generic.cpp)
sanitize-native:
	mkdir -p build
	for kind in thread address,undefined; do \
	  $(SANITIZED) -fsanitize=$$kind $(STORE) native/tests/store_stress.cpp -o build/store_stress && \
	  $(SANITIZED) -fsanitize=$$kind $(FORWARD) native/tests/forward_stress.cpp -o build/forward_stress && \
	  for test in store_stress forward_stress; do \
	    TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/$$test build/$$test.bin || exit 1; \
	  done || exit 1; \
	done

# Random rows, bit for bit, while the drive fails: a quarter of an hour. ROWS and SEED change it.
ROWS ?= 50000
SEED ?= 0
soak: $(VENV)/.test
	mkdir -p build
	$(CC) -shared -fPIC -O1 -o build/shim.so tests/store/shim.c -ldl
	LD_PRELOAD=$(CURDIR)/build/shim.so MOEFLUX_SHIM_FILE=model.safetensors MOEFLUX_SHIM_MODE=sometimes PYTHONPATH=tests \
	  $(BIN)/python -m soak.rows --rows $(ROWS) --seed $(SEED)

# Fifty clients on a server, some of which leave, while the drive fails: five minutes. SECONDS and SEED change it.
SECONDS ?= 300
soak-serve: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m serve.load --seconds $(SECONDS) --seed $(SEED)

# Clients and conformance tools of the server whose packages clash with ours. With it, `make test` runs their tests too.
CLIENTS := .venv-clients
clients:
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check litellm==1.106.2 llm-comply==0.5.0 \
	  schemathesis==4.32.5 'lm-eval[api]==0.4.13'

# The table of docs/server.md.
conformance: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m serve.conformance

# Coding agents and SDKs in JavaScript, pinned, with a node of their own: 1.4 GB from npm. Then `make test-agents`.
AGENTS := .agents
agents:
	mkdir -p $(AGENTS)
	cp tests/serve/agents/package.json $(AGENTS)/
	npm install --prefix $(AGENTS) --silent --no-audit --no-fund

test-agents: $(VENV)/.test
	$(BIN)/python -m pytest -q -rs tests/serve/test_agents.py

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
	rm -rf $(VENV) $(SANITIZE) $(CLIENTS) build
