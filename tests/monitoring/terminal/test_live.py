import io

import pytest
from fake_clock import FakeClock
from rich.console import Console

from asyncrl.monitoring.config import MonitoringConfig
from asyncrl.monitoring.terminal.live import LiveView, panel
from asyncrl.monitoring.terminal.run_view import RunView
from asyncrl.wire.messages.from_trainer import ShownSample
from asyncrl.wire.records.step import (
    BatchMetrics,
    IdleShares,
    LearningMetrics,
    MismatchMetrics,
    StalenessMetrics,
    StepMetrics,
    TokenCounts,
)

FULL = RunView(
    phase="training",
    step=30,
    last=StepMetrics(
        step=29,
        time=0.0,
        tokens_per_second=7512.0,
        idle=IdleShares(generator=0.04, trainer=0.37),
        learning=LearningMetrics(reward_mean=0.72, grad_norm=0.414, entropy=0.53),
        batch=BatchMetrics(
            groups=8,
            zero_variance_groups=2,
            samples=64,
            response_length_mean=45.2,
            truncated_share=0.03,
        ),
        mismatch=MismatchMetrics(kl=1.5e-5),
        algorithm={"reference_kl": 0.01},
        rewards={"correct": 0.5, "format": 0.22},
        staleness=StalenessMetrics(mean=0.62, max=1),
    ),
    recent_rewards=(0.6, 0.7, 0.72),
    tokens=TokenCounts(generated=2025, drafted=1100, accepted=891),
    samples_running=64,
    samples_held=12,
    samples_queued=8,
    eta_seconds=132,
    accuracy_before=0.664,
    waiting_for="step 30 waits for 3 samples",
)

NOT_A_NUMBER = StepMetrics(step=98, time=0.0, learning=LearningMetrics(reward_mean=float("nan")))
LINE = (
    "demo: 30/60 steps | reward 0.720 (correct 0.500, format 0.220) | length 45, 3% cut | "
    "25% of groups without signal | entropy 0.53, KL to behaviour 1.5e-05, KL to reference 0.01, "
    "grad norm 0.41 | 7,512 tokens/s | staleness 0.62 (max 1) | "
    "drafts accepted 81% | reused 44% | idle generator 4% trainer 37% | 2 min 12 s left"
)


def plain(mode="auto", **more):
    stream = io.StringIO()
    clock = FakeClock()
    view = LiveView(
        MonitoringConfig(live=mode), 60, "demo", Console(file=stream, width=40), clock=clock
    )
    return view, stream, clock


def terminal(width=100):
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, width=width, height=40, color_system="truecolor",
        _environ={"TERM": "xterm-256color"},
    )  # fmt: skip
    return console, stream


def test_without_a_terminal_one_whole_line_per_step_and_phase():
    view, stream, _ = plain()
    view.update(RunView(phase="starting"))
    for done in (1, 120, 256):
        view.update(RunView(phase=f"evaluating {done}/256"))
    view.update(FULL)
    view.update(FULL)
    view.close()
    assert stream.getvalue().splitlines() == [
        "demo: starting",
        "demo: evaluating 1/256",
        "demo: training",
        LINE,
    ]


def test_a_log_file_never_looks_dead():
    view, stream, clock = plain()
    view.update(FULL)
    lines = len(stream.getvalue().splitlines())
    clock.now = 29.0
    view.update(FULL)
    assert len(stream.getvalue().splitlines()) == lines
    clock.now = 31.0
    view.update(FULL)
    assert stream.getvalue().splitlines()[lines:] == [
        "demo: training, 30/60 steps: step 30 waits for 3 samples"
    ]


@pytest.mark.parametrize("mode", ["auto", "rich", "plain"])
def test_no_control_codes_reach_a_file(mode):
    view, stream, _ = plain(mode)
    view.update(FULL)
    view.update(RunView(phase="\x1b[31mtraining\r", step=31, waiting_for="\x07x"))
    view.log("child said: \x1b[2Jboo\x00 [bold]not markup[/bold]\nsecond\tline")
    view.close()
    text = stream.getvalue()
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "demo: child said: [2Jboo [bold]not markup[/bold]\ndemo: second  line\n" in text


def test_rich_without_a_terminal_says_why_there_are_lines():
    _, stream, _ = plain("rich")
    assert "this is not a terminal" in stream.getvalue()


def test_samples_of_a_step_are_a_table_with_the_result_of_each_function():
    view, stream, _ = plain()
    shown = [
        ShownSample("1+1=", "2\x1b[2J\nso", 0.75, (1.0, 0.5), 2, "stop"),
        ShownSample("2+2=", "five " * 60, 0.0, (), 60, "length"),
    ]
    view.samples(shown, ("correct", "format"), 7)
    view.samples([], ("correct", "format"), 8)
    lines = stream.getvalue().splitlines()
    assert lines[0].strip() == "demo: samples of step 7"
    assert lines[1].split()[1:] == ["prompt", "response", "correct", "format", "reward", "tokens"]
    row = next(line for line in lines if "1+1=" in line)
    assert row.split()[1:] == ["1+1=", "2[2J", "↵", "so", "1.000", "0.500", "0.750", "2"]
    assert any("– " in line and "60 (length)" in line for line in lines)
    assert max(map(len, lines)) <= 120 + len("demo: ")


def test_off_shows_nothing():
    view, stream, _ = plain("off")
    view.update(FULL)
    view.log("x")
    view.close()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_panel_with_everything_in_it():
    console, stream = terminal()
    with LiveView(MonitoringConfig(), 60, "demo", console) as view:
        view.update(FULL)
        view.log("checkpoint written [red]")
        view.update(FULL)
    shown = stream.getvalue()
    last = Console(width=100, file=io.StringIO(), record=True)
    last.print(panel(FULL, run_name="demo", total_steps=60))
    text = last.export_text()
    for words in (
        "demo", "training", "30 of 60 steps", "2 min 12 s", "0.72", "▁▇█", "7,512", "at most 1",
        "81%", "share of tokens 44%", "64 running  12 held  8 queued", "4%", "37%", "66.4%",
        "45  cut off 3%", "25% of groups",
        "waiting: step 30 waits for 3 samples",
    ):  # fmt: skip
        assert words in text
    assert "checkpoint written [red]" in shown
    assert shown.endswith("\x1b[?25h")


@pytest.mark.parametrize("width", [20, 40, 80, 91, 92, 200])
def test_the_panel_fits_any_width_and_missing_numbers(width):
    for view in (RunView(), FULL, RunView(step=99, last=NOT_A_NUMBER)):
        out = Console(width=width, file=io.StringIO(), record=True)
        out.print(panel(view, run_name="x" * 300, total_steps=0, wide=width >= 92))
        assert max(len(line) for line in out.export_text().splitlines()) <= width
