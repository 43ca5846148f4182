"""Who gets which GPU, and what is said when there are too few."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import UserError
from asyncrl.launch.gpus import Gpu
from asyncrl.launch.placement import GpuNeeds, GpuPlan, plan_gpus, select_gpus


def machine(count: int) -> list[Gpu]:
    return [
        Gpu(str(i), f"GPU-{i:08x}-aaaa", "NVIDIA H100 80GB HBM3", 81920, i) for i in range(count)
    ]


MIG = [Gpu(f"MIG-{i:04x}-bbbb", f"MIG-{i:04x}-bbbb", "1g.10gb of A100") for i in range(3)]


def names(gpus: object) -> list[str]:
    return [gpu.name for gpu in gpus]  # type: ignore[attr-defined]


def plan(count: int, generators: int, per: int, trainer: int = 1, **more: bool) -> GpuPlan:
    return plan_gpus(
        machine(count), GpuNeeds(generators, per, trainer, **more), renumbers=more == {}
    )


def test_generators_come_first_and_the_trainer_next() -> None:
    found = plan(8, 2, 3)
    assert [names(found.of(f"generator-{i}")) for i in range(2)] == [
        ["0", "1", "2"], ["3", "4", "5"],
    ]  # fmt: skip
    assert names(found.of("trainer")) == ["6"]
    assert names(found.spare) == ["7"]


def test_a_replacement_has_its_predecessors_gpus() -> None:
    found = plan(3, 2, 1)
    assert found.of("generator-1.4") == found.of("generator-1")
    assert found.of("trainer.2") == found.of("trainer")


def test_a_process_on_the_cpu_sees_no_gpu() -> None:
    found = plan(2, 1, 0, 1)
    assert found.environment("generator-0")["CUDA_VISIBLE_DEVICES"] == ""
    assert found.environment("trainer")["CUDA_VISIBLE_DEVICES"] == "0"


def test_numbers_are_those_of_nvidia_smi_unless_the_user_has_set_the_order() -> None:
    assert plan(2, 1, 1).environment("trainer") == {
        "CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip
    own = plan_gpus(machine(2), GpuNeeds(1, 1, 1), renumbers=False)
    assert own.environment("trainer") == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_process_gets_numbers_or_names_never_both() -> None:
    usable = select_gpus(machine(3), None, ["GPU-00000001-aaaa", 2, 0])
    found = plan_gpus(usable, GpuNeeds(1, 2, 1), renumbers=True)
    both = found.environment("generator-0")["CUDA_VISIBLE_DEVICES"]
    assert both == "GPU-00000001-aaaa,GPU-00000002-aaaa"
    assert found.environment("trainer")["CUDA_VISIBLE_DEVICES"] == "0"


def test_one_gpu_is_shared_and_of_more_only_if_asked_for() -> None:
    found = plan(1, 1, 1)
    assert found.shares
    assert found.of("trainer") == found.of("generator-0")
    assert any("shared" in line for line in found.lines())
    assert not plan(2, 1, 1).shares
    four = plan(8, 2, 4, colocate=True)
    assert names(four.trainer) == ["4"], "the first GPU of the last generator"


@pytest.mark.parametrize(
    ("generators", "per", "trainer", "more"),
    [(1, 1, 1, {"colocate": False}), (2, 1, 1, {}), (1, 2, 1, {}), (1, 1, 2, {})],
)
def test_what_one_gpu_cannot_be_shared_by(
    generators: int, per: int, trainer: int, more: dict[str, bool]
) -> None:
    with pytest.raises(UserError, match=r"need \d GPUs, and this run may use 1"):
        plan(1, generators, per, trainer, **more)


def test_a_process_on_the_cpu_leaves_the_only_gpu_to_the_other() -> None:
    for per, trainer in ((0, 1), (1, 0)):
        assert not plan(1, 1, per, trainer).shares


def test_too_few_gpus_are_refused_with_who_asked_for_how_many_and_what_fits() -> None:
    with pytest.raises(UserError) as refused:
        plan(8, 2, 4)
    assert str(refused.value).startswith(
        "2 generator(s) (launcher.generators) with 4 GPU(s) each "
        "(engine.vllm.tensor_parallel_size) and the trainer with 1 need 9 GPUs, and this run may "
        "use 8: 0 (NVIDIA H100 80GB HBM3, 80 GiB), 1 "
    )
    for remedy in (
        "launcher.generators: 1,",
        "launcher.colocate: true",
        "trainer.device: cpu",
        "a smaller engine.vllm.tensor_parallel_size",
    ):
        assert remedy in str(refused.value)


@given(
    *(st.integers(0, 12), st.integers(1, 5), st.integers(0, 4), st.integers(0, 1)),
    st.sampled_from([None, True, False]),
)
def test_no_gpu_is_given_twice_and_every_remedy_works(
    count: int, generators: int, per: int, trainer: int, colocate: bool | None
) -> None:
    needs = GpuNeeds(generators, per, trainer, colocate).on(count)
    colocate = needs.colocate
    gpus = machine(count)
    try:
        found = plan_gpus(gpus, needs, renumbers=True)
    except UserError as error:
        assert needs.total > count
        fewer = re.search(r"launcher.generators: (\d+)", str(error))
        if fewer:
            plan_gpus(gpus, GpuNeeds(int(fewer[1]), per, trainer, colocate), renumbers=True)
        if "launcher.colocate: true" in str(error):
            plan_gpus(gpus, GpuNeeds(generators, per, trainer, colocate=True), renumbers=True)
        return
    given_out = list(itertools.chain(*found.generators))
    assert [len(block) for block in found.generators] == [per] * generators
    assert len(found.trainer) == trainer
    if not found.shares:
        given_out += found.trainer
    assert sorted(names([*given_out, *found.spare]), key=int) == names(gpus)
    assert found.shares == bool(colocate and per and trainer)


@pytest.mark.parametrize(
    ("visible", "wanted", "expected"),
    [
        (None, None, ["0", "1", "2", "3"]),
        (None, [], []),
        ("", None, []),
        ("-1", None, []),
        ("NoDevFiles", None, []),
        ("2, 0", None, ["2", "0"]),
        ("2,0", [0], ["0"]),
        ("GPU-00000003,1", None, ["GPU-00000003-aaaa", "1"]),
        (None, ["GPU-00000001-aaaa", 2], ["GPU-00000001-aaaa", "2"]),
        # A number would mean something else to CUDA where its variable has UUIDs.
        ("GPU-00000003-aaaa,GPU-00000001-aaaa", [1], ["GPU-00000001-aaaa"]),
        ("3,1", ["GPU-00000001-aaaa"], ["GPU-00000001-aaaa"]),
    ],
)
def test_which_gpus_a_run_may_use(
    visible: str | None, wanted: list[int | str] | None, expected: list[str]
) -> None:
    assert names(select_gpus(machine(4), visible, wanted)) == expected


@pytest.mark.parametrize(
    ("visible", "wanted", "message"),
    [
        ("0,7", None, r"CUDA_VISIBLE_DEVICES=0,7: GPU '7' is not there; this machine has 0 \("),
        ("0,1", [2], r"launcher.gpus: GPU '2' is not there; CUDA_VISIBLE_DEVICES=0,1 leaves 0 "),
        (None, [1, "GPU-00000001-aaaa"], "launcher.gpus: GPU 'GPU-00000001-aaaa' is named twice"),
        ("GPU-0000", None, "is the beginning of 4 names"),
        ("0,x", None, "GPU 'x' is not there"),
    ],
)
def test_a_gpu_that_a_run_cannot_use(
    visible: str | None, wanted: list[int | str] | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        select_gpus(machine(4), visible, wanted)


def test_parts_of_a_divided_gpu() -> None:
    usable = select_gpus(MIG, "MIG-0001-bbbb,MIG-0002-bbbb", None)
    found = plan_gpus(usable, GpuNeeds(1, 1, 1), renumbers=False)
    assert found.environment("generator-0") == {"CUDA_VISIBLE_DEVICES": "MIG-0001-bbbb"}
    with pytest.raises(UserError, match="only one part of a GPU that is divided by MIG"):
        plan_gpus(MIG, GpuNeeds(1, 2, 1), renumbers=True)
