"""The building blocks of metrics: declarations, counters, labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKENS = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The declaration of one metric."""

    name: str
    kind: Kind
    help: str
    """One sentence, shown by Prometheus."""
    labels: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    """Possible values of its label, or None for any (keep them few); a second label has any."""
    buckets: tuple[float, ...] = SECONDS
    """Upper bounds of a histogram's buckets, in its unit."""
    value: Callable[[Any], float | None] | None = None
    """Reads a gauge's value from the step record that the role publishes."""


def _declared(kind: Kind, name: str, text: str, **more: Any) -> Any:
    """Declare a metric as a dataclass field; `more` as in `MetricSpec`."""
    return field(metadata={"spec": MetricSpec(name, kind, text, **more)})


counter, gauge = partial(_declared, "counter"), partial(_declared, "gauge")
histogram = partial(_declared, "histogram")


def specs_of(role: type[DataclassInstance]) -> Iterator[tuple[str, MetricSpec]]:
    """Yield field name and declaration of each metric of a dataclass."""
    for one in fields(role):
        if "spec" in one.metadata:
            yield one.name, one.metadata["spec"]


class Total:
    """A counter that can also follow an external total."""

    def __init__(self, child: Counter) -> None:
        self._counter = child
        self._last = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to the counter. Raises ValueError for an amount below 0."""
        self._counter.inc(amount)

    def follow(self, total: float) -> None:
        """Count the growth of `total` since the last call; a smaller total restarted from 0."""
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total


class By(Generic[T]):
    """One metric per value of a label, or per pair of values of two labels."""

    def __init__(self, spec: MetricSpec, make: Callable[..., T]) -> None:
        self._spec = spec
        self._make = make
        self._label, self._values = next(iter(spec.labels.items()))
        self._made: dict[tuple[str, ...], T] = {(one,): make(one) for one in self._values or ()}

    def of(self, value: str, *second: str) -> T:
        """The metric with this label value, or these two. Raises ValueError if not declared."""
        if (value, *second) not in self._made:
            if self._values is not None:
                raise ValueError(
                    f"{self._spec.name}: {self._label}={value!r} is not declared, only "
                    f"{', '.join(self._values)}"
                )
            self._made[value, *second] = self._make(value, *second)
        return self._made[value, *second]


def new_registry() -> CollectorRegistry:
    """Create a registry with this process's CPU time, memory and open files.

    The library's `_created` series, which would double the number of series, are turned off.
    """
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def build(spec: MetricSpec, registry: CollectorRegistry, process: str) -> Any:
    """Build the metric that `spec` declares, or `By` of it. Raises ValueError if it exists."""
    labels = ["process", *spec.labels]
    family: Counter | Gauge | Histogram
    if spec.kind == "histogram":
        family = Histogram(spec.name, spec.help, labels, registry=registry, buckets=spec.buckets)
    else:
        kind = Counter if spec.kind == "counter" else Gauge
        family = kind(spec.name, spec.help, labels, registry=registry)

    def child(*values: str) -> Any:
        made = family.labels(process, *values)
        return Total(made) if isinstance(made, Counter) else made

    return By(spec, child) if spec.labels else child()
