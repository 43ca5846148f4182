"""What of a run can be watched, and how."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

HIGHEST_PORT = 65_535

LiveMode = Literal["auto", "rich", "plain", "off"]


class MonitoringConfig(BaseModel):
    """Metrics, live view and report of a run.

    Example:
        >>> MonitoringConfig(port=9100).port_of(2)
        9102
        >>> MonitoringConfig(port=0).port_of(2)
        0
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    metrics: bool = True
    """Serve Prometheus metrics over HTTP from every process."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address that metrics are served on. They are not encrypted and need no password: bind
    anything but loopback only on a network that you trust."""
    port: int = Field(default=0, ge=0, le=HIGHEST_PORT)
    """Base port: the controller serves on it, the other processes on the next ones in order of
    their start. 0 takes any free port for each and logs which."""
    live: LiveMode = "auto"
    """The view while a run goes on: a panel (rich), one line per step (plain), nothing (off), or
    the panel where there is a terminal and lines where not (auto)."""
    report_samples: int = Field(default=8, ge=0, le=200)
    """Most sample trajectories shown in report.html."""
    timeline: bool = True
    """Record who was busy when under RUN/timeline/."""

    @model_validator(mode="after")
    def _refuse_odd_addresses(self) -> Self:
        if "://" in self.host or "/" in self.host:
            raise ValueError(
                f"host {self.host!r} is not an address; give a name or number such as "
                "127.0.0.1, without scheme or path"
            )
        return self

    def port_of(self, index: int) -> int:
        """Port of the index-th process of a run (the controller is 0); 0 means any free one.

        Raises:
            ValueError: the port would lie above 65535.
        """
        if index < 0:
            raise ValueError(f"process index {index} is negative")
        if self.port == 0:
            return 0
        port = self.port + index
        if port > HIGHEST_PORT:
            raise ValueError(
                f"monitoring.port {self.port} leaves no port for process {index}: "
                f"{port} is above {HIGHEST_PORT}; choose a lower base port, or 0"
            )
        return port
