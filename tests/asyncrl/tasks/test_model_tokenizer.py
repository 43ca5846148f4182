"""The model's tokenizer is the one that AutoTokenizer loads, at a fraction of the imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import transformers
from transformers import AutoTokenizer

from asyncrl.errors import ModelError
from asyncrl.tasks.model import builtin_tokenizer
from asyncrl.tasks.model_tokenizer import (
    _CLASSES,
    load_tokenizer,
    model_stop_tokens,
    tokenizer_digest,
)

KNOWN = [(family, name) for family, names in _CLASSES.items() for name in names]
TEXT = "What is 12 + 7?  Compute.\n"


def directory_of(path: Path, family: str, tokenizer_class: str) -> Path:
    builtin = builtin_tokenizer()
    if "Qwen" in tokenizer_class:
        vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"\u0120": 95, "12": 96}
        builtin = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[("1", "2")])
    builtin.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = tokenizer_class
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(("family", "tokenizer_class"), KNOWN)
def test_it_is_the_one_of_autotokenizer(tmp_path: Path, family: str, tokenizer_class: str) -> None:
    path = directory_of(tmp_path, family, tokenizer_class)
    ours, theirs = load_tokenizer(str(path)), AutoTokenizer.from_pretrained(path)
    assert type(ours) is type(theirs)
    assert type(ours).__name__ == _CLASSES[family][tokenizer_class]
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert ours.chat_template == theirs.chat_template
    assert ours.all_special_tokens == theirs.all_special_tokens


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_the_models_own_is_left_to_autotokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    path = directory_of(tmp_path, "llama", "TokenizersBackend")
    settings = json.loads((path / file).read_text())
    settings["auto_map"] = {"AutoTokenizer": ["mine.Tokenizer", None]}
    (path / file).write_text(json.dumps(settings))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _, **_named: "theirs")
    assert load_tokenizer(str(path)) == "theirs"


@pytest.mark.parametrize("family", ["llama", "family_of_its_own"])
@pytest.mark.parametrize("named", [{"AutoTokenizer": ["mine.Mine", None]}, ["mine.Mine", None]])
def test_a_tokenizer_with_code_of_its_own_is_refused(
    tmp_path: Path, family: str, named: Any
) -> None:
    path = directory_of(tmp_path, family, "Mine")
    (path / "mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"auto_map": named}))
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(path))
    assert str(caught.value) == (
        f"the tokenizer of {str(path)!r} needs its own code (auto_map in tokenizer_config.json), "
        "which is not supported"
    )
    assert not (tmp_path / "executed").exists()


def test_stop_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(directory_of(tmp_path, "llama", "TokenizersBackend")))
    own = tokenizer.eos_token_id
    found = []
    for stop in (None, 7, [9, 7], own):
        transformers.GenerationConfig(eos_token_id=stop).save_pretrained(tmp_path)
        found.append(model_stop_tokens(str(tmp_path), tokenizer))
    assert [set(ids) - {own} for ids in found] == [set(), {7}, {7, 9}, set()]
    assert all(own in ids for ids in found)
    tokenizer.eos_token = None
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ModelError, match="does not have an end-of-sequence token"):
        model_stop_tokens(str(tmp_path), tokenizer)


def with_settings(folder: Path, file: str, **settings: Any) -> None:
    """Change settings of one of a model's JSON files."""
    path = folder / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | settings))


@pytest.mark.parametrize("nested", [False, True])
def test_stop_tokens_of_config_json_count_where_the_generation_config_names_none(
    tmp_path: Path, nested: bool
) -> None:
    """As in transformers."""
    tokenizer = load_tokenizer(str(directory_of(tmp_path, "llama", "TokenizersBackend")))
    tokenizer.eos_token = None
    own = {"eos_token_id": [3, 5], "vocab_size": 10}
    with_settings(tmp_path, "config.json", **({"text_config": own} if nested else own))
    assert model_stop_tokens(str(tmp_path), tokenizer) == (3, 5)
    with_settings(tmp_path, "generation_config.json", temperature=0.5)
    assert model_stop_tokens(str(tmp_path), tokenizer) == (3, 5)
    with_settings(tmp_path, "generation_config.json", eos_token_id=4)
    assert model_stop_tokens(str(tmp_path), tokenizer) == (4,)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("<end>", "must be a token id or a list of ids, got '<end>'"),
        ([[1]], r"got \[\[1\]\]"),
        (True, "got True"),
        (1.0, "got 1.0"),
        (10, "eos_token_id 10 is not a token of the model .the model knows the ids 0 to 9"),
        ([1, -1], "eos_token_id -1 is not a token"),
    ],
)
def test_stop_tokens_that_are_not_tokens_are_refused_with_their_file(
    tmp_path: Path, file: str, value: object, said: str
) -> None:
    tokenizer = load_tokenizer(str(directory_of(tmp_path, "llama", "TokenizersBackend")))
    with_settings(tmp_path, "config.json", vocab_size=10)
    with_settings(tmp_path, file, eos_token_id=value)
    with pytest.raises(ModelError, match=rf"/{file}: .*{said}"):
        model_stop_tokens(str(tmp_path), tokenizer)


@pytest.mark.parametrize("text", ["no JSON", "[]", "[" * 100_000, "\x00"])
def test_a_damaged_generation_config_is_refused(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(str(directory_of(tmp_path, "llama", "TokenizersBackend")))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json (cannot be read|must hold)"):
        model_stop_tokens(str(tmp_path), tokenizer)


def test_a_cached_model_and_its_task_are_found_without_importing_torch(tmp_path: Path) -> None:
    script = f"""
import sys
import asyncrl.controller.execute
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import ensure_builtin_model
task = load_task(TaskConfig(train_size=4), {str(tmp_path)!r}, 0)
print(len(task.train), sorted({{"torch", "numba"}} & sys.modules.keys()))
"""
    directory_of(tmp_path, "qwen3", "TokenizersBackend")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["4", "[]"]


def test_the_digest_is_of_what_a_tokenizer_does(tmp_path: Path) -> None:
    def loaded() -> Any:
        return load_tokenizer(str(path))

    path = directory_of(tmp_path, "llama", "TokenizersBackend")
    ours = tokenizer_digest(loaded())
    used = loaded()
    used([TEXT, "1"], padding=True, truncation=True, max_length=7)
    assert tokenizer_digest(used) == ours

    template = loaded()
    template.chat_template = "{{ messages[0].content }}!"
    found = tokenizer_digest(template)
    assert found.vocabulary == ours.vocabulary
    assert found.chat_template != ours.chat_template

    more, special = loaded(), loaded()
    more.add_tokens(["forty-two"])
    special.pad_token = "1"
    found = {tokenizer_digest(one).vocabulary for one in (more, special)} | {ours.vocabulary}
    assert len(found) == 3

    class InPython:
        chat_template = None
        special_tokens_map: ClassVar[dict[str, str]] = {}

        def __init__(self, words: dict[str, int]) -> None:
            self.get_vocab = lambda: words

    assert tokenizer_digest(InPython({"a": 1})) != tokenizer_digest(InPython({"a": 2}))
