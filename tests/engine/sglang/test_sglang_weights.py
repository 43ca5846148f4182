"""New weights in a real model of SGLang's, without a scheduler around it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import bare_sglang
import pytest
from served_sglang import REAL_SGLANG, sglang_python

from engine.sglang.worker.plugin import MARK_VARIABLE

pytestmark = REAL_SGLANG
SECONDS = 300.0


@pytest.fixture(scope="module")
def found() -> Any:
    """What `bare_sglang` has found out."""
    root = Path(__file__).parents[3]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(Path(bare_sglang.__file__).parent)]),
        "SGLANG_PLATFORM": "asyncrl_cpu",
        MARK_VARIABLE: "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sglang_python(), str(bare_sglang.__file__)],
        env=environment, cwd=root, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


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
        "SGLang loads no new weights into model.norm.weight of Qwen3"
    )


def test_experts_are_loaded_and_compared(found: Any) -> None:
    """SGLang takes them one by one, under other names than the trainer's, and skips the others."""
    mixture = found["mixture"]
    assert mixture["differ"] == [[]] * 4
    assert mixture["why"] == [""] * 3
    assert mixture["one number"] == [bare_sglang.EXPERTS]
