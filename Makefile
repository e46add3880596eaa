# `make mesh20` and `make test` work on a fresh machine: each creates the virtual environment, installs, and runs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Test processes. Tests of several processes mostly wait, so one more than the two cores of a small machine.
JOBS   ?= 3

# Images of containers often set it. Tests start many interpreters, and each would compile torch and this project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install mesh20 quick test golden lint types unit docs check claims search fuzz bench clean

install: $(VENV)/installed

# uv installs in a quarter of pip's time, but does not read pip's settings: without them it may find no packages.
$(VENV)/installed: pyproject.toml
	@echo 'Installing into $(VENV): a minute or two, most of it for torch (no news until it is done).'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]' || $(BIN)/pip install --editable '.[dev]'
	touch $@

mesh20: install
	$(BIN)/p2pfl launch topologies/mesh20.yaml

# The one-minute loop: everything that starts no process.
quick: install
	@$(MAKE) --no-print-directory -j 3 --output-sync=target lint types unit

# All tests. COVERAGE=1 also measures coverage and fails below the floor in pyproject.toml.
test: install
	$(BIN)/pytest -n $(JOBS) --dist worksteal --durations=25 --durations-min=2 $(if $(COVERAGE),--cov)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/pytest tests/unit -n 2 -m "not exhaustive"

# Small runs of every algorithm end with the bits and byte counts that are pinned in tests/golden. CONTRIBUTING.md says how to renew them.
golden: install
	$(BIN)/python -m tests.golden check

# The tables of names in README and docs, from what is registered. A test checks that they are up to date.
docs: install
	$(BIN)/python -m tests.generated_docs

# Everything that CI does besides a short launch.
check: lint types test

# The pages of the papers' claims, from the kept runs. `python -m benchmarks.claims run` executes runs again.
claims: install
	$(BIN)/python -m benchmarks.claims pages

# Thousands of runs over faulty connections in virtual time. About two minutes on one core.
search: install
	$(BIN)/python -m tests.simulation --schedules 2000 --minutes 10

# Bytes that nobody should send, at the decoder (guided by coverage) and at peers in the middle of a run. Six minutes.
fuzz: install
	$(BIN)/pip install --quiet --editable '.[fuzz]'
	$(BIN)/python -m benchmarks.fuzz decoder --frames 1200000
	$(BIN)/python -m benchmarks.fuzz live --seconds 240

# Paired runs with their goals beside them: writes docs/benchmarks.md and benchmarks/results. 30 to 40 minutes.
bench: install
	$(BIN)/pip install --quiet --editable '.[bench]'
	$(BIN)/python -m benchmarks.bench --profile $(BENCH)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
