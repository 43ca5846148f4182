"""PEFT directories: an adapter's settings. Light: no torch.

```
adapter_config.json         its settings, and the model it belongs to
adapter_model.safetensors   base_model.model.LAYER.lora_A.weight and lora_B, of each layer
```

`asyncrl.trainer.lora.adapter` has the tensors. `adapter_model.bin`, a pickle, is refused.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.trainer.base.lora_config import LoraConfig

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of the layers' names in a PEFT file."""
ADAPTER = "adapter"
"""Folder of a checkpoint with the settings of its adapter, if it has one."""
_OFF = ("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out")
_PLAIN: dict[str, Any] = {"bias": "none", **dict.fromkeys(_OFF, False)}
"""Required values: other variants are not trained here."""
_EMPTY = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform",
          "target_parameters", "trainable_token_indices", "layer_replication")  # fmt: skip


def adapter_settings(layers: Iterable[str], config: LoraConfig, base: str) -> dict[str, Any]:
    """Return the contents of adapter_config.json; `base` is a directory or hub id."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "inference_mode": True,
        **_PLAIN,
    }


def why_not_started_from(directory: Path, config: LoraConfig) -> str | None:
    """Return why its settings forbid starting from an adapter, or None.

    Light: reads adapter_config.json only. The adapter may still not fit the model.
    """
    if not (directory / CONFIG).is_file():
        return f"{directory} has no {CONFIG}"
    if not (directory / TENSORS).is_file():
        return f"{directory} has no {TENSORS} (pickled adapters are not read)"
    try:
        found = json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        return f"{directory / CONFIG} cannot be read: {error}"
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        return f"{directory} is not a LoRA adapter"
    for name, value in (("r", config.rank), ("lora_alpha", config.alpha)):
        if found.get(name) != value:
            return f"{directory} has {name} {found.get(name)}, but the run {value:g}"
    odd = [name for name, plain in _PLAIN.items() if found.get(name, plain) not in (plain, None)]
    odd += [name for name in _EMPTY if found.get(name)]
    return f"{directory} uses {', '.join(odd)}, which is not trained here" if odd else None


def write_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write adapter_config.json. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(dict(settings), indent=1), encoding="utf-8")
