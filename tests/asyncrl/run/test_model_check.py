"""Models that are not whole, and tokenizers that are not theirs, are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from asyncrl.errors import ModelError
from asyncrl.run.model_check import check_files, check_vocabulary
from asyncrl.tasks.model import builtin_tokenizer
from asyncrl.tasks.prompts import LoadedTask, Prompt


def test_weights_that_are_not_all_there_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8, 8), "b": torch.ones(8)}, file)
    whole = file.read_bytes()
    check_files(tmp_path)
    for content, message in [
        (whole[:-1], f"has {len(whole) - 1:,} of {len(whole):,} bytes: it was cut off"),
        (whole[:40], "is no safetensors file, or damaged"),
        (b"", "is no safetensors file, or damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "git lfs pull"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ModelError, match=f"^model.path: {file} .*{message}"):
            check_files(tmp_path)
    file.write_bytes(whole)
    names = {"a": "model.safetensors", "c": "model-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"names model-2.safetensors, which is not there"):
        check_files(tmp_path)


def test_a_tokenizer_that_is_larger_than_the_model_is_refused_where_prompts_need_it(
    tmp_path: Path,
) -> None:
    tokenizer: Any = builtin_tokenizer()
    size = len(tokenizer)
    prompts = [Prompt("add-1", np.array([1, size - 1], np.int32), "1+1=", {})]
    task = LoadedTask(prompts, [], (0,), tokenizer)
    for known in (size, size + 1):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": known}))
        check_vocabulary(tmp_path, task)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size - 1}))
    message = f"prompt add-1 has the token id {size - 1}, and the model knows {size - 1} "
    with pytest.raises(ModelError, match=message):
        check_vocabulary(tmp_path, task)
    check_vocabulary(tmp_path, LoadedTask([], [], (0,), tokenizer))
