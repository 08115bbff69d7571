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
# A recipe is one script that ends where something fails.
.ONESHELL:
.SHELLFLAGS := -ec

# Values stand in recipes without quotes, and make takes a name with a space for two.
UNFIT := ' " ` $$ & ; \ | < > ( ) [ * ?
define check
$(if $(strip $($1)),,$(error $1= is empty, as from a shell variable that is not set: give it a value, or leave $1= out))
$(if $(word 2,$($1)),$(error $1=$($1) has a space in it, which make can't take: name a path without, such as a link))
$(foreach sign,$(UNFIT),$(if $(findstring $(sign),$($1)),$(error $1=$($1) has a $(sign) in it: use another name)))
endef
GIVEN := CONFIG CACHE RUN TORCH $(if $(filter undefined,$(origin PYTHON)),,PYTHON)
$(foreach name,$(GIVEN),$(if $(strip $(call check,$(name))),))
$(if $(wildcard $(CONFIG)),,$(error CONFIG=$(CONFIG) does not exist: name a TOML file, see configs/))
$(if $(wildcard $(CONFIG)/.),$(error CONFIG=$(CONFIG) is a directory: name a TOML file in it))

# PYTHON= names an environment of the user's, which is only completed. Without it there is .venv, which is ours.
IS_ENVIRONMENT := import sys; sys.exit(sys.prefix == sys.base_prefix)
MADE := .venv/.ready-$(TORCH)-$(firstword $(shell cksum pyproject.toml))
ifdef PYTHON
READY := complete-environment
else
PYTHON := .venv/bin/python
READY := $(MADE)
# Never into the Python that .venv was made from, which is what the interpreter of a damaged .venv is.
export PIP_REQUIRE_VIRTUALENV := 1
ifneq ($(shell $(PYTHON) -c '$(IS_ENVIRONMENT)' 2>&1 || echo no),)
.PHONY: $(READY)
endif
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
	@echo "make setup      the Python environment: .venv, with torch $(TORCH); made anew if it was broken off"
	@echo "make extract    data and target to a cache of hidden states"
	@echo "make train      all that is missing, then a drafter from the cache (continues an unfinished run)"
	@echo "make stats      what a cache holds"
	@echo "make verify     whether every byte of a cache is as it was written"
	@echo "make status     what a run is doing now: alive, step, speed, what it waits for"
	@echo "make report     how a run went: curves and figures in RUN/report.html"
	@echo "make evaluate   live speculative decoding with the run's drafter: acceptance length, losslessness"
	@echo "make test       the tests; make test-gpu: those for a GPU; make test-kernels: the kernels, on the CPU"
	@echo "make lint       style"
	@echo
	@echo "Variables, after the command, without spaces but in SET:"
	@echo "  CONFIG=$(CONFIG)"
	@echo "  CACHE=$(CACHE)"
	@echo "  RUN=$(RUN)"
	@echo "  SET='train.lr=3e-4 data.files=[\"a.jsonl\"]'   override keys of the configuration"
	@echo "  TORCH=$(TORCH)   the version that setup installs"
	@echo "  PYTHON=/path/to/python   use that environment, which has torch 2.11 or newer, instead of .venv"

.PHONY: setup
setup: $(READY)

# One make at a time. The lock is on this file, which every program of the recipe has open: it ends with the last of them.
define LOCK
{ [ -w Makefile ] && exec 9<>Makefile; } || exec 9<Makefile
flock -n 9 || {
	[ $$? != 1 ] || echo "setup: another make is setting up the environment: waiting for it"
	flock 9 || echo "setup: the checkout can't be locked: see that no other make is setting up"
}
endef

# There from before the first thing is written until all is installed. What was broken off between can't be told from
# what is whole, not even by pip, so it is made anew.
UNFINISHED := .venv/.unfinished

$(MADE):
	@refuse() { echo "error: $$*" >&2; exit 1; }
	[ ! -L .venv ] || refuse ".venv is a link to $$(readlink .venv), where make installs nothing: remove the link, or" \
		"name that environment, once it has torch, with PYTHON=$$(readlink -f .venv)/bin/python"
	[ -d .venv ] || [ ! -e .venv ] || refuse ".venv is no directory, and the environment is made there: move it away"
	place=.; [ ! -d .venv ] || place=.venv
	[ -w $$place ] || refuse "$$(readlink -f $$place) can't be written to: make that possible, or use a checkout where" \
		"it is, or name an environment that has torch with PYTHON=/path/to/python"
	$(LOCK)
	is_environment() { .venv/bin/python -c '$(IS_ENVIRONMENT)' 2>/dev/null; }
	if [ -e $@ ] && is_environment; then exit 0; fi  # now that the other make is through
	# Python answers Ctrl-C with a traceback. In a session of its own it is deaf to it, and is ended with all it started.
	run() { setsid "$$@" & child=$$!; wait $$child; }
	trap 'kill -- -$$child 2>/dev/null || :; echo "setup: interrupted, the next make begins it anew" >&2; exit 1' INT TERM HUP
	rm -f .venv/.ready-*
	if [ -e $(UNFINISHED) ] || ! is_environment || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
		for python in python3 python3.14 python3.13 python3.12 python3.11 none; do
			[ $$python != none ] || refuse "no Python 3.11 or newer was found: install one, or name one that has" \
				"torch with PYTHON=/path/to/python"
			! $$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null || break
		done
		echo "setup: making .venv with $$($$python --version)"
		mkdir -p .venv
		find .venv -mindepth 1 -delete
		touch $(UNFINISHED)
		run $$python -m venv .venv
	fi
	touch $(UNFINISHED)
	run .venv/bin/python -m pip install --quiet --upgrade pip
	echo "setup: installing torch $(TORCH): 0.2 GB to download if pip finds a build for the CPU, about 3 GB with CUDA"
	run .venv/bin/python -m pip install $(QUIET) torch==$(TORCH)
	echo "setup: installing the other packages: about 90 MB to download, a minute"
	run .venv/bin/python -m pip install $(QUIET) --group run --group test
	run .venv/bin/python -m pip install --quiet --no-deps --group client
	rm $(UNFINISHED)
	touch $@

.PHONY: complete-environment
complete-environment:
	@refuse() { echo "error: PYTHON=$(PYTHON) $$*" >&2; exit 1; }
	$(PYTHON) -c '' 2>/dev/null || refuse "is no Python that can be run: name the interpreter of an environment that has" \
		"torch, or leave PYTHON= out"
	$(PYTHON) -c '$(IS_NEW_ENOUGH)' || refuse "is no Python 3.11 or newer"
	$(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null || refuse "has no torch 2.11 or newer: install the build for your machine" \
		"there, or leave PYTHON= out"
	$(LOCK)
	echo "setup: completing the environment of $(PYTHON): at most 90 MB to download, and not torch"
	$(PYTHON) -m pip install --quiet 'pip>=25.1'
	$(PYTHON) -m pip install --quiet --group run --group test
	$(PYTHON) -m pip install --quiet --no-deps --group client

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

.PHONY: status
status: $(READY)
	@$(PYTHON) -m train status $(RUN)

.PHONY: report
report: $(READY)
	$(PYTHON) -m train report $(RUN)

.PHONY: evaluate
evaluate: $(READY) $(EMBEDDED)
	$(PYTHON) -m speculate --config $(CONFIG) --run $(RUN) --json $(RUN)/speculate.json $(OVERRIDES)

.PHONY: test
test: $(READY)
	$(PYTHON) -m pytest -m "not gpu" --numprocesses auto --maxprocesses 8 --dist loadfile

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
