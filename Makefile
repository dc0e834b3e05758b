# Each target makes its own .venv from the pinned constraints, so that a fresh clone needs only make and Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export MAX_JOBS ?= 2
# Small tensors are faster on one thread, and tests then share the machine better.
test test-all: export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all bench lint format clean

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[emulator,demo]'
	touch $@

$(VENV)/.all: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[emulator,demo,serve,test,lint]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/greenroom demo

test: $(VENV)/.all
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: $(VENV)/.all
	$(BIN)/python -m pytest

bench: $(VENV)/.all
	$(BIN)/python benchmarks/run.py

lint: $(VENV)/.all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
