"""Queries from declared metrics, so that none names a metric that does not exist."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.monitoring.metrics.instruments import MetricSpec, specs_of
from asyncrl.monitoring.metrics.process_metrics import ProcessMetrics

RUN = 'run=~"$run"'
"""Selects the runs that are chosen at the top of the dashboard."""
WINDOW = "$__rate_interval"
"""Grafana's: four scrapes or one pixel, whichever is longer."""


@dataclass(frozen=True, slots=True)
class Series:
    """One declared metric, as PromQL."""

    spec: MetricSpec
    matchers: tuple[str, ...] = ()
    """Further conditions on labels."""

    def __str__(self) -> str:
        """The instant vector."""
        return self._selected(self.spec.name)

    def where(self, **labels: str) -> Series:
        """Only series with these values of labels, which may be patterns.

        Raises:
            ValueError: the metric does not have such a label.
        """
        known = {"process", self.spec.label, self.spec.second_label}
        for label in labels:
            if label not in known:
                raise ValueError(f"{self.spec.name} has no label {label}")
        more = tuple(f'{label}=~"{value}"' for label, value in labels.items())
        return Series(self.spec, self.matchers + more)

    @property
    def rate(self) -> str:
        """Growth of a counter per second."""
        return f"rate({self}[{WINDOW}])"

    def quantile(self, share: float) -> str:
        """A quantile of a histogram, over all processes of a run.

        Raises:
            ValueError: the metric is not a histogram.
        """
        if self.spec.kind != "histogram":
            raise ValueError(f"{self.spec.name} is not a histogram")
        buckets = self._selected(f"{self.spec.name}_bucket")
        return f"histogram_quantile({share}, sum by (run, le) (rate({buckets}[{WINDOW}])))"

    def mean(self) -> str:
        """The mean of a histogram's values, over all processes of a run.

        Raises:
            ValueError: the metric is not a histogram.
        """
        if self.spec.kind != "histogram":
            raise ValueError(f"{self.spec.name} is not a histogram")
        total, count = (self._selected(f"{self.spec.name}_{part}") for part in ("sum", "count"))
        rates = (f"sum by (run) (rate({one}[{WINDOW}]))" for one in (total, count))
        return " / ".join(rates)

    def _selected(self, name: str) -> str:
        return f"{name}{{{', '.join((RUN, *self.matchers))}}}"


class Metrics:
    """The declared metrics of a role, by field: `Metrics(TrainerMetrics)["loss"]`."""

    def __init__(self, role: type[ProcessMetrics]) -> None:
        self._specs = dict(specs_of(role))

    def __getitem__(self, field: str) -> Series:
        """Raises KeyError if the role has no such metric."""
        return Series(self._specs[field])
