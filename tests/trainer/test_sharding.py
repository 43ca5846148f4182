"""Ranks with weights in parts train what one rank would: real processes, connected by gloo."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import forking
from safetensors.torch import load_file
from sharded_learner import CASES, RESUMED, RUNS
from threaded_world import ThreadedWorld
from transformers import AutoModelForCausalLM

from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.sharding.lockstep import NextAction, RankStatus, RankWork, next_action
from asyncrl.trainer.sharding.policy import one_by_one

SEVERAL = [one for one in RUNS if one[2] > 1]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], str]) -> Path:
    """The folder of all jobs of `sharded_learner`; torch is loaded once for them."""
    folder = tmp_path_factory.mktemp("sharded")
    models = [model_path(name) for name in ("qwen3", "llama", "qwen3_moe")]
    command = [sys.executable, "-m", "sharded_learner", str(folder), *models]
    with forking():
        done = subprocess.run(command, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return folder


def _said(ran: Path, name: str) -> Any:
    return json.loads((ran / f"{name}.json").read_text())


@pytest.mark.parametrize(("case", "deal", "size"), SEVERAL)
def test_the_gradient_and_the_step_are_those_of_one_rank(
    ran: Path, case: str, deal: str, size: int
) -> None:
    want = load_file(ran / f"{case} in turn 1.safetensors")
    got = load_file(ran / f"{case} {deal} {size}.safetensors")
    assert got.keys() == want.keys()
    assert any(name.startswith("gradient") and bool(one.any()) for name, one in want.items())
    close = 1e-5 if case == "experts" else 1e-10
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=close, rtol=close, msg=name)


@pytest.mark.parametrize(("case", "deal", "size"), SEVERAL)
def test_padding_is_in_no_number_of_a_step(ran: Path, case: str, deal: str, size: int) -> None:
    want, got = _said(ran, f"{case} in turn 1"), _said(ran, f"{case} {deal} {size}")
    assert want["empty"] == 0
    assert got["empty"] > 0 or deal != "all to the last"
    close = 1e-5 if case == "experts" else 1e-10
    assert _near(want["metrics"], close) == got["metrics"]


def _near(value: Any, close: float) -> Any:
    if isinstance(value, dict):
        return {key: _near(one, close) for key, one in value.items()}
    if isinstance(value, list):
        return [_near(one, close) for one in value]
    return pytest.approx(value, rel=close, abs=close) if isinstance(value, float) else value


def test_the_fingerprint_of_parts_is_that_of_the_whole(ran: Path) -> None:
    for case in CASES:
        want, got = _said(ran, f"{case} in turn 1"), _said(ran, f"{case} in turn 2")
        assert got["digest"] == want["digest"], case


@pytest.mark.parametrize(("before", "after", "full"), RESUMED)
def test_a_checkpoint_continues_with_parts_and_without(
    ran: Path, before: int, after: int, full: bool
) -> None:
    want = load_file(ran / "grpo in turn 1.safetensors")
    got = load_file(ran / f"{before} to {after} {full}.safetensors")
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_the_same_order_of_sums_every_bit_is_the_same(ran: Path, dtype: str) -> None:
    want = load_file(ran / f"{dtype} False.safetensors")
    got = load_file(ran / f"{dtype} True.safetensors")
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_part_of_weights_gradients_and_moments(ran: Path, rank: int) -> None:
    """Of its tensors, not of its pages; vectors are whole but for their moments.

    One more copy of the matrices would be a quarter more; torch's own tables are the rest.
    """
    full, plain = (_said(ran, f"live {which} {rank}") for which in (True, False))
    matrices, vectors = full["matrices"], full["vectors"]
    assert full["held"] == pytest.approx(4 * matrices / 2 + 3 * vectors, rel=0.05)
    assert plain["held"] == pytest.approx(3 * matrices + 3 * vectors, rel=0.05)
    assert not full["mapped"], "the file of the weights, which a view of it keeps in memory"


def test_a_checkpoint_of_parts_is_exported_as_that_of_one_rank(ran: Path, tmp_path: Path) -> None:
    tokens = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(0))
    found = []
    for size in (1, 2):
        target = tmp_path / str(size)
        export(path_of(ran / f"grpo in turn {size}", 1), target)
        model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        found.append(model(tokens).logits.log_softmax(-1))
    assert found[0].dtype == torch.float64
    torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=1e-10)


def test_a_rank_that_is_lost_in_a_micro_batch_is_noticed(ran: Path) -> None:
    said = (ran / "lost 0").read_text()
    assert said.startswith("rank 0 of 2 lost one in a micro-batch: ")


def test_what_all_do_follows_from_what_each_has() -> None:
    """Every combination of three ranks; nobody computes before a checkpoint that all know of."""
    words = [RankStatus(has) for has in RankWork] + [RankStatus(RankWork.NOTHING, saves=True)]
    for each in itertools.product(words, repeat=3):
        act = next_action(each)
        have = [one.has for one in each]
        if all(one.saves for one in each):
            assert act is NextAction.SAVE
        elif RankWork.WORK in have:
            assert act is NextAction.COMPUTE
        elif not any(one.saves for one in each) and set(have) in ({RankWork.DONE}, {RankWork.OVER}):
            assert act is {RankWork.DONE: NextAction.FINISH, RankWork.OVER: NextAction.END}[have[0]]
        else:
            assert act is NextAction.WAIT


@pytest.mark.parametrize(("left", "together"), [(20, True), (19, False), (None, True)])
def test_ranks_load_one_after_the_other_where_the_host_is_small(
    left: int | None, together: bool
) -> None:
    """Three ranks and 10 bytes each; rank 0 has loaded when the others begin."""
    loading: list[int] = []
    most: list[int] = []
    lock, met = threading.Lock(), threading.Barrier(2)

    def load(rank: int) -> int:
        with lock:
            loading.append(rank)
            most.append(len(loading))
        if together and rank:
            met.wait(60)
        with lock:
            loading.remove(rank)
        return 10

    worlds = ThreadedWorld.of(3)
    threads = [
        threading.Thread(target=one_by_one, args=(partial(load, w.rank), w, lambda: left))
        for w in worlds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 3
    assert most[0] == 1
    assert max(most) == (2 if together else 1)
    assert len({tuple(world.said) for world in worlds}) == 1
