"""What `builtin:agent` imitates are games of the built-in environments, token for token."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.run_config import load_config
from asyncrl.environments.calculator import Calculator, evaluate
from asyncrl.environments.guessing import Guessing
from asyncrl.environments.protocol import Action
from asyncrl.environments.rendering import TurnRenderer
from asyncrl.environments.tool_calls import parse_turn
from asyncrl.environments.tool_formats import format_of_template
from asyncrl.tasks.builtin.agent_lessons import (
    ARGUMENTS,
    ATTEMPTS,
    GUESSES,
    HIGHEST,
    PROGRAMS,
    Program,
    agent_lessons,
    all_bugs,
    call_text,
)
from asyncrl.tasks.builtin.tokenizer import AGENT_VOCABULARY, END, make_tokenizer
from asyncrl.tasks.builtin.warm_start_recipe import AGENT_RECIPE
from asyncrl.tasks.examples import Example
from asyncrl.tasks.loading import dataset_questions

ROOT = Path(__file__).parents[4]


def test_lessons_have_the_tokens_of_a_run_and_the_players_turns_are_learned() -> None:
    tokenizer = make_tokenizer(AGENT_VOCABULARY)
    draw = agent_lessons(tokenizer, AGENT_RECIPE)
    lessons = [lesson for _ in range(8) for lesson in draw(0.11)]
    for one in lessons:
        assert tokenizer.unk_token_id not in _all_tokens(one)
        assert len(one) < 200
        tokens, learned = one.tokens, one.learned
        assert len(tokens) == len(learned)
        own = np.flatnonzero(learned)
        ends = [i for i in own if tokens[i] == tokenizer.eos_token_id]
        assert ends  # each turn of the player is learned with its end
        assert learned[-1]
        text = tokenizer.decode([tokens[i] for i in own])
        assert "<user>" not in text
        assert "<assistant>" not in text
    texts = [tokenizer.decode(_all_tokens(one)) for one in lessons]
    assert any("<tool>" in text for text in texts)
    assert any("higher" in text for text in texts)
    assert any("repair" in text for text in texts)


def _all_tokens(one: Example) -> list[int]:
    return [*one.prompt.tolist(), *one.tokens.tolist()]


def test_the_chat_template_writes_calls_as_the_player_does() -> None:
    tokenizer = make_tokenizer(AGENT_VOCABULARY)
    call = {"function": {"name": "calculator", "arguments": {"expression": "3+4"}}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "3+4=?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "7"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == f"<user>3+4=?<assistant>{call_text('3+4')}{END}<tool>7<assistant>"
    assert len(tokenizer(call_text("33+44"), add_special_tokens=False)["input_ids"]) == 13
    assert json.loads(re.sub("</?tool_call>", "", call_text("3+4"))) == call["function"]


def test_a_run_renders_and_reads_turns_as_the_lessons_have_them() -> None:
    tokenizer = make_tokenizer(AGENT_VOCABULARY)
    renderer = TurnRenderer(tokenizer, stop_tokens=(tokenizer.eos_token_id,))
    assert renderer.findings == ()
    question = [{"role": "user", "content": "3+4=?"}]
    tools = list(Calculator.tools)
    turn = tokenizer(call_text("3+4") + END, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(renderer.prompt(question, tools)) == "<user>3+4=?<assistant>"
    shown = renderer.between(question, [{"role": "tool", "content": "7"}], turn, tools)
    assert tokenizer.decode(shown) == "<tool>7<assistant>"
    guess = tokenizer(f"15{END}", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(renderer.between(question, "higher", guess)) == (
        "<user>higher<assistant>"
    )
    form = format_of_template(tokenizer.chat_template)
    (call,) = parse_turn(renderer.turn_text(turn), form, tools).calls
    assert (call.name, call.arguments, call.error) == ("calculator", {"expression": "3+4"}, "")


def test_careful_players_win_and_careless_ones_lose_some() -> None:
    tokenizer = make_tokenizer(AGENT_VOCABULARY)

    def won(slip: float) -> dict[str, float]:
        draw = agent_lessons(tokenizer, AGENT_RECIPE)
        results: dict[str, list[bool]] = {}
        for _ in range(12):
            for one in draw(slip):
                text = tokenizer.decode(_all_tokens(one))
                game = "guess" if "guess" in text else "repair" if "repair" in text else "sum"
                results.setdefault(game, []).append(_won(game, text))
        return {game: float(np.mean(wins)) for game, wins in results.items()}

    careful, careless = won(0.0), won(0.11)
    assert careful["guess"] == careful["sum"] == 1.0
    assert careful["repair"] > 0.9
    assert all(careless[game] < careful[game] - 0.05 for game in ("sum", "guess"))


def _won(game: str, text: str) -> bool:
    turns = [part.split(END)[0] for part in text.split("<assistant>")[1:]]
    if game == "sum":
        a, b = map(int, re.findall(r"\d+", text.split("<assistant>")[0]))
        return turns[-1] == f":{a + b}"
    if game == "guess":
        hints = re.findall("higher|lower", text)
        assert len(turns) <= GUESSES
        number = len(hints) < len(turns)  # the last guess was not answered
        return number and _found(turns, hints)
    assert len(turns) <= ATTEMPTS
    expected = re.findall(r"is (-?\d+) not (-?\d+)", text)
    program = Program.read(turns[-1])
    assert program is not None
    return program(*ARGUMENTS[0]) == int(expected[0][1])


def _found(turns: list[str], hints: list[str]) -> bool:
    """Whether the hints leave only the last guess, or allow it."""
    low, high = 0, HIGHEST
    for guess, hint in zip(map(int, turns), hints, strict=False):
        low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
    return low <= int(turns[-1]) <= high and (len(turns) < GUESSES or low == high)


def test_the_prompts_are_those_of_the_environments() -> None:
    assert Guessing(high=HIGHEST).reset({}, 0) == f"guess the number from 0 to {HIGHEST}."
    assert evaluate("38+295") == "333"
    hint = Guessing(high=HIGHEST)
    hint.reset({"number": 7}, 0)
    step = hint.step(Action("3", [3], {"role": "assistant", "content": "3"}))
    assert (step.observation, step.done) == ("higher", False)


def test_the_tests_of_a_tiny_program_tell_it_from_all_others() -> None:
    results = {tuple(program(*both) for both in ARGUMENTS) for program in PROGRAMS}
    assert len(results) == len(PROGRAMS)
    for program in PROGRAMS:
        scope: dict[str, object] = {}
        exec(program.text, scope)  # noqa: S102 - it is the Python that it says
        assert [scope["f"](*both) for both in ARGUMENTS] == [  # type: ignore[operator]
            program(*both) for both in ARGUMENTS
        ]
        assert Program.read(program.text) == program


def test_the_rows_of_code_repair_are_all_bugs() -> None:
    lines = (ROOT / "examples" / "code_repair.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [bug.row() for bug in all_bugs()]


@pytest.mark.parametrize("name", ["guessing", "code_repair"])
def test_no_row_of_an_example_is_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(Path("examples") / f"{name}.yaml")
    train, held_out = dataset_questions(config.task, config.run.seed)
    assert len(held_out) == config.task.evaluation_size >= config.evaluation.prompts
    rows = (ROOT / "examples" / f"{name}.jsonl").read_text().splitlines()
    assert len(train) == len(rows) - len(held_out)
