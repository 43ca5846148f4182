"""The built-in model: a normal HF directory, created once, completely or not at all."""

import io
import json
import multiprocessing
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from asyncrl.errors import ModelError
from asyncrl.tasks.builtin.warm_start_recipe import RECIPE
from asyncrl.tasks.config import ModelConfig, TaskConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import (
    BUILTIN_ARITHMETIC,
    builtin_tokenizer,
    default_cache_dir,
    ensure_builtin_model,
    resolve_model,
)
from benchmarks.tiny_models import SMOKE_START


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_builtin_model(tmp_path_factory.mktemp("cache"), None, SMOKE_START)


def test_it_is_a_normal_hf_directory(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer) <= 64
    assert str(model.dtype) == "torch.float32"
    text = "what is 12+345? compute"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("find the sum of 1 and 2.")["input_ids"]) == 14
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2=?"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<user>1+2=?<assistant>"
    assert "sampled_accuracy" in json.loads((tiny_model / "warm_start.json").read_text())


def test_the_real_recipe_gives_a_small_model() -> None:
    from asyncrl.tasks.builtin.warm_start import new_model

    parameters = sum(p.numel() for p in new_model(builtin_tokenizer(), RECIPE).parameters())
    assert 300_000 < parameters < 400_000


def test_created_once_with_progress_and_without_leftovers(tmp_path: Path) -> None:
    progress = Progress(console=Console(file=io.StringIO()))
    place = ensure_builtin_model(tmp_path, progress, SMOKE_START)
    assert progress.tasks[0].completed == SMOKE_START.steps
    made = (place / "model.safetensors").stat().st_mtime_ns
    assert ensure_builtin_model(tmp_path, None, SMOKE_START) == place
    assert (place / "model.safetensors").stat().st_mtime_ns == made
    assert [entry.name for entry in tmp_path.iterdir()] == [place.name]


def test_without_a_terminal_lines_say_what_takes_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(console=Console(file=io.StringIO()), disable=True)
    for _ in range(2):  # the second time nothing is made
        ensure_builtin_model(tmp_path, progress, SMOKE_START)
    said = progress.console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("training the built-in model first (once): ") == said.count("\n") == 1
    monkeypatch.setattr("asyncrl.tasks.model._TELL_SECONDS", -1.0)
    ensure_builtin_model(tmp_path / "again", progress, SMOKE_START)
    said = progress.console.file.getvalue()  # type: ignore[attr-defined]
    assert said.endswith(f"{SMOKE_START.steps} of {SMOKE_START.steps} steps\n")


@pytest.mark.slow
def test_two_processes_at_once_agree(tmp_path: Path) -> None:
    both, one = tmp_path / "both", tmp_path / "one"
    with multiprocessing.get_context("fork").Pool(1) as pool:  # which imports nothing again
        make = ensure_builtin_model
        pool.apply(make, (one, None, SMOKE_START))  # so that it begins at once
        result = pool.apply_async(make, (both, None, SMOKE_START))
        places = {make(both, None, SMOKE_START), result.get(timeout=120)}
    assert [both / entry.name for entry in both.iterdir()] == list(places)


def test_an_interrupted_warm_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncrl.tasks.builtin.warm_start.warm_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ensure_builtin_model(tmp_path, None, SMOKE_START)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_cache_is_explained(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        ensure_builtin_model(blocked / "cache", None, SMOKE_START)


def test_cache_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/asyncrl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "asyncrl"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        default_cache_dir()


def test_resolve_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(ModelConfig(path=str(tiny_model)), None) == str(tiny_model)
    monkeypatch.setattr("asyncrl.tasks.model.ensure_builtin_model", lambda *_: tmp_path)
    assert resolve_model(ModelConfig(path=BUILTIN_ARITHMETIC), None) == str(tmp_path)
    assert resolve_model(ModelConfig(path="builtin:agent"), None) == str(tmp_path)


def test_resolve_model_refuses(tiny_model: Path, tmp_path: Path) -> None:
    def refused(path: Path | str) -> str:
        with pytest.raises(ModelError) as caught:
            resolve_model(ModelConfig(path=str(path)), None)
        assert caught.value.exit_code == 2
        return str(caught.value)

    assert "there is no directory" in refused(tmp_path / "nothing")
    assert "built-in ones are 'builtin:arithmetic' and 'builtin:agent'" in refused("builtin:maths")
    assert "config.json is missing" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "does not have a tokenizer" in refused(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is a file" in refused(tiny_model / "config.json")


def test_load_task_tokenises_the_builtin_task(tiny_model: Path) -> None:
    task = load_task(TaskConfig(train_size=40, evaluation_size=10), str(tiny_model), seed=0)
    assert (len(task.train), len(task.evaluation), task.left_out) == (40, 10, 0)
    assert task.stop_tokens == (task.tokenizer.convert_tokens_to_ids("<end>"),)
    prompt = task.train[0]
    assert task.tokenizer.decode(prompt.tokens) == prompt.text
    assert prompt.text == f"<user>{prompt.example['prompt']}<assistant>"
    assert task.tokenizer.unk_token_id not in prompt.tokens
    with pytest.raises(ValueError, match="read-only"):
        prompt.tokens[0] = 1
