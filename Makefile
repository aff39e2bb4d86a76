# Two commands do everything on a machine with python3, pip and make:
#   make demo    environment, install, train on real data that ships with the package, show the result
#   make test    environment, install, lint, types, tests (`make slow`, `make integrations`, `make examples` and `make scorecard` take longer)
# `make docs` builds the documentation: docs/_build/html/index.html

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types tests docs slow integrations examples mutants scorecard notebooks bench bench-peers bench-checkpoints bench-mirror bench-growth bench-loaders bench-styles bench-small bench-presets bench-scaling bench-start bench-preflight many-runs data configs generative measure clean

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

# empty, whatever the shell has: without bytecode every process rewrites the assertions of all tests again
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# What it compiles is kept in .pytest_cache: a second run takes about half as long
tests: $(VENV)/installed-test
	$(PYTEST) -n 2 -m "not slow and not integration and not example and not scorecard"

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -n -q -d docs/_build/doctrees docs docs/_build/html
	@echo "Built docs/_build/html/index.html"

# every option in every style, every chunk size, every model, runs that are killed
slow: $(VENV)/installed-test
	$(PYTEST) -n 2 -m slow

# MLflow, launchers, object storage, databases, worker processes of loaders, a browser
ALONE := tests/datasets/test_records.py tests/datasets/test_torch_workers.py  # which look for shared memory left behind

integrations: $(VENV)/installed-integrations
	$(PYTEST) -n 2 -m integration $(ALONE:%=--ignore=%)
	$(BIN)/python -m pytest -m integration $(ALONE)
	$(BIN)/python -m pytest -k "Hugging" tests/datasets  # skipped without `datasets`

# all code of the documentation, all examples and notebooks in full, generated projects, the quality of samples
examples: $(VENV)/installed-test
	$(PYTEST) -n 2 -m example

notebooks: $(VENV)/installed-test
	$(BIN)/jupytext --quiet --to ipynb notebooks/*.py  # the .py files are the source

mutants: $(VENV)/installed-test
	$(BIN)/python scripts/mutation_sample.py -j 2 --out mutants.json  # can be interrupted and continued

scorecard: $(VENV)/installed-test
	$(BIN)/python scripts/scorecard.py --resume  # every fault, many times over; continues after an interruption

bench: $(VENV)/installed
	$(BIN)/python benchmarks/step_overhead.py

bench-peers: $(VENV)/installed-peers
	$(BIN)/python benchmarks/step_overhead.py --peers

bench-checkpoints: $(VENV)/installed
	$(BIN)/python benchmarks/checkpoints.py

bench-mirror: $(VENV)/installed
	$(BIN)/python benchmarks/mirror.py

bench-growth: $(VENV)/installed
	$(BIN)/python benchmarks/growth.py

bench-loaders: $(VENV)/installed-test
	$(BIN)/python benchmarks/loaders.py

bench-styles: $(VENV)/installed-test
	$(BIN)/python benchmarks/styles.py

bench-small: $(VENV)/installed-test
	$(BIN)/python benchmarks/small_data.py

bench-start: $(VENV)/installed
	$(BIN)/python benchmarks/start.py  # with a GPU, also gpt2.yaml: needs `make data`

# 200 short runs of each style, each in a process of its own; takes an hour on two cores
many-runs: $(VENV)/installed-test
	$(BIN)/python scripts/many_runs.py

data: $(VENV)/installed
	$(BIN)/python scripts/fetch_data.py

generative: $(VENV)/installed-test
	$(BIN)/python scripts/evaluate_samples.py $(foreach name,flow edm distillation consistency gan,src/jax_trainer/configs/digits_$(name).yaml)

bench-scaling: $(VENV)/installed
	$(BIN)/python benchmarks/scaling.py  # on eight CPU devices; takes some minutes

bench-presets: $(VENV)/installed
	$(BIN)/python benchmarks/presets.py  # needs a large GPU, and `make data`

bench-preflight: $(VENV)/installed
	$(BIN)/python benchmarks/preflight.py  # needs a large GPU; takes some minutes

measure: $(VENV)/installed
	$(BIN)/python scripts/measure_architecture.py --write  # writes docs/architecture.md

configs: $(VENV)/installed
	$(BIN)/python scripts/run_configs.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-test: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@ $(VENV)/installed

# MLflow, Lightning and Ray: 800 MB, which only `make integrations` needs
$(VENV)/installed-integrations: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,mlflow,ray]' 'lightning>=2.6' 'datasets>=4'
	touch $@

$(VENV)/installed-docs: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@ $(VENV)/installed

# torch first and by exact version: the plain name would fetch several GB of CUDA libraries
$(VENV)/installed-peers: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check keras lightning
	touch $@

clean:
	rm -rf $(VENV) runs docs/_build .pytest_cache .ruff_cache
