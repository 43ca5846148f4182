"""What a node is told to start a child: its spec, its configuration, its environment."""

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
    """The order for `asyncrl.launch.node_child.NodeChild.start`, JSON.

    Args:
        spec: of the child, with its configuration.
        mark: of the run's processes.
        relay_per_node: whether two nodes of one machine have a relay each.
    """
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
    """The configuration as JSON, for nodes that may not see the run's folder.

    `launcher.ray.runtime_env` stays out: it may hold passwords, and Ray has applied it.
    """
    ray = config.launcher.ray.model_copy(update={"runtime_env": {}})
    launcher = config.launcher.model_copy(update={"ray": ray})
    return config.model_copy(update={"launcher": launcher}).model_dump_json()


def random_letters() -> str:
    """Eight random letters.

    The end of a run's id, where its processes are on several machines. It is no process id, so
    nobody takes the run's files for those of a dead process.
    """
    return "".join(chr(ord("a") + byte % 26) for byte in secrets.token_bytes(8))
