# Everything a person needs first. Each target that runs something installs first; where .venv is up to date that
# takes a fraction of a second.
# The first of these that is Python 3.11, 3.12 or 3.13 makes .venv. What `uv python install` brings is not always in PATH.
PYTHON ?= python3 python3.13 python3.12 python3.11 $(shell uv python find --system --no-project ">=3.11,<3.14" 2>/dev/null)
ARGS ?=
# cpu or gpu; without it, what .venv was installed for (cpu at first).
EXTRA ?= $(or $(patsubst .venv/installed-%,%,$(wildcard .venv/installed-*)),cpu)
$(if $(filter-out cpu gpu,$(EXTRA)),$(error EXTRA is cpu or gpu, not $(EXTRA)))
VENV := .venv/bin

# What is set on make's command line and is not one of make's own names is an override of the configuration:
# `make quickstart seed=1 steps=20` is `r3async train quickstart seed=1 steps=20`. ARGS is passed as it is, instead.
OVERRIDES := $(if $(ARGS),,$(filter-out PYTHON=% ARGS=% EXTRA=%,$(MAKEOVERRIDES)))

# What needs neither Ray nor an engine nor a process group runs on all cores at once, with one process more, since some tests
# wait. The rest has processes of its own, which mostly wait for each other to load: two files at a time, however many cores.
QUICK := not (ray or engine or ranks or emulated or gpu or long or nightly) or short_run
# Folders without a quick test (MARKED_FOLDERS in tests/conftest.py): each process would import vLLM to find none.
LEFT_OUT := $(addprefix --ignore=tests/,engine gpu ranks)
ON_ALL_CORES := -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist loadfile --no-loadscope-reorder $(LEFT_OUT)
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install quickstart test test-all test-gpu lint format wheel docs docs-serve check-frozen clean distclean
.DEFAULT_GOAL := help

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

# One at a time: pip inherits the lock on this folder, which ends with the last process that has it.
install: ## create or repair .venv and install r3async (EXTRA=gpu for CUDA; for another Python: make distclean install PYTHON=...)
	@flock -n . true || echo "another installation works in this folder: waiting for it"
	@flock . $(MAKE) -s $(STAMP)

# Empty while .venv is installed for the first time, then the folder's name: moved or copied, .venv is no good.
STAMP := .venv/installed-$(EXTRA)
ifneq ($(file <$(STAMP)),$(CURDIR))
.PHONY: $(STAMP)
endif
# To have free. The largest wheels of EXTRA=gpu are 3.9 GB (vLLM 0.30, torch 2.13 for CUDA 13); those of NVIDIA's libraries that
# were looked into unpack to 1.6 times as much, and others to more.
GB := $(if $(filter gpu,$(EXTRA)),12,5)
PIP := $(VENV)/python -I -m pip --disable-pip-version-check
RIGHT_PYTHON := import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
# An index of pip's own settings may have torch's CPU build, which pip takes for newer: === is the one of PyPI, for CUDA.
CUDA_TORCH := import torch; print("" if torch.version.cuda else "torch===" + torch.__version__.partition("+")[0])
# vLLM for CPU brings these in builds that do not match its torch, and then does not import. Engines alone see a torchvision, which
# vLLM imports for Qwen3.5 (rollout/vllm/engine_packages.py).
UNWANTED := torchvision torchaudio torchcodec
ENGINE_PACKAGES := --target .venv/share/r3async/vllm torchvision==0.28.0
# PyPI does not have the CPU build of torch. An index of pip's own settings may (PIP_EXTRA_INDEX_URL).
TORCH_INDEX = $$($(PIP) index versions torch 2>/dev/null | grep -q +cpu || \
  echo --extra-index-url https://download.pytorch.org/whl/cpu)

# The pip of Python 3.11 takes half as long again as a later one. It is replaced before the stamp is there: interrupted, all
# starts anew.
$(STAMP): pyproject.toml
	test -f $@ && $(VENV)/python -c "" && grep -qs " $(CURDIR)/.venv$$" .venv/pyvenv.cfg || { \
	  test ! -L .venv || { echo ".venv links to another folder's: install there" >&2; exit 1; }; \
	  for python in $(PYTHON) ""; do $$python -c "$(RIGHT_PYTHON)" 2>/dev/null && break; done; \
	  test "$$python" || { echo "r3async needs Python 3.11, 3.12 or 3.13 with venv; none of these is one: $(strip $(PYTHON))." \
	    "This brings one, which make then finds: uv python install 3.12. Where only venv lacks (Debian, Ubuntu):" \
	    "apt install python3-venv. One that is elsewhere is named: make install PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	  df -Pk . | awk 'NR == 2 { exit $$4 < $(GB)000000 }' || { echo "less than $(GB) GB are free here" >&2; exit 1; }; \
	  echo "installing $(if $(filter gpu,$(EXTRA)),up to 12,about 4) GB into .venv for $(EXTRA), with $$($$python --version)"; \
	  rm -f .venv/installed-*; $$python -I -m venv --clear .venv && \
	  { $(PIP) install -q --upgrade pip || echo "going on with the pip that came with Python"; } && touch $@; }
	# pip writes INSTALLER when a package is whole: one that was interrupted has none, and is installed again. ~: what it replaced.
	rm -rf .venv/lib/python*/site-packages/~*
	for package in .venv/lib/python*/site-packages/*.dist-info; do test -f $$package/INSTALLER || rm -r $$package; done
	# What a run imports is compiled when it first is. pip would compile all 33,000 files, for more than a minute.
	$(PIP) install --no-compile -e ".[$(EXTRA),dev]" $(if $(filter cpu,$(EXTRA)),$(TORCH_INDEX))
	$(if $(filter cpu,$(EXTRA)),$(PIP) uninstall -q -y $(UNWANTED))
	$(if $(filter cpu,$(EXTRA)),$(PIP) install -q --no-compile --no-deps --upgrade $(ENGINE_PACKAGES))
	$(if $(filter gpu,$(EXTRA)),torch=$$($(VENV)/python -c '$(CUDA_TORCH)') && test -z "$$torch" || $(PIP) install "$$torch")
	$(if $(filter gpu,$(EXTRA)),torch=$$($(VENV)/python -c '$(CUDA_TORCH)') && test -z "$$torch" || \
	  { echo "torch was installed without CUDA: name an index that has it (PIP_INDEX_URL) and make distclean install EXTRA=gpu" >&2; exit 1; })
	echo "checking that everything imports"
	$(VENV)/python -I -W ignore -c "import vllm, megatron.core, ray, torch" && $(VENV)/r3async --help > /dev/null || \
	  { rm $@; exit 1; }
	echo $(CURDIR) > $@

quickstart: install ## install, then train a tiny mixture-of-experts model here, for example: make quickstart seed=1
	@$(VENV)/r3async train quickstart $(OVERRIDES) $(ARGS)

test: install ## install, then run the quick tests; make test ARGS='tests/unit/test_config.py -x' runs those instead
	@$(VENV)/python -m pytest $(if $(ARGS),$(ARGS),-m "$(QUICK)" $(ON_ALL_CORES))

test-all: install ## install, then run the tests with Ray, vLLM and process groups too: all but those marked gpu or nightly
	@$(VENV)/python -m pytest -m "$(QUICK)" $(ON_ALL_CORES) --durations=30
	@$(VENV)/python -m pytest -m "not ($(QUICK)) and not (gpu or nightly)" $(TWO_AT_A_TIME) --durations=30

test-gpu: install ## install, then the tests that need a GPU (EXTRA=gpu), in order; `r3async doctor --gpu` has the same in parts
	@$(VENV)/python -m pytest -m gpu $(ARGS)

lint: install ## ruff, mypy, what may pass the seam to the world by, what may import what and in no circle, generated docs
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(VENV)/python -m dev.lint.seam
	@$(VENV)/python -m dev.lint.references
	@$(VENV)/lint-imports --no-logo
	@$(VENV)/python -m dev.lint.circles
	@$(VENV)/python -m dev.pages.reference --check

wheel: install ## make dist/r3async-*.whl: pip install it, with [cpu] or [gpu], where nobody changes the sources
	@$(VENV)/python -I -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

docs: install ## build the documentation's site into site/; a link that leads nowhere fails
	@$(VENV)/zensical build --strict

docs-serve: install ## show the documentation at http://localhost:8000, and build again what changes
	@$(VENV)/zensical serve

check-frozen: install ## compare simulated runs, trained steps, messages and a chaos run with dev/frozen.json, for refactorings
	@$(VENV)/python -m dev.frozen $(ARGS)

format: install ## let ruff format the code
	@$(VENV)/ruff check --fix-only .
	@$(VENV)/ruff format .

clean: ## remove caches and build outputs (distclean: .venv too); runs/ is kept
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .cache site build dist *.egg-info
	@find . -path ./.venv -prune -o -path ./runs -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean
	@rm -rf .venv
