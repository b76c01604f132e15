# Two commands do all the set-up: `make demo` and `make test`. The rest are conveniences.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Tests start many processes. Where Python must not keep what it compiled, each of them compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

# The tests of `make quick`: one or two fast files for each subpackage of both packages.
QUICK  := \
    $(addprefix tests/, test_accepted.py test_layering.py test_whole_file.py \
        $(addprefix cli/test_, cli.py cli_explain.py) \
        $(addprefix conditioning/test_, product_spectra.py spectra.py) \
        $(addprefix control/test_, law_granularity.py rates_claims.py) preconditioners/test_renormalize.py \
        $(addprefix diagnosis/test_, rules.py explain.py rank_correlation.py) \
        $(addprefix figures/test_, run_data.py rotation_curves.py) \
        integrations/test_sink_choice.py \
        $(addprefix layers/test_, layer_order.py layer_parts.py) \
        $(addprefix monitor/test_, activations_counts.py quantities.py watch_numbers.py) \
        $(addprefix store/test_, queue.py write_and_read.py) \
        $(addprefix theory/test_, invariance.py theory_decay.py) \
        $(addprefix vectors/test_, vectors_combine.py vectors_dots.py)) \
    $(addprefix lab/tests/, test_lab_layering.py test_public_names.py \
        $(addprefix commands/test_, cli_data.py cli_shared.py) \
        $(addprefix lab/test_, digits.py mnist.py initialization.py mlp.py recipe.py trial.py cost.py population.py \
            fault_scores.py demo_words.py study_multipliers.py))

.DEFAULT_GOAL := help
.PHONY: help demo test quick lint types unit gpu bench docs clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# A folder that was renamed or copied has a .venv whose programs start those of the folder it was made in.
MADE_IN := $(shell cat $(READY) 2>/dev/null)
ifneq "$(MADE_IN)" ""
ifneq "$(MADE_IN)" "$(CURDIR)"
.PHONY: $(READY)
CLEAR := --clear
endif
endif

VERSION := import sys; print("%d.%d" % sys.version_info[:2])

$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	@given=$$($(PYTHON) -c '$(VERSION)'); case "$$given" in 3.1[1-9]|3.[2-9]?) ;; *) \
	    echo "Python 3.11 or later is needed, and $(PYTHON) is $${given:-not found}; name another:" \
	    "make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1;; esac; \
	there=$$($(BIN)/python -c '$(VERSION)' 2>/dev/null || echo "$$given"); \
	test -n "$(CLEAR)" -o "$$there" = "$$given" || { \
	    echo "$(VENV) has Python $$there, and $(PYTHON) is $$given; to make it anew: rm -r $(VENV)" >&2; exit 1; }
	$(PYTHON) -m venv $(CLEAR) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --editable lab
	@pwd -P > $@

demo: $(READY)  ## train the digits network under Layca; prints a table, writes demo/
	$(BIN)/gyroscope demo

test: lint types unit  ## lint, type-check and test

quick: lint types  ## lint, type-check and a selection of the tests: under a minute on two cores
	$(BIN)/pytest -n 2 --dist loadfile $(QUICK)

lint: $(READY)  ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy --strict on both packages, and on a use of its public names by itself, as a user's code is
	$(BIN)/mypy
	$(BIN)/mypy tests/type_checked.py

unit: $(READY)  ## the tests and the examples in docstrings and documents
	$(BIN)/pytest -n 2 --dist worksteal

gpu: $(READY)  ## the tests that need a GPU, and those of the kernels on it
	GYROSCOPE_TEST_DEVICE=cuda $(BIN)/pytest tests

bench: $(READY)  ## what a step costs on this machine; writes benchmarks/results/ and the tables in docs/
	$(BIN)/python benchmarks/step_cost.py --device cpu
	$(BIN)/python benchmarks/vectors.py --device cpu
	$(BIN)/python benchmarks/monitor_cost.py --device cpu
	$(BIN)/python benchmarks/monitor_cost.py --device cpu --budget
	$(BIN)/python benchmarks/run_store.py
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/conditioning_cost.py --device cpu
	$(BIN)/python benchmarks/report.py

docs: $(READY)  ## run every example in the documents and check every link between them
	$(BIN)/pytest tests/docs

clean:  ## remove what the other targets made
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
