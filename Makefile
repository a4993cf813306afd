# Everything a developer runs. `make` lists the targets. The first one that needs it sets up .venv, which takes minutes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PINS := requirements/constraints.txt
SBOM ?= sbom.json
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install -c $(PINS)
BENCHMARKS := $(filter-out __init__ claims _%,$(basename $(notdir $(wildcard benchmarks/*.py))))
# Those that have a form of a minute.
SMOKED := balance chaos decisions exchange search spot_rehearsal time_to_target

# Tests side by side: many wait for processes of their own. 0 runs them in one, for a debugger.
JOBS ?= 3

DEMO ?= demo-run
# Of a transformer with 110 million parameters, as large as BERT: three spot machines, of which one is slowed down and one
# is taken.
LARGE ?= --params 1.1e8 --samples 3e6 --tokens 512 --budget 50 --market spot --gpus A10G --quota spot:g=40 \
    --objective fastest
BUDGET ?= 2
SLOWDOWN ?= 1,2
EPOCHS ?= 100
BATCH ?= 256

# Processes of tests are many and short: without bytecode each compiles what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check types bench claims smoke docs dist pins locks sbom clean
MAKEFLAGS += --no-print-directory

help:
	@echo "make demo    profile a small job here, plan it, train it on two unequal workers, compare prediction with fact"
	@echo "make test    run the tests"
	@echo "make check   formatting, lint, types, import rules"
	@echo "make types   types once more, as editors read them (basedpyright; two minutes)"
	@echo "make bench   every benchmark in its quick form"
	@echo "make claims  measure what README and the page of claims quote and today's code has not shown (ARGS=--list: what)"
	@echo "make smoke   benchmarks in their shortest form, to see that they still run"
	@echo "make setup   only make $(VENV), with the pinned versions (PYTHON=/path/to/python3 chooses the interpreter)"
	@echo "make docs    the documentation as plain files: site/index.html"
	@echo "make dist    wheel and source distribution, with an index from which pip installs them by name"
	@echo "make pins    write the versions in $(VENV) to $(PINS)"
	@echo "make locks   write the packages and hashes that rented machines install to hetopt/backends/ec2/node/locks"
	@echo "make sbom    write what is installed, and what rented machines install, as CycloneDX files: sbom*.json"
	@echo "make clean   remove what these targets made"

setup: $(READY)

$(READY): pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    found=$$(command -v $(PYTHON) >/dev/null && $(PYTHON) --version 2>&1 | head -1); \
	    echo "hetopt needs Python 3.11 or newer, and '$(PYTHON)' is $${found:-not there}:" \
	         "run 'make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3'." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments: install them (on Debian: apt install python3-venv)." >&2; exit 1; }
	@echo "[1/4] making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/4] installing torch, the largest part (a minute or more, up to the network)"
	@$(PIP) $$($(BIN)/python requirements/torch_index.py) torch
	@echo "[3/4] installing the other pinned packages ($$(grep -c == $(PINS)) in all)"
	@sed -n 's/==.*//p' $(PINS) | $(PIP) -r /dev/stdin
	@echo "[4/4] installing hetopt from this folder"
	@$(PIP) --no-build-isolation --no-deps --editable '.[dev]'
	@$(BIN)/python -m pip --disable-pip-version-check check >/dev/null || { $(BIN)/python -m pip check; exit 1; }
	@touch $@
	@echo "hetopt is ready: $(BIN)/hetopt"

demo: $(READY)
	@rm -rf $(DEMO) && mkdir -p $(DEMO)
	@run() { echo; echo "\$$ $$*"; PATH="$(CURDIR)/$(BIN):$$PATH" HETOPT_HOME="$(abspath $(DEMO))" "$$@"; }; set -e; \
	run hetopt profile digits -o $(DEMO)/profile.json; \
	run hetopt recommend $(DEMO)/profile.json --budget $(BUDGET) --epochs $(EPOCHS) \
	    --batch-size $(BATCH) -o $(DEMO)/plan.json; \
	run hetopt launch $(DEMO)/plan.json --on local --slowdown $(SLOWDOWN) --yes; \
	run hetopt report; \
	if [ "$$(id -u)" = 0 ]; then \
	run hetopt estimate $(LARGE) -o $(DEMO)/large.json; \
	run hetopt launch $(DEMO)/large.json --on rehearsal --steps 100 --max-restarts 1 --schedule examples/preemption.txt --yes; \
	run hetopt report; \
	else echo; echo "As root, make demo also rehearses a cluster of three machines with GPUs."; fi
	@echo; echo "The profile, the plan and the run are in $(DEMO)/. Look again with:" \
	    "HETOPT_HOME=$(DEMO) $(BIN)/hetopt report"

# House rules are looked at by check.
test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	    --ignore=tests/test_house.py --ignore=tests/test_reachable.py $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_house.py tests/test_reachable.py

# Beside check, which strict mypy is part of: this takes as long as all of that.
types: $(READY)
	$(BIN)/basedpyright

bench: $(READY)
	@set -e; for name in $(BENCHMARKS); do \
	    echo; echo "\$$ python -m benchmarks.$$name --quick"; $(BIN)/python -m benchmarks.$$name --quick; done

claims: $(READY)
	@$(BIN)/python -m benchmarks.claims $(ARGS)

smoke: $(READY)
	@set -e; for name in $(SMOKED); do \
	    echo; echo "\$$ python -m benchmarks.$$name --smoke"; $(BIN)/python -m benchmarks.$$name --smoke; done

# Pages that are made from the code are committed; this shows them as they are now.
docs: $(READY)
	$(BIN)/python docs/generated.py
	$(BIN)/python docs/plots.py
	$(BIN)/zensical build --strict --clean
	@echo "look at it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

dist: $(READY)
	@rm -rf dist build
	@$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null && rm -rf build
	@mkdir -p dist/simple/hetopt && cd dist && for file in hetopt-*; do \
	    echo "<a href=\"../../$$file#sha256=$$(sha256sum $$file | cut -d' ' -f1)\">$$file</a><br>"; done > simple/hetopt/index.html
	@echo "install by name: pip install --extra-index-url file://$(CURDIR)/dist/simple 'hetopt[train]'"

pins: $(READY)
	$(BIN)/python requirements/freeze.py > $(PINS).new && mv $(PINS).new $(PINS)
	@touch $(READY)

# Needs PyPI, and for torch without CUDA the index of PyTorch.
locks: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python requirements/machines.py

# Every package of this environment, as CycloneDX; what rented machines install is in hetopt/backends/ec2/node/locks.
sbom: $(READY)
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o $(SBOM) $(BIN)/python
	@for lock in hetopt/backends/ec2/node/locks/*.txt; do \
	    $(BIN)/cyclonedx-py requirements --output-reproducible --of JSON \
	        -o $(SBOM:.json=)-$$(basename $$lock .txt).json $$lock; done
	@ls -1 $(SBOM:.json=)*.json

clean:
	rm -rf $(VENV) $(DEMO) build dist site sbom*.json *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache \
	    .import_linter_cache
	find catalogs hetopt optimizer profiler trainer tests -name __pycache__ -prune -exec rm -rf {} +
