"""The settings of metrics, live view, timelines, report and web page."""

import ipaddress
import logging
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from asyncrl.monitoring.sinks.config import SinkConfig
from asyncrl.wire.transport.paths import AbsolutePath

LogLevel = Literal["debug", "info", "warning", "error"]
LiveMode = Literal["auto", "rich", "plain", "off"]
MAX_PORT = 65_535


def set_log_level(level: LogLevel) -> None:
    """Set the level of asyncrl's loggers; other packages' loggers are unaffected."""
    logging.getLogger("asyncrl").setLevel(level.upper())


def unquoted_off(value: object) -> object:
    """Turn false into "off": YAML reads an unquoted `off` as false."""
    return "off" if value is False else value


class TracingConfig(BaseModel):
    """Traces of groups of samples, for an OpenTelemetry collector."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    enabled: bool = False
    """Send traces. Needs `pip install 'asyncrl[otel]'` wherever the run has processes."""
    endpoint: str = "http://127.0.0.1:4318"
    """Address of the collector (OTLP over HTTP, protobuf), as every process of the run reaches it.
    Without a path, `/v1/traces` is added. Do not put credentials here: processes read the
    environment variable OTEL_EXPORTER_OTLP_HEADERS."""
    sample_rate: float = Field(default=0.01, gt=0, le=1)
    """Share of the groups that are traced, with all their samples. The choice follows from the run
    and the group, so all processes trace the same groups."""
    queue_spans: int = Field(default=4096, ge=1, le=1_000_000)
    """Spans that may wait for the collector in each process. Further ones are dropped and
    counted."""

    @field_validator("endpoint")
    @classmethod
    def _refuse_odd_endpoints(cls, value: str) -> str:
        url = urlsplit(value)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                f"endpoint {value!r} is not a URL of http or https, such as http://127.0.0.1:4318"
            )
        if url.username is not None or url.password is not None:
            raise ValueError(
                "endpoint has a user name or a password, which would be written to config.yaml; "
                "set the environment variable OTEL_EXPORTER_OTLP_HEADERS instead"
            )
        return value

    @property
    def traces_url(self) -> str:
        """URL that spans are posted to."""
        has_path = urlsplit(self.endpoint).path not in ("", "/")
        return self.endpoint if has_path else self.endpoint.rstrip("/") + "/v1/traces"


def is_loopback(host: str) -> bool:
    """Return True if an address, or the name `localhost`, means this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_port(host: str, port: int) -> str:
    """Join a host and a port.

    >>> host_port("127.0.0.1", 80), host_port("::1", 80)
    ('127.0.0.1:80', '[::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_brackets(host: str) -> str:
    """Return the bare address of `[::1]`, as IPv6 is written before a port."""
    is_bracketed = host.startswith("[") and host.endswith("]")
    return host[1:-1] if is_bracketed else host


def _address(host: str) -> str:
    bare = without_brackets(host)
    if "/" in bare or bare.count(":") == 1 or not bare:
        raise ValueError(
            f"host {host!r} is not an address; give a name or number such as "
            "127.0.0.1, without scheme, port or path"
        )
    return bare


Host = Annotated[str, Field(min_length=1), AfterValidator(_address)]


class WebConfig(BaseModel):
    """The web page of a run, and its HTTP API."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    enabled: bool = True
    """Serve a page that shows the run while it trains (docs/operate.md). It needs no CPU until it
    is opened; `asyncrl web` prints the link."""
    host: Host = "127.0.0.1"
    """Address that the page is served on. Any other than a loopback address needs `token_file`. The
    connection is not encrypted: for another machine, use an SSH tunnel or a proxy with TLS."""
    port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Port of the page; 0 takes any free one."""
    token_file: AbsolutePath | None = None
    """File with the token that orders need, and that all requests need unless `host` is a loopback
    address: at least 16 letters, digits or signs, mode 0600. null: RUN/web.token, generated at each
    start."""

    @model_validator(mode="after")
    def _needs_a_token_elsewhere(self) -> Self:
        if self.enabled and self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines, so every request needs a "
                "token: write one into a file that only you can read, for instance with `umask "
                "077; openssl rand -hex 32 > FILE`, and set monitoring.web.token_file to it; or "
                "use host 127.0.0.1 and an SSH tunnel"
            )
        return self


class MonitoringConfig(BaseModel):
    """Metrics, live view and report of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    metrics: bool = True
    """Serve Prometheus metrics over HTTP from every process."""
    host: Host = "127.0.0.1"
    """Address that metrics are served on. They are neither encrypted nor protected by a password,
    so bind an address other than loopback only on a network that you trust."""
    port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Base port: the controller uses it, the other processes the following ones in the order of
    their start. At the start all must be free; a process that joins later leaves out a port that is
    taken. 0 takes any free port for each. `asyncrl status` lists them."""
    live: Annotated[LiveMode, BeforeValidator(unquoted_off)] = "auto"
    """The view of a running run: a panel (rich), one line per step (plain), nothing (off), or the
    panel in a terminal and lines elsewhere (auto)."""
    log_level: LogLevel = "info"
    """Level of the processes' messages in RUN/logs: debug, info, warning or error."""
    report_samples: int = Field(default=8, ge=0, le=200)
    """Most sample trajectories that report.html shows; 0: none is recorded."""
    timeline: bool = True
    """Record each process's activity over time, in RUN/timeline/."""
    tracing: TracingConfig = TracingConfig()
    sinks: tuple[SinkConfig, ...] = ()
    """Places for metrics, evaluations and samples besides the run's files: `wandb`, `tensorboard`,
    `mlflow` (docs/monitoring.md)."""
    sink_seconds: float = Field(default=30.0, ge=0, le=3600)
    """Longest time for which the end of a run waits for sinks that have not sent everything."""
    web: WebConfig = WebConfig()

    @model_validator(mode="after")
    def _every_sink_is_there_once(self) -> Self:
        kinds = [one.kind for one in self.sinks]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"sinks: {', '.join(twice)} is listed twice; keep one entry of a kind")
        return self

    def port_of(self, index: int) -> int:
        """Port of the index-th process (0: controller); 0 is any free one. Raises ValueError.

        >>> MonitoringConfig(port=9100).port_of(2), MonitoringConfig(port=0).port_of(2)
        (9102, 0)
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
