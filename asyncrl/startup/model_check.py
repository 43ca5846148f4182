"""Refuses incomplete model files, and prompts with tokens that the model does not have.

Otherwise a truncated download, a bad conversion or a clone without Git LFS would end a running
process, or show nowhere: transformers initialises weights that the files lack.
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ModelError
from asyncrl.rollout.trajectory import IntArray
from asyncrl.startup.loading_trial import Loaded
from asyncrl.tasks import model_files
from asyncrl.tasks.model import default_cache_dir
from asyncrl.tasks.model_files import INDEX, WHOLE, weight_files, why_no_tensor
from asyncrl.tasks.model_tokenizer import POINTER_ADVICE, is_pointer, read_settings
from asyncrl.tasks.prompts import Task, held_out_sets
from asyncrl.wire.transport.atomic_files import write_atomically

_ADAPTER = "adapter_config.json"
_AGAIN = "; download or save the model again"
_SHOWN = 5
_TRIAL_SECONDS = 300.0
_OTHER_FORMATS = ("pytorch_model*.bin", "*.pth", "*.gguf", "consolidated*.safetensors")


def description_of(directory: Path) -> dict[str, Any]:
    """Return config.json, or its text part if nested; empty if missing. Raises ModelError."""
    found = read_settings(directory / "config.json")
    text = found.get("text_config", found)
    return text if isinstance(text, dict) else {}


def check_files(model: Path, setting: str = "model.path", *, needs_head: bool = True) -> Loaded:
    """Refuse a directory that does not hold a complete causal language model.

    Return what transformers finds in it without reading weights; nothing for a hub id. `setting`
    names the directory. `needs_head` is False for a critic, which has another head. Raises
    ModelError with folder, file and tensor.
    """
    if not (model / "config.json").is_file():
        return Loaded()  # an id of the hub, or what `check_directory` refuses
    _check_description(model, setting)
    _check_weight_files(model, setting)
    found = _loaded(model)
    if found.error:
        raise ModelError(
            f"{setting}: {model} cannot be loaded as its config.json describes it: {found.error}"
        )
    missing = [name for name in found.missing if needs_head or name not in found.head]
    if missing:
        others = f", and has {len(found.unexpected)} others ({_listed(found.unexpected)})"
        raise ModelError(
            f"{setting}: {model} lacks {len(missing)} of its {found.needed} weights "
            f"({_listed(missing)}){others if found.unexpected else ''}{_AGAIN}"
        )
    if found.mismatched:
        raise ModelError(
            f"{setting}: {model} has weights that do not fit its config.json: "
            f"{_listed(found.mismatched)}"
        )
    if found.not_numbers:
        raise ModelError(
            f"{setting}: {model} has weights that are not floating-point numbers: "
            f"{_listed(found.not_numbers)}; use the model that it was made from"
        )
    return found


def check_numbers(model: Path) -> None:
    """Refuse weights that are not finite, by reading them all. Raises ModelError."""
    import torch
    from safetensors import safe_open

    for file in weight_files(model):
        with safe_open(file, framework="pt") as opened:
            tensors = ((name, opened.get_tensor(name)) for name in sorted(opened.keys()))
            wrong = [
                name
                for name, tensor in tensors
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all())
            ]
        if wrong:
            raise ModelError(
                f"model.path: {file} has weights that are not finite numbers (NaN or infinity): "
                f"{_listed(wrong)}{_AGAIN}"
            )


def unexpected_line(model: Path, found: Loaded) -> str | None:
    """Return a sentence about tensors that the model does not use, or None."""
    names = found.unexpected
    return f"weights:    {len(names)} of {model} are not used: {_listed(names)}" if names else None


def prompts_of(task: Task) -> Iterator[tuple[str, IntArray]]:
    """Yield the name and the tokens of each prompt."""
    for prompt in itertools.chain(task.train, *held_out_sets(task).values()):
        yield f"prompt {prompt.prompt_id}", prompt.tokens


def check_vocabulary(model: Path, tokenizer: Any, texts: Iterable[tuple[str, IntArray]]) -> None:
    """Refuse texts with token ids that the model does not have. Raises ModelError, naming one."""
    size = description_of(model).get("vocab_size")
    if not isinstance(size, int) or len(tokenizer) <= size:
        return  # ids that no text has (of padding, say) do no harm
    for name, tokens in texts:
        if (highest := int(tokens.max())) >= size:
            raise ModelError(
                f"model.path: {model}: {name} has the token id {highest:,}, and "
                f"the model knows {size:,} (vocab_size in config.json): its tokenizer is larger "
                "than the model. Give the model the tokenizer that it was trained with, or call "
                "model.resize_token_embeddings(len(tokenizer)) and save both"
            )


def _check_weight_files(model: Path, setting: str) -> None:
    """Refuse missing or incomplete weights, and a second source of weights."""
    if (model / _ADAPTER).is_file():
        raise ModelError(
            f"{setting}: {model} holds a PEFT adapter next to the model ({_ADAPTER}), and "
            "transformers would load both; move the adapter to a separate folder, and give that as "
            "trainer.lora.adapter to continue its training"
        )
    try:
        files = weight_files(model)
    except ValueError as error:
        raise ModelError(f"{setting}: {error}{_AGAIN}") from error
    if not files:
        raise ModelError(f"{setting}: {model} has neither {WHOLE} nor {INDEX}{_instead_of(model)}")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{setting}: {model / INDEX} names the missing {file.name}{_AGAIN}")
        if (why := why_not_whole(file)) is not None:
            raise ModelError(f"{setting}: {file} {why}{_AGAIN}")


def _check_description(model: Path, setting: str) -> None:
    try:
        found = read_settings(model / "config.json")
    except ModelError as error:
        raise ModelError(f"{setting}: {error}{_AGAIN}") from error
    quantised = found.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        raise ModelError(
            f"{setting}: {model} is quantised ({method or 'quantization_config in config.json'}), "
            "and quantised weights cannot be trained; use the model that it was made from"
        )
    if found.get("auto_map"):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if found.get("model_type") not in CONFIG_MAPPING_NAMES:  # else its own code is not needed
            raise ModelError(
                f"{setting}: {model} is a model with custom code (auto_map in config.json), which "
                "is not supported; use a model that transformers itself knows"
            )


def _instead_of(model: Path) -> str:
    for pattern in _OTHER_FORMATS:
        if other := sorted(model.glob(pattern)):
            return (
                f", only {other[0].name}: save it as safetensors with AutoModelForCausalLM."
                "from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
    return "; save the weights with model.save_pretrained(directory)"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _loaded(model: Path) -> Loaded:
    """Return the result of `loading_trial`, cached by config.json and the headers."""
    version, headers = importlib.metadata.version("transformers"), model_files.headers_of(model)
    seen = hashlib.blake2b(version.encode() + (model / "config.json").read_bytes(), digest_size=16)
    seen.update(json.dumps(headers, sort_keys=True).encode())
    with contextlib.suppress(ModelError):  # no home folder: nothing is kept
        kept = default_cache_dir() / "loading-trials" / f"{seen.hexdigest()}.json"
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(kept.read_bytes(), type=Loaded)
        found = tried(model)
        if not found.error:
            with contextlib.suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(kept, msgspec.json.encode(found).decode())
        return found
    return tried(model)


def tried(model: Path) -> Loaded:
    """Run `loading_trial` in a separate process and return its result."""
    command = [sys.executable, "-P", "-m", "asyncrl.startup.loading_trial", str(model)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return Loaded(error=f"transformers did not answer within {_TRIAL_SECONDS:.0f} s")
    try:
        return msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=Loaded)
    except msgspec.MsgspecError:
        lines = done.stderr.strip().splitlines()
        return Loaded(error=lines[-1] if lines else f"exit status {done.returncode}")


def why_not_whole(file: Path) -> str | None:
    """Say what is wrong with a safetensors file's size, or return None. Raises OSError."""
    if is_pointer(file):
        return POINTER_ADVICE
    try:
        header = model_files.header_of(file)
        with file.open("rb") as opened:
            begin = 8 + int.from_bytes(opened.read(8), "little")
        wrong = next((why for one in header.items() if (why := why_no_tensor(*one))), None)
    except model_files.DAMAGED:
        return "is not a safetensors file, or is damaged"
    if wrong is not None:
        return f"is damaged: its header says {wrong}"
    needed = begin + max((one["data_offsets"][1] for one in header.values()), default=0)
    has = file.stat().st_size
    return None if has >= needed else f"has {has:,} of {needed:,} bytes: it was cut off"
