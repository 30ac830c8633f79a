# Every target works alone on a machine with Python 3.11 or newer, make and gcc.
# Set-up happens in .venv; a stamp per extra keeps a second call from installing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Files of tests go to so many processes, each file to one of them. Most tests trace and
# compile, which uses one core; more than two processes need 5 GiB of memory each.
PROCESSES ?= 2
# Which delays `make chaos` makes, and the share of the tests that it runs.
SEED  ?= 1
SHARE ?= 0.1
# Which part of the slow cases `make test-slow` runs: 2/3 is the second third.
PART  ?= 1/1
# For how long `make fuzz` judges random layouts.
SECONDS ?= 3600
PYTEST  = $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
# Hundreds of processes import the library and the tests: each would compile them again.
export PYTHONDONTWRITEBYTECODE =
LIBRARY = not parity and not compilers and not ray
SPHINX  = JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --fail-on-warning --keep-going -d build/docs-pages

.PHONY: run test test-slow test-thorough test-all chaos fuzz slow-tests lint targets ray parity docs docs-links package bench clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

run: $(VENV)/.experiments  ## set up, then prove data-parallel gradients equal on real data (quick form)
	$(BIN)/python -m experiments data_parallel_equivalence --quick

test: $(VENV)/.test  ## set up, then run the tests: of each as many cases as there is time for
	$(PYTEST) -m "not slow and $(LIBRARY)"

test-slow: $(VENV)/.test  ## the others, but for what test-thorough runs; PART=2/3: the second third
	JDIST_SLOW_PART=$(PART) $(PYTEST) -m "slow and not compiled and $(LIBRARY)"

test-thorough: $(VENV)/.test  ## what rests on XLA, compiled as users have it
	JDIST_THOROUGH=1 $(PYTEST) -m "(optimized or compiled) and $(LIBRARY)"

test-all: test test-slow test-thorough  ## all three

chaos: $(VENV)/.test  ## tests of workers with random delays at every hand-off: SEED=7, SHARE=0.1 of them
	JDIST_CHAOS=$(SEED) JDIST_CHAOS_SHARE=$(SHARE) $(PYTEST) -m "$(LIBRARY)" \
	  $$($(BIN)/python -c "from tests.chaos import SUBJECTS; print(*SUBJECTS)")

fuzz: $(VENV)/.test  ## the library's own trainers in layouts of their options, for SECONDS=3600
	JAX_PLATFORMS=cpu PJRT_NPROC=16 $(BIN)/python -m tests.matrix.fuzz --seconds $(SECONDS)

slow-tests: $(VENV)/.test  ## measure again which tests are slow: tests/slow.txt
	JDIST_RECORD_SLOW=1 $(PYTEST) -m "$(LIBRARY)"

lint: $(VENV)/.lint $(VENV)/.test  ## ruff, the type checker, the architecture test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

targets: $(VENV)/.targets  ## compile every family of programs for TPUs and H100s, which need not be here
	JDIST_THOROUGH=1 $(BIN)/python -m pytest -q -m compilers tests/targets

ray: $(VENV)/.test $(VENV)/.ray  ## place workers by Ray on a cluster of made-up machines, and kill one of them
	$(BIN)/python -m pytest -q -m ray tests/ray

parity: $(VENV)/.parity  ## set up with torch, then compare with it side by side
	JDIST_THOROUGH=1 $(PYTEST) -m parity tests --ignore tests/parity/test_migration.py -k "not all_options"
	# Random options are static arguments: each example is another program, whose time is XLA's.
	$(BIN)/python -m pytest -n $(PROCESSES) -m parity tests/optim -k all_options
	$(BIN)/python -m pytest -m parity tests/parity/test_migration.py

docs: $(VENV)/.docs  ## build the site, build/docs/index.html; a warning is an error
	$(SPHINX) -b html docs build/docs

docs-links: $(VENV)/.docs  ## try the site's links to other sites; needs the network
	$(SPHINX) -b linkcheck docs build/docs-links

package: $(VENV)/.package  ## build wheel and sdist; install the wheel alone, and run README's twelve lines with it
	bash .ci/package $(BIN)/python

bench: $(VENV)/.parity  ## measure speed, and say what got worse; writes results/bench, and the tables of both pages of benchmarks
	$(BIN)/python -m benchmarks --record

clean:  ## remove the set-up and all results
	rm -rf $(VENV) results build dist *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jdist needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%: pyproject.toml | $(BIN)/python
	@echo "Setting up $(VENV) for '$*' (a few minutes the first time) ..."
	$(PIP) --editable '.[$*]'
	@touch $@
