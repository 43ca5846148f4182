"""The order to a node to start a child: its spec, its configuration, its environment."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.launch.child_spec import ChildSpec
from asyncrl.launch.records import MARK_VARIABLE


def start_order(spec: ChildSpec, *, mark: str, relay_per_node: bool) -> str:
    """Return the order for `asyncrl.launch.node_child.NodeChild.start`, JSON."""
    order: dict[str, Any] = {
        "name": spec.name,
        "run_id": spec.run_id,
        "relay_per_node": relay_per_node,
        "shares_run_directory": spec.shares_run_directory,
        "spec": json.loads(msgspec.json.encode(spec)),
        "cwd": str(Path.cwd()),
        "environment": {
            "OMP_NUM_THREADS": str(spec.threads),
            "MKL_NUM_THREADS": str(spec.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "TQDM_DISABLE": "1",
            MARK_VARIABLE: mark,
        },
    }
    return json.dumps(order)


def inline_config(config: RunConfig) -> str:
    """Return the configuration as JSON without `runtime_env`, which may hold passwords."""
    ray = config.launcher.ray.model_copy(update={"runtime_env": {}})
    launcher = config.launcher.model_copy(update={"ray": ray})
    return config.model_copy(update={"launcher": launcher}).model_dump_json()


def random_letters() -> str:
    """Return the end of a run's id on several machines: letters, unlike a process id."""
    return "".join(chr(ord("a") + byte % 26) for byte in secrets.token_bytes(8))
