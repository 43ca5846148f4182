"""Refuse model files that cannot be the whole model, and prompts that it has no tokens for.

A download that was cut off, or a clone without Git LFS, would otherwise show as a traceback in a
process that has started, on a cluster after minutes.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from asyncrl.errors import ModelError
from asyncrl.run.memory import header_of
from asyncrl.run.positions_check import description_of
from asyncrl.tasks.prompts import Task, held_out_sets

_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
_AGAIN = "; download or save the model again"


def check_files(model: Path, setting: str = "model.path") -> None:
    """Refuse a directory whose weights are not all there. A hub id is none.

    Raises:
        ModelError: a file that the index names is missing, or a file is damaged or cut off.
    """
    index = model / _INDEX
    if index.is_file():
        for name in _listed(index):
            if not (model / name).is_file():
                raise ModelError(f"{setting}: {index} names {name}, which is not there{_AGAIN}")
    for file in sorted(model.glob("*.safetensors")):
        if (why := why_not_whole(file)) is not None:
            raise ModelError(f"{setting}: {file} {why}{_AGAIN}")


def check_vocabulary(model: Path, task: Task) -> None:
    """Refuse prompts with token ids that the model does not have. Raises ModelError."""
    size = description_of(model, "model.path").get("vocab_size")
    if not isinstance(size, int) or len(task.tokenizer) <= size:
        return  # ids that no prompt has (of padding, say) do no harm
    for prompt in itertools.chain(task.train, *held_out_sets(task).values()):
        if (highest := int(prompt.tokens.max())) >= size:
            raise ModelError(
                f"model.path: prompt {prompt.prompt_id} has the token id {highest:,}, and the "
                f"model knows {size:,} (vocab_size in config.json): its tokenizer is larger than "
                "the model. Give the model the tokenizer that it was trained with, or call "
                "model.resize_token_embeddings(len(tokenizer)) and save both"
            )


def _listed(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # transformers says what is wrong with it


def why_not_whole(file: Path) -> str | None:
    """What is wrong with a safetensors file, by its size; None: nothing. Raises OSError."""
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            return "is a pointer of Git LFS, not the weights: run git lfs pull there"
    try:
        header = header_of(file)
        with file.open("rb") as opened:
            begin = 8 + int.from_bytes(opened.read(8), "little")
        needed = begin + max((one["data_offsets"][1] for one in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "is no safetensors file, or damaged"
    has = file.stat().st_size
    return None if has >= needed else f"has {has:,} of {needed:,} bytes: it was cut off"
