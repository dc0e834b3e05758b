# Each target makes its own .venv from the pinned constraints, so that a fresh clone needs only make and Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export MAX_JOBS ?= 2
# Small tensors are faster on one thread, and tests then share the machine better.
test test-all: export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all bench lint format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[emulator,demo,serve,test,lint]'
	touch $@

demo: $(STAMP)
	$(BIN)/greenroom demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
