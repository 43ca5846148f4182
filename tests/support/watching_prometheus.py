"""A real Prometheus with the configuration of monitoring/, for the runs of a folder."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.monitoring.rules.__main__ import RULES, faster

MONITORING = Path(__file__).parents[2] / "monitoring"
WINDOW = "15s"
"""Stands for Grafana's `$__rate_interval`."""


@dataclass(frozen=True)
class Prometheus:
    port: int
    server: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.server.kill()
        self.server.wait(60)

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an answer; an empty dictionary while there is none."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return json.load(reply)["data"]
        except OSError:
            return {}

    def has_data(self, panel_query: str) -> bool:
        """Whether a panel's query returns a number for any time of the last minutes."""
        expr = panel_query.replace("$__rate_interval", WINDOW).replace("$run", ".*")
        now = time.time()
        found = self.ask("query_range", query=expr, start=now - 120, end=now, step=1)
        series = found.get("result", [])
        return any(not math.isnan(float(value)) for one in series for _, value in one["values"])

    def firing(self) -> set[str]:
        alerts = self.ask("alerts").get("alerts", [])
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def unhealthy_rules(self) -> list[str]:
        groups = self.ask("rules").get("groups", [])
        assert groups, "no rules are loaded"
        return [
            f"{rule['name']}: {rule.get('lastError')}"
            for group in groups
            for rule in group["rules"]
            if rule["health"] == "err"
        ]


@contextlib.contextmanager
def watching(runs: Path, folder: Path, *, faster_by: float = 1.0) -> Iterator[Prometheus]:
    """Watch the runs of a folder, every second, with monitoring/prometheus.yml."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(folder / "rules.yaml")]
    for discovery in config["scrape_configs"][0]["file_sd_configs"]:
        discovery["files"] = [str(runs / Path(one).name) for one in discovery["files"]]
    folder.mkdir()
    rules = RULES.read_text(encoding="utf-8")
    (folder / "rules.yaml").write_text(rules if faster_by == 1 else faster(rules, faster_by))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    binary = shutil.which("prometheus")
    assert binary is not None
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(port, server)
    finally:
        server.kill()
        server.wait(60)
