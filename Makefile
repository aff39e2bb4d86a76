# Two commands do everything on a machine with python3, pip and make:
#   make demo    environment, install, train on real data that ships with the package, show the result
#   make test    environment, install, lint, types, tests
# CONTRIBUTING.md says what the other targets are for, and how long they take.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# empty, whatever the shell has: without bytecode every process rewrites the assertions of all tests again
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
ALONE := tests/datasets/test_records.py tests/datasets/test_torch_workers.py  # which look for shared memory left behind
NAME ?= step_overhead

.PHONY: demo test lint types tests slow integrations examples scorecard mutants docs bench measure clean

demo: $(VENV)/installed
	$(BIN)/jax-trainer train digits

# pyright takes one core, and the tests two processes: side by side they end sooner
test: lint
	+$(MAKE) --jobs=2 types tests

lint: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# a larger young generation: node spends a fifth of its time collecting garbage otherwise
types: $(VENV)/installed-test
	NODE_OPTIONS=--max-semi-space-size=64 $(BIN)/pyright --pythonpath $(BIN)/python

# what it compiles is kept in .pytest_cache: a second run takes about half as long
tests: $(VENV)/installed-test
	$(PYTEST) -n 2 -m "not slow and not integration and not example and not scorecard"

# every option in every style, every chunk size, every model, runs that are killed
slow: $(VENV)/installed-test
	$(PYTEST) -n 2 -m slow

# other systems, each if it is installed: SLURM, Chromium; torch, Hugging Face, MLflow, Ray, S3, PostgreSQL are
integrations: $(VENV)/installed-integrations
	$(PYTEST) -n 2 -m integration $(ALONE:%=--ignore=%)
	$(BIN)/python -m pytest -m integration $(ALONE)
	$(PYTEST) -n 2 -m "not integration and not scorecard" -k "torch or Hugging" tests

# all code of the documentation, examples and notebooks in full, generated projects, the quality of samples
examples: $(VENV)/installed-test
	$(PYTEST) -n 2 -m example

scorecard: $(VENV)/installed-test
	$(BIN)/python scripts/scorecard.py --resume  # every fault, many times over; continues after an interruption

mutants: $(VENV)/installed-test
	$(BIN)/python scripts/mutation_sample.py -j 2 --out mutants.json  # can be interrupted and continued

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -n -q -d docs/_build/doctrees docs docs/_build/html
	@echo "Built docs/_build/html/index.html"

# NAME: a file of benchmarks/, or gpt2 or dit; ARGS: its options
bench: $(VENV)/installed
	$(BIN)/python $(if $(wildcard benchmarks/$(NAME).py),benchmarks/$(NAME).py,benchmarks/presets.py --only $(NAME)) $(ARGS)

measure: $(VENV)/installed
	$(BIN)/python scripts/measure_architecture.py --write  # into docs/architecture.md

clean:
	rm -rf $(VENV) runs docs/_build .pytest_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(PIP) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/bin/python pyproject.toml
	$(PIP) -e '.[test]'
	touch $@ $(VENV)/installed

# torch first and by exact version: the plain name would fetch several GB of CUDA libraries
$(VENV)/installed-integrations: $(VENV)/installed-test
	$(PIP) torch==2.13.0
	$(PIP) -e '.[test,integrations]'
	touch $@

$(VENV)/installed-docs: $(VENV)/bin/python pyproject.toml
	$(PIP) -e '.[docs]'
	touch $@ $(VENV)/installed
