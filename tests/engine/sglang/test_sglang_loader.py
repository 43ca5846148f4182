"""What SGLang may not skip when it loads new weights, and its ranks. Imports no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sglang.worker.weights import SglangLoader, in_all_ranks


def loader_of(words: int) -> SglangLoader:
    """Of a rank that holds so many words of the vocabulary, and padding."""
    model: Any = nn.Module()
    model.embed = nn.Embedding(4, 2)
    model.embed.shard_indices = SimpleNamespace(num_org_elements=words)
    model.norm = nn.LayerNorm(2)
    model.packed = nn.Parameter(torch.empty(0))
    config = SimpleNamespace(model_path="")
    return SglangLoader(SimpleNamespace(model=model, model_config=config, dtype=torch.float32))


def test_a_parameter_without_new_weights_is_an_error() -> None:
    loader = loader_of(words=4)
    loader.check_unchanged([])
    loader.check_unchanged(["packed"])  # it has no numbers
    with pytest.raises(WeightsError, match=r"into norm\.bias of Module: use engine"):
        loader.check_unchanged(["norm.bias"])
    with pytest.raises(WeightsError, match=r"into embed\.weight"):
        loader.check_unchanged(["embed.weight"])


def test_rows_of_padding_have_no_weights() -> None:
    loader_of(words=0).check_unchanged(["embed.weight"])


class Other(Ranks):
    """Of two ranks the second is given."""

    given: Any = None

    def gather(self, value: Any) -> list[Any]:
        return [value, type(self).given]


def test_a_failure_in_one_rank_is_one_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that raised before the ranks meet would leave the others waiting."""

    def fail() -> str:
        raise WeightsError("version 3 is not staged")

    monkeypatch.setattr(Other, "given", ("there", ""))
    assert in_all_ranks(Other(), lambda: "here") == ["here", "there"]
    with pytest.raises(WeightsError, match="version 3 is not staged"):
        in_all_ranks(Other(), fail)
    monkeypatch.setattr(Other, "given", (None, "OSError: gone"))
    with pytest.raises(WeightsError, match="in another rank: OSError: gone"):
        in_all_ranks(Other(), lambda: "here")
