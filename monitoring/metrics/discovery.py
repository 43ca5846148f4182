"""Lists a run's metrics endpoints for Prometheus in `RUNS/prometheus-NAME.json`.

Prometheus's service discovery (`file_sd_configs`) watches the file, which is replaced atomically
and removed when the run ends. A process of another node is listed under that node's address; with a
loopback address in `monitoring.host` it is left out, since it would count as down.
"""

import json
import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from asyncrl.monitoring.config import host_port, is_loopback
from asyncrl.wire.transport.atomic_files import write_atomically

logger = logging.getLogger(__name__)

_EVERY_ADDRESS = ("0.0.0.0", "::", "")  # noqa: S104 - to recognise it, not to bind it


def targets_file(run_folder: Path) -> Path:
    """The targets file of the run in this folder."""
    return run_folder.parent / f"prometheus-{run_folder.name}.json"


class Target(NamedTuple):
    """A process's metrics endpoint."""

    port: int
    node: str = ""
    """Address of its node; empty for the controller's."""

    def host(self, bound: str) -> str | None:
        """The host to scrape, given `monitoring.host`; None if other nodes cannot reach it.

        >>> Target(9100, "10.0.0.7").host("0.0.0.0"), Target(9100, "10.0.0.7").host("127.0.0.1")
        ('10.0.0.7', None)
        """
        if bound in _EVERY_ADDRESS:
            return self.node or socket.gethostname()
        return None if self.node and is_loopback(bound) else bound


def target_groups(run: str, host: str, targets: Mapping[str, Target]) -> list[dict[str, object]]:
    """One group with a single target for each process, labelled with the run and its name."""
    groups: list[dict[str, object]] = []
    for name, target in sorted(targets.items()):
        if reached := target.host(host):
            labels = {"run": run, "instance": name}
            groups.append({"targets": [host_port(reached, target.port)], "labels": labels})
    return groups


def metrics_line(run: Path) -> list[str]:
    """A sentence that locates the metrics of an active run; empty if it serves none."""
    path = targets_file(run)
    try:
        groups = json.loads(path.read_bytes())
        found = {group["labels"]["instance"]: group["targets"][0] for group in groups}
    except (OSError, ValueError, LookupError, TypeError):
        return []
    own = f"http://{found['controller']}/metrics (controller), " if "controller" in found else ""
    return [f"metrics: {own}all addresses in {path}"]


class Targets:
    """Keeps the targets file of a run up to date; `port` is the controller's."""

    def __init__(self, path: Path, run: str, *, host: str, port: int) -> None:
        self._path, self._run, self._host = path, run, host
        self._own = {"controller": Target(port)}
        self._written: dict[str, Target] | None = None
        self._has_failed = False

    def update(self, targets: Mapping[str, Target]) -> None:
        """List the controller and these processes; a failing disk is logged once, and retried."""
        everyone = self._own | dict(targets)
        if self._written == everyone:
            return
        groups = target_groups(self._run, self._host, everyone)
        try:
            # Prometheus may be another user; the run's own files are private.
            write_atomically(self._path, json.dumps(groups, indent=1) + "\n", mode=0o644)
            self._written = everyone
        except OSError as error:
            if not self._has_failed:
                logger.warning("cannot write %s: %s", self._path, error.strerror)
            self._has_failed = True

    def remove(self) -> None:
        """Remove the file after the run, so that Prometheus drops its processes."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot remove %s: %s", self._path, error.strerror)
