"""The second tree of a model's modules, on layers that hold their weights as vLLM's do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.engine.remote.worker.shadow_model import (
    Attributes,
    ShadowModel,
    differing,
    loaded_parts,
    unchanged,
)

CPU = torch.device("cpu")
WIDTH, VOCABULARY = 4, 6


class Packed(nn.Module):
    """Multiplies by a packed copy, which a function holds."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size_per_partition = WIDTH
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined, assignment]
        self.pack(torch.zeros(WIDTH, WIDTH))

    def pack(self, weight: Tensor) -> None:
        kept = weight.clone()
        self.cpu_linear = lambda x, _weight, bias: functional.linear(x, kept, bias)
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def load(self, weight: Tensor) -> None:
        self.pack(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.cpu_linear(x, self.weight, None)


class Model(nn.Module):
    """An embedding, a packed layer, a norm, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, False)
        self.head.weight = self.embed.weight
        self.inner, self.norm = Packed(), nn.LayerNorm(WIDTH)
        self.register_buffer("angles", torch.arange(3.0), persistent=False)

    def load(self, seed: int) -> None:
        """New numbers, by what the modules say that loads them."""
        generator = torch.Generator().manual_seed(seed)
        new = partial(torch.randn, generator=generator)
        self.embed.weight.data.copy_(new(VOCABULARY, WIDTH))
        self.inner.load(new(WIDTH, WIDTH))
        self.norm.weight.data.copy_(new(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.inner(self.embed(tokens))))
        return logits


def loaded(seed: int, kind: type[Model] = Model) -> Any:
    model = kind()
    model.load(seed)
    return model


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    return torch.as_tensor(model(torch.arange(VOCABULARY)))


@torch.inference_mode()
def test_the_model_decodes_unchanged_until_what_was_loaded_is_copied() -> None:
    model = loaded(1)
    place = model.embed.weight.data_ptr()
    twin = ShadowModel(model, CPU)
    for seed in (2, 3, 4):
        before = logits(model)
        twin.model.load(seed)
        assert torch.equal(logits(model), before)
        twin.install()
        assert torch.equal(logits(model), logits(loaded(seed)))
    assert model.embed.weight.data_ptr() == place, "what was captured from it stays valid"
    assert twin.model.head.weight is twin.model.embed.weight
    assert model.head.weight is model.embed.weight


@torch.inference_mode()
def test_a_method_that_loads_a_tensor_becomes_that_of_the_twin() -> None:
    model = Model()
    weight = model.inner.weight
    weight.weight_loader = model.inner.load  # type: ignore[attr-defined, assignment]
    twin = ShadowModel(model, CPU)
    assert twin.model.inner.weight.weight_loader.__self__ is twin.model.inner


@torch.inference_mode()
def test_equal_trees_have_no_differences() -> None:
    model = loaded(1)
    twin = ShadowModel(model, CPU)
    for tree in (model, twin.model):
        tree.load(2)
    assert twin.differences(loaded_parts(model)) == []


@torch.inference_mode()
@pytest.mark.parametrize("place", ["embed.weight", "norm.weight", ".angles"])
def test_one_bit_is_a_difference(place: str) -> None:
    model = loaded(1)
    twin = ShadowModel(model, CPU)
    name = place.rpartition(".")
    tensor = getattr(model.get_submodule(name[0]), name[2])
    tensor.view(-1)[-1] = torch.nextafter(tensor.view(-1)[-1], torch.tensor(9.0))
    assert place in twin.differences(loaded_parts(model))


@torch.inference_mode()
def test_another_packed_weight_is_a_difference() -> None:
    model = loaded(1)
    twin = ShadowModel(model, CPU)
    generator = torch.Generator().manual_seed(1)
    torch.randn(VOCABULARY, WIDTH, generator=generator)
    weight = torch.randn(WIDTH, WIDTH, generator=generator)
    twin.model.inner.pack(weight)
    assert twin.differences(loaded_parts(model)) == []
    weight[2, 1] += 1e-5
    twin.model.inner.pack(weight)
    assert twin.differences(loaded_parts(model)) == ["the packed weight of 'inner'"]


def test_what_loading_has_left_as_it_was_is_a_difference() -> None:
    """Also if the model and its twin hold the same numbers there."""
    model = loaded(1)
    twin = ShadowModel(model, CPU)
    for tree in (model, twin.model):
        tree.load(1)
    assert twin.differences(loaded_parts(model)) == []
    twin.poison()
    twin.model.load(1)
    assert twin.differences(loaded_parts(model)) == ["norm.bias"], "which no loading sets"


def test_what_no_loading_changes_is_left_as_it_is() -> None:
    """Only if that was seen when the model was loaded with other numbers."""
    model = loaded(1)
    parts = loaded_parts(model)
    model.load(2)
    untouched = unchanged(parts, loaded_parts(model))
    assert untouched == {"norm.bias", "inner.weight"}, "the latter is packed, and empty"
    twin = ShadowModel(model, CPU, untouched)
    twin.poison()
    twin.model.load(2)
    assert twin.differences(loaded_parts(model)) == []
    model.norm.load_state_dict({"weight": torch.ones(WIDTH), "bias": torch.zeros(WIDTH)})
    assert twin.differences(loaded_parts(model)) == ["norm.weight"]


def test_a_packed_weight_that_no_loading_changes_may_be_shared() -> None:
    model = loaded(1)
    parts = loaded_parts(model)
    assert ShadowModel(model, CPU, unchanged(parts, parts)).differences(loaded_parts(model)) == []


def test_a_packed_weight_that_was_not_packed_anew_is_a_difference() -> None:
    model = loaded(1)
    assert ShadowModel(model, CPU).differences(loaded_parts(model)) == [
        "the packed weight of 'inner'"
    ]


def test_a_parameter_that_loading_has_put_elsewhere_is_a_difference() -> None:
    """Installing copies from where it was."""
    model = loaded(1)
    twin = ShadowModel(model, CPU)
    twin.model.inner.load(torch.zeros(WIDTH, WIDTH))
    model.inner.load(torch.zeros(WIDTH, WIDTH))
    assert twin.differences(loaded_parts(model)) == []
    twin.model.norm.weight = nn.Parameter(twin.model.norm.weight.detach().clone())
    assert twin.differences(loaded_parts(model)) == ["norm.weight"]


@torch.inference_mode()
def test_the_twin_is_compared_with_what_the_model_held_and_copying_restores_it() -> None:
    """The model holds something else meanwhile."""
    model = loaded(1)
    started, before = loaded_parts(model), logits(model)
    model.load(2)
    twin = ShadowModel(model, CPU, {"norm.bias"})
    twin.poison()
    twin.model.load(3)
    found = {"embed.weight", "norm.weight", "head.weight", "the packed weight of 'inner'"}
    assert set(twin.differences(started)) == found
    twin.model.load(1)
    assert twin.differences(started) == []
    others = {"embed.weight", "norm.weight", "head.weight", "inner.cpu_linear"}
    assert set(differing(started, loaded_parts(model))) == others
    twin.install()
    assert differing(started, loaded_parts(model)) == []
    assert torch.equal(logits(model), before)


class Unpacked(Packed):
    """Keeps its weight, and multiplies by what a function of each layer says."""

    def __init__(self, *, reads_own: bool) -> None:
        self.reads_own = reads_own
        super().__init__()

    def pack(self, weight: Tensor) -> None:
        self.weight.data.copy_(weight)
        own = self.weight.detach()
        self.cpu_linear = lambda x, given, bias: functional.linear(
            x, own if self.reads_own else given, bias
        )


@pytest.mark.parametrize(("reads_own", "found"), [(True, ["the packed weight of ''"]), (False, [])])
def test_a_product_that_reads_the_layers_memory_cannot_be_swapped(
    reads_own: bool, found: list[str]
) -> None:
    model = Unpacked(reads_own=reads_own)
    model.load(torch.ones(WIDTH, WIDTH))
    twin = ShadowModel(model, CPU)
    twin.model.load(torch.ones(WIDTH, WIDTH))
    assert twin.differences(loaded_parts(model)) == found


class Setting(Model):
    """Sets the same scales at each loading."""

    def load(self, seed: int) -> None:
        super().load(seed)
        self.scale, self.scales = torch.tensor(1.0), [torch.tensor(2.0)]


class Deriving(Setting):
    """Keeps something that is made of its weights where nobody copies it."""

    def load(self, seed: int) -> None:
        super().load(seed)
        self.absorbed = self.norm.weight.data * 2


class InPlace(Model):
    """The same, in a list, and the tensor stays."""

    def __init__(self) -> None:
        super().__init__()
        self.absorbed = [torch.zeros(WIDTH)]

    def load(self, seed: int) -> None:
        super().load(seed)
        self.absorbed[0].copy_(self.norm.weight.data)


class InBuffer(Model):
    """The same, in a buffer."""

    def load(self, seed: int) -> None:
        super().load(seed)
        self.angles.copy_(self.norm.weight.data[:3])


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (Model, []),
        (Setting, []),
        (Deriving, [".absorbed"]),
        (InPlace, [".absorbed.0"]),
        (InBuffer, ["._buffers.angles"]),
    ],
)
def test_what_loading_changes_besides_parameters_is_named(
    kind: type[Model], changed: list[str]
) -> None:
    model = loaded(1, kind)
    attributes = Attributes(model)
    assert attributes.changed() == []
    model.load(2)
    assert attributes.changed() == changed


def test_parameters_in_columns_are_refused() -> None:
    model = Model()
    model.norm.weight = nn.Parameter(torch.zeros(WIDTH, 2).t()[0], requires_grad=False)
    with pytest.raises(ValueError, match=r"not contiguous in memory: norm\.weight"):
        ShadowModel(model, CPU)
