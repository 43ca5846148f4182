"""The Prometheus metrics of a relay.

`asyncrl.monitoring.metrics.metrics` says how metrics are declared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Gauge, Histogram

from asyncrl.monitoring.metrics.instruments import By, Total, counter, gauge, histogram
from asyncrl.monitoring.metrics.process_metrics import CommonMetrics

# ruff: noqa: RUF009 - the calls below make dataclass fields; ruff cannot see that through a helper


@dataclass(frozen=True, slots=True)
class RelayMetrics(CommonMetrics):
    """One relay: the weights, the control messages and the files of its node."""

    weights_sent: Total = counter(
        "asyncrl_relay_weights_sent_bytes_total", "Weights sent to other nodes."
    )
    weights_received: Total = counter(
        "asyncrl_relay_weights_received_bytes_total",
        "Weights that came from other nodes, of versions that are whole.",
    )
    weights_fetched: By[Total] = counter(
        "asyncrl_relay_weights_fetches_total",
        "Versions that were to be brought to this node, by what came of it.",
        label="outcome",
        values=("whole", "superseded", "failed"),
    )
    weights_time: Histogram = histogram(
        "asyncrl_relay_weights_fetch_seconds",
        "From the order to fetch a version to the whole version in this node's memory.",
    )
    frames: By[Total] = counter(
        "asyncrl_relay_frames_total",
        "Frames of control messages that were passed on: up to the controller, down to this "
        "node's processes.",
        label="direction",
        values=("up", "down"),
    )
    bundles: By[Total] = counter(
        "asyncrl_relay_bundles_total",
        "Bundles in which these frames travelled between relay and controller.",
        label="direction",
        values=("up", "down"),
    )
    dropped: Total = counter(
        "asyncrl_relay_dropped_frames_total",
        "Frames and bundles that could not be passed on; sessions send them again.",
    )
    waiting: Gauge = gauge(
        "asyncrl_relay_waiting_frames", "Frames that are gathered and leave soon."
    )
    files_sent: Total = counter(
        "asyncrl_relay_files_sent_bytes_total", "Parts of files sent to other relays."
    )
    files_copied: Total = counter(
        "asyncrl_relay_files_copied_bytes_total",
        "Parts of other nodes' files that were copied into the run's folder.",
    )
    nodes_followed: Gauge = gauge(
        "asyncrl_relay_followed_nodes", "Nodes whose files this relay copies."
    )
    nodes_failing: Gauge = gauge(
        "asyncrl_relay_failing_nodes", "Of these, nodes whose files could not be copied last time."
    )

    def watch_gathered(self, waiting: Callable[[], int]) -> None:
        """Measure what waits whenever the metrics are read."""
        self.waiting.set_function(waiting)
