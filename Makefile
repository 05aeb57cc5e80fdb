# make demo   set up, then train the embedded tiny model in front of you (a few minutes on two cores)
# make test   set up, then lint, type-check and run all tests (about half an hour on two cores)
# make quick  the same without the slow tests, which is also what a plain `pytest` runs
# make lint   ruff and mypy alone
# make docs   the documentation as a site, into site/
#
# Everything lives in $(VENV). One thing else on the machine is touched: `make test` as root on Debian installs chromium,
# which the browser tests need. `make test BROWSER=no` leaves that, and they are skipped.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
THREADS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 8))')
TRAIN_ARGS ?=
PYTEST_ARGS ?=
BROWSER ?= yes

.PHONY: demo test quick lint format docs browser setup clean
TESTS := HF_HUB_OFFLINE=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Left to itself the launcher gives a process one thread.
demo: $(READY)
	$(BIN)/accelerate launch --config_file recipes/accelerate/one_process.yaml --num_cpu_threads_per_process $(THREADS) \
		recipes/gsm8k_grpo.py --embedded $(TRAIN_ARGS)

test: lint browser
	$(TESTS) -m '' $(PYTEST_ARGS)

quick: lint
	$(TESTS) $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Best effort, and never for long: without a browser its tests are skipped and say why.
APT := DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$(BROWSER)" != no ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& $(APT) update >/dev/null && $(APT) install -y chromium chromium-driver >/dev/null; then \
		echo "Installed chromium and chromium-driver for the browser tests."; \
	else \
		echo "The browser tests will be skipped: there is no chromium with chromedriver, and it was not installed here."; \
	fi

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m docs.site.build --out site

setup: $(READY)

# torch first and by its exact version, so that no other dependency can pull another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) outputs site .mypy_cache .pytest_cache .ruff_cache .hypothesis
