# Two commands do all the set-up: `make demo` and `make test`. The rest are conveniences.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# An environment of its own for the frameworks that the integrations are for, so that `make test` shows what works without.
FRAMEWORKS := .venv-integrations
# And one for building the site.
DOCS := .venv-docs

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
        $(addprefix page/test_, document.py frames.py live_access.py) \
        $(addprefix store/test_, queue.py write_and_read.py) \
        $(addprefix theory/test_, invariance.py theory_decay.py) \
        $(addprefix vectors/test_, vectors_combine.py vectors_dots.py)) \
    $(addprefix lab/tests/, test_lab_layering.py test_public_names.py \
        $(addprefix commands/test_, cli_data.py cli_shared.py) \
        $(addprefix lab/test_, digits.py mnist.py initialization.py mlp.py recipe.py trial.py cost.py population.py \
            fault_scores.py demo_words.py study_multipliers.py))

.DEFAULT_GOAL := help
.PHONY: help demo test test-integrations test-docs quick lint types unit gpu bench matrix dist page docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# A folder that was renamed or copied has environments whose programs start those of the folder they were made in.
moved = $(if $(wildcard $(1)/.ready),$(shell test "$$(cat $(1)/.ready)" = "$$(pwd -P)" || echo --clear))
.PHONY: $(foreach one,$(VENV) $(FRAMEWORKS) $(DOCS),$(if $(call moved,$(one)),$(one)/.ready))

VERSION := import sys; print("%d.%d" % sys.version_info[:2])
PIP     := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# $(call environment,FOLDER,WHAT): a new environment with torch, and then with what pip is asked for.
define environment
	@given=$$($(PYTHON) -c '$(VERSION)'); case "$$given" in 3.1[1-9]|3.[2-9]?) ;; *) \
	    echo "Python 3.11 or later is needed, and $(PYTHON) is $${given:-not found}; name another:" \
	    "make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1;; esac; \
	there=$$($(1)/bin/python -c '$(VERSION)' 2>/dev/null || echo "$$given"); \
	test -n "$(call moved,$(1))" -o "$$there" = "$$given" || { \
	    echo "$(1) has Python $$there, and $(PYTHON) is $$given; to make it anew: rm -r $(1)" >&2; exit 1; }
	$(PYTHON) -m venv $(call moved,$(1)) $(1)
	$(1)/bin/python $(PIP) torch
	$(1)/bin/python $(PIP) $(2)
	@pwd -P > $(1)/.ready
endef

$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	$(call environment,$(VENV),--editable '.[dev]' --editable lab)

$(FRAMEWORKS)/.ready: pyproject.toml constraints.txt
	$(call environment,$(FRAMEWORKS),--editable '.[integration-tests]')

$(DOCS)/.ready: pyproject.toml lab/pyproject.toml constraints.txt
	$(call environment,$(DOCS),--editable '.[docs]' --editable lab)

demo: $(READY)  ## train the digits network under Layca; prints a table, writes demo/
	$(BIN)/gyroscope demo

test: lint types unit  ## lint, type-check and test

test-integrations: $(FRAMEWORKS)/.ready  ## the integrations with the real frameworks, in .venv-integrations
	HF_HUB_OFFLINE=1 $(FRAMEWORKS)/bin/pytest -n 2 --dist loadfile tests/integrations/frameworks \
	    $(addprefix src/gyroscope/integrations/, accelerate.py keras.py lightning.py optax.py optuna.py ray.py transformers.py) \
	    tests/control/test_contract_integrations.py tests/layers/test_layer_wrappers.py \
	    'tests/docs/test_tutorials.py::test_every_cell_runs_shows_pictures_and_what_the_text_says[fine_tune]'

quick: lint types  ## lint, type-check and a selection of the tests: under a minute on two cores
	$(BIN)/pytest -n 2 --dist loadfile $(QUICK)

lint: $(READY)  ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy --strict on both packages, and on a use of its public names by itself, as a user's code is
	$(BIN)/mypy
	$(BIN)/mypy tests/type_checked.py

unit: $(READY)  ## the tests and the examples in docstrings and documents
	$(BIN)/pytest -n 3 --dist worksteal

gpu: $(READY)  ## the tests that need a GPU, and those of the kernels on it
	GYROSCOPE_TEST_DEVICE=cuda $(BIN)/pytest tests

bench: $(READY)  ## what a step costs on this machine; writes benchmarks/results/ and the tables in docs/
	$(BIN)/python benchmarks/step_cost.py --device cpu
	$(BIN)/python benchmarks/host_time.py
	$(BIN)/python benchmarks/vectors.py --device cpu
	$(BIN)/python benchmarks/monitor_cost.py --device cpu
	$(BIN)/python benchmarks/monitor_cost.py --device cpu --budget
	$(BIN)/python benchmarks/run_store.py
	$(BIN)/python benchmarks/growth.py --device cpu
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/conditioning_cost.py --device cpu
	$(BIN)/python benchmarks/report.py

matrix:  ## the library's tests on several versions of torch and Python, in .matrix; writes the table in docs/versions.md
	$(PYTHON) tools/matrix

dist:  ## build and check wheels and sdists of both packages; writes dist/
	$(PYTHON) tools/build_dists

page:  ## minify the page's scripts and styles (needs npm); commit what it writes
	tools/build_page

docs: $(DOCS)/.ready  ## build the site from docs/ into docs/_build/html, in .venv-docs, and check it; warnings are errors
	@# Sphinx does not read again what did not change, so a failed build is forgotten: it would pass the second time.
	$(DOCS)/bin/sphinx-build -b html -W --keep-going -n -q -j 2 docs docs/_build/html \
	    || { rm -rf docs/_build/html/.doctrees; exit 1; }
	$(DOCS)/bin/pytest tests/docs/site

test-docs: $(READY)  ## run every example in the documents and check every link between them
	$(BIN)/pytest tests/docs

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(FRAMEWORKS) $(DOCS) .matrix docs/_build demo build dist .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
