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
# How environments are made ($(VENV)/.core and so on, and PIP), and how versions are chosen.
include requirements/environments.mk requirements/locks.mk

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
.PHONY: help setup setup-sglang setup-environments run test rewritten second-try test-busy test-peers check lint types format docs site bench locks sbom gpu-bundle test-deploy prometheus chromium grafana-schema clean

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
	@$(MAKE) --no-print-directory test-peers

rewritten: $(VENV)/.dev
	$(KEPT) $(VENV)/bin/python tests/support/rewritten_tests.py

second-try: ## the failed tests of the last `make test` once more, alone, if they are few (.ci/run does it)
	$(KEPT) ASYNCRL_SGLANG_PYTHON="$(abspath $(SGLANG_VENV))/bin/python" $(VENV)/bin/python tests/support/second_try.py $(OUTCOME)

test-busy: $(VENV)/.core ## make test beside two busy processes of the same priority (BUSY=1: one)
	$(VENV)/bin/python tests/support/beside_busy.py $(or $(BUSY),2) "$(MAKE)" test

test-peers: $(VENV)/.dev $(VENV)-peers/.ready ## our formulas and tables against the code of TRL and verl (20 s); `make test` runs it too
	PYTHONPATH="$(abspath $(VENV)-peers)" $(PYTEST) -m peers tests/trainer/test_peers_losses.py tests/docs/test_settings.py

check: lint types ## lint, types and the fast tests, in three minutes
	$(COMPILED)
	$(PYTEST) $(PARALLEL) --quick -m "not slow and not vllm and not sglang and not ray and not library"

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

test-deploy: $(VENV)/.dev ## Slurm, Docker Compose and Kubernetes for real, each in a verdict: root on Debian 12, nothing else prepared (an hour, 20 GB)
	VENV=$(VENV) bash tests/deploy/slurm.sh
	SAVE=$(DEPLOY_DIR)/asyncrl.tar DEPLOY_DIR=$(DEPLOY_DIR) bash tests/deploy/compose.sh
	IMAGE_ARCHIVE=$(DEPLOY_DIR)/asyncrl.tar DEPLOY_DIR= PYTHON="$(abspath $(VENV))/bin/python" bash tests/deploy/kubernetes.sh || [ $$? = 3 ]

# tests/benchmarks/test_smoke.py compares it with what is there.
BENCHMARKS := cache scheduler delivery vllm_host torch_host engines exactness rollout pipeline paced peers chaos \
  long_tail hostile trainer turns weights controller gpu_plan live_audit mutants noise_floor \
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
	rm -rf $(VENV) $(SGLANG_VENV) $(VENV)-verifiers $(VENV)-openenv $(VENV)-triton $(VENV)-peers $(TOOLS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
