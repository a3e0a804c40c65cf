# Everything a person needs first. Each target that runs something installs first; where .venv is up to date that
# takes a fraction of a second.
PYTHON ?= python3
ARGS ?=
# cpu or gpu; empty keeps what .venv was installed for (cpu at first).
EXTRA ?=
VENV := .venv/bin

# What is set on make's command line and is not one of make's own names is an override of the configuration:
# `make quickstart seed=1 steps=20` is `r3async train quickstart seed=1 steps=20`. ARGS is passed as it is, instead.
OVERRIDES := $(if $(ARGS),,$(filter-out PYTHON=% ARGS=% EXTRA=%,$(MAKEOVERRIDES)))

# What needs neither Ray nor an engine nor a process group runs on all cores at once. The rest has processes of its own,
# which mostly wait for each other to load: two files at a time, however many cores there are.
QUICK := not (ray or engine or ranks) or short_run
ON_ALL_CORES := -n auto --dist loadfile --no-loadscope-reorder
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install quickstart test test-all lint format clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make install      create or repair .venv and install r3async (EXTRA=gpu for CUDA)"
	@echo "make quickstart   install, then train a tiny mixture-of-experts model here, for example: make quickstart seed=1"
	@echo "make test         install, then run the quick tests; make test ARGS='tests/test_config.py -x' runs those instead"
	@echo "make test-all     install, then run every test: with Ray, vLLM and process groups"
	@echo "make lint         ruff, mypy, what may pass the seam to the world by, what may import what, generated docs"
	@echo "make format       let ruff format the code"
	@echo "make clean        remove caches and build outputs (distclean: .venv too); runs/ is kept"

install:
	@$(PYTHON) -m tools.install $(if $(EXTRA),--extra $(EXTRA))

quickstart: install
	@$(VENV)/r3async train quickstart $(OVERRIDES) $(ARGS)

test: install
	@$(VENV)/python -m pytest $(if $(ARGS),$(ARGS),-m "$(QUICK)" $(ON_ALL_CORES))

test-all: install
	@$(VENV)/python -m pytest -m "$(QUICK)" $(ON_ALL_CORES) --durations=30
	@$(VENV)/python -m pytest -m "not ($(QUICK))" $(TWO_AT_A_TIME) --durations=30

lint: install
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(VENV)/python -m tools.lint_seam
	@$(VENV)/lint-imports --no-logo
	@$(VENV)/python -m tools.config_reference --check

format: install
	@$(VENV)/ruff check --fix-only .
	@$(VENV)/ruff format .

clean:
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	@find . -path ./.venv -prune -o -path ./runs -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean
	@rm -rf .venv
