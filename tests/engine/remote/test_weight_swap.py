"""Staging and installing weights from the client's side, with a core that is made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engine.errors import EngineError, WeightsError, WeightsSupersededError
from asyncrl.engine.remote.client.engine import Pausing, WeightSwap
from asyncrl.engine.remote.extras import StagingReport
from asyncrl.engine.weights import ModelShapes
from asyncrl.wire.weights.layout import Fingerprint, TensorSpec, WeightManifest


@dataclass
class FakeCore:
    """Answers `staging` from a list; notes what is asked."""

    reports: list[StagingReport] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    failed: list[EngineError] = field(default_factory=list)
    broken: bool = False
    installed: int = 0
    why_reloaded: str = ""
    looked: asyncio.Event | None = None

    def __post_init__(self) -> None:
        self.name = "vLLM"
        self.process = SimpleNamespace(failure=EngineError, fail=self.failed.append)
        self.meter = SimpleNamespace(busy=lambda: self.calls.append("busy"))
        self.responses = SimpleNamespace(flush=lambda: self.calls.append("flush"))

    async def begin_staging(self, manifest: WeightManifest) -> None:
        self.calls.append(("begin", manifest.policy_version))

    async def staging(self) -> StagingReport:
        return self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def install(self, policy_version: int, limit: float) -> str:
        assert limit == 0.05
        if self.broken:
            raise EngineError("the core died")
        self.calls.append(("install", policy_version))
        self.installed = policy_version
        return self.why_reloaded

    async def fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> Fingerprint:
        self.calls.append(("compare", *shapes))
        if self.looked is not None:
            await self.looked.wait()
        return Fingerprint({}, f"version {self.installed}")


class FakeStreams:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return 1

    async def restart_unstarted(self) -> None:
        self.calls.append("restart")


def manifest(version: int, *shape: int) -> WeightManifest:
    return WeightManifest(version, "", 64, (TensorSpec("a", "float32", shape or (2,), 64, 8),))


def play(
    core: FakeCore, scene: Callable[[WeightSwap, Pausing], Coroutine[Any, Any, None]]
) -> list[Any]:
    """Runs a scene, where 2 numbers may take 0.05 s; gives the calls of the core."""

    async def run() -> None:
        streams: Any = FakeStreams(core.calls)
        pausing = Pausing(core, streams)  # type: ignore[arg-type]
        shapes = ModelShapes({"a": (2,)}, frozenset({"a"}), {})
        await scene(WeightSwap(core, streams, pausing, shapes, lambda n: 0.05 * n / 64), pausing)  # type: ignore[arg-type]

    asyncio.run(run())
    return core.calls


RUNNING, STAGED = StagingReport("running"), StagingReport("staged")


def test_weights_are_staged_while_running_and_installed_between_steps() -> None:
    async def scene(swap: WeightSwap, _: Pausing) -> None:
        await swap.stage(manifest(4))
        with pytest.raises(WeightsError, match=r"version 5 cannot be installed: version 4 is"):
            await swap.install(5)
        await swap.install(4)
        assert (await swap.fingerprint()).whole == "version 4"
        assert (await swap.fingerprint()).whole == "version 4"
        with pytest.raises(WeightsError, match="no version is staged"):
            await swap.install(4)
        await swap.stage(manifest(5))
        await swap.install(5)
        assert (await swap.fingerprint()).whole == "version 5"

    calls = play(FakeCore([RUNNING, RUNNING, STAGED]), scene)
    assert calls == [step for version in (4, 5) for step in [("begin", version), *swapped(version)]]


def swapped(version: int) -> list[Any]:
    """The calls of an installation, and of one look at the weights after the core draws again."""
    installed = ["pause", "flush", ("install", version), "restart", "resume", "busy"]
    return [*installed, ("compare", "a")]


def test_weights_stay_until_they_are_looked_at() -> None:
    """Nobody may install while pieces of a fingerprint are taken between the steps."""
    looked = asyncio.Event()

    async def scene(swap: WeightSwap, _: Pausing) -> None:
        await swap.stage(manifest(4))
        await swap.install(4)
        looking = asyncio.create_task(swap.fingerprint())
        await asyncio.sleep(0)
        replacing = asyncio.create_task(swap.stage(manifest(5)))
        await asyncio.sleep(0)
        assert core.calls[-1] == ("compare", "a")
        looked.set()
        assert (await looking).whole == "version 4"
        await replacing

    core = FakeCore([STAGED], looked=looked)
    assert play(core, scene)[-1] == ("begin", 5)


def test_loading_in_the_pause_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(swap: WeightSwap, _: Pausing) -> None:
        for version in (4, 5):
            await swap.stage(manifest(version))
            await swap.install(version)

    play(FakeCore([STAGED], why_reloaded="layer 'x' is odd"), scene)
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "vLLM loads new weights while it is paused, 0.0 s for each version" in caplog.text
    assert caplog.text.rstrip().endswith("layer 'x' is odd")


def test_a_paused_engine_stays_paused() -> None:
    async def scene(swap: WeightSwap, pausing: Pausing) -> None:
        await pausing.pause()
        await pausing.pause()
        await swap.stage(manifest(4))
        await swap.install(4)
        assert pausing.paused
        await pausing.resume()
        await pausing.resume()

    calls = play(FakeCore([STAGED]), scene)
    installed = [("begin", 4), ("install", 4), "restart"]
    assert calls == ["pause", "flush", *installed, "resume", "busy"]


@pytest.mark.parametrize(
    ("report", "error"),
    [
        (StagingReport("refused", "not finite"), WeightsError),
        (StagingReport("superseded", "holds version 9"), WeightsSupersededError),
        (RUNNING, EngineError),
    ],
)
def test_what_was_not_staged_is_not_installed(
    report: StagingReport, error: type[EngineError]
) -> None:
    async def scene(swap: WeightSwap, _: Pausing) -> None:
        await swap.stage(manifest(3))
        core.reports[:] = [report]
        with pytest.raises(error, match=report.message or "did not stage new weights within 0.05"):
            await swap.stage(manifest(4))
        for version in (3, 4):
            with pytest.raises(WeightsError, match="no version is staged"):
                await swap.install(version)

    core = FakeCore([STAGED])
    assert play(core, scene) == [("begin", 3), ("begin", 4)]
    assert not core.failed


def test_weights_that_do_not_fit_are_not_sent() -> None:
    async def scene(swap: WeightSwap, _: Pausing) -> None:
        with pytest.raises(WeightsError, match="wrong shape"):
            await swap.stage(manifest(4, 3))

    assert play(FakeCore(), scene) == []


def test_a_failed_installation_ends_the_engine() -> None:
    async def scene(swap: WeightSwap, _: Pausing) -> None:
        await swap.stage(manifest(4))
        with pytest.raises(EngineError, match="the core died"):
            await swap.install(4)

    core = FakeCore([STAGED], broken=True)
    assert play(core, scene) == [("begin", 4), "pause", "flush"]
    assert [str(error) for error in core.failed] == ["the core died"]


def test_the_limit_grows_with_all_weights_also_for_an_adapter() -> None:
    """The manifest of one is small, and all weights are loaded."""
    limits: list[float] = []

    class Core(FakeCore):
        async def install(self, policy_version: int, limit: float) -> str:
            limits.append(limit)
            return ""

    async def run() -> None:
        core: Any = Core([STAGED])
        streams: Any = FakeStreams(core.calls)
        shapes = ModelShapes({"a": (1000,), "same": (1000,)}, frozenset({"a"}), {"same": "a"})
        swap = WeightSwap(core, streams, Pausing(core, streams), shapes, float)
        for size in (4000, 100):
            spec = TensorSpec("a", "float32", (1000,), 64, 0)
            await swap.stage(WeightManifest(1, "", size, (spec,)))
            await swap.install(1)

    asyncio.run(run())
    assert limits == [4000.0, 2000.0]
