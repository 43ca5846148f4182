"""vLLM and SGLang receive a broadcast in the process that holds the model. No file is read."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from served_engine import PROMPT, Served, ask, collect, drawn, logprobs_of, tokens_of

from wire.weights.broadcast import sending
from wire.weights.broadcast.sending import Outcome, WeightSender
from wire.weights.fingerprint import fingerprint
from wire.weights.writer import WeightPublisher


def test_a_broadcast_version_is_decoded_with_and_a_damaged_one_is_found(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.install(served.old)
    version = served.engine.stats().policy_version
    outcomes: list[Outcome] = []
    fill = sending.fill

    def damaged(target: memoryview, descriptor: int, offset: int) -> None:
        fill(target, descriptor, offset)
        target[1000] ^= 1

    tensors = list(served.new.state_dict().items())
    with (
        WeightPublisher(tmp_path, "trainer") as publisher,
        closing(WeightSender("127.0.0.1", members=1, note=outcomes.append)) as sender,
    ):
        for change in (fill, damaged):
            version += 1
            monkeypatch.setattr(sending, "fill", change)
            manifest = publisher.publish(tensors, version, fingerprint(tensors))
            manifest = msgspec.structs.replace(sender.publish(manifest), path="/nowhere")
            served.call(served.engine.stage_weights(manifest))
            served.call(served.engine.install_weights(version))
            found = served.call(served.engine.fingerprint())
            assert manifest.fingerprint is not None
            assert (found.whole == manifest.fingerprint.whole) is (change is fill)
            if change is fill:
                asked = ask("broadcast", seed=1, max_tokens=30)
                chunks = served.call(collect(served.engine, asked))
                assert {chunk.policy_version for chunk in chunks} == {version}
                wanted = drawn(served.new, PROMPT, tokens_of(chunks))
                np.testing.assert_allclose(logprobs_of(chunks), wanted, atol=2e-4)
    assert outcomes == ["whole", "whole"]
    served.install(served.old)
