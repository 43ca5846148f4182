import html
import re
import xml.etree.ElementTree as ET
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from synthetic_run import make_run

from asyncrl.monitoring.errors import ReportError
from asyncrl.monitoring.records.metrics_log import MetricsLog, read_metrics
from asyncrl.monitoring.records.samples import SampleLog, SampleRecord, SampleSegment
from asyncrl.monitoring.records.spans import Span
from asyncrl.monitoring.records.timeline import Timeline
from asyncrl.monitoring.report import write
from asyncrl.monitoring.report.compare import table
from asyncrl.monitoring.report.data import load_run
from asyncrl.monitoring.report.write import write_report
from asyncrl.runs.run_list import list_runs
from asyncrl.wire.records.evaluations import EvaluationRecord, SetEvaluation
from asyncrl.wire.records.step import (
    EnvironmentCounts,
    RunResult,
    StalenessMetrics,
    StepMetrics,
    TokenCounts,
    TrainerTimes,
)

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title></pre><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "]]>&amp;&lt;&#60;\x00\x1b[31m\x85\ufffe",
    "\u202egnp.exe",
    "javascript:alert(1)",
]


class Seen(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs


def check_page(text):
    """Well-formed, no script, nothing external, nothing unescaped."""
    head, rest = text.split("\n", 1)
    assert head == "<!doctype html>"
    ET.fromstring(rest)  # noqa: S314 - our own output
    seen = Seen()
    seen.feed(text)
    assert not seen.tags & {"script", "img", "iframe", "link", "object", "embed", "form", "a"}
    for name, value in seen.attributes:
        assert not name.startswith("on")
        assert name not in {"src", "href", "xlink:href", "action"}
        assert "url(" not in (value or "")
    assert "url(" not in text.split("</style>")[0]
    assert "@import" not in text
    return seen


def words(text):
    """The page's text as a reader sees it, titles of hovered parts included."""
    return html.unescape(re.sub(r"<[^>]+>", " ", text.split("</style>", 1)[1]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


def test_a_finished_run_on_one_page(run):
    path = write_report(run)
    assert path == run / "report.html"
    assert sorted(p.name for p in run.iterdir() if p.suffix == ".tmp") == []
    text = path.read_text()
    check_page(text)
    read = words(text)
    for expected in (
        "Held-out accuracy rose from 66.4% to 85.9% in 60 optimizer steps",
        "+19.5 points, 95% interval +12.2 to +26.6, 256 held-out samples",
        "engine  torch",
        "of 60 planned",
        "Reward",
        "Rollout tokens",
        "Staleness",
        "Where the time of a step goes",
        "Engine against trainer",
        "waiting for trajectories",
        "generator-1",
        "step 31 done",
        "KL divergence from the behaviour policy",
        "Importance capped",
        "drafted from the cache and accepted",
        "max_off_policy_steps",
        "share of slot time",
        "of 64 slots",
        "of all generated",
        "rejected under unchanged weights, of 4,130 tokens verified again",
        "0.48%",
    ):
        assert expected in read
    assert len(text) < 1_000_000


def a_result(**values):
    """A result in which nothing happened, but for `values`."""
    nothing = RunResult(
        run="r",
        engine="torch",
        steps=0,
        wall_seconds=0.0,
        total_seconds=0.0,
        tokens=TokenCounts(),
        staleness=StalenessMetrics(),
        exactly_on_policy=True,
    )
    return msgspec.structs.replace(nothing, **values)


def written_with(run, *, config="", **result):
    """The report's words when these lines are in the configuration and these numbers come out."""
    (run / "config.yaml").write_text("run: {name: r}\n" + config)
    (run / "result.json").write_bytes(msgspec.json.encode(a_result(**result)))
    return words(write_report(run).read_text())


def test_only_a_run_without_stale_or_lenient_tokens_is_called_on_policy(tmp_path):
    def of_steps(*flags, **changes):
        steps = [
            StepMetrics(step=step, time=1.0, exactly_on_policy=flag)
            for step, flag in enumerate(flags)
        ]
        lines = b"".join(msgspec.json.encode(step) + b"\n" for step in steps)
        (tmp_path / "metrics.jsonl").write_bytes(lines)
        return written_with(tmp_path, steps=len(flags), **changes)

    read = of_steps(True, True, True)
    assert "exactly on-policy: every token follows the trained policy" in read
    assert "biased" not in read
    read = of_steps(True, True, staleness=StalenessMetrics(mean=0.3, max=1))
    assert "exactly on-policy" not in read
    assert "steps on average, 1 at most" in read
    read = of_steps(False, False, config="cache: {reuse: lenient}\n")
    assert "by version only: 2 of 2 steps are not on-policy (lenient reuse or a sample" in read
    assert "do NOT follow" in read
    read = of_steps(False, True, True)  # lenient reuse was turned off
    assert "by version only: 1 of 3 steps" in read
    read = of_steps(
        False, True, config="run: {on_wrong_policy: warn}\n", wrong_policy=("g samples otherwise",)
    )
    assert "Wrong policy: g samples otherwise. Its tokens were trained on" in read
    assert "1 of 2 steps are not on-policy (a wrong policy)" in read
    read = of_steps(None, True)
    assert "records of 1 steps do not say whether they were exactly on-policy" in read


def test_rewards_are_shown_by_function_and_failures_are_counted(tmp_path):
    lines = [
        msgspec.json.encode(
            StepMetrics(step=step, time=1.0 + step, rewards={"format": 0.5, "math_verify": 0.25})
        )
        for step in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    read = written_with(tmp_path, reward_failures={"math_verify": {"timeout": 3}})
    assert "Reward by function" in read
    assert "math_verify" in read
    assert "3 rewards failed and counted as 0" in read
    assert "math_verify: 3 timeout" in read
    assert "failed and counted" not in written_with(tmp_path)


def test_intervals_are_over_prompts(tmp_path):
    """Four samples of each of 62 prompts, which agree half of the time."""
    folder = make_run(tmp_path / "demo")
    found = SetEvaluation(
        prompts=62, samples=248, accuracy=0.664, accuracy_error=0.045, pass_at={1: 0.664}
    )
    records = [
        EvaluationRecord(step=step, time=1.0, when=when, sets={"held_out": found})
        for step, when in ((0, "before"), (60, "after"))
    ]
    lines = b"\n".join(msgspec.json.encode(one) for one in records) + b"\n"
    (folder / "evaluations.jsonl").write_bytes(lines)
    read = words(write_report(folder).read_text())
    assert "256 held-out samples of 62 prompts" in read
    assert "before: 66.4% (57.2% to 74.5%)" in read


def test_an_unfinished_run_shows_its_newest_evaluation(tmp_path):
    folder = make_run(tmp_path / "demo")
    (folder / "result.json").unlink()
    records = [
        EvaluationRecord(step=step, time=1.0, when=when, sets={"held_out": found})
        for step, when, found in (
            (0, "before", SetEvaluation(prompts=8, samples=8, accuracy=0.25, reward=0.25)),
            (20, "during", SetEvaluation(prompts=8, samples=8, accuracy=0.5, reward=0.625)),
        )
    ]
    lines = b"\n".join(msgspec.json.encode(one) for one in records) + b"\n"
    (folder / "evaluations.jsonl").write_bytes(lines)
    read = words(write_report(folder).read_text())
    assert "→ 0.500 (step 20, mean reward 0.625)" in read
    assert "held-out accuracy, before → step 20" in read
    assert "Held-out reward by step" in read
    data = load_run(folder)
    accuracy = next(row for row in table([data]) if row.name == "held-out accuracy")
    assert accuracy.values[0].endswith("→ 0.500 (step 20, mean reward 0.625)")
    [listed] = list_runs(tmp_path)
    assert listed.evaluated == records[1]


def test_each_colour_that_is_used_is_declared():
    style = Path(write.__file__).with_name("report.css").read_text()
    declared = set(re.findall(r"(--[\w-]+):", style))
    assert set(re.findall(r"var\((--[\w-]+)", style)) <= declared
    assert {f"--{name}" for name in ("drafted", "verified", "observed")} <= declared


def test_what_environments_did_is_said(tmp_path):
    counts = EnvironmentCounts(turns=1200, seconds=6.0, started_over=1, calls=800, wrong_calls=9)
    step = StepMetrics(step=0, time=1.0, environments=counts)
    (tmp_path / "metrics.jsonl").write_bytes(msgspec.json.encode(step) + b"\n")
    read = written_with(tmp_path)
    assert "answered 1,200 turns, in 5.0 ms each on average. 1 sample started over, bec" in read
    assert "called tools 800 times, 9 of them wrongly" in read
    assert "made again" not in read, "none was"


def test_what_the_ranks_of_a_trainer_lose_to_each_other_is_shown(tmp_path):
    times = TrainerTimes(rank_idle_seconds=0.5)
    lines = [
        msgspec.json.encode(StepMetrics(step=step, time=1.0 + step, step_seconds=5.0, times=times))
        for step in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert "ranks wait" not in words(write_report(tmp_path).read_text())
    (tmp_path / "config.yaml").write_text("trainer: {ranks: 2}\n")
    read = words(write_report(tmp_path).read_text())
    assert "the trainer's ranks wait 10% for each other" in read


def test_slots_and_causes_are_told_apart(tmp_path):
    """Of each 64 slots of a step: 60 verify for a tenth of it, then 57 to 1 are due, and so on."""
    run = make_run(tmp_path / "r", steps=4)
    read = words(write_report(run).read_text())
    due = sum(64 - 7 * part for part in range(1, 10)) / 640
    ahead = sum((7 * part) // 2 for part in range(1, 10)) / 640
    found = re.search(r"due samples ([\d.]+)%, verification ([\d.]+)%, run-ahead ([\d.]+)%", read)
    assert found is not None
    got = [float(share) / 100 for share in found.groups()]
    assert got == pytest.approx([due, 60 / 640, ahead], abs=0.03)
    assert re.search(r"trajectories [\d.]+%", read)  # what the trainer waited for
    (run / "slots" / "generator-1.jsonl").write_text("nonsense\n{}\n")
    read = words(write_report(run).read_text())
    assert "generator-1.jsonl, line 1" in read
    assert "share of slot time" in read


def test_an_unfinished_run_says_so(tmp_path):
    run = make_run(tmp_path / "r", steps=7, finished=False)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":7,"rew')
    read = words(write_report(run).read_text())
    assert "This run has not finished. Its records end after 7 of 7 steps" in read
    assert "Not evaluated." in read


def test_only_a_configuration_is_enough(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {name: early, steps: 3}\n")
    text = write_report(tmp_path).read_text()
    check_page(text)
    assert "early" in words(text)
    assert "No step is finished yet." in words(text)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ReportError, match=r"/.* does not exist; `ls "):
        write_report(tmp_path / "nothing")
    with pytest.raises(ReportError, match=r"contains none of config\.yaml"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unreadable_files_are_named_and_the_rest_is_shown(tmp_path):
    run = make_run(tmp_path / "r", steps=5)
    (run / "result.json").write_text("{bro")
    (run / "config.yaml").write_text("run: [1\n: {")
    (run / "timeline" / "trainer.jsonl").write_text("x\n{}\n")
    read = words(write_report(run).read_text())
    assert "result.json, line 1" in read
    assert "config.yaml cannot be read" in read
    assert "trainer.jsonl, line 1" in read
    assert "generator-0" in read


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 6_000])
def test_a_configuration_of_any_text_is_noted(tmp_path, text):
    run = make_run(tmp_path / "r", steps=1)
    (run / "config.yaml").write_text(text)
    assert "config.yaml cannot be read" in words(write_report(run).read_text())


def hostile_run(folder, nasty):
    """A run in which every text is hostile."""
    config = {"run": {"name": nasty, "steps": nasty}, "trainer": {"algorithm": nasty}}
    folder.mkdir()
    (folder / "config.yaml").write_bytes(msgspec.json.encode({**config, nasty: [nasty]}))
    (folder / "result.json").write_bytes(
        msgspec.json.encode(a_result(run=nasty, engine=nasty, steps=1))
    )
    log = MetricsLog(folder / "metrics.jsonl")
    log.append(StepMetrics(step=0, time=1.0, algorithm={nasty: 1.0}))
    log.close()
    with closing(Timeline(folder / "timeline" / "trainer.jsonl", "trainer")) as line:
        line.record("training", 0.0, 1.0, note=nasty)
        line.record("waiting", 1.0, 2.0, **{"for": nasty})
    with (folder / "timeline" / "trainer.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(Span(nasty, 3.0, 4.0)) + b"\n")
    samples = SampleLog(folder / "samples.jsonl")
    samples.append(
        SampleRecord(
            step=0, prompt=nasty, tokens=[nasty, nasty], provenance=["sampled", "verified"],
            segments=[SampleSegment(0, 0, 2)], reward=float("nan"), answer=nasty,
            logprobs=[float("-inf"), -1.0], sample_id=nasty, finish_reason=nasty,
        )
    )  # fmt: skip
    samples.close()
    return folder


@pytest.mark.parametrize("nasty", HOSTILE)
def test_hostile_text_stays_text(tmp_path, nasty):
    text = write_report(hostile_run(tmp_path / "r", nasty)).read_text()
    seen = check_page(text)
    assert "img" not in seen.tags
    visible = "".join(char for char in nasty if char.isprintable() and char.isascii())
    assert "".join(char for char in words(text) if char.isprintable()).count(visible[:12]) >= 4


def test_the_page_forbids_loading_and_follows_the_system_colours(run):
    text = write_report(run).read_text()
    assert "default-src 'none'" in html.unescape(text)
    assert "prefers-color-scheme: dark" in text
    assert "http://" not in text
    assert "https://" not in text


def test_the_setting_of_the_run_bounds_the_samples_shown(tmp_path):
    run = make_run(tmp_path / "r", steps=10)
    (run / "config.yaml").write_text("monitoring: {report_samples: 2}\n")
    assert write_report(run).read_text().count('class="sample"') == 2


def idle_tile(text):
    """The idle shares of generators and trainer at the top of the report."""
    found = re.search(r"idle: generators · trainer +(\d+)% · (\d+)%", text)
    assert found is not None, text[:1000]
    return [int(share) for share in found.groups()]


def test_the_time_between_the_end_and_the_resumption_of_a_run_is_not_idle(tmp_path):
    """The same records, with a night between their halves, give the same shares."""
    run = make_run(tmp_path / "r", steps=8)
    before = words(write_report(run).read_text())
    middle = read_metrics(run / "metrics.jsonl")[3].time
    for file in [run / "metrics.jsonl", *run.glob("timeline/*.jsonl"), *run.glob("slots/*.jsonl")]:
        file.write_bytes(
            b"".join(a_night_later(one, middle) for one in file.read_bytes().splitlines())
        )
    after = words(write_report(run).read_text())
    # What a process did at the cut overlaps the night by a piece of its time line.
    assert idle_tile(after) == pytest.approx(idle_tile(before), abs=4)
    assert "without 9 h 59 min in which no process existed" in after
    assert "without" not in before.split("by what each process waited for")[0][-60:]


def a_night_later(line, middle):
    """A line of a record, ten hours later if it begins after the middle."""
    record = msgspec.json.decode(line)
    if record.get("start", record.get("time", 0.0)) >= middle:
        record |= {key: record[key] + 36_000 for key in ("start", "end", "time") if key in record}
    return msgspec.json.encode(record) + b"\n"
