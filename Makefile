# `make mesh20` and `make test` on a fresh machine: each makes the virtual environment, installs, and runs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: install mesh20 test lint types check claims torture fuzz clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	@echo 'Installing into $(VENV): some minutes, most of them for torch (no news until it is done).'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

mesh20: install
	$(BIN)/p2pfl launch topologies/mesh20.yaml

test: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Everything that CI does besides a short launch.
check: lint types test

# What the papers say will come out, on real data (P2PFL_DATA). Hours on two cores: docs/claims.md.
claims: install
	$(BIN)/python -m benchmarks.claims

# Thousands of runs over faulty wires in virtual time. About two minutes on one core.
torture: install
	$(BIN)/python -m benchmarks.torture --schedules 2000 --minutes 10

# Bytes that nobody should send, at the decoder (guided by coverage) and at peers in the middle of a run. Six minutes.
fuzz: install
	$(BIN)/pip install --quiet --editable '.[fuzz]'
	$(BIN)/python -m benchmarks.fuzz decoder --frames 1200000
	$(BIN)/python -m benchmarks.fuzz live --seconds 240

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
