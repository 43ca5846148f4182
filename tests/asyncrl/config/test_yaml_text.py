"""YAML that is hostile, or careless: refused with its line, in a message of bounded length."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.run_config import load_config
from asyncrl.config.yaml_text import dump_yaml, parse_yaml
from asyncrl.errors import ConfigError

NINE = ",".join(["*a{}"] * 9)
BOMB = "a0: &a0 [x,x,x]\n" + "".join(
    f"a{i + 1}: &a{i + 1} [{NINE.replace('{}', str(i))}]\n" for i in range(9)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i + 1}: &a{i + 1} {{<<: [{NINE.replace('{}', str(i))}]}}\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {name: a}\ntask: {}\nrun: {steps: 5}", r"line 3, .*'run' is also on line 1"),
        ("run:\n  steps: 1\n  steps: 2", r"line 3, column 3: the key 'steps' is also on line 2"),
        (BOMB, r"more than 20,000 values, aliases written out"),
        (MERGES, r"more than 20,000 values, aliases written out"),
        ("a: &a [*a]", r"an alias stands for the value that it is part of"),
        ("run: " + "[" * 20_000, r"nested too deeply"),
        ("run:\n  seed: " + "9" * 5000, r"line 2, column 9: .*cannot be read as a value"),
        ("run: {name: !!timestamp 2026-13-45}", r"'2026-13-45' cannot be read as a value: month"),
        ("run:\n  steps: 010", r"line 2, column 10: the number 010 begins with 0"),
        ("run: {seed: -08}", r"the number -08 begins with 0, so YAML reads it as octal or as text"),
        ("run: {0_7: 1}", r"the number 0_7 begins with 0"),
        ("run: !!bool maybe", r"line 1, column 6: 'maybe' cannot be read as a value"),
        ('run: !!int ""', r"line 1, column 6: '' cannot be read as a value"),
        ("run: !!timestamp maybe", r"cannot be read as a value"),
        ("run: !!python/object/apply:os.system [id]", r"could not determine a constructor"),
        ("run: *" + "a" * 100_000, r"undefined alias"),
        ("run: [", r"line 1, column 7: "),
        ("run: \0", r"special characters are not allowed"),
        ("a: 1\n---\nb: 2", r"single document"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_yaml(text, source="run.yaml")
    assert str(caught.value).startswith("run.yaml ")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-1.e+2", -100.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("0o17", 15),
        ("12:30:45", "12:30:45"),
        ("1:30", "1:30"),
        ("2026-11-28", "2026-11-28"),
        ("2026-11-28 10:00:00", "2026-11-28 10:00:00"),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("0b11", "0b11"),
        ("1__0", "1__0"),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = parse_yaml(text, source="run.yaml")
    assert (found, type(found)) == (value, type(value))
    assert parse_yaml(dump_yaml([value]), source="run.yaml") == [value]


plain_text = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")))
looks_like_a_value = st.from_regex(r"\A[-+.0-9eEx_:oTZ ]{1,12}\Z")
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | plain_text
values = st.recursive(
    scalars | looks_like_a_value | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(plain_text, inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_what_is_written_is_read_back_as_the_same_value(value: object) -> None:
    found = parse_yaml(dump_yaml(value), source="run.yaml")
    assert found == value
    assert repr(found) == repr(value), "1 is not 1.0 and not True"


def test_other_numbers_with_a_zero_are_read() -> None:
    text = "[0, -0, 0.5, 00.5, 0x10, '010', 10, 100_000]"
    values = parse_yaml(text, source="run.yaml")
    assert values == [0, 0, 0.5, 0.5, 16, "010", 10, 100_000]


def test_aliases_and_merges_are_allowed_and_become_values_of_their_own() -> None:
    text = "base: &b {x: 1, y: [2]}\none: *b\ntwo: {<<: *b, x: 3}"
    values = parse_yaml(text, source="run.yaml")
    assert values["one"] == values["base"] == {"x": 1, "y": [2]}
    assert values["two"] == {"x": 3, "y": [2]}
    values["one"]["y"].append(4)
    assert values["base"]["y"] == values["two"]["y"] == [2]


@given(st.text(max_size=60) | st.text(alphabet="&*a0:[]{}-,!? \n'\"|>#%", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_yaml(text, source="run.yaml")


def test_files_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"run:\n  name: \xff\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:2: not UTF-8 \(byte 0xff\)"):
        load_config(file)
    file.write_bytes(b"\xef\xbb\xbfrun: {name: with-bom}\r\n")
    assert load_config(file).run.name == "with-bom"
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*directory"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="more than 256 KiB"):
        load_config(Path("/dev/zero"))
