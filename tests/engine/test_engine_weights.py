"""New weights in an engine: what fits a model, and the memory they are staged in."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch

from asyncrl.engine.errors import EngineStartError, WeightsError, WeightsSupersededError
from asyncrl.engine.remote.worker.staging import check_finite
from asyncrl.engine.vllm.config import VllmConfig
from asyncrl.engine.weights import ModelShapes, NamedTensors, StagedWeights, longest_installation
from asyncrl.wire.weights.layout import TensorSpec, WeightManifest
from asyncrl.wire.weights.writer import WeightPublisher, published


def manifest_of(shapes: dict[str, tuple[int, ...]], *more: TensorSpec) -> WeightManifest:
    specs = [TensorSpec(name, "float32", shape, 64, 0) for name, shape in shapes.items()]
    return WeightManifest(1, "", 64, (*specs, *more))


def test_of_tied_weights_the_first_name_is_enough(tiny_qwen3: str, tiny_llama: str) -> None:
    tied = ModelShapes.of_path(tiny_qwen3)
    assert tied.shapes.keys() - tied.needed == {"lm_head.weight"}
    assert tied.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    tied.check(manifest_of({name: tied.shapes[name] for name in tied.needed}))
    without = {n: s for n, s in tied.shapes.items() if n != "model.embed_tokens.weight"}
    with pytest.raises(WeightsError, match=r"missing weights: model.embed_tokens.weight"):
        tied.check(manifest_of(without))
    separate = ModelShapes.of_path(tiny_llama)
    assert "lm_head.weight" in separate.needed
    assert not separate.tied


def test_a_manifest_that_does_not_fit_the_model_is_refused() -> None:
    shapes = ModelShapes({"a": (2, 3), "b": (1,)}, frozenset({"a", "b"}), {})
    good: dict[str, tuple[int, ...]] = {"a": (2, 3), "b": (1,)}
    shapes.check(manifest_of(good))
    for changed, message in [
        (manifest_of(good, TensorSpec("a", "float32", (2, 3), 64, 0)), "given twice: a;"),
        (manifest_of(good | {"c": (1,)}), r"unexpected weights \(not in the model\): c;"),
        (manifest_of(good | {"a": (3, 2)}), r"a: \(3, 2\) given, \(2, 3\) needed"),
        (manifest_of({"a": (2, 3)}), "missing weights: b; the engine keeps its weights"),
    ]:
        with pytest.raises(WeightsError, match=message):
            shapes.check(changed)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=str(tmp_path)):
        ModelShapes.of_path(str(tmp_path))


def filled(value: float) -> NamedTensors:
    return [("w", torch.full((5,), value))]


def test_only_what_is_staged_can_be_installed_and_once(tmp_path: Path) -> None:
    staged = StagedWeights(check_finite)

    def refuses(version: int, message: str) -> None:
        with pytest.raises(WeightsError, match=message), staged.install(version):
            pass

    refuses(1, "version 1 cannot be installed: no version is staged")
    with WeightPublisher(tmp_path, "run") as publisher:
        first = publisher.publish(filled(1.0), 1)
        staged.stage(first)
        refuses(2, "version 1 is staged")
        staged.stage(publisher.publish(filled(2.0), 2))
        refuses(1, "version 2 is staged")
        # The published file may change: the copy does not.
        publisher.publish(filled(3.0), 3)
        publisher.publish(filled(4.0), 4)
        with staged.install(2) as tensors:
            assert [(name, t.tolist()) for name, t in tensors] == [("w", [2.0] * 5)]
        refuses(2, "no version is staged")
        with pytest.raises(WeightsSupersededError, match="holds version 3"):
            staged.stage(first)
    with pytest.raises(WeightsSupersededError, match="version 1 were removed"):
        staged.stage(first)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refused_values_leave_nothing_staged(value: float, dtype: torch.dtype) -> None:
    staged = StagedWeights(check_finite)
    good = ("good", torch.ones(3, 4, dtype=dtype))
    broken = torch.ones(70, 9, dtype=dtype)
    broken[31, 7] = value
    with published([good, ("none", torch.empty(0, 2))], 6) as manifest:
        staged.stage(manifest)
    with (
        published([good, ("broken", broken)], 7) as manifest,
        pytest.raises(WeightsError, match="'broken' has values that are not finite"),
    ):
        staged.stage(manifest)
    for version in (6, 7):
        with pytest.raises(WeightsError, match="no version is staged"), staged.install(version):
            pass


def test_unknown_data_types_are_refused() -> None:
    with published(filled(1.0), 1) as manifest:
        (spec,) = manifest.tensors
        wrong = (msgspec.structs.replace(spec, dtype="float3"),)
        with pytest.raises(WeightsError, match="unknown data type 'float3'"):
            StagedWeights(check_finite).stage(msgspec.structs.replace(manifest, tensors=wrong))


def test_the_page_has_the_limits_and_they_are_twice_what_is_computed() -> None:
    """The rates are those that the page names: seconds a GB of a proof, staging, and loading."""
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    row = re.compile(
        r"^\| ([\d.]+) billion \| ([\d.]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE
    )
    rows = [[float(cell) for cell in found] for found in row.findall(page)]
    assert [parameters for parameters, *_ in rows] == [7.6, 32.8, 70.6]
    settings = VllmConfig()
    for parameters, gigabytes, proof, staging, loading, limit in rows:
        assert gigabytes == pytest.approx(2 * parameters, rel=0.01)
        computed = 1.1 * gigabytes, 0.45 * gigabytes, 0.27 * gigabytes
        assert (proof, staging, loading) == tuple(map(round, computed))
        longest = longest_installation(round(1e9 * gigabytes), settings.call_seconds)
        assert limit == round(longest)
        assert limit >= 2 * (staging + loading)
        assert settings.start_limit >= 2 * 3 * proof, "also where eight ranks share the memory"


def test_a_users_longer_limit_stays() -> None:
    assert longest_installation(0) == 60.0
    assert longest_installation(int(0.3e9), 45.0) == 61.0
    assert longest_installation(int(0.3e9), 600.0) == 600.0
