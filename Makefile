# Every command of the project. `make test` and `make demo` need Python >= 3.11 and make, and do the rest themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python tools/install.py --constraint constraints.txt
# Stamps: what is installed, and that it is newer than pyproject.toml and constraints.txt.
DEV := $(VENV)/.installed-dev
DEMO := $(VENV)/.installed-demo
# How many workers `auto` means is in tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install test check format demo soak chaos bench device-wheel clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(DEV) ## Create .venv with everything a developer needs

test: check ## Check, then run the tests
	$(PYTEST)

check: $(DEV) ## Check format, lint, types and architecture; change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.architecture

format: $(DEV) ## Format the code and apply the linter's fixes
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

demo: $(DEMO) ## Train a model for about a minute, with a server and devices on this machine (ARGS=--sync, ARGS="--engine torch")
	@$(BIN)/papaya demo $(ARGS)

soak: $(DEV) ## The tests and simulation seeds that take many minutes
	$(PYTEST) -m soak
	$(PYTEST) --hypothesis-profile random
	$(BIN)/papaya swarm --seeds 2000
	$(BIN)/python -m tests.chaos.run --minutes 120

chaos: $(DEV) ## A whole installation on network namespaces under random faults (root; ARGS="--minutes 3 --seed 1")
	$(BIN)/python -m tests.chaos.run $(ARGS)

bench: $(DEV) ## Run every benchmark, one after the other
	@set -e; for file in $(sort $(filter-out bench/_%,$(wildcard bench/*.py))); do \
	  echo "$$file" >&2; $(BIN)/python $$file; \
	done

device-wheel: $(DEV) ## Build the package for devices without torch into dist
	$(BIN)/python -m tools.device_wheel

clean: ## Remove caches and build output; keep .venv
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# venv installs pip last: without pip, an earlier venv was interrupted and is created again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Papaya needs Python 3.11 or newer, \
	this is " + sys.version.split()[0] + "\n\nhint: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@$(PYTHON) tools/install.py --venv $(VENV)

# torch comes first and alone, under the constraint: nothing that depends on it may choose another build.
# executorch asks for a hundred megabytes that only its other uses need: the extra `executorch` names the rest.
$(DEMO): pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing Papaya into $(VENV) (the first time takes some minutes: torch is large)' >&2
	@$(INSTALL) torch
	@$(INSTALL) --no-deps executorch \
	  || echo 'There is no executorch for this machine: the demo will use --engine torch' >&2
	@$(INSTALL) safetensors --editable '.[serve,device,torch,executorch,sim]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing Papaya and all tools into $(VENV) (the first time takes some minutes)' >&2
	@$(INSTALL) torch
	@$(INSTALL) --no-deps executorch
	@$(INSTALL) --editable '.[dev]'
	@touch $(DEMO) $@
