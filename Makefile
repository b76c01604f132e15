# Two commands do all the set-up: `make demo` and `make test`. The rest are conveniences.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit bench docs clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## train the digits network under Layca; prints a table, writes demo/
	$(BIN)/gyroscope demo

test: lint types unit  ## lint, type-check and test

lint: $(READY)  ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy --strict on src
	$(BIN)/mypy

unit: $(READY)  ## the tests and the examples in docstrings and documents
	$(BIN)/pytest -n 2 --dist worksteal

bench: $(READY)  ## what a step costs on this machine; writes benchmarks/results/ and the tables in docs/
	$(BIN)/python benchmarks/step_cost.py --device cpu
	$(BIN)/python benchmarks/vectors.py --device cpu
	$(BIN)/python benchmarks/monitor_cost.py --device cpu
	$(BIN)/python benchmarks/monitor_cost.py --device cpu --budget
	$(BIN)/python benchmarks/run_store.py
	$(BIN)/python benchmarks/conditioning_cost.py --device cpu
	$(BIN)/python benchmarks/report.py

docs: $(READY)  ## run every example in the documents and check every link between them
	$(BIN)/pytest tests/docs

clean:  ## remove what the other targets made
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
