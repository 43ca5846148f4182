"""The totals of a step over all ranks: each rank has those of its own groups."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import msgspec

from asyncrl.trainer.objective.step_statistics import StepTotals, TokenSums
from asyncrl.trainer.ranks.world import World


def of_all_ranks(own: StepTotals, world: World) -> StepTotals:
    """The totals of the whole step, the same on each rank. A collective; `own` stays as it is.

    Raises:
        RankLost: another rank did not take part.
    """
    own.read()
    if world.size == 1:
        return own
    packed = msgspec.msgpack.encode({name: getattr(own, name) for name in _TOGETHER})
    found = [msgspec.msgpack.decode(one) for one in world.gather(packed, "the step's totals")]
    values = {
        name: together([rank[name] for rank in found]) for name, together in _TOGETHER.items()
    }
    return StepTotals(own.signals, **values)


_Together = Callable[[Sequence[Any]], Any]


def _added(values: Sequence[Any]) -> Any:
    return reduce(operator.add, values)


def _counted(values: Sequence[dict[int, int]]) -> Counter[int]:
    return _added([Counter(one) for one in values])  # type: ignore[no-any-return]


def _token_sums(values: Sequence[list[float]]) -> TokenSums:
    return TokenSums(*map(_added, zip(*values, strict=True)))


def _by_name(values: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in values for name in one)
    return {name: _added([one[name] for one in values if name in one]) for name in names}


def _lists_by_name(values: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for one in values for name in one)
    return {
        name: [
            _added(column)
            for column in zip(*(one[name] for one in values if name in one), strict=True)
        ]
        for name in names
    }


def _alike(values: Sequence[float]) -> float:
    return values[0]


_TOGETHER: dict[str, _Together] = {
    "centre": _alike,
    "groups": _added,
    "zero_variance_groups": _added,
    "samples": _added,
    "tokens": _added,
    "observed": _added,
    "lengths": _counted,
    "truncated": _added,
    "rewards": _added,
    "staleness_sum": _added,
    "staleness_max": max,
    "computed": _added,
    "sums": _token_sums,
    "signal_sums": _lists_by_name,
    "part_sums": _by_name,
    "ratio_max": max,
    "abs_gap_max": max,
}
"""How the ranks' values of each field become one. Every field of `StepTotals` but `signals`, which
the algorithm declares on each rank, and what was not read."""
