"""Loads a model without its weights, in a separate process, and compares the tensors.

    python -m asyncrl.startup.loading_trial FOLDER

transformers loads the tensors that the files name on the device `meta`, without memory and without
reading them, so its renamings, fusions and ties are those of a real load. The last line of the
output is a `Loaded` as JSON.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.tasks.model_files import headers_of
from asyncrl.user_code.process_tree import end_process

SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
"""Numbers of a model's configuration, under the names that most families use."""
_LAYERS_A_TENSOR = 10
"""A model with more layers than this per tensor of its files is not tried."""


class Loaded(msgspec.Struct, frozen=True):
    """The result of a trial."""

    error: str = ""
    needed: int = 0
    missing: list[str] = []
    unexpected: list[str] = []
    mismatched: list[str] = []
    """Tensors of another shape, with both shapes."""
    not_numbers: list[str] = []
    """Weights that are integers in the files, with their type."""
    head: list[str] = []
    sizes: dict[str, int] = {}


_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def load(folder: Path) -> Loaded:
    """Load the model of a directory onto the device `meta`."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    described: dict[str, Any] = {}
    try:
        described = json.loads((folder / "config.json").read_bytes())
        headers = headers_of(folder)
        if wrong := _wrong_numbers(described, len(headers)):
            return Loaded(error=wrong)
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if wrong := _wrong_sizes(_sizes(config)):
            return Loaded(error=wrong)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return Loaded(error=f"{type(config).__name__} is not that of a causal language model")
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        tensors = {
            name: torch.empty(
                one["shape"], dtype=getattr(torch, _DTYPES[one["dtype"]]), device="meta"
            )
            for name, one in headers.items()
        }
        reports = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, found = kind.from_pretrained(
            None, config=config, state_dict=tensors, device_map="meta", **reports
        )
    except Exception as error:  # noqa: BLE001 - of files that can hold anything
        return Loaded(error=_sentence(error, described))
    output = model.get_output_embeddings()
    head = {id(one) for one in output.parameters()} if output is not None else set()
    return Loaded(
        needed=len(model.state_dict()),
        missing=sorted(found["missing_keys"]),
        unexpected=sorted(found["unexpected_keys"]),
        mismatched=[
            f"{name} ({list(there)} in the files, {list(needed)} by config.json)"
            for name, there, needed in sorted(found["mismatched_keys"])
        ],
        not_numbers=_not_numbers(model, headers),
        head=[name for name, one in model.named_parameters() if id(one) in head],
        sizes=_sizes(config),
    )


def _sizes(config: Any) -> dict[str, int]:
    text = config.get_text_config()
    found = {name: getattr(text, name, None) for name in SIZES}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _wrong_numbers(described: dict[str, Any], tensors: int) -> str:
    """Say what is wrong with the numbers of config.json, before transformers reads it."""
    text = described.get("text_config")
    settings = described | (text if isinstance(text, dict) else {})
    sizes = {name: settings[name] for name in SIZES if isinstance(settings.get(name), int)}
    if wrong := _wrong_sizes(sizes):
        return wrong
    layers = sizes.get("num_hidden_layers", 0)
    if layers > _LAYERS_A_TENSOR * tensors:  # each would be made, one after the other
        return f"num_hidden_layers is {layers:,}, and the files have {tensors:,} tensors"
    pad, size = settings.get("pad_token_id"), sizes.get("vocab_size")
    if isinstance(pad, int) and size is not None and pad >= size:
        return f"pad_token_id is {pad:,}, and the ids are 0 to {size - 1:,} (vocab_size)"
    return ""


def _wrong_sizes(sizes: dict[str, int]) -> str:
    wrong = [f"{name} is {value:,}" for name, value in sizes.items() if value < 1]
    return f"{', '.join(wrong)}, and must be at least 1" if wrong else ""


def _not_numbers(model: Any, headers: dict[str, Any]) -> list[str]:
    """Return parameters that are integers or booleans in the files under the same name."""
    names = {name for name, _ in model.named_parameters()}
    return [
        f"{name} ({one['dtype']})"
        for name, one in sorted(headers.items())
        if name in names and one["dtype"][0] in "IUB" and one["dtype"] != "BF16"
    ]


def _sentence(error: Exception, described: dict[str, Any]) -> str:
    """Summarise an error of transformers, with the setting from which a bare value comes."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    if isinstance(error, KeyError) and (place := _place_of(error.args[0], described)):
        said = f"{place} is {said}, which is not known"
    return f"{type(error).__name__}: {said}"


def _place_of(value: object, described: dict[str, Any]) -> str:
    """Return the dotted name of the setting with this value, or an empty string."""
    for name, one in described.items():
        inner = _place_of(value, one) if isinstance(one, dict) else ""
        if inner or one == value:
            return f"{name}.{inner}" if inner else name
    return ""


if __name__ == "__main__":
    gc.disable()  # nothing of what transformers imports is garbage; a quarter of the time
    print(msgspec.json.encode(load(Path(sys.argv[1]))).decode())
    end_process(0)
