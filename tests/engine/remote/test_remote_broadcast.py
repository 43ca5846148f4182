"""vLLM and SGLang receive a broadcast in the process that holds the model. No file is read."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
from served_engine import PROMPT, Served, ask, collect, drawn, logprobs_of, tokens_of

from asyncrl.wire.records.wrong_policy import compare_weights
from asyncrl.wire.weights.broadcast.sending import WeightSender
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Outcome
from asyncrl.wire.weights.writer import WeightPublisher


def test_a_version_that_was_broadcast_is_decoded_with(served: Served, tmp_path: Path) -> None:
    served.install(served.old)
    version = served.engine.stats().policy_version
    outcomes: list[Outcome] = []
    with (
        WeightPublisher(tmp_path, "trainer") as publisher,
        closing(WeightSender("127.0.0.1", members=1, note=outcomes.append)) as sender,
    ):
        for model in (served.new, served.old):
            version += 1
            tensors = list(model.state_dict().items())
            manifest = publisher.publish(tensors, version, fingerprint(tensors))
            manifest = msgspec.structs.replace(sender.publish(manifest), path="/nowhere")
            served.call(served.engine.stage_weights(manifest))
            served.call(served.engine.install_weights(version))
            found = served.call(served.engine.fingerprint())
            assert manifest.fingerprint is not None
            assert compare_weights("g", version, expected=manifest.fingerprint, found=found) is None
            chunks = served.call(
                collect(served.engine, ask(f"broadcast{version}", seed=1, max_tokens=30))
            )
            assert {chunk.policy_version for chunk in chunks} == {version}
            wanted = drawn(model, PROMPT, tokens_of(chunks))
            np.testing.assert_allclose(logprobs_of(chunks), wanted, atol=2e-4)
    assert outcomes == ["whole", "whole"]
