"""A trainer refuses a step that its device cannot hold, before it waits for other ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from asyncrl.config.run_config import parse_config
from asyncrl.errors import UserError
from asyncrl.launch.child_spec import TrainerSpec
from asyncrl.startup import memory
from asyncrl.trainer import scoring
from asyncrl.trainer_process import setup

GIB = 2**30
QWEN_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip


class Found(NamedTuple):
    """What torch says of a GPU."""

    name: str
    total_memory: int


class MetError(Exception):
    """The other ranks are waited for."""


def load(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gib: int, kind: str = "ray", **trainer: Any
) -> None:
    """Load a learner of a 7B, on a GPU of this size, up to where the ranks meet."""

    class _Child(NamedTuple):
        spec: TrainerSpec
        config: Any

    def join(*_: object, **__: object) -> None:
        raise MetError

    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    for module in (setup, scoring):
        monkeypatch.setattr(module, "resolve_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: Found("NVIDIA H100", gib * GIB)
    )
    monkeypatch.setattr(setup, "join", join)
    settings = {"dtype": "bfloat16", "gradient_checkpointing": True} | trainer
    config = {"launcher": {"kind": kind}, "trainer": settings}
    spec = TrainerSpec(
        name="trainer", run_directory=str(folder), model_path=str(folder), control_address="",
        data_address=f"ipc://{folder}/data", parent=0, threads=1,
    )  # fmt: skip
    child: Any = _Child(spec, parse_config(config, source="test"))
    setup._load_learner(child, None)  # type: ignore[arg-type] - not reached


def test_a_step_that_does_not_fit_is_refused_before_the_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"and its GPU \(NVIDIA H100\) has 78 GiB.*optimizer_state: int8"
    ):
        load(monkeypatch, tmp_path, 78, ranks=4)
    with pytest.raises(MetError):
        load(monkeypatch, tmp_path, 78, ranks=4, sharding="full")


def test_a_model_that_is_not_here_and_a_local_run_are_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MetError):
        load(monkeypatch, tmp_path, 8, kind="local")
    monkeypatch.setattr(setup, "local_model", lambda _: None)
    with pytest.raises(MetError):
        load(monkeypatch, tmp_path, 8)


def test_ranks_of_a_cpu_share_its_memory_where_all_are_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory.memory_estimate, "host_bytes", lambda: 64 * GIB)
    launcher = {"kind": "ray", "trusted_network": True}
    for network, ranks in (("lo", 4), ("eth0", 1)):
        trainer = {"device": "cpu", "ranks": 4, "rank_network": network}
        config = parse_config({"launcher": launcher, "trainer": trainer}, source="test")
        assert memory.device_here(config).room == 64 * GIB // ranks
