import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from needed_programs import needs, path_of

from asyncrl.monitoring.config import MonitoringConfig
from asyncrl.monitoring.errors import ExporterError, PortInUse
from asyncrl.monitoring.metrics.exporter import exporter_for, start_exporter
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, new_registry


def get(url):
    with urllib.request.urlopen(url, timeout=5) as reply:  # noqa: S310 - http to loopback
        return reply.read().decode()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_serves_what_the_registry_holds_until_closed():
    registry = new_registry()
    metrics = GeneratorMetrics.register(registry, "generator-0")
    exporter = start_exporter(registry, "127.0.0.1", 0)
    metrics.running.set(7)
    assert 'asyncrl_engine_running_requests{process="generator-0"} 7.0' in get(exporter.url)
    exporter.close()
    exporter.close()
    with pytest.raises(urllib.error.URLError):
        get(exporter.url)
    again = start_exporter(registry, "127.0.0.1", exporter.port)
    assert again.port == exporter.port
    again.close()


def test_a_port_in_use_says_which_and_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"{port} on 127\.0\.0\.1 is in use.*monitoring\.port"):
            start_exporter(new_registry(), "127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("2001:db8::1", 0), ("127.0.0.1", 70_000)]
)
def test_an_impossible_address_is_explained(host, port):
    with pytest.raises(ExporterError, match=r"127\.0\.0\.1|65535") as refused:
        start_exporter(new_registry(), host, port)
    assert "::" not in host or "on [2001:db8::1]:0 (" in str(refused.value)


def test_the_configuration_turns_it_off():
    assert exporter_for(MonitoringConfig(metrics=False), new_registry(), 0) is None
    exporter = exporter_for(MonitoringConfig(), new_registry(), 3)
    assert exporter is not None
    exporter.close()


@needs("prometheus")
def test_a_real_prometheus_scrapes_it(tmp_path):
    registry = new_registry()
    metrics = GeneratorMetrics.register(registry, "generator-0")
    metrics.generated_tokens.inc(123)
    metrics.response_length.observe(40)
    exporter = start_exporter(registry, "127.0.0.1", 0)
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "scrape_configs:\n- job_name: asyncrl\n  scrape_interval: 1s\n  scrape_timeout: 1s\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{exporter.port}']}}]\n"
    )
    port = free_port()
    server = subprocess.Popen(
        [
            str(path_of("prometheus")),
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        query = "asyncrl_generated_tokens_total + on(process) asyncrl_response_length_tokens_count"
        assert ask(port, query, deadline=time.monotonic() + 120) == ("generator-0", "124")
    finally:
        server.kill()
        server.wait(60)
        exporter.close()


def ask(port, query, deadline):
    """The one series of an instant query as (process, value), once there is one."""
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    while time.monotonic() < deadline:
        try:
            found = json.loads(get(url))["data"]["result"]
        except OSError:  # not ready yet, or slow
            found = []
        if found:
            return found[0]["metric"]["process"], found[0]["value"][1]
        threading.Event().wait(0.05)
    raise AssertionError("Prometheus has no such series within its time")
