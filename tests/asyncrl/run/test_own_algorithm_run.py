"""A whole run with an algorithm of the user's own, named by its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from asyncrl_runs import ROOT, CommandLine

PAGE = ROOT / "docs" / "algorithms.md"


@pytest.mark.slow
def test_a_run_trains_with_the_example_of_the_page(
    command_line: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "my_algorithm.py"
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file.write_text(example)
    done = command_line.run(trainer__algorithm=f"{file}:AboveMean", run__steps=1)
    assert done.returncode == 0, done.stdout
    assert "AboveMean: an algorithm of your own" in done.stdout
    (step,) = command_line.metrics()
    assert step.algorithm["clip_ratio"] == 0


def test_a_class_that_fails_is_refused_before_any_process(
    command_line: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import nowhere")
    done = command_line.run(trainer__algorithm=f"{tmp_path / 'broken.py'}:Mine")
    assert done.returncode != 0
    assert "No module named 'nowhere'" in done.stdout
    assert not command_line.folder.exists()
