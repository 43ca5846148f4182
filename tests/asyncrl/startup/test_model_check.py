"""Models that are not whole, and tokenizers that are not theirs, are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_llama, make_qwen3, save
from transformers import GPT2Config, GPT2LMHeadModel

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import ModelError
from asyncrl.startup import model_check
from asyncrl.startup.memory import shape_of
from asyncrl.startup.model_check import (
    check_files,
    check_numbers,
    check_vocabulary,
    prompts_of,
    unexpected_line,
)
from asyncrl.tasks.model import builtin_tokenizer
from asyncrl.tasks.model_files import WHOLE, only_what_counts, parameters, weight_files
from asyncrl.tasks.prompts import Prompt, Task

NORM = "model.norm.weight"


@pytest.fixture(autouse=True)
def _cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(save(make_llama(), tmp_path / "model"))


def change(model: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a model's file."""
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def describe(model: Path, **settings: object) -> None:
    """Change settings of its config.json."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def refused(model: Path, **named: Any) -> str:
    with pytest.raises(ModelError) as caught:
        check_files(model, **named)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_weights_that_are_not_all_there_are_named(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    check_files(model)
    for content, message in [
        (whole[:-1], f"has {len(whole) - 1:,} of {len(whole):,} bytes: it was cut off"),
        (whole[:40], "is not a safetensors file, or is damaged"),
        (b"", "is not a safetensors file, or is damaged"),
        (b"\xff" * 64, "is not a safetensors file, or is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "git lfs pull"),
    ]:
        file.write_bytes(content)
        assert refused(model).startswith(f"model.path: {file} {message}"[:40])
        assert message in refused(model)
    file.rename(model / "model-1.safetensors")
    (model / "model-1.safetensors").write_bytes(whole)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    check_files(model)
    names = {"a": "model-1.safetensors", "c": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    assert f"{index} names the missing model-2.safetensors" in refused(model)
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    assert "names a file of another folder" in refused(model)
    index.write_text("[")
    assert f"{index} is damaged" in refused(model)


@pytest.mark.parametrize("make", [make_llama, make_qwen3])
def test_tensors_that_the_files_lack_are_not_made_up(make: Any, tmp_path: Path) -> None:
    model = Path(save(make(), tmp_path / "model"))
    needed = len(load_file(model / "model.safetensors"))
    assert (found := check_files(model)).missing == []
    assert found.needed in (needed, needed + 1), "a tied head has two names"
    change(model, lambda tensors: tensors.pop(NORM))
    said = refused(model, setting="trainer.critic.model")
    assert said.startswith(f"trainer.critic.model: {model} lacks 1 of its ")
    assert f"weights ({NORM})" in said
    change(model, lambda tensors: tensors.setdefault("model.norm_.weight", torch.ones(2)))
    assert "and has 1 others (model.norm_.weight)" in refused(model)


def test_a_critic_needs_no_head(model: Path) -> None:
    change(model, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks 1 of its" in refused(model)
    check_files(model, needs_head=False)


def test_tensors_that_are_not_used_are_said(model: Path) -> None:
    assert unexpected_line(model, check_files(model)) is None
    change(model, lambda tensors: tensors.setdefault("value_head.weight", torch.ones(2)))
    said = unexpected_line(model, check_files(model))
    assert said is not None
    assert said.endswith("are not used: value_head.weight")


def test_shapes_that_do_not_fit_are_named_with_both(model: Path) -> None:
    describe(model, intermediate_size=999)
    said = refused(model)
    assert "do not fit its config.json: model.layers.0.mlp." in said
    assert "by config.json" in said
    assert "999" in said


@pytest.mark.parametrize(
    "copies", [["consolidated.safetensors"], ["model.fp16.safetensors", "old-00001.safetensors"]]
)
def test_other_copies_of_the_weights_do_not_count(model: Path, copies: list[str]) -> None:
    count, found = parameters(model), check_files(model)
    for name in copies:
        shutil.copy(model / "model.safetensors", model / name)
    assert parameters(model) == count == sum(p.numel() for p in make_llama().parameters())
    assert check_files(model) == found
    assert weight_files(model) == [model / "model.safetensors"]
    (model / "model.safetensors").unlink()
    said = refused(model)
    assert "has neither model.safetensors nor model.safetensors.index.json" in said


def test_an_adapter_next_to_the_model_is_refused(model: Path) -> None:
    """transformers loads it with the model, other engines do not."""
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "holds a PEFT adapter next to the model (adapter_config.json)" in refused(model)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F99"}, f"that {NORM} has the type 'F99'"),
        ({"shape": "x"}, f"that {NORM} has the shape 'x'"),
        ({"shape": [-32]}, f"that {NORM} has the shape [-32]"),
        ({"data_offsets": [0, 4]}, f"that {NORM}, of 128 bytes, has the place [0, 4]"),
        ({"data_offsets": None}, f"that {NORM}, of 128 bytes, has the place None"),
    ],
)
def test_a_wrong_entry_of_a_header_is_named_with_its_tensor(
    model: Path, entry: dict[str, Any], said: str
) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[NORM] |= entry
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    assert f"model.path: {file} is damaged: its header says {said}" in refused(model)


def test_weights_that_are_integers_are_named(model: Path) -> None:
    change(model, lambda tensors: tensors.update({NORM: tensors[NORM].char()}))
    assert f"not floating-point numbers: {NORM} (I8)" in refused(model)
    change(model, lambda tensors: tensors.update({NORM: tensors[NORM].bfloat16()}))
    change(model, lambda tensors: tensors.update(position_ids=torch.arange(4)))
    assert check_files(model).unexpected == ["position_ids"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_evaluation_refuses_weights_that_are_not_finite(model: Path, value: float) -> None:
    check_numbers(model)
    change(model, lambda tensors: tensors[NORM][3:4].fill_(value))
    with pytest.raises(ModelError, match=rf"{WHOLE} has weights .* \(NaN or infinity\): {NORM}"):
        check_numbers(model)


def test_engines_that_choose_files_themselves_see_one_copy(model: Path) -> None:
    with only_what_counts(model) as seen:
        assert seen == model
    with only_what_counts(Path("some-org/some-model")) as seen:
        assert seen == Path("some-org/some-model")
    names = {one.name for one in model.iterdir()}
    for other in ("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin"):
        (model / other).write_bytes(b"")
    for index in ("model.safetensors.index.json", "consolidated.safetensors.index.json"):
        (model / index).write_text("{}")
    with only_what_counts(model) as seen:
        assert {one.name for one in seen.iterdir()} == names
        assert load_file(seen / "model.safetensors").keys()
    assert not seen.exists()


def test_weights_in_other_formats_are_refused_with_what_to_do(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    said = refused(model)
    assert "only pytorch_model.bin: save it as safetensors" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised (gptq)"),
        ({"auto_map": {"AutoConfig": "x.C"}, "model_type": "mine"}, "custom code (auto_map"),
        ({"model_type": "of_nobody"}, "cannot be loaded"),
        ({"model_type": "vit"}, "is not that of a causal language model"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and must be at least 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1,000,000, and the files have 21"),
        ({"pad_token_id": 10}, "pad_token_id is 10, and the ids are 0 to 9 (vocab_size)"),
        ({"rope_parameters": {"rope_type": "x"}}, "rope_parameters.rope_type is 'x', which is not"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, and must be at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": "many"}, "cannot be loaded as its config.json describes it"),
    ],
)
def test_what_config_json_says_is_checked(model: Path, settings: dict[str, Any], said: str) -> None:
    describe(model, **settings)
    assert said in refused(model)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_damaged_config_json_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert f"{model / 'config.json'} " in refused(model)


def test_memory_of_families_with_other_names_is_known(tmp_path: Path) -> None:
    made = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=64)
    )
    made.save_pretrained(tmp_path)
    found = check_files(tmp_path)
    count = parameters(tmp_path)
    shape = shape_of(RunConfig(), tmp_path, count, found.sizes)
    assert shape is not None
    assert (shape.hidden, shape.layers, shape.vocabulary) == (32, 2, 50)
    assert shape.parameters == count == sum(p.numel() for p in made.parameters())


@pytest.mark.usefixtures("_forked_runs")
def test_a_trial_has_its_own_process_and_is_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent / "cache"))
    first = check_files(model)
    assert first.needed > 10

    def never(_: Path) -> Any:
        raise AssertionError("it was tried before")

    monkeypatch.setattr(model_check, "tried", never)
    assert check_files(model) == first
    change(model, lambda tensors: tensors.pop(NORM))
    with pytest.raises(AssertionError, match="tried before"):
        check_files(model)


def test_a_tokenizer_that_is_larger_than_the_model_is_refused_where_prompts_need_it(
    tmp_path: Path,
) -> None:
    tokenizer: Any = builtin_tokenizer()
    size = len(tokenizer)
    prompts = [Prompt("add-1", np.array([1, size - 1], np.int32), "1+1=", {})]
    task = Task(prompts, [], (0,), tokenizer)
    for known in (size, size + 1):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": known}))
        check_vocabulary(tmp_path, tokenizer, prompts_of(task))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size - 1}))
    message = f"prompt add-1 has the token id {size - 1}, and the model knows {size - 1} "
    with pytest.raises(ModelError, match=message):
        check_vocabulary(tmp_path, tokenizer, prompts_of(task))
    check_vocabulary(tmp_path, tokenizer, prompts_of(Task([], [], (0,), tokenizer)))
