"""New weights of a rank: copying from a twin is proved at the start, then it is done.

The model stacks two projections and loads by methods of its layers, as SGLang's models do.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

import pytest
import torch
from torch import Tensor, nn

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker import staging
from asyncrl.engine.remote.worker.shadow_model import ShadowModel
from asyncrl.engine.remote.worker.staging import WorkerWeights, other_numbers
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


class Meddling(Sharing):
    """Its twin loads into both."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(tensors)
        super().load_weights(given.items())
        self.norm.data.copy_(given["norm"])


class Uncopied(Model):
    """Only the model itself can be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.own_id = id(self)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if id(self) != self.own_id:
            raise KeyError("unknown module")
        super().load_weights(tensors)


class Ignoring(Uncopied):
    """The same, and it says nothing."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if id(self) == self.own_id:
            super().load_weights(tensors)


class Rounding(Model):
    """A later loading leaves other numbers than the first one."""

    scale = 1.0

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights([(name, one * self.scale) for name, one in tensors])
        Rounding.scale = 1.0 + 1e-6


class Loader:
    """As an engine's, which has loaded `policy(0)`."""

    name = "the engine"
    device, dtype = torch.device("cpu"), torch.float32
    model_path = ""

    def __init__(self, model: Model) -> None:
        self.model: nn.Module = model
        model.load_weights(policy(0).items())
        self.loaded: list[str] = []
        self.forgotten = 0
        self.versions: list[int] = []

    def load(self, model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded.append("model" if model is self.model else "twin")
        assert isinstance(model, Model)
        model.load_weights(iter(list(tensors)))

    def adopt(self, twin: ShadowModel) -> None:
        assert twin.model is not self.model

    def forget(self, twin: ShadowModel) -> None:
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


@pytest.fixture(autouse=True)
def _own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory that every engine here was started from."""
    monkeypatch.setattr(staging, "weights_of_model", lambda _path, _dtype: policy(0))


def started(model: Model) -> tuple[Loader, WorkerWeights]:
    """An engine that has proved how it installs."""
    loader = Loader(model)
    weights = WorkerWeights(loader)
    weights.prove()
    return loader, weights


def test_copying_is_proved_before_the_first_version_and_leaves_the_model_as_it_was() -> None:
    loader, weights = started(Model())
    assert weights._twin is not None
    assert loader.loaded == ["model", "twin"]
    assert holds(loader, policy(0))
    for version in (1, 2, 3):
        before = len(loader.loaded)
        assert give(weights, version, policy(version)) == ""
        assert holds(loader, policy(version))
        assert loader.loaded[before:] == ["twin"]
    assert loader.versions == [1, 2, 3]


def test_the_model_keeps_its_weights_until_the_installation() -> None:
    loader, weights = started(Model())
    give(weights, 1, policy(1))
    stage(weights, 2, policy(2))
    assert holds(loader, policy(1))
    stage(weights, 3, policy(3))
    with pytest.raises(WeightsError, match="version 2 cannot be installed: version 3 is staged"):
        weights.install(2)
    assert holds(loader, policy(1))
    weights.install(3)
    assert holds(loader, policy(3))


_MISSES = "copying would not reproduce what the engine's loader does to "
_ITSELF = "the model itself, while it loads a copy of it"


@pytest.mark.parametrize(
    ("model", "named", "twins"),
    [
        (Deriving, f"{_MISSES}.squares", 0),
        (Sharing, f"{_MISSES}.norm, {_ITSELF}", 1),
        (Meddling, f"{_MISSES}{_ITSELF}", 1),
        (Uncopied, "cannot load into a copy of its modules: KeyError: 'unknown module'", 1),
        (Ignoring, f"{_MISSES}.norm, both.weight", 1),
    ],
)
def test_what_a_copy_would_miss_is_loaded_in_the_pause(
    model: type[Model], named: str, twins: int
) -> None:
    loader, weights = started(model())
    assert holds(loader, policy(0)), "also if it does not copy"
    assert weights._twin is None
    for version in (1, 2):
        assert give(weights, version, policy(version)).endswith(named)
        assert holds(loader, policy(version))
        assert weights._twin is None
    assert loader.loaded[-1] == "model"
    assert loader.forgotten == twins


def test_a_loading_that_does_something_else_than_the_engines_start_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rounding, "scale", 1.0)
    with pytest.raises(WeightsError, match=r"cannot install new weights.*differ: norm, "):
        started(Rounding())


def test_what_was_not_proved_is_loaded_in_the_pause() -> None:
    loader = Loader(Model())
    weights = WorkerWeights(loader)
    assert give(weights, 1, policy(1)) == "copying was not proved equal to loading"
    assert loader.loaded == ["model"]
    assert holds(loader, policy(1))


def test_weights_that_a_model_skips_are_an_error() -> None:
    class Skipping(Model):
        """A loader that knows no norms."""

        def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights((name, one) for name, one in tensors if name != "norm")

    with pytest.raises(WeightsError, match="not loaded: norm"):
        started(Skipping())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_numbers_differ_in_every_place_and_are_finite(dtype: torch.dtype) -> None:
    """All numbers of 16 bits there are; what is made of zeros changes too."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    given = every.view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    given = given[given.isfinite()]
    before = given.clone()
    ((_, other), (_, index)) = other_numbers([("a", given), ("index", every)])
    assert other.isfinite().all()
    assert not (other == given).any()
    assert not (torch.exp(other[before == 0]) == 1).any()
    assert torch.equal(given, before), "the engine's own numbers are copied first"
    assert torch.equal(index, every)


def test_weights_that_are_not_finite_are_refused() -> None:
    loader, weights = started(Model())
    give(weights, 1, policy(1))
    broken = policy(2)
    broken["norm"][3] = torch.inf
    state, message = stage(weights, 2, broken)
    assert (state, "'norm' has values that are not finite" in message) == ("refused", True)
    assert holds(loader, policy(1))
