"""The start of a child by any launcher: its environment, its log, and the order to a node."""

import json
import logging
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.launch.child_spec import ChildSpec
from asyncrl.launch.records import MARK_VARIABLE

logger = logging.getLogger(__name__)

_TAIL_BYTES = 16_384


def child_environment(threads: int, mark: str) -> dict[str, str]:
    """Return the variables of a child; `mark` is that of the run (`asyncrl.launch.records`)."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",  # writing a bar to a log on a full disk would end the process
        MARK_VARIABLE: mark,
    }


def configure_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch's CUDA allocator grow its segments: else batches of all lengths leave gaps."""
    if {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}.isdisjoint(environment):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def open_log(path: Path) -> BinaryIO:
    """Open a child's log to append to; without room for one, its output is dropped."""
    try:
        return path.open("ab")
    except OSError as error:
        logger.warning("no log of this process: %s", error)
        return Path(os.devnull).open("ab")


def last_lines(log: Path, lines: int) -> str:
    """Return the end of a child's log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:])


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank; empty if there is none."""
    lines = reversed(last_lines(log, 99).splitlines())
    return next((line for line in lines if line.strip()), "")


def start_order(spec: ChildSpec, *, mark: str, relay_per_node: bool) -> str:
    """Return the order for `asyncrl.launch.node_child.NodeChild.start`, JSON."""
    order: dict[str, Any] = {
        "name": spec.name,
        "run_id": spec.run_id,
        "relay_per_node": relay_per_node,
        "shares_run_directory": spec.shares_run_directory,
        "spec": json.loads(msgspec.json.encode(spec)),
        "cwd": str(Path.cwd()),
        "environment": child_environment(spec.threads, mark),
    }
    return json.dumps(order)


def inline_config(config: RunConfig) -> str:
    """Return the configuration as JSON without `runtime_env`, which may hold passwords."""
    ray = config.launcher.ray.model_copy(update={"runtime_env": {}})
    return config.with_values("launcher", ray=ray).model_dump_json()
