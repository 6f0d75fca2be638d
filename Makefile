# Everything that a contributor runs. Each target first makes .venv in this folder, from pinned versions;
# nothing else on the machine is touched. Kept to what GNU make 3.81 (macOS) understands.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The tests need TensorFlow, which has no wheels for other versions of Python.
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
SUPPORTED := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

# TensorFlow's information and warnings would bury the results.
export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# No plan of an earlier run is followed, and none is left in the user's cache folder.
export REMAT_PLAN_CACHE ?= off

# Two files run at a time, each on one core: with two threads each, frameworks get in one another's way.
PYTEST := TF_NUM_INTRAOP_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-thorough test-other-cpu test-slow lint format docs dist test-dist gpu versions clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## Train two real models under byte budgets; writes remat-demo/
	$(BIN)/remat demo --out remat-demo

test: $(STAMP) ## Run the tests, two files at a time; ARGS='-k name' is passed on to pytest
	@sh tests/report/install_browser.sh
	$(PYTEST) -m "not slow and not thorough" --ignore=tests/paddle tests $(ARGS)
	@# Paddle's tests have processes of their own: importing Paddle after TensorFlow ends the process. Exit code 5 says
	@# that ARGS chose none of them.
	$(PYTEST) -m "not slow and not thorough" tests/paddle $(ARGS) || [ $$? -eq 5 ]

test-thorough: $(STAMP) ## Run more cases of the same, as CI does too
	$(PYTEST) -m "thorough and not slow" --ignore=tests/paddle tests $(ARGS)
	$(PYTEST) -m "thorough and not slow" tests/paddle $(ARGS) || [ $$? -eq 5 ]

test-other-cpu: $(STAMP) ## Run TensorFlow's and Keras' tests of numbers as on a CPU without oneDNN, on all cores
	TF_ENABLE_ONEDNN_OPTS=0 $(BIN)/python -m pytest -q -m "other_cpu and not slow" -n 2 --dist loadfile \
	  --ignore=tests/paddle tests $(ARGS)

test-slow: $(STAMP) ## Run the longer checks
	$(BIN)/python -m pytest -q -m slow --ignore=tests/paddle tests $(ARGS)
	$(BIN)/python -m pytest -q -m slow tests/paddle $(ARGS) || [ $$? -eq 5 ]

lint: $(STAMP) ## Check style (ruff) and types (mypy)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## Build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

dist: $(STAMP) ## Build the wheel and the source archive in dist/
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	rm -rf build

test-dist: $(STAMP) ## Try the wheel with each extra in an environment of its own (downloads gigabytes)
	$(BIN)/python -m pytest -q tests/release

gpu: $(STAMP) ## Check and measure on the CUDA device at hand (up to 90 minutes); writes benchmarks/results/gpu-*
	$(BIN)/python -m benchmarks.gpu $(ARGS)

versions: $(STAMP) ## Try other versions of the frameworks (hours); ARGS=torch-2.9.0 for one; writes docs/versions.md
	$(BIN)/python -m benchmarks.versions $(ARGS)

clean: ## Remove .venv and everything else that make created
	rm -rf $(VENV) build dist site remat-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis src/remat.egg-info
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted install is done again.
$(STAMP): pyproject.toml constraints.txt requirements-dev.txt
	@if ! $(BIN)/python -c '$(SUPPORTED)' 2>/dev/null; then \
	  found=; \
	  for candidate in $(CANDIDATES); do \
	    if "$$candidate" -c '$(SUPPORTED)' 2>/dev/null; then found=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "remat: needs Python 3.11, 3.12 or 3.13 with venv; none of these is one: $(CANDIDATES)." \
	      "On Debian or Ubuntu: sudo apt install python3-venv. Elsewhere name one: make PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$("$$found" -V)"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@echo "Installing the pinned packages into $(VENV) (a few minutes, once)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -r requirements-dev.txt
	@# It asks for the full build of TensorFlow; the CPU build is there.
	@$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt tf_keras
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[demo,dev,docs]'
	@touch $@
