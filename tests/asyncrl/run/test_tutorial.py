"""The commands of docs/tutorial.md, on the files that `asyncrl init` writes, as they are."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from asyncrl_runs import ROOT, worst_mismatch
from forked_runs import shell_command
from tiny_warm_start import place_untrained
from trace_collector import collecting
from traced_lives import check_lives

from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.tasks.builtin.warm_start_recipe import RECIPE
from asyncrl.tasks.exported_model import export_run
from asyncrl.tasks.model import ensure_builtin_model
from asyncrl.wire.records.step import RunResult

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "tutorial.md"
INSTALLATION = "make setup && . .venv/bin/activate\n"
SMALL = (
    "run.steps=$((3 + resumed)) scheduler.groups_per_step=4 scheduler.group_size=4 "
    "evaluation.samples=1 sampling.max_tokens=16 trainer.skip_zero_variance_groups=false"
)
"""Settings that make the runs of the page short. They come last, so they prevail. The model is
untrained, so that all its rewards may be 0."""
TRACED = (
    "monitoring.tracing.enabled=true monitoring.tracing.endpoint={} "
    "monitoring.tracing.sample_rate=0.75"
)
"""Of the first run, three of four groups are traced."""
ASYNCRL = f"""#!/bin/bash
resumed=0; small="{SMALL}"
case "$*" in
  run*--resume*) resumed=1; small="{SMALL}";;
  run*) small="$small $TRACED";;
  *) small=;;
esac
set -- "$@" ${{small:+--set}} ${{small// / --set }}
"""


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """Environment of a shell that has `asyncrl`, and the built-in model without its training."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "asyncrl").write_text(ASYNCRL + shell_command())
    (commands / "asyncrl").chmod(0o755)
    place_untrained(tmp_path / "cache", RECIPE)
    return os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def test_the_commands_of_the_tutorial(tmp_path: Path, shell: dict[str, str]) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks[0] == INSTALLATION
    commands = "".join(blocks[1:])
    assert commands.count("asyncrl ") == 6
    with collecting() as collector:
        done = subprocess.run(
            ["bash", "-ex", "-c", commands],
            cwd=tmp_path,
            env=shell | {"TRACED": TRACED.format(collector.endpoint)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    assert ensure_builtin_model(tmp_path / "cache" / "asyncrl").is_dir(), "it was not made again"
    run = tmp_path / "first" / "runs" / "first"
    check_lives(collector.spans, run, rate=0.75, groups=12, group_size=4, per_step=4)
    result = msgspec.json.decode((run / "result.json").read_bytes(), type=RunResult)
    assert result.steps == 4
    assert result.tokens.generated > 0
    assert result.staleness.max == 0
    assert result.exactly_on_policy
    assert 0 <= result.accuracy_before <= 1
    assert 0 <= result.accuracy_after <= 1
    steps = read_metrics(run / "metrics.jsonl")
    assert [step.step for step in steps] == [0, 1, 2, 3]
    first = steps[0].mismatch.fresh_abs_mean
    assert first is not None
    assert first < 1e-4, "version 0 generates what version 0 trains on"
    assert worst_mismatch(steps) < 1e-3
    the_output_is_as_on_the_page(done.stdout)
    page = (run / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r"<[^>]+\b(?:src|href)=.?(?:https?:)?//", page), "it needs the network"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, _ = export_run(run, None, None, None)
    assert model == run / "exports" / "step-000004"
    AutoModelForCausalLM.from_pretrained(model)
    AutoTokenizer.from_pretrained(model)


def the_output_is_as_on_the_page(output: str) -> None:
    """The first lines, but for numbers; what the page names is printed."""
    shown = re.search(r"```\n(model .*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None

    def without_numbers(text: str) -> list[str]:
        # What the memory is for stands in the order of its size.
        # A line without a label that ends in dots is printed where a machine is slow.
        slow = re.compile(r"(?!\w+  ).* \.\.\.")
        lines = [line for line in text.splitlines() if not slow.fullmatch(line)]
        return [re.sub(r"[\d.,]+", "N", line.partition(": process ")[0]) for line in lines]

    expected = without_numbers(shown[1])
    printed = without_numbers(output)
    assert len(expected) == 7
    begin = printed.index(expected[0])
    assert printed[begin : begin + 7] == expected
    assert "first: held-out accuracy before training: N (N to N at N%; N samples" in " ".join(
        printed
    )
    evaluated = r": accuracy N \(N to N at N%.*; N tokens a response"
    assert any(re.search(evaluated, line) for line in printed)
