"""Generators' counts of failures of reward functions and of their use of servers."""

from typing import Self

import msgspec

from asyncrl.wire.transport.decoding import Amount, Count


def _added(one: dict[str, Count], other: dict[str, Count]) -> dict[str, Count]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in sorted({*one, *other})}


class ServiceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A reward function's use of a server. Counts add."""

    requests: Count = 0
    """Attempts, including failed ones."""
    retries: dict[str, Count] = {}
    """Attempts that were repeated, by cause."""
    seconds: Amount = 0.0
    """Total time of all calls, from the beginning of the function to the answer."""
    opened: Count = 0
    """Times that a breaker opened, or stayed open after a probe."""

    def __add__(self, other: Self) -> Self:
        return type(self)(
            requests=self.requests + other.requests,
            retries=_added(self.retries, other.retries),
            seconds=self.seconds + other.seconds,
            opened=self.opened + other.opened,
        )


class RewardWait(msgspec.Struct, frozen=True, kw_only=True):
    """The wait of deliveries for rewards; sums are over generators."""

    step: Count = 0
    """The first step with samples that were ordered to be delivered and have no reward yet."""
    samples: Count = 0
    """Number of these samples of the step."""
    function: str = ""
    """The function that has run longest, by its label; empty if none runs."""
    seconds: Amount = 0.0
    """Time for which it has run."""

    def __add__(self, other: Self) -> Self:
        waiting = [one for one in (self, other) if one.samples]
        step = min((one.step for one in waiting), default=0)
        samples = sum(one.samples for one in waiting if one.step == step)
        longest = max(self, other, key=lambda one: one.seconds)
        return msgspec.structs.replace(longest, step=step, samples=samples)


class RewardCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of reward functions. Counts of several processes add."""

    failed: dict[str, dict[str, Count]] = {}
    """Calls that gave no reward, by function and reason."""
    retried: Count = 0
    largest: dict[str, float] = {}
    """Largest absolute value by function, if it is suspiciously large."""
    services: dict[str, ServiceCounts] = {}
    """Counts of the functions that ask a server, by function."""

    def __add__(self, other: Self) -> Self:
        # Sorted, so that the order in which failures happen does not show in metrics.jsonl.
        functions = sorted({*self.failed, *other.failed})
        failed = {f: _added(self.failed.get(f, {}), other.failed.get(f, {})) for f in functions}
        largest = dict(self.largest)
        for function, value in other.largest.items():
            largest[function] = max(value, largest.get(function, value))
        services = dict(self.services)
        for function, used in other.services.items():
            services[function] = services.get(function, ServiceCounts()) + used
        return type(self)(
            failed=failed, retried=self.retried + other.retried, largest=largest, services=services
        )

    @property
    def failures(self) -> int:
        """Number of calls that gave no reward."""
        return sum(sum(reasons.values()) for reasons in self.failed.values())

    def describe_failures(self) -> str:
        """Describe the failures by function and reason: `score: 3 raised, 1 timeout`."""
        return "; ".join(
            f"{function}: "
            + ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in reasons.items())
            for function, reasons in self.failed.items()
        )
