# make demo     install, fetch the default model, show plain and speculative decoding side by side
# make test     install with the test tools, fetch the default model, run the whole suite
#               (first what may share the machine, one process a core, then what measures time, alone)
# make check    ruff and mypy
# make install  only the environment;  make clean  remove it and every build product
# PYTHON=... chooses the interpreter (3.11 or newer).

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check

.PHONY: install demo test check clean
.DEFAULT_GOAL := demo

install: $(VENV)/.installed

demo: install
	@$(BIN)/paceline demo

test: $(VENV)/.installed-dev
	@$(BIN)/paceline models --fetch default > /dev/null
	@OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not serial' -n auto --dist worksteal --durations=10
	@$(BIN)/python -m pytest -m serial -s

check: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find paceline tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: a second run of any target above starts at once.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null \
		|| { echo "error: $(PYTHON) is missing or older than Python 3.11; run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null \
		|| { echo "error: $(PYTHON) has no venv module; install it (for instance the package python3-venv) and run make again" >&2; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the pinned dependencies (torch and numba are large: a few minutes the first time)"
	@$(PIP) install -c constraints.txt setuptools
	@$(PIP) install -c constraints.txt --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the test tools"
	@$(PIP) install -c constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@
