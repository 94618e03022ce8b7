# The front door. `make test` on a fresh clone builds its own environment in .venv and checks everything.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: test lint types unit docs bench clean environment

test: lint types unit docs  ## Everything that CI checks

environment: .venv/ready

.venv/ready: pyproject.toml constraints.txt src/bayesbackprop/kernels/fused.c src/bayesbackprop/kernels/fused_real.h
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
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: environment  ## Needs a quiet machine and a few minutes
	$(BIN)/python benchmarks/steps.py

clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache src/*.egg-info src/bayesbackprop/kernels/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
