"""The weights of a relay: orders of the controller, files in memory, answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from weight_cluster import same, weights

from asyncrl.launch.child_spec import weights_hub
from asyncrl.relay.setup import RelayWeights
from asyncrl.wire import RunKey
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages import from_relay, to_relay
from asyncrl.wire.messages.chain import Parent
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.writer import WeightPublisher

KEY = RunKey.new()
SECONDS = 60


class Relay:
    """One relay without its process, and what it says."""

    def __init__(self, name: str, directory: Path) -> None:
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.name = name
        self.weights = RelayWeights(
            name,
            "tcp://127.0.0.1:*",
            KEY.hub(weights_hub(name)),
            directory=directory,
            files_id=f"run-{name}",
            say=self.said.put_nowait,
        )

    async def answer(self) -> Any:
        async with asyncio.timeout(SECONDS):
            return await self.said.get()

    def parent(self, child: str) -> Parent:
        """This relay as the source of the trainer's weights."""
        keys = KEY.line(weights_hub(self.name), child)
        return Parent(self.name, self.weights.source_address, keys)


def with_relays(directory: Path, scenario: Callable[[Relay, Relay, WeightPublisher], Any]) -> None:
    async def main() -> None:
        source, node = Relay("relay-0", directory), Relay("relay-1", directory)
        try:
            with WeightPublisher(directory, "trainer", dtype=torch.bfloat16) as publisher:
                await scenario(source, node, publisher)
        finally:
            node.weights.close()
            source.weights.close()

    asyncio.run(main())
    assert list(directory.iterdir()) == []


def fetch(manifest: WeightManifest, source: Relay, attempt: int) -> to_relay.FetchWeights:
    return to_relay.FetchWeights(manifest, (source.parent("relay-1"),), attempt)


def test_what_one_serves_the_other_has_in_a_file_of_its_own(tmp_path: Path) -> None:
    async def scenario(source: Relay, node: Relay, publisher: WeightPublisher) -> None:
        for version in range(2):
            manifest = publisher.publish(weights(version), version)
            source.weights.serve(to_relay.ServeWeights(manifest, 2 * version))
            node.weights.fetch(fetch(manifest, source, 2 * version + 1))
            here = await node.answer()
            assert isinstance(here, from_relay.WeightsHere)
            assert (here.attempt, here.left) == (2 * version + 1, {})
            assert Path(here.manifest.path).name == f"asyncrl-run-relay-1-weights-{version}"
            assert same(here.manifest, version)
        assert here.nbytes < 0.1 * manifest.nbytes, "what has changed"
        assert source.weights.sent_bytes > 0
        assert source.said.empty(), "nothing is said of what works"
        for path, exists in ((here.manifest.path, True), (str(tmp_path / "none"), False)):
            checked = await node.weights.check(to_relay.CheckWeights(path))
            assert checked == from_relay.WeightsChecked(path, exists)

    with_relays(tmp_path, scenario)


def test_what_fails_is_named_with_its_order(tmp_path: Path) -> None:
    async def scenario(source: Relay, node: Relay, publisher: WeightPublisher) -> None:
        manifest = publisher.publish(weights(0), 0)
        source.weights.serve(to_relay.ServeWeights(replace(manifest, policy_version=3), 7))
        failed = await source.answer()
        assert (failed.attempt, failed.superseded) == (7, True)
        source.weights.serve(to_relay.ServeWeights(replace(manifest, nbytes=64), 8))
        failed = await source.answer()
        assert (failed.attempt, failed.superseded) == (8, False)
        source.weights.serve(to_relay.ServeWeights(manifest, 9))
        source.weights.forget()
        node.weights.fetch(fetch(manifest, source, 10))
        failed = await node.answer()
        assert (failed.attempt, failed.superseded) == (10, True)
        assert "no parent has it any longer" in failed.reason

    with_relays(tmp_path, scenario)


def test_a_thread_that_has_ended_ends_the_relay(tmp_path: Path) -> None:
    async def scenario(source: Relay, node: Relay, _publisher: WeightPublisher) -> None:
        source.weights.check_threads()
        node.weights._node._call(lambda: None).result(SECONDS)
        node.weights._node.close()
        with pytest.raises(WireError, match=r"thread that serves weights at tcp://.* has ended"):
            node.weights.check_threads()

    with_relays(tmp_path, scenario)
