# The front door. `make test` on a fresh clone builds its own environment in .venv and checks everything.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: test lint types unit docs bench clean environment

test: lint types unit  ## Everything that CI checks

environment: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt setuptools -e ".[dev,docs]"
	touch $@

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: environment
	$(BIN)/mypy

unit: environment
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2

docs: environment
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
