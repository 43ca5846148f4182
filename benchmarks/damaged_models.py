"""What can be wrong with a model's folder, and what a user has to be told of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"
MLP = tuple(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
Role = Literal["policy", "critic", "eval"]


@dataclass(frozen=True)
class Damage:
    """One folder: what is done to a sound model, and what has to come of it."""

    name: str
    change: Callable[[Path], object]
    named: tuple[str, ...] = ()
    """Words that the sentence has, beside the folder."""
    trains: bool = False
    """It does no harm: the folder is trained, as the sound one is; `named` is said nevertheless."""
    role: Role = "policy"
    """Which setting names the folder."""
    late: bool = False
    """Only the process that reads the weights can know it, so a run has begun."""
    real: bool = False
    """The command has a process of its own, with its own imports; all that train have."""


def _tensors(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def _without(*names: str) -> Callable[[Path], object]:
    return partial(_tensors, edit=lambda tensors: [tensors.pop(name) for name in names])


def _with(**tensors: torch.Tensor) -> Callable[[Path], object]:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return partial(_tensors, edit=lambda found: found.update(named))


def _one_is(value: float) -> Callable[[Path], object]:
    return partial(_tensors, edit=lambda tensors: tensors[MLP[0]].view(-1)[7:8].fill_(value))


def _renamed(tensors: dict[str, Any]) -> None:
    tensors["model.norm_.weight"] = tensors.pop(NORM)


def _config(**settings: object) -> Callable[[Path], object]:
    return partial(_json, name="config.json", settings=settings)


def _generation(**settings: object) -> Callable[[Path], object]:
    return partial(_json, name="generation_config.json", settings=settings)


def _json(folder: Path, name: str, settings: dict[str, object]) -> None:
    """Change settings of a JSON file; None removes one."""
    found = json.loads((folder / name).read_text()) | settings
    kept = {key: value for key, value in found.items() if value is not None}
    (folder / name).write_text(json.dumps(kept))


def _file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _removed(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def _moved(name: str, target: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / target)


def _copied(name: str, *targets: str) -> Callable[[Path], object]:
    return lambda folder: [shutil.copy(folder / name, folder / one) for one in targets]


def _all(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: [change(folder) for change in changes]


def _cut(length: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(content[:length])

    return change


def _header(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change what the header of the weights says of `NORM`, and nothing else."""

    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(
            len(text).to_bytes(8, "little") + text + content[8 + length :]
        )

    return change


def _in_shards(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = {name: f"model-0000{1 + (name >= MLP[0])}-of-00002.safetensors" for name in tensors}
    for file in sorted(set(names.values())):
        part = {name: tensor for name, tensor in tensors.items() if names[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _index(content: object) -> Callable[[Path], object]:
    return _all(_in_shards, lambda folder: (folder / INDEX).write_text(json.dumps(content)))


def _dangling(folder: Path) -> None:
    """A hub's cache, whose blob was removed."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../../blobs/0123456789abcdef")


def _in_bfloat16(tensors: dict[str, Any]) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


_SHARD = "model-00002-of-00002.safetensors"
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
_QUANTISED = "quantization_config"
_MADE_UP = (  # weights that the folder lacks
    Damage("no norm", _without(NORM), (NORM,), real=True),
    Damage("no mlp of a layer", _without(*MLP), MLP),
    Damage("no embeddings", _without("model.embed_tokens.weight"), ("model.embed_tokens.weight",)),
    Damage("no output head", _without("lm_head.weight"), ("lm_head.weight",)),
    Damage("a tensor of another name", partial(_tensors, edit=_renamed), (NORM, "norm_.weight")),
    Damage("critic: no norm", _without(NORM), (NORM,), role="critic"),
    Damage("critic: no mlp", _without(*MLP), MLP, role="critic"),
    Damage("critic: of NaN", _one_is(float("nan")), (MLP[0], "NaN"), role="critic", late=True),
    Damage("eval: no norm", _without(NORM), (NORM,), role="eval", real=True),
    Damage(
        "eval: no embeddings",
        _without("model.embed_tokens.weight"),
        ("model.embed_tokens.weight",),
        role="eval",
    ),
    Damage("eval: cut off", _cut(5000), (WEIGHTS, "5,000 of"), role="eval"),
    Damage("eval: of NaN", _one_is(float("nan")), (MLP[0], "NaN"), role="eval"),
    Damage("layers too few", _config(num_hidden_layers=3), ("model.layers.2.",)),
    Damage("a million layers", _config(num_hidden_layers=10**6), ("num_hidden_layers",)),
    Damage("layers too many", _config(num_hidden_layers=1), ("9 of", "layers.1."), trains=True),
    Damage("tensors too many", _with(value__weight=torch.ones(2)), ("value.weight",), trains=True),
    Damage("critic: no output head", _without("lm_head.weight"), trains=True, role="critic"),
)
_WHICH = (  # files that hold weights
    Damage("consolidated beside", _copied(WEIGHTS, "consolidated.safetensors"), trains=True),
    Damage("fp16 beside", _copied(WEIGHTS, "model.fp16.safetensors"), trains=True),
    Damage(
        "old shards beside",
        _all(_copied(WEIGHTS, "whole"), _in_shards, _moved("whole", WEIGHTS), _cut(10**9)),
        trains=True,
    ),
    Damage(
        "an adapter beside",
        _all(
            _file("adapter_config.json", b'{"peft_type": "LORA"}'),
            _copied(WEIGHTS, "adapter_model.safetensors"),
        ),
        ("adapter_config.json",),
    ),
    Damage("in shards", _in_shards, trains=True),
    Damage("in bfloat16", partial(_tensors, edit=_in_bfloat16), trains=True),
    Damage("a shard is missing", _all(_in_shards, _removed(_SHARD)), (INDEX, _SHARD)),
    Damage(
        "a shard was cut off",
        _all(_in_shards, _moved(_SHARD, WEIGHTS), _cut(1000), _moved(WEIGHTS, _SHARD)),
        (_SHARD, "1,000 of"),
    ),
    Damage(
        "index of elsewhere", _index({"weight_map": {"a": "../b.safetensors"}}), (INDEX, "../b")
    ),
    Damage("index of nothing", _index({"weight_map": {}}), (INDEX,)),
    Damage("index is a list", _index([1]), (INDEX,)),
    Damage("index of numbers", _index({"weight_map": {"a": 1}}), (INDEX,)),
    Damage("index is no JSON", _all(_in_shards, _file(INDEX, b"{")), (INDEX,)),
    Damage("no weights", _removed(WEIGHTS), (WEIGHTS, INDEX)),
    Damage("a link to nothing", _dangling, (WEIGHTS,)),
    Damage(
        "a folder as weights", _all(_removed(WEIGHTS), lambda f: (f / WEIGHTS).mkdir()), (WEIGHTS,)
    ),
    Damage("pytorch_model.bin", _moved(WEIGHTS, "pytorch_model.bin"), ("pytorch_model.bin",)),
    Damage("gguf", _moved(WEIGHTS, "model-q4.gguf"), ("model-q4.gguf",)),
    Damage("consolidated only", _moved(WEIGHTS, "consolidated.safetensors"), ("consolidated.",)),
)
_WEIGHTS = (  # content of the weights' file
    Damage("one byte less", _cut(-1), (WEIGHTS, "cut off")),
    Damage("in the header", _cut(40), (WEIGHTS,), real=True),
    Damage("empty", _cut(0), (WEIGHTS,)),
    Damage("of ones", _file(WEIGHTS, b"\xff" * 64), (WEIGHTS,)),
    Damage("a page of HTML", _file(WEIGHTS, b"<!DOCTYPE html><title>401</title>"), (WEIGHTS,)),
    Damage("header is no JSON", _file(WEIGHTS, (9).to_bytes(8, "little") + b"{" * 9), (WEIGHTS,)),
    Damage("header is a list", _file(WEIGHTS, (2).to_bytes(8, "little") + b"[]"), (WEIGHTS,)),
    Damage("pointer of Git LFS", _file(WEIGHTS, _POINTER), (WEIGHTS, "git lfs pull")),
    Damage("unknown type", _header(lambda h: h[NORM].update(dtype="F99")), (WEIGHTS, NORM, "F99")),
    Damage("shape of text", _header(lambda h: h[NORM].update(shape="x")), (WEIGHTS, NORM)),
    Damage("negative shape", _header(lambda h: h[NORM].update(shape=[-64])), (WEIGHTS, NORM)),
    Damage("wrong places", _header(lambda h: h[NORM].update(data_offsets=[0, 4])), (WEIGHTS, NORM)),
    Damage("no places", _header(lambda h: h[NORM].pop("data_offsets")), (WEIGHTS, NORM)),
    Damage("NaN", _one_is(float("nan")), (MLP[0], "NaN"), late=True),
    Damage("infinite", _one_is(float("inf")), (MLP[0], "infinit"), late=True),
    Damage(
        "integers", partial(_tensors, edit=lambda t: t.update({NORM: t[NORM].char()})), (NORM, "I8")
    ),
)
_DESCRIPTION = (  # config.json
    Damage("none", _removed("config.json"), ("config.json",)),
    Damage("empty config", _file("config.json", b""), ("config.json",)),
    Damage("config is a list", _file("config.json", b"[]"), ("config.json",)),
    Damage("config is cut off", _file("config.json", b'{"model_type": "lla'), ("config.json",)),
    Damage("config in Latin-1", _file("config.json", b'{"a": "\xfc"}'), ("config.json",)),
    Damage("config is deep", _file("config.json", b"[" * 100_000), ("config.json",)),
    Damage(
        "gptq", _config(**{_QUANTISED: {"quant_method": "gptq", "bits": 4}}), ("gptq",), real=True
    ),
    Damage("awq", _config(**{_QUANTISED: {"quant_method": "awq"}}), ("awq",)),
    Damage("bitsandbytes", _config(**{_QUANTISED: {"load_in_4bit": True}}), (_QUANTISED,)),
    Damage(
        "code of its own", _config(model_type="mine", auto_map={"AutoConfig": "x.C"}), ("auto_map",)
    ),
    Damage("code that is not needed", _config(auto_map={"AutoConfig": "x.C"}), trains=True),
    Damage("no type", _config(model_type=None), ("model_type", "config.json")),
    Damage("type of nobody", _config(model_type="of_nobody"), ("of_nobody", "config.json")),
    Damage("of images", _config(model_type="vit"), ("ViT",)),
    Damage("zero heads", _config(num_attention_heads=0), ("num_attention_heads",)),
    Damage("zero heads of keys", _config(num_key_value_heads=0), ("num_key_value_heads",)),
    Damage("heads that do not fit", _config(num_key_value_heads=3, head_dim=None), ("k_proj",)),
    Damage("negative layers", _config(num_hidden_layers=-1), ("num_hidden_layers",)),
    Damage("no vocabulary", _config(vocab_size=0), ("vocab_size",)),
    Damage("width of text", _config(hidden_size="many"), ("hidden_size", "config.json")),
    Damage("width of a list", _config(hidden_size=[64]), ("hidden_size", "config.json")),
    Damage("width of a half", _config(hidden_size=64.5), ("hidden_size", "config.json")),
    Damage(
        "huge vocabulary", _config(vocab_size=10**12), ("embed_tokens", "config.json", str(10**12))
    ),
    Damage("another width", _config(intermediate_size=999), (MLP[0], "999")),
    Damage("another vocabulary", _config(vocab_size=80), ("embed_tokens", "80")),
    Damage("padding beyond", _config(pad_token_id=999), ("pad_token_id", "999", "config.json")),
    Damage(
        "scaling of text", _config(rope_scaling="x", rope_parameters=None), ("rope_", "config.json")
    ),
    Damage(
        "scaling of nobody", _config(rope_parameters={"rope_type": "x"}), ("rope_", "config.json")
    ),
    Damage("unknown activation", _config(hidden_act="of_nobody"), ("of_nobody", "config.json")),
    Damage("unknown type of numbers", _config(dtype="float12"), ("float12", "config.json")),
    Damage("few positions", _config(max_position_embeddings=8), ("max_model_len",)),
    Damage(
        "positions of text", _config(max_position_embeddings="x"), ("max_position", "config.json")
    ),
    Damage("unknown settings", _config(of_nobody=1, transformers_version="99.0"), trains=True),
)
_STOPS = "eos_token_id"
_ENDS = (  # stop tokens and the tokenizer
    Damage("end only in config.json", _removed("generation_config.json"), trains=True),
    Damage("end beyond", _generation(eos_token_id=999), ("generation_config.json", _STOPS, "999")),
    Damage("end is text", _generation(**{_STOPS: "<end>"}), ("generation_config.json", "<end>")),
    Damage(
        "end in two lists", _generation(eos_token_id=[[1]]), ("generation_config.json", "[[1]]")
    ),
    Damage("end is negative", _generation(eos_token_id=-1), ("generation_config.json", "-1")),
    Damage(
        "end of config.json beyond",
        _all(_removed("generation_config.json"), _config(eos_token_id=[1, 76])),
        ("config.json", _STOPS, "76"),
    ),
    Damage(
        "broken generation_config", _file("generation_config.json", b"{"), ("generation_config",)
    ),
    Damage(
        "generation_config a list", _file("generation_config.json", b"[]"), ("generation_config",)
    ),
    Damage("no tokenizer", _removed("tokenizer.json"), ("tokenizer.json",)),
    Damage("broken tokenizer", _file("tokenizer.json", b"{"), ("tokenizer",)),
    Damage("tokenizer of Git LFS", _file("tokenizer.json", _POINTER), ("tokenizer.json", "lfs")),
    Damage("broken tokenizer_config", _file("tokenizer_config.json", b"{"), ("tokenizer_config",)),
    Damage(
        "tokenizer with code",
        partial(
            _json,
            name="tokenizer_config.json",
            settings={
                "tokenizer_class": "Mine",
                "auto_map": {"AutoTokenizer": ["mine.Mine", None]},
            },
        ),
        ("tokenizer_config.json", "auto_map"),
    ),
    Damage(
        "tokenizer larger than the model",
        _all(
            partial(
                _tensors,
                edit=lambda t: t.update(
                    {
                        name: t[name][:20].clone()
                        for name in ("model.embed_tokens.weight", "lm_head.weight")
                    }
                ),
            ),
            _config(vocab_size=20),
        ),
        ("vocab_size", "tokenizer"),
    ),
)
DAMAGES = (*_MADE_UP, *_WHICH, *_WEIGHTS, *_DESCRIPTION, *_ENDS)
