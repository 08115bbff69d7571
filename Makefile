# Every command of the project, run from the checkout. `make` alone lists them.
# Nothing is done twice: an environment, a cache, a run that is there is used.

CONFIG ?= configs/smollm2-135m.toml
CACHE ?= caches/$(basename $(notdir $(CONFIG)))
RUN ?= runs/$(basename $(notdir $(CONFIG)))
SET ?=
TORCH ?= 2.13.0

MAKEFLAGS += --no-builtin-rules
# OpenMP's threads spin while they wait for each other, by default for so long that a pass of the small target over 8 tokens
# takes 4 s on two cores that are busy with other work. With so few turns it takes 0.3 s, and on idle cores 0.1 s as before.
export GOMP_SPINCOUNT ?= 3000
export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# PYTHON= names an environment of the user's, which is only completed. Without it there is .venv, which is ours.
ifdef PYTHON
READY := complete-environment
else
PYTHON := .venv/bin/python
READY := .venv/.ready-$(TORCH)-$(firstword $(shell cksum pyproject.toml))
endif

# What the embedded default needs is built when the configuration names it. A complete cache needs neither target nor data.
EMBEDDED := $(if $(findstring models/smollm2-135m,$(file <$(CONFIG))),embedded)
INPUTS := $(if $(wildcard $(CACHE)/complete.json),,$(EMBEDDED))
# What training would refuse anyway is refused before the extraction, which may take days.
PREFLIGHT := $(if $(wildcard $(CACHE)/complete.json),,preflight)

# In quotes that the shell takes away, so that it leaves those in the values alone; the programs take the overrides apart.
OVERRIDES := $(if $(value SET),'$(subst ','\'',$(value SET))')

# make sets this on a terminal. In a log pip's progress is noise.
QUIET := $(if $(MAKE_TERMOUT),,--quiet)

IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
HAS_TORCH := import sys, importlib.metadata as m; sys.exit([int(n) for n in m.version("torch").split(".")[:2]] < [2, 11])

.PHONY: help
help:
	@echo "make setup      the Python environment: .venv, with torch $(TORCH)"
	@echo "make extract    data and target to a cache of hidden states"
	@echo "make train      all that is missing, then a drafter from the cache (continues an unfinished run)"
	@echo "make stats      what a cache holds"
	@echo "make verify     whether every byte of a cache is as it was written"
	@echo "make evaluate   live speculative decoding with the run's drafter: acceptance length, losslessness"
	@echo "make test       the tests; make test-gpu: those for a GPU; make test-kernels: the kernels, on the CPU"
	@echo "make lint       style"
	@echo
	@echo "Variables, after the command:"
	@echo "  CONFIG=$(CONFIG)"
	@echo "  CACHE=$(CACHE)"
	@echo "  RUN=$(RUN)"
	@echo "  SET='train.lr=3e-4 data.files=[\"a.jsonl\"]'   override keys of the configuration"
	@echo "  TORCH=$(TORCH)   the version that setup installs"
	@echo "  PYTHON=/path/to/python   use that environment, which has torch 2.11 or newer, instead of .venv"

.PHONY: setup
setup: $(READY)

.venv/.ready-%:
	@echo "setup: making .venv with torch $(TORCH); the first time this downloads a few hundred megabytes"
	@.venv/bin/python -m pip --version >/dev/null 2>&1 || { \
		for python in python3 python3.14 python3.13 python3.12 python3.11 none; do \
			if [ $$python = none ]; then echo "error: no Python 3.11 or newer was found: install one, or name one" \
				"that has torch with PYTHON=/path/to/python" >&2; exit 1; fi; \
			$$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null && break; \
		done; \
		$$python -m venv --clear .venv; }
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install $(QUIET) torch==$(TORCH)
	.venv/bin/python -m pip install --quiet --group run --group test
	@rm -f .venv/.ready-*
	@touch $@

.PHONY: complete-environment
complete-environment:
	@$(PYTHON) -c '' 2>/dev/null || { echo "error: PYTHON=$(PYTHON) is no Python that can be run: name the interpreter" \
		"of an environment that has torch, or leave PYTHON= out" >&2; exit 1; }
	@$(PYTHON) -c '$(IS_NEW_ENOUGH)' || { echo "error: PYTHON=$(PYTHON) is no Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null || { echo "error: PYTHON=$(PYTHON) has no torch 2.11 or newer: install" \
		"the build for your machine there, or leave PYTHON= out" >&2; exit 1; }
	@$(PYTHON) -m pip install --quiet 'pip>=25.1'
	$(PYTHON) -m pip install --quiet --group run --group test

.PHONY: embedded
embedded: $(READY)
	$(PYTHON) -m extract.embedded

.PHONY: extract
extract: $(READY) $(INPUTS)
	$(PYTHON) -m extract --config $(CONFIG) --cache $(CACHE) $(OVERRIDES)

.PHONY: preflight
preflight: $(READY)
	$(PYTHON) -m train --config $(CONFIG) --cache $(CACHE) --run $(RUN) --resume --preflight $(OVERRIDES)

.NOTPARALLEL:
.PHONY: train
train: $(PREFLIGHT) extract
	$(PYTHON) -m train --config $(CONFIG) --cache $(CACHE) --run $(RUN) --resume $(OVERRIDES)

.PHONY: stats
stats: $(READY)
	$(PYTHON) -m shards stats $(CACHE)

.PHONY: verify
verify: $(READY)
	$(PYTHON) -m shards verify --deep $(CACHE)

.PHONY: evaluate
evaluate: $(READY) $(EMBEDDED)
	$(PYTHON) -m speculate --config $(CONFIG) --run $(RUN) --json $(RUN)/speculate.json $(OVERRIDES)

.PHONY: test
test: $(READY)
	$(PYTHON) -m pytest -m "not gpu"

.PHONY: test-kernels
test-kernels: $(READY)
	$(PYTHON) -m pip install --quiet --group kernels
	TRITON_INTERPRET=1 $(PYTHON) -m pytest tests/kernels

.PHONY: test-gpu
test-gpu: $(READY)
	$(PYTHON) -m pytest -m gpu

.PHONY: lint
lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
