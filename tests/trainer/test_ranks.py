"""Several ranks train what one would: real processes, connected by gloo over loopback."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_runs import forking
from ranked_learner import RESUMED, RUNS
from safetensors.torch import load_file

from asyncrl.trainer.accumulation import _TOGETHER
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import RankLost, TrainerError
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.objective.step_statistics import StepTotals
from asyncrl.trainer.ranks import ALONE, World
from asyncrl.trainer.ranks.world import join
from benchmarks.machines.namespaces import why_not

SEVERAL = [one for one in RUNS if one[2] > 1]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], str]) -> Path:
    """The folder of all jobs of `ranked_learner`; torch is loaded once for them."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = "steps,saved,resumed,lost,apart"
    command = [sys.executable, "-m", "ranked_learner", jobs, str(folder), model_path("qwen3")]
    with forking():
        done = subprocess.run(command, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return folder


@pytest.mark.parametrize(("case", "deal", "size"), SEVERAL)
def test_the_gradient_and_the_step_are_those_of_one_rank(
    ran: Path, case: str, deal: str, size: int
) -> None:
    want = load_file(ran / f"{case} in turn 1.safetensors")
    got = load_file(ran / f"{case} {deal} {size}.safetensors")
    assert got.keys() == want.keys()
    assert any(name.startswith("gradient") and bool(one.any()) for name, one in want.items())
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize(("case", "deal", "size"), SEVERAL)
def test_a_step_reports_the_samples_of_all_ranks(
    ran: Path, case: str, deal: str, size: int
) -> None:
    want = json.loads((ran / f"{case} in turn 1.json").read_text())
    assert json.loads((ran / f"{case} {deal} {size}.json").read_text()) == [
        pytest.approx(one, rel=1e-10, abs=1e-12) if not isinstance(one, dict) else _near(one)
        for one in want
    ]


def _near(value: object) -> object:
    if isinstance(value, dict):
        return {key: _near(one) for key, one in value.items()}
    return pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value


@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_a_checkpoint_continues_on_another_number_of_ranks(
    ran: Path, before: int, after: int
) -> None:
    want = load_file(ran / "1 to 1.safetensors")
    got = load_file(ran / f"{before} to {after}.safetensors")
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-10, rtol=1e-10, msg=name)


def test_a_lost_rank_is_noticed_and_what_was_waited_for_is_said(ran: Path) -> None:
    said = (ran / "lost 0").read_text()
    assert said.startswith("rank 0 of 2 waited ")
    assert "for the other ranks of the trainer to exchange the step's totals, and lost one" in said


def test_ranks_listen_on_loopback_only(ran: Path) -> None:
    for rank in range(2):
        addresses = json.loads((ran / f"listens {rank}").read_text())
        assert addresses
        assert set(addresses) == {"0100007F"}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_on_two_machines_speak_over_the_network_that_is_named_and_no_other(ran: Path) -> None:
    for rank, address in enumerate(["010200C0", "020200C0"]):  # 192.0.2.1 and .2
        said = json.loads((ran / f"apart {rank}").read_text())
        assert said["sum"] == [[3.0], [20.0]][rank]
        assert said["host"] == ["one", "two"][rank]
        assert set(said["listens"]) == {address}
        refused = (ran / f"refused {rank}").read_text()
        assert "rank 0 is on one, rank 1 on two" in refused or "rank 1 is on two" in refused
        assert "trainer.rank_network: lo reaches no other machine" in refused


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match=r"rank-0, rank-2 of the trainer did not join within 0 s"):
        join(tmp_path / "meeting", 1, 3, on_gpu=False, join_seconds=0.2, seconds=1)


def test_a_trainer_of_one_process_exchanges_nothing() -> None:
    assert join(Path(), 0, 1, on_gpu=False, join_seconds=0, seconds=0) is ALONE
    assert (ALONE.decided(True, ""), ALONE.any(False, ""), ALONE.norm(2.5)) == (True, False, 2.5)
    ALONE.barrier("nothing")
    ALONE.agree("x", "nothing")
    ALONE.close()


def test_ranks_that_loaded_other_weights_are_refused() -> None:
    class Others(World):
        def gather(self, own: bytes, what: str) -> list[bytes]:
            return [own, b"other"]

    with pytest.raises(TrainerError, match="disagree on the weights: rank 0: mine; rank 1: other"):
        Others(0, 2).agree("mine", "the weights")


def test_ranks_whose_gpus_choose_other_types_are_refused() -> None:
    class Newer(World):
        def gather(self, own: bytes, what: str) -> list[bytes]:
            return [own, b"bfloat16"]

    with pytest.raises(
        TrainerError, match=r"trainer\.dtype, .*: rank 0: float32; rank 1: bfloat16"
    ):
        Learner(TrainerConfig(device="cpu"), "/nowhere", group_size=2, seed=0, world=Newer(0, 2))


def test_every_total_of_a_step_is_put_together() -> None:
    names = {field.name for field in dataclasses.fields(StepTotals)} - {"signals", "_unread"}
    assert names == _TOGETHER.keys(), "say how the ranks' values of a new field become one"
