"""The settings of metrics, live view, time lines and report."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_PORT = 65_535

LiveMode = Literal["auto", "rich", "plain", "off"]


def unquoted_off(value: object) -> object:
    """The text "off" for false: YAML reads it so where it is not in quotes."""
    return "off" if value is False else value


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
    """Address that metrics are served on. They are not encrypted and need no password, so bind
    an address other than loopback only on a network that you trust."""
    port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Base port: the controller serves on it, the other processes on the following ones in the
    order of their start. 0 takes any free port for each; `asyncrl status` lists them."""
    live: Annotated[LiveMode, BeforeValidator(unquoted_off)] = "auto"
    """The view of a running run: a panel (rich), one line per step (plain), nothing (off), or the
    panel in a terminal and lines elsewhere (auto)."""
    report_samples: int = Field(default=8, ge=0, le=200)
    """How many sample trajectories report.html shows at most."""
    timeline: bool = True
    """Record what each process did when, in RUN/timeline/."""

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
        if port > MAX_PORT:
            raise ValueError(
                f"monitoring.port {self.port} leaves no port for process {index}: "
                f"{port} is above {MAX_PORT}; choose a lower base port, or 0"
            )
        return port
