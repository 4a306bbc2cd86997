# make demo     install, fetch the default model, show plain and speculative decoding side by side
# make test     install with the test tools, fetch the default model, run the suite without its slowest tests
#               (first what may share the machine, one process a core, then what measures time, alone)
# make test-all the same with the slowest tests, too: what a change must pass
# make check    ruff and mypy
# make docs     the documents as a site, in site/ (python -m http.server -d site shows it, with its search)
# make test-peers  the tests of the benchmark's peers, where they are installed (minutes; not part of make test)
# make peers    what `paceline bench --peers` compares with, each in an environment of its own (about 20 minutes on two cores:
#               llama.cpp is compiled for this machine, with cmake and g++); make peers/llamacpp installs one of them
# make heads/qwen2.5-coder-1.5b, make heads/qwen2.5-coder-0.5b  the target writes and its heads learn, on a GPU; again: goes on
#               MODEL=file.gguf or a Hugging Face name, PROMPTS=file.jsonl, CODE=share of programs, HOURS=for all of it,
#               STOP_AFTER=seconds of this call, KINDS=eagle,dflash, SEED=..., DEVICE=... (docs/train.md)
# make install  only the environment;  make clean  remove it and every build product;  make clean-peers  remove the peers
# PYTHON=... chooses the interpreter (3.11 or newer).

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
PEERS := $(or $(PACELINE_PEERS),.peers)
HEADS := heads/qwen2.5-coder-1.5b heads/qwen2.5-coder-0.5b
CODE ?= 0.6
HOURS ?= 0.4
KINDS ?= eagle
SEED ?= 1
DEVICE ?= auto
QUIETLY := -m pip --quiet --quiet --disable-pip-version-check
PIP := $(BIN)/python $(QUIETLY)

.PHONY: install demo test test-all test-peers check docs clean clean-peers peers peers/llamacpp peers/transformers peers/vllm $(HEADS)
.DEFAULT_GOAL := demo

install: $(VENV)/.installed

demo: install
	@$(BIN)/paceline demo

test: SELECTION := not slow
test-all: SELECTION := not peers
test test-all: $(VENV)/.installed-dev
	@$(BIN)/paceline models --fetch default > /dev/null
	@OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(BIN)/python -m tests.compile_kernels
	@OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not serial and not peers and $(SELECTION)' -n auto --dist worksteal --durations=40
	@$(BIN)/python -m pytest -m 'serial and not peers and $(SELECTION)' -s

test-peers: $(VENV)/.installed-dev
	@$(BIN)/paceline models --fetch default > /dev/null
	@$(BIN)/python -m pytest -m peers -rs --durations=10

check: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

heads/qwen2.5-coder-1.5b: MODEL ?= Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
heads/qwen2.5-coder-0.5b: MODEL ?= Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
$(HEADS): install
	@$(BIN)/paceline train --kinds $(KINDS) --target '$(MODEL)' --code $(CODE) --hours $(HOURS) --bits 8 --seed $(SEED) \
		$(if $(PROMPTS),--prompts '$(PROMPTS)' --vary) $(if $(STOP_AFTER),--stop-after $(STOP_AFTER)) --device $(DEVICE) --resume -o $@

peers: peers/llamacpp peers/transformers peers/vllm
peers/llamacpp: $(PEERS)/llamacpp/.installed
peers/transformers: $(PEERS)/transformers/.installed
peers/vllm: $(PEERS)/vllm/.installed

clean:
	rm -rf $(VENV) build dist site deploy/heads/build deploy/heads/*.egg-info *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find paceline tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-peers:
	rm -rf $(addprefix $(PEERS)/,llamacpp transformers vllm)

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

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what makes a site of the documents"
	@$(PIP) install -c constraints.txt --no-build-isolation --editable '.[docs]'
	@touch $@

# TLS and grammars are of no use to a benchmark and would make the build longer.
$(PEERS)/llamacpp/.installed: export CMAKE_ARGS := -DLLAMA_LLGUIDANCE=OFF -DLLAMA_BUILD_BORINGSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
$(PEERS)/llamacpp/.installed: export CMAKE_GENERATOR := $(if $(shell command -v ninja),Ninja,Unix Makefiles)
$(PEERS)/llamacpp/.installed: peers/llamacpp.txt
	@command -v cmake > /dev/null && command -v g++ > /dev/null \
		|| { echo "error: llama.cpp is compiled with cmake and g++, and one of them is missing; install both and run make again" >&2; exit 1; }
	@echo "building llama.cpp (about ten minutes on two cores)"
	@$(PYTHON) -m venv $(@D)
	@MAKEFLAGS= $(@D)/bin/python $(QUIETLY) install -r $<
	@touch $@

$(PEERS)/transformers/.installed $(PEERS)/vllm/.installed: $(PEERS)/%/.installed: peers/%.txt
	@echo "installing $* (its torch is large: a few minutes)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(QUIETLY) install --no-deps -r $<
	@touch $@
