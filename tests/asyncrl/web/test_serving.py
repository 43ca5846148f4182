"""The processes that serve a page: they end with the controller, and with Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import page_of_a_controller
import pytest
from asyncrl_runs import ROOT, until
from synthetic_run import make_run

from asyncrl.launch.identity import is_running
from asyncrl.launch.records import ProcessRecord
from asyncrl.monitoring.records.jsonl import read_jsonl

pytestmark = pytest.mark.slow


def test_a_killed_controller_takes_its_page_along(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    command = [sys.executable, str(Path(page_of_a_controller.__file__)), str(run)]
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": path}
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert controller.stdout is not None
        url = controller.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=100) as reply:  # noqa: S310
            assert b"<html" in reply.read()
        (record,) = read_jsonl(run / "processes.jsonl", ProcessRecord)
        assert record.name == "web"
        assert is_running(record.process)
    finally:
        controller.kill()
        controller.communicate()
    until(lambda: not is_running(record.process), seconds=60, what="the page's process to end")
    with pytest.raises(OSError, match=r"refused|reset"):
        urllib.request.urlopen(url, timeout=60)  # noqa: S310


@pytest.mark.usefixtures("_forked_runs")
def test_an_ended_run_is_shown_until_ctrl_c(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "done", steps=5)
    command = [sys.executable, "-m", "asyncrl", "web", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert json.load(urllib.request.urlopen(url + "/api/status", timeout=100))["step"]  # noqa: S310 == 5
        request = urllib.request.Request(  # noqa: S310
            url + "/api/orders/stop", b"{}", {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError, match="409"):
            urllib.request.urlopen(request, timeout=60)  # noqa: S310
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
