"""A process that loads a model without its weights: which does it need, and which are there?

    python -m asyncrl.run.loading_trial FOLDER

transformers itself loads the tensors that the files name, without memory and without reading them
(on the device `meta`), so that its renamings, fusions and ties are those of the real load. The last
line of the output is a `Loaded` as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.run.model_files import headers_of

SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
"""Numbers of a model's configuration, by the names that most families have."""


class Loaded(msgspec.Struct, frozen=True):
    """What came of it."""

    error: str = ""
    """Why it cannot be loaded; empty: it can."""
    needed: int = 0
    """Tensors of the model."""
    missing: list[str] = []
    """Tensors that the model needs and no file has."""
    unexpected: list[str] = []
    """Tensors that the files have and the model does not."""
    mismatched: list[str] = []
    """Tensors of another shape, with both shapes."""
    head: list[str] = []
    """Tensors of the output embeddings."""
    sizes: dict[str, int] = {}
    """`SIZES`, where the family has them under that name or its own."""


_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def load(folder: Path) -> Loaded:
    """Load the model of a directory onto the device `meta`."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        wrong = _wrong_sizes(config)
        if wrong:
            return Loaded(error=wrong)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return Loaded(error=f"{type(config).__name__} is not that of a causal language model")
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        tensors = {
            name: torch.empty(
                one["shape"], dtype=getattr(torch, _DTYPES[one["dtype"]]), device="meta"
            )
            for name, one in headers_of(folder).items()
        }
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # noqa: BLE001 - of files that can hold anything
        lines = str(error).strip().splitlines()
        return Loaded(error=f"{type(error).__name__}: {lines[0] if lines else ''}")
    output = model.get_output_embeddings()
    head = {id(one) for one in output.parameters()} if output is not None else set()
    return Loaded(
        needed=len(model.state_dict()),
        missing=sorted(found["missing_keys"]),
        unexpected=sorted(found["unexpected_keys"]),
        mismatched=[
            f"{name} ({_shape(there)} in the files, {_shape(needed)} by config.json)"
            for name, there, needed in sorted(found["mismatched_keys"])
        ],
        head=[name for name, one in model.named_parameters() if id(one) in head],
        sizes=_sizes(config),
    )


def _shape(size: Any) -> str:
    return f"[{', '.join(map(str, size))}]"


def _sizes(config: Any) -> dict[str, int]:
    text = config.get_text_config()
    found = {name: getattr(text, name, None) for name in SIZES}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _wrong_sizes(config: Any) -> str:
    """What is wrong with the numbers of a configuration; empty: nothing."""
    wrong = [f"{name} is {value:,}" for name, value in _sizes(config).items() if value < 1]
    return f"{', '.join(wrong)}, and must be at least 1" if wrong else ""


if __name__ == "__main__":
    print(msgspec.json.encode(load(Path(sys.argv[1]))).decode())
