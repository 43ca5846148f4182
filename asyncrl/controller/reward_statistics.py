"""What went wrong in the reward functions of a run, and what a person is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from asyncrl.config.run_config import RunConfig
from asyncrl.environments.protocol import LABEL
from asyncrl.wire.records.reward_counts import RewardCounts


class RewardTotals:
    """Adds up the reward failures of all generators, lost ones included.

    Args:
        config: of the run.
        say: shows a message to the person who watches.
        earlier: counted before the run was resumed.
    """

    def __init__(
        self, config: RunConfig, say: Callable[[str], None], earlier: RewardCounts
    ) -> None:
        self._labels = config.reward_labels
        self._counts_as_zero = config.rewards.on_error == "zero"
        self._say = say
        self._earlier = earlier
        self._now = RewardCounts()
        self._told: set[tuple[str, str]] = set()

    @property
    def counts(self) -> RewardCounts:
        """Since the run began."""
        return self._earlier + self._now

    def update(self, reports: Iterable[RewardCounts]) -> None:
        """Take in the last report of every generator that ever was; tell of what is new."""
        self._now = sum(reports, start=RewardCounts())
        for function, reasons in self._now.failed.items():
            for reason in reasons:
                what = f"reward {function!r} gave no reward"
                if function == LABEL:
                    what = "the environment gave no answer"
                if self._counts_as_zero:
                    self._tell(
                        (function, reason),
                        f"WARNING: {what} ({_words(reason)}); that counts as 0 (rewards.on_error: "
                        "zero). The generators' logs show the first cases; reward_failures in "
                        "metrics.jsonl counts them",
                    )
        for function, value in self._now.largest.items():
            self._tell(
                (function, "large"),
                f"WARNING: reward {function!r} returned {value:.3g} (absolute value). Rewards this "
                "large dominate every advantage; check the function, or lower its weight",
            )

    def named(self, terms: tuple[float, ...]) -> dict[str, float | None]:
        """The mean of each term of a step, by its function's label; empty if there is none."""
        return dict(zip(self._labels, terms, strict=False))

    def summarize(self) -> None:
        """Say how many rewards failed, at the end of training."""
        counts = self.counts
        if counts.failures and self._counts_as_zero:
            self._say(
                f"WARNING: {counts.failures} rewards failed and counted as 0: "
                f"{counts.describe_failures()}"
            )

    def _tell(self, kind: tuple[str, str], text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._say(text)


def _words(reason: str) -> str:
    return reason.replace("_", " ")
