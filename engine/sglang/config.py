"""Settings of the SGLang engine, and the Python interpreter that it runs in."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec
from pydantic import Field

from asyncrl.engine.errors import EngineStartError
from asyncrl.engine.process_config import ProcessConfig

_SHARE_OF_GPU = 0.85


class SglangConfig(ProcessConfig):
    """Settings of SGLang's start and of the number of tokens in its steps."""

    python: str | None = Field(default=None, min_length=1)
    """Python interpreter that SGLang runs in. It may differ from this one, because SGLang's pins
    disagree with vLLM's; a relative path starts at the current directory. null: this one if it has
    SGLang, otherwise `.venv-sglang/bin/python`, which `make setup-sglang` makes."""
    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the memory that is free when SGLang starts for weights and KV; the rest is for
    activations, and for a trainer that starts on the same GPU. It bounds kv_cache_gib too. null:
    0.85; on a GPU shared with the trainer, what the trainer leaves (docs/trainer.md)."""

    @property
    def share_of_gpu(self) -> float:
        """`mem_fraction_static`, or its default."""
        return self.mem_fraction_static or _SHARE_OF_GPU


SGLANG_VERSION = "0.5.23"
"""The only version that `engine/sglang/worker` is written against."""
DEFAULT = ".venv-sglang/bin/python"
_SECONDS = 60.0
_MAKE = "`make setup-sglang` makes an environment with it (docs/engines.md)"
_NEEDED = ("asyncrl", "torch", "numba", "msgspec", "pyzmq", "pydantic", "transformers")
_ASK = f"""
import json, sys
from importlib import metadata
found = {{}}
for name in {("sglang", *_NEEDED)}:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps([sys.version_info[:2], found]))
"""


def path_of(config: SglangConfig) -> str:
    """Return the setting, or this interpreter if it has SGLang, or that of `make setup-sglang`."""
    if config.python is not None:
        return config.python
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return DEFAULT
    return sys.executable


def check_interpreter(config: SglangConfig) -> str:
    """Return the versions of SGLang's interpreter, as text.

    Raises EngineStartError if it does not exist or fit; the message says what to do.
    """
    python = path_of(config)
    where = f"engine.sglang.python: {python}"
    if not Path(python).is_file():
        raise EngineStartError(
            f"{where} does not exist. engine.kind=sglang needs an interpreter with sglang "
            f"{SGLANG_VERSION}: {_MAKE}"
        )
    number, versions = _ask(python, where)
    shown = ".".join(map(str, number))
    if number < (3, 11):
        raise EngineStartError(f"{where} is Python {shown}; asyncrl needs 3.11 or newer")
    sglang = versions.get("sglang")
    if sglang != SGLANG_VERSION:
        has = f"has sglang {sglang}" if sglang else "does not have sglang"
        raise EngineStartError(f"{where} {has}; {SGLANG_VERSION} is needed: {_MAKE}")
    missing = [name for name in _NEEDED if name not in versions]
    if missing:
        raise EngineStartError(
            f"{where} lacks {', '.join(missing)}, which asyncrl's part inside SGLang needs: {_MAKE}"
        )
    ours = metadata.version("asyncrl")
    if versions["asyncrl"] != ours:
        raise EngineStartError(
            f"{where} has asyncrl {versions['asyncrl']}, but this is asyncrl {ours}: install the "
            "same version there (pip install --no-deps)"
        )
    return f"python {shown}, sglang {sglang}, torch {versions['torch']}"


def _ask(python: str, where: str) -> tuple[tuple[int, int], dict[str, str]]:
    try:
        answer = subprocess.run(
            [python, "-P", "-c", _ASK], capture_output=True, timeout=_SECONDS, check=True
        )
        return msgspec.json.decode(answer.stdout, type=tuple[tuple[int, int], dict[str, str]])
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise EngineStartError(f"{where} is not a working Python 3.11: {' '.join(last)}") from error
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        raise EngineStartError(f"{where} is not a working Python interpreter: {error}") from error
