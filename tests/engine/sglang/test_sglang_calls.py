"""Calls of the client to SGLang's scheduler process, and what it is started with."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.extras import DrafterSettings, StagingReport
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sglang.messages import Answer, Call, WorkerSettings
from asyncrl.engine.sglang.worker.calls import WorkerCalls, answer
from asyncrl.wire.weights.layout import WeightManifest


class Calls:
    def asyncrl_double(self, number: int) -> int:
        return 2 * number

    def asyncrl_fail(self) -> None:
        raise KeyError("no such thing")

    def secret(self) -> None:
        raise AssertionError("nobody may call this")


class TwoRanks(Ranks):
    """Of two ranks the first; a call fails in the other."""

    def gather(self, value: Any) -> list[Any]:
        return [value, "rank 1 broke"]


def test_the_result_of_rank_0_and_the_errors_of_all() -> None:
    assert answer(Calls(), Call(3, "asyncrl_double", [4]), Ranks()) == Answer(3, 8)
    failed = answer(Calls(), Call(4, "asyncrl_fail", []), Ranks())
    assert failed.error == "KeyError: 'no such thing'"
    found = answer(Calls(), Call(5, "asyncrl_double", [4]), TwoRanks())
    assert found == Answer(5, 8, "rank 1 broke")


@pytest.mark.parametrize("name", ["secret", "asyncrl_unknown", "__class__"])
def test_nothing_else_can_be_called(name: str) -> None:
    found = answer(Calls(), Call(1, name, []), Ranks())
    assert found.error == f"ValueError: the worker has no call {name!r}"


class Scheduler:
    """A scheduler and the weights of its model; notes what is done, in order."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def stop(self) -> None:
        self.done.append("stop")

    def resume_steps(self) -> None:
        self.done.append("go on")

    def record_weight_version_change(self, new_version: str) -> None:
        self.done.append(("label", new_version))

    def advance(self, policy_version: int) -> None:
        self.done.append(("draw under", policy_version))

    def begin(self, manifest: WeightManifest) -> None:
        self.done.append(manifest.policy_version)

    def report(self) -> StagingReport:
        return StagingReport("staged")

    def install(self, policy_version: int) -> str:
        if policy_version == 9:
            raise WeightsError("version 9 is not staged")
        self.done.append(("install", policy_version))
        return "some layer is odd"


def test_a_version_is_drawn_under_once_its_weights_are_in_place() -> None:
    scheduler: Any = Scheduler()
    calls = WorkerCalls.__new__(WorkerCalls)
    calls._scheduler = calls._weights = scheduler
    calls._ranks, calls._loader = Ranks(), Mock(device=torch.device("cpu"))
    calls._fingerprint = iter([None])

    def call(name: str, *arguments: Any) -> Answer:
        return answer(calls, Call(1, f"asyncrl_{name}", list(arguments)), Ranks())

    manifest = msgspec.to_builtins(WeightManifest(4, "", 0, ()))
    assert call("begin_staging", manifest).error == ""
    assert call("staging").result == {"state": "staged", "message": ""}
    assert call("pause").error == ""
    assert call("install", 4).result == "some layer is odd"
    assert call("install", 9).error == "WeightsError: version 9 is not staged"
    assert call("resume").error == ""
    assert call("fingerprint") == Answer(1, None)
    assert scheduler.done == [
        4, "stop", ("install", 4), ("label", "4"), ("draw under", 4), "go on",
    ]  # fmt: skip


def test_settings_travel_in_the_environment() -> None:
    settings = WorkerSettings(
        requests="ipc:///a",
        outputs="ipc:///b",
        parent=7,
        top_k=8,
        logits_bytes=1 << 20,
        stage_on_device=False,
        steps_per_message=4,
        drafting=DrafterSettings({"max_bytes": 1}, "{}", None, 100, 1 << 20),
    )
    assert WorkerSettings.from_environment(settings.to_environment()) == settings
