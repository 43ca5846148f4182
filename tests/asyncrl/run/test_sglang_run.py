"""A whole run on real SGLang through the command line, in a mixed fleet."""

from __future__ import annotations

import msgspec
import pytest
from asyncrl_runs import CommandLine, worst_mismatch
from served_sglang import REAL_SGLANG, sglang_python

pytestmark = [*REAL_SGLANG, pytest.mark.slow]


def test_a_run_on_torch_and_real_sglang_is_exactly_on_policy(command_line: CommandLine) -> None:
    done = command_line.run(
        engine__kinds="[torch, sglang]",
        engine__sglang__python=sglang_python(),
        launcher__generators=2,
        run__steps=4,
    )
    assert done.returncode == 0, done.stdout
    result = command_line.result()
    assert (result.engine, result.steps, result.staleness.max) == ("torch+sglang", 4, 0)
    assert result.exactly_on_policy
    assert worst_mismatch(command_line.metrics()) < 1e-3
    for name in ("generator-0", "generator-1"):
        *_, last = (command_line.folder / "engine" / f"{name}.jsonl").read_bytes().splitlines()
        engine = msgspec.json.decode(last)["engine"]
        assert engine["tokens"]["generated"] > 0, name
        assert engine["policy_version"] == 4
    log = (command_line.folder / "logs" / "generator-1.log").read_text()
    assert "Traceback" not in log
