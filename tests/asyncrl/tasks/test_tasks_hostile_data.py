"""Data files that hold anything: located errors, or rows that are left out and counted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import DataError
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.data.sources import MAX_ROW_BYTES
from asyncrl.tasks.loading import dataset_questions

GOOD = b'{"prompt": "a", "answer": "b"}\n'


def load(path: Path, **values: Any) -> list[Any]:
    settings_ = {"kind": "dataset", "path": str(path), "evaluation_size": 0} | values
    train, _ = dataset_questions(TaskConfig.model_validate(settings_), seed=0)
    return sorted(train, key=lambda question: question.prompt_id)


def example(**values: Any) -> bytes:
    return json.dumps({"prompt": "x", "answer": "y"} | values).encode()


BAD_LINES = {
    "lone surrogate": (b'{"prompt": "\\ud800", "answer": "b"}', r"lone surrogate \(\\ud800\)"),
    "20,000 levels": (
        b'{"prompt": "x", "answer": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        "nested too deeply",
    ),
    "500 levels": (
        b'{"prompt": "x", "answer": ' + b"[" * 500 + b"]" * 500 + b"}",
        "nested more than 64 levels",
    ),
    "NUL bytes": (b"\0\0\0", "not JSON"),
    "cut short": (b'{"prompt": "x", "ans', "not JSON: "),
    "not UTF-8": (b'{"prompt": "\xe9"}', "byte 13 of the line, 0xe9, is not UTF-8"),
    "NaN": (b'{"prompt": "x", "answer": NaN}', "'answer' is nan, not a finite number"),
    "Infinity": (b'{"prompt": "x", "answer": -Infinity}', "'answer' is -inf, not a finite number"),
    "1e999": (b'{"prompt": "x", "answer": 1e999}', "'answer' is inf, not a finite number"),
    "a key twice": (b'{"prompt": "x", "prompt": "y", "answer": 1}', "key 'prompt' is in it twice"),
    "a long line": (b'{"prompt": "' + b"x" * MAX_ROW_BYTES + b'"}', "longer than 16 MiB"),
    "no object": (b"[1]", "one JSON object, got list"),
    "no field": (b'{"prompt": "x"}', "has no 'answer'"),
    "null": (b'{"prompt": null, "answer": 1}', r"its 'prompt' \(task.prompt_field\) is null"),
    "empty prompt": (b'{"prompt": " ", "answer": 1}', "prompt is empty"),
    "a picture": (
        example(prompt=[{"role": "user", "content": [{"type": "image_url"}]}]),
        r"message 0 of the prompt has a part that is not text \(image_url\)",
    ),
    "no content": (
        example(prompt=[{"role": "user", "content": "a"}, {"role": "assistant"}]),
        "the content of message 1 of the prompt must be a text",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_refused_with_its_place_or_left_out(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    line, message = BAD_LINES[name]
    path = tmp_path / "q.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=rf"q\.jsonl:3: .*{message}") as caught:
        load(path)
    assert "or leave such rows out with task.on_bad_row: skip" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert [q.prompt_id for q in load(path, on_bad_row="skip")] == ["0", "2"], "ids do not change"
    assert "left out 1 of 3 examples" in caplog.text
    assert "q.jsonl:3: " in caplog.text
    assert "the row numbers" in caplog.text


def test_only_bad_rows_are_an_error_also_if_they_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"oops\n" * 5)
    with pytest.raises(
        DataError, match=r"can be used; 5 were left out .*, the first at .*q\.jsonl:1: not"
    ):
        load(path, on_bad_row="skip")
    with pytest.raises(DataError) as caught:
        load(path)
    assert "on_bad_row" not in str(caught.value), "the first row: the configuration is wrong"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x1f\x8b\x08\x00 cut short", "gzip data; decompress it first"),
        (b"PK\x03\x04...", "zip archive"),
        ("{}".encode("utf-16"), "UTF-16 text; save it as UTF-8"),
        (b"PAR1...PAR1", "rename it to .parquet"),
    ],
)
def test_another_format_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^task\.path: .*q\.jsonl is .*{message}"):
        load(path, on_bad_row="skip")


def test_files_that_are_a_little_odd_are_read(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n \n" + GOOD.rstrip())
    assert [q.prompt_id for q in load(path)] == ["0", "1"]


def test_a_folder_or_an_array_in_place_of_lines(tmp_path: Path) -> None:
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(DataError, match=r"^task\.path: .*dir\.jsonl is a folder"):
        load(tmp_path / "dir.jsonl")
    (tmp_path / "a.json").write_text('[\n{"prompt": "x"}]')
    with pytest.raises(DataError, match=r"one JSON array; .*jq -c"):
        load(tmp_path / "a.json")
    (tmp_path / "q.jsonl").write_bytes(GOOD)
    with pytest.raises(DataError, match=r"^task\.evaluation_path: there is no dataset at"):
        load(tmp_path / "q.jsonl", evaluation_path=str(tmp_path / "no.jsonl"))


def test_ids_are_unique_short_and_text_or_integers(tmp_path: Path) -> None:
    def ids(*values: Any, **more: Any) -> list[str]:
        path = tmp_path / "q.jsonl"
        path.write_bytes(b"".join(example(id=value) + b"\n" for value in values))
        return [q.prompt_id for q in load(path, id_field="id", **more)]

    assert ids("a", 7) == ["7", "a"]
    for bad, message in (
        (7, r"q\.jsonl:3: .*must be unique, but '7' is also at .*q\.jsonl:2"),
        (True, "must be a text or an integer, got true"),
        ("", "must be a text or an integer"),
        ([1], "must be a text or an integer"),
        ("x" * 500, "the id has 500 characters"),
    ):
        with pytest.raises(DataError, match=message):
            ids("a", "7", bad)
        assert ids("a", "7", bad, on_bad_row="skip") == ["7", "a"]
    held_out = tmp_path / "e.jsonl"
    held_out.write_bytes(example(id=0) + b"\n")
    with pytest.raises(DataError, match=r"'eval-0' .* is also that of the held-out example at"):
        ids("eval-0", evaluation_path=str(held_out), evaluation_size=1)


def test_parquet_cells_that_no_message_can_carry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "q.parquet"
    text = pa.array([b"a", b"\xff\xfe", b"c"]).cast(pa.string(), safe=False)
    when = pa.array([0, 0, 2**60]).cast(pa.timestamp("ms"))
    parquet.write_table(pa.table({"prompt": text, "answer": ["1", "2", "3"]}), path)
    with pytest.raises(
        DataError, match=r"example 1: its 'prompt' \(task.prompt_field\) cannot be read: .*utf-8"
    ):
        load(path)
    assert [q.prompt_id for q in load(path, on_bad_row="skip")] == ["0", "2"]
    nanos = pa.array([2**60 + 1] * 3).cast(pa.timestamp("ns"))
    columns = {"prompt": ["a"] * 3, "answer": [1, 2, 3], "when": when, "nanos": nanos}
    parquet.write_table(pa.table(columns), path)
    rows = load(path)
    assert rows[0].example["row"]["when"] == "1970-01-01T00:00:00"
    assert rows[2].example["row"].keys() == {"prompt", "answer", "nanos"}
    assert rows[2].example["row"]["nanos"] == "2006-07-14T23:58:24.606846977"
    assert "'when' is left out of rows of" in caplog.text
    assert "example 2: it cannot be read: " in caplog.text
    twice = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["prompt", "prompt"])
    parquet.write_table(twice, path)
    with pytest.raises(DataError, match="has 2 columns named 'prompt'"):
        load(path)
    nans = pa.table({"prompt": ["a", "b"], "answer": [1.0, float("nan")]})
    parquet.write_table(nans, path)
    with pytest.raises(DataError, match="example 1: 'answer' is nan, not a finite number"):
        load(path)


def test_columns_that_nobody_reads_do_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "q.jsonl"
    deep = b"[" * 99 + b"]" * 99
    said = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
    chat = json.dumps([said, {"role": "user", "content": parts}]).encode()
    odd = b'NaN, "b": 1e999, "c": "\\ud800", "d": %s, "e": %s' % (deep, b"9" * 30)
    path.write_bytes(b'{"prompt": %s, "answer": %s, "a": %s}\n' % (chat, b"9" * 30, odd) + GOOD)
    question, _ = load(path)
    assert question.content == [{**said, "content": ""}, {"role": "user", "content": "1+1"}]
    assert (question.example["prompt"], question.example["answer"]) == ("1+1", "9" * 30)
    row = question.example["row"]
    assert row.keys() == {"prompt", "answer", "a", "b", "e"}
    assert (row["a"] != row["a"], row["b"], row["e"]) == (True, float("inf"), "9" * 30)
    assert "'c' is left out of rows of" in caplog.text
    assert "q.jsonl:1: it is nested more than 64 levels deep" in caplog.text
    mapped = tmp_path / "mine.py"
    mapped.write_text("def one(row):\n    return {'prompt': row['c'], 'answer': 1}\n")
    with pytest.raises(DataError, match=r"(?s)KeyError: 'c'.*Its 'c' has a lone surrogate"):
        load(path, map=f"{mapped}:one")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | st.lists(
        st.sampled_from([GOOD, b"\r", b"\n", b"\xff", b'{"prompt":', b"NaN", b"\\ud800", b'"']),
        max_size=8,
    ).map(b"".join)
)
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    for mode in ("refuse", "skip"):
        try:
            load(path, on_bad_row=mode)
        except DataError as error:
            assert "q.jsonl" in str(error)  # noqa: PT017 - not every content is refused


def test_folders_and_places_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    folder, pipe = tmp_path / "damaged", tmp_path / "q.jsonl"
    folder.mkdir()
    (folder / "train.jsonl.gz").write_bytes(b"\x1f\x8b\x08" + b"x" * 100)
    os.mkfifo(pipe)
    for path, message in (
        (folder, "task.path: the dataset .*damaged.* cannot be loaded: "),
        (pipe, "task.path: .*q.jsonl is neither a file nor a folder"),
        (Path("/dev/null"), "task.path: /dev/null is neither a file nor a folder"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            load(path)
        assert len(str(caught.value)) < 600
