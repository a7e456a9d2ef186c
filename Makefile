# Every target sets up what it needs by itself: a virtual environment in .venv, Debian packages where
# they are needed and this is Debian with root, nothing elsewhere.
SHELL := /bin/bash
# Tests start hundreds of processes; none should compile all of the project again.
unexport PYTHONDONTWRITEBYTECODE
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for v in 3.14 3.13 3.12 3.11; do if python$$v -c '' 2>/dev/null; then echo python$$v; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 3
SECONDS_PER_TARGET ?= 60
FIRST ?= 1
COUNT ?= 300
PLAYS ?= 4
SCALE ?= 0.2
BENCH ?=

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || tests/setup/debian.sh venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[collector]' --group dev
	@touch $@

venv: $(VENV)/.ready  ## the virtual environment with everything for the host and development

demo: $(VENV)/.ready  ## one benchmark end to end on this machine, stored and shown
	@$(BIN)/bmoe demo

test: $(VENV)/.ready  ## the tests, with real adb, adbd and PostgreSQL where this machine can have them
	@tests/setup/debian.sh services
	$(BIN)/python -m pytest -n $(JOBS) -m 'not slow and not serial and not spark'
	$(BIN)/python -m pytest -m 'serial and not slow and not spark'
	@$(MAKE) --no-print-directory test-agent

test-agent: $(VENV)/.ready  ## the agent's own tests on the newest CPython here, with pure-Python protobuf
	@tests/setup/agent.sh

test-slow: $(VENV)/.ready  ## what is minutes long or wants a quiet machine
	@tests/setup/debian.sh services
	$(BIN)/python -m pytest -m 'slow and not spark' --timeout 3600

test-spark: $(VENV)/.ready  ## the exported dataset read by a local Spark
	@tests/setup/debian.sh java
	$(BIN)/python -m pip install --quiet --group spark
	$(BIN)/python -m pytest -m spark --timeout 900

fuzz: $(VENV)/.ready  ## property tests with new examples, then coverage-guided fuzzing of every reader, SECONDS_PER_TARGET (60) each
	@$(BIN)/python -m pip install --quiet --only-binary atheris --group fuzz || \
		{ echo "fuzz: atheris has no build for this Python or system: make venv with PYTHON=python3.13" >&2; exit 1; }
	BMOE_EXAMPLES=new nice $(BIN)/python -m pytest -n $(JOBS) --timeout 1200 $$(grep -rl '^from hypothesis' tests)
	nice $(BIN)/python tests/faults/fuzz/fuzz.py --seconds $(SECONDS_PER_TARGET)

bench: $(VENV)/.ready  ## speeds as ratios to a baseline measured beside them; wants a quiet machine; BENCH=NAME for one
	@tests/setup/debian.sh services
	$(BIN)/python tests/bench/run.py $(BENCH)

test-faults: $(VENV)/.ready  ## 300 seeded fault schedules in their own time; FIRST, COUNT, PLAYS (at once), SCALE (of timers)
	@tests/setup/debian.sh services
	cd tests && ../$(BIN)/python -m faults.harness --first $(FIRST) --count $(COUNT) --jobs $(PLAYS) --scale $(SCALE)

lint: $(VENV)/.ready  ## ruff, mypy and shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@tests/setup/debian.sh shellcheck

proto: $(VENV)/.ready  ## regenerate the stubs from telemetry.proto
	@proto/generate.sh

clean:  ## remove what make made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help venv demo test test-agent test-slow test-spark test-faults fuzz bench lint proto clean
