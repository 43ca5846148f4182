"""docs/monitoring.md names every number that a user can see, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from each_one import each_one

from asyncrl.monitoring.metrics.metrics import all_specs
from asyncrl.trainer import critic
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.base.algorithm_registry import known_algorithms
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.wire.records.step import RunResult, StepMetrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SPECS = {spec.name: spec for _, spec in all_specs()}


def first_cells(heading: str, header: str) -> list[str]:
    """The names in the first column of the table with this header, the first under a heading."""
    table = PAGE.split(heading, 1)[1].split(header, 1)[1].split("\n\n", 1)[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_each_metric_that_a_page_names_exists() -> None:
    with each_one() as checking:
        for page in PAGES:
            named = re.findall(r"\b(asyncrl_[a-z_]+_[a-z_]*[a-z])(?:\{(\w+))?", page.read_text())
            for name, label in named:
                with checking(f"{page}: {name}"):
                    if name in SPECS:
                        assert label in ("", *SPECS[name].labels)
                    else:
                        assert name == "asyncrl_cpu_sampling", "not a metric of metrics.py"


def fields_of(kind: type[msgspec.Struct], *whole: str) -> list[str]:
    """Dotted names of a record's numbers; fields in `whole` are not taken apart."""
    names = []
    for field in msgspec.structs.fields(kind):
        is_record = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        if field.name not in whole and is_record:
            names += [f"{field.name}.{name}" for name in field.type.__struct_fields__]
        else:
            names.append(field.name)
    return sorted(names)


def test_each_field_of_a_step_and_of_the_result_is_documented() -> None:
    header = "| field | meaning |"
    assert sorted(first_cells("## `metrics.jsonl`", header)) == fields_of(
        StepMetrics, "algorithm", "rewards", "reward_failures"
    )
    of_result = first_cells("## `result.json`", header)
    whole = ("tokens", "reward_failures", "accuracy_before", "accuracy_after")
    assert sorted(of_result) == fields_of(RunResult, *whole)


def test_each_signal_of_an_algorithm_is_documented() -> None:
    signals = {
        name: signal.help
        for algorithm in known_algorithms()
        for kl in (0.0, 0.1)
        for name, signal in make(
            TrainerConfig(algorithm=algorithm, kl_coefficient=kl)
        ).signals.items()
    } | {name: signal.help for name, signal in critic.SIGNALS.items()}
    for name, meaning in signals.items():
        assert re.search(rf"^\| `{name}` \| .* \| {re.escape(meaning)} \|$", PAGE, re.MULTILINE)
    assert set(first_cells("## `metrics.jsonl`", "| signal | of | meaning |")) == signals.keys()
