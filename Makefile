# The front door. `make test` on a fresh clone builds its own environment in .venv and checks everything.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: demo test lint types unit docs bench bench-peers clean environment

demo: environment  ## A few minutes, then a page to look at: demo/index.html
	$(BIN)/bbb demo

test: lint types unit docs  ## Everything that CI checks

environment: .venv/ready

.venv/ready: pyproject.toml constraints.txt $(wildcard src/bayesbackprop/_engine/cpu*.[ch])
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt setuptools -e ".[dev,docs,paper,sklearn]"
	touch $@

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

types: environment
	$(BIN)/mypy

unit: environment
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2

docs: environment
	$(BIN)/python docs/rooms.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: environment  ## Needs a quiet machine and a few minutes
	$(BIN)/bbb bench step $(PEERS) --json results/bench/step.json
	$(BIN)/bbb bench small $(PEERS) --json results/bench/small.json
	$(BIN)/bbb bench predict $(PEERS) --json results/bench/predict.json
	$(BIN)/bbb bench report $(foreach what,step small predict,results/bench/$(what)*.json) --out docs/benchmarks.md

bench-peers: environment  ## The same beside other libraries, in about half an hour
	$(PIP) install -c constraints.txt -e ".[peers]"
	$(MAKE) bench PEERS=--peers

clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache src/*.egg-info src/bayesbackprop/_engine/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
