"""New weights of a rank: proved at the first installation, then copied from a twin.

The model stacks two projections and loads by methods of its layers, as SGLang's models do.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

import pytest
import torch
from torch import Tensor, nn

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker.staging import WorkerWeights
from asyncrl.engine.remote.worker.twin import Twin
from asyncrl.wire.weights.writer import published

WIDTH = 5


class Stacked(nn.Module):
    """Holds `gate` and `up` in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined, assignment]

    def load(self, parameter: Tensor, given: Tensor, part: int) -> None:
        parameter.data[part * WIDTH : (part + 1) * WIDTH].copy_(given)


class Model(nn.Module):
    """Loads what it knows, and skips what it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Stacked()
        self.norm = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        held = dict(self.named_parameters())
        for name, tensor in tensors:
            if name in ("gate", "up"):
                loader: object = held["both.weight"].weight_loader  # type: ignore[attr-defined]
                assert callable(loader)
                loader(held["both.weight"], tensor, ("gate", "up").index(name))
            elif name in held:
                held[name].data.copy_(tensor)


class Deriving(Model):
    """Makes something of a weight at each loading, in its own module."""

    def __init__(self) -> None:
        super().__init__()
        self.squares = torch.ones(WIDTH)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(tensors)
        self.squares = self.norm**2


class Sharing(Model):
    """Its twin loads into the model itself: a function holds the model's own parameter."""

    def __init__(self) -> None:
        super().__init__()
        norm = self.norm
        self.write = lambda tensor: norm.data.copy_(tensor)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(tensors)
        self.write(given.pop("norm"))
        super().load_weights(given.items())


class Loader:
    """As an engine's."""

    name = "the engine"
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, model: Model) -> None:
        self.model: nn.Module = model
        self.loaded: list[str] = []
        self.forgotten = 0
        self.versions: list[int] = []

    def load(self, model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded.append("model" if model is self.model else "twin")
        assert isinstance(model, Model)
        model.load_weights(iter(list(tensors)))

    def adopt(self, twin: Twin) -> None:
        assert twin.model is not self.model

    def forget(self, twin: Twin) -> None:
        assert twin.model is not self.model
        self.forgotten += 1

    def check_unchanged(self, names: Collection[str]) -> None:
        if names:
            raise WeightsError(f"not loaded: {', '.join(sorted(names))}")

    def installed(self, policy_version: int) -> None:
        self.versions.append(policy_version)


def policy(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    square = WIDTH, WIDTH
    return {
        "gate": torch.randn(square, generator=generator),
        "up": torch.randn(square, generator=generator),
        "norm": torch.randn(WIDTH, generator=generator),
    }


def stage(weights: WorkerWeights, version: int, tensors: dict[str, Tensor]) -> tuple[str, str]:
    with published(tensors.items(), version) as manifest:
        weights.begin(manifest)
        deadline = time.monotonic() + 20
        while (report := weights.report()).state == "running":
            assert time.monotonic() < deadline
    return report.state, report.message


def give(weights: WorkerWeights, version: int, tensors: dict[str, Tensor]) -> str:
    assert stage(weights, version, tensors) == ("staged", "")
    return weights.install(version)


def holds(loader: Loader, tensors: dict[str, Tensor]) -> bool:
    model = loader.model
    both = torch.cat([tensors["gate"], tensors["up"]])
    assert isinstance(model, Model)
    return torch.equal(model.both.weight, both) and torch.equal(model.norm, tensors["norm"])


def test_the_first_version_is_loaded_and_the_others_are_copied() -> None:
    loader = Loader(Model())
    weights = WorkerWeights(loader)
    for version in (1, 2, 3):
        before = len(loader.loaded)
        assert give(weights, version, policy(version)) == ""
        assert holds(loader, policy(version))
        assert weights.copies
        done = loader.loaded[before:]
        assert done == (["model", "model", "twin"] if version == 1 else ["twin"])
    assert loader.versions == [1, 2, 3]


def test_the_model_keeps_its_weights_until_the_installation() -> None:
    loader = Loader(Model())
    weights = WorkerWeights(loader)
    give(weights, 1, policy(1))
    stage(weights, 2, policy(2))
    assert holds(loader, policy(1))
    stage(weights, 3, policy(3))
    with pytest.raises(WeightsError, match="version 2 cannot be installed: version 3 is staged"):
        weights.install(2)
    assert holds(loader, policy(1))
    weights.install(3)
    assert holds(loader, policy(3))


@pytest.mark.parametrize(
    ("model", "named", "twins"),
    [
        (Deriving, "copying would not do what the engine's loading does to .squares", 0),
        (Sharing, "copying would not do what the engine's loading does to .norm", 1),
    ],
)
def test_what_a_copy_would_miss_is_loaded_in_the_pause(
    model: type[Model], named: str, twins: int
) -> None:
    loader = Loader(model())
    weights = WorkerWeights(loader)
    for version in (1, 2):
        why = give(weights, version, policy(version))
        assert named in why
        assert holds(loader, policy(version))
        assert not weights.copies
    assert loader.loaded[-1] == "model"
    assert loader.forgotten == twins


def test_weights_that_a_model_skips_are_an_error() -> None:
    class Skipping(Model):
        """A loader that knows no norms."""

        def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights((name, one) for name, one in tensors if name != "norm")

    weights = WorkerWeights(Loader(Skipping()))
    stage(weights, 1, policy(1))
    with pytest.raises(WeightsError, match="not loaded: norm"):
        weights.install(1)


def test_weights_that_are_not_finite_are_refused() -> None:
    loader = Loader(Model())
    weights = WorkerWeights(loader)
    give(weights, 1, policy(1))
    broken = policy(2)
    broken["norm"][3] = torch.inf
    state, message = stage(weights, 2, broken)
    assert (state, "'norm' has values that are not finite" in message) == ("refused", True)
    assert holds(loader, policy(1))
