# The front door. `make test` on a fresh clone builds its own environment in .venv and checks everything.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: demo test lint types unit docs attack bench bench-peers lock clean environment

demo: environment  ## A few minutes, then a page to look at: demo/index.html
	$(BIN)/bbb demo

test: lint types unit docs  ## Everything that CI checks

environment: .venv/ready

# Nothing is installed whose hash is not locked, but for the packages that torch's builds for CUDA ask for by their exact
# version. Which build that is, pip decides as usual; given hashes it would take the one of its index.
.venv/ready: pyproject.toml constraints.txt requirements/torch.txt requirements/environment.txt $(wildcard src/bayesbackprop/_engine/cpu*.[ch])
	$(PYTHON) -m venv .venv
	$(PIP) download --no-deps -d .venv/wheels -c constraints.txt torch
	$(PIP) install --require-hashes --no-deps --no-index --find-links .venv/wheels -r requirements/torch.txt
	rm -r .venv/wheels
	$(PIP) install --require-hashes --no-deps -r requirements/environment.txt
	$(PIP) install -c constraints.txt torch
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

types: environment
	$(BIN)/mypy

unit: environment
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal

docs: environment  ## The site, in the folder site: links, anchors, formulas and spelling are checked
	$(BIN)/python docs/rooms.py
	$(BIN)/python docs/supported.py --check
	$(BIN)/codespell
	$(BIN)/python docs/website.py

attack: environment  ## Ten minutes of mangled files, kills, bad calls, threads and a full disk; SECONDS=60 SEED=1
	cd tests && ../$(BIN)/python -m attack --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

bench: environment  ## Needs a quiet machine and about an hour
	$(BIN)/bbb bench step $(PEERS) --json results/bench/step.json
	$(BIN)/bbb bench small $(PEERS) --json results/bench/small.json
	$(BIN)/bbb bench predict $(PEERS) --json results/bench/predict.json
	$(BIN)/bbb bench paths $(PEERS) --json results/bench/paths.json
	$(BIN)/bbb bench networks $(PEERS) --json results/bench/networks.json
	$(BIN)/bbb bench size --json results/bench/size.json
	$(BIN)/bbb bench growth --json results/bench/growth.json
	$(BIN)/bbb bench bandit $(PEERS) --seed 300 --json results/bench/bandits.json
	$(BIN)/bbb bench report $(foreach what,step small predict paths networks size growth bandits,results/bench/$(what)*.json) --out docs/benchmarks.md

bench-peers: environment  ## The same beside other libraries, in some hours
	$(PIP) install -c constraints.txt -e ".[peers]"
	$(MAKE) bench PEERS=--peers

lock: environment  ## After a change of pyproject.toml or constraints.txt
	$(BIN)/python requirements/lock.py

clean:
	rm -rf .venv build dist site .cache docs/notebooks/*.md docs/notebooks/*.png .mypy_cache .pytest_cache .ruff_cache src/*.egg-info src/bayesbackprop/_engine/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
