"""New weights in a real model of SGLang's, without a scheduler around it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import bare_sglang
import forked_sglang
import pytest
from served_sglang import REAL_SGLANG, SUPPORT, sglang_python

from asyncrl.engine.sglang.worker.plugin import MARK_VARIABLE

pytestmark = REAL_SGLANG
SECONDS = 300.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `bare_sglang` has found out."""
    root = Path(__file__).parents[3]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), SUPPORT]),
        "SGLANG_PLATFORM": "asyncrl_cpu",
        MARK_VARIABLE: "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    folder = tmp_path_factory.mktemp("bare")
    said, log = folder / "said", folder / "log"
    with said.open("wb") as out, log.open("wb") as error:
        python = [sglang_python(), "-m", bare_sglang.__name__]
        status = forked_sglang.Popen(python, env=environment, stdout=out, stderr=error).wait(
            SECONDS
        )
    assert status == 0, log.read_text()[-3000:]
    return json.loads(said.read_text().splitlines()[-1])


def test_a_copy_is_proved_to_do_what_loading_does(found: Any) -> None:
    assert found["copied"] == [["", True]] * 3


def test_the_fingerprint_is_that_of_what_was_installed(found: Any) -> None:
    """Every tensor has one, those that SGLang stacks included; a single number shows."""
    assert found["differ at the start"] == []
    assert found["differ after"] == [[]] * 3
    assert len(found["differs from another"]) == 16, "all but norms, which are ones everywhere"
    assert found["one number"] == [bare_sglang.KEY]


def test_sglangs_own_spans_are_ours(found: Any) -> None:
    """1 token before version 1 came, 2 before version 2, 3 before version 3, 3 after it."""
    assert found["spans"] == [["0", 0, 1], ["1", 1, 3], ["2", 3, 6], ["3", 6, 9]]


def test_what_loading_derives_is_loaded_in_the_pause(found: Any) -> None:
    assert [why.endswith("does to model.norm.derived") for why in found["derived"]] == [True] * 2
    assert found["differ where derived"] == []


def test_weights_that_sglang_skips_are_an_error(found: Any) -> None:
    """It would log the name and continue with the old ones."""
    assert found["skipped"].startswith(
        "SGLang did not load new weights into model.norm.weight of Qwen3"
    )


def test_experts_are_loaded_and_compared(found: Any) -> None:
    """SGLang takes them one by one, under other names than the trainer's, and skips the others."""
    mixture = found["mixture"]
    assert mixture["differ"] == [[]] * 4
    assert mixture["why"] == [""] * 3
    assert mixture["one number"] == [bare_sglang.EXPERTS]
