# make demo   set up, then train the embedded tiny model in front of you (a few minutes on two cores)
# make test   set up, then lint, type-check and run all tests (about half an hour on two cores)
# make quick  the same without the slow tests, which is also what a plain `pytest` runs
# make lint   ruff and mypy alone
#
# Everything lives in $(VENV); nothing else on the machine is touched.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
THREADS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 8))')
TRAIN_ARGS ?=
PYTEST_ARGS ?=

.PHONY: demo test quick lint format setup clean
TESTS := HF_HUB_OFFLINE=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Left to itself the launcher gives a process one thread.
demo: $(READY)
	$(BIN)/accelerate launch --config_file recipes/accelerate/one_process.yaml --num_cpu_threads_per_process $(THREADS) \
		recipes/gsm8k_grpo.py --embedded $(TRAIN_ARGS)

test: lint
	$(TESTS) -m '' $(PYTEST_ARGS)

quick: lint
	$(TESTS) $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

# torch first and by its exact version, so that no other dependency can pull another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) outputs .mypy_cache .pytest_cache .ruff_cache .hypothesis
