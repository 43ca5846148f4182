"""The model's tokenizer and the tokens that end its responses.

`AutoTokenizer` and `GenerationConfig` import torch and all model code of transformers, which would
add three seconds to the start of processes that need neither. For the families below, the
tokenizer's class is known without them.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from asyncrl.errors import ModelError
from asyncrl.wire.records.wrong_policy import TokenizerDigest

_QWEN = {"Qwen2Tokenizer": "Qwen2Tokenizer", "Qwen2TokenizerFast": "Qwen2Tokenizer"}
_GENERAL = dict.fromkeys(("TokenizersBackend", "PreTrainedTokenizerFast"), "TokenizersBackend")
_CLASSES: dict[str, dict[str, str]] = {
    "llama": _GENERAL,
    "qwen2": _QWEN,
    "qwen3": _QWEN | _GENERAL,
    "qwen3_moe": _QWEN | _GENERAL,
}
"""The class that AutoTokenizer chooses, by `model_type` of config.json and `tokenizer_class` of
tokenizer_config.json. A test compares the two."""

_POINTER = b"version https://git-lfs"
POINTER_ADVICE = "is a pointer of Git LFS, not the file itself: run git lfs pull there"
_BY_THE_CALL = frozenset({"padding", "truncation"})


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer. Raises ModelError if it is missing or has its own code."""
    try:
        known = _known_class(Path(model_path))
        if known is not None:
            return known.from_pretrained(model_path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if wants_own_code(error):
            raise ModelError(
                f"the tokenizer of {model_path!r} needs its own code (auto_map in "
                "tokenizer_config.json), which is not supported"
            ) from error
        for file in sorted(Path(model_path).glob("*.json")):
            if is_pointer(file):
                raise ModelError(f"{file} {POINTER_ADVICE}") from error
        raise ModelError(
            f"the tokenizer cannot be loaded from {model_path!r}: {_first_line(error)}. A model "
            "directory needs tokenizer.json (or its older forms) and tokenizer_config.json next to "
            "config.json; save both with tokenizer.save_pretrained(directory)."
        ) from error


def is_pointer(file: Path) -> bool:
    """Return True if a file is a Git LFS pointer that was not fetched. Raises OSError."""
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


def wants_own_code(error: Exception) -> bool:
    """Return True if transformers refused a model because of the code in its folder."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def tokenizer_digest(tokenizer: Any) -> TokenizerDigest:
    """Return digests of a tokenizer's behaviour, without its padding and truncation settings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python: its vocabulary and its class stand for what it does
        words = sorted(tokenizer.get_vocab().items())
        rules = f"{type(tokenizer).__qualname__} {words}"
    else:
        pipeline = json.loads(backend.to_str())
        kept = {key: value for key, value in pipeline.items() if key not in _BY_THE_CALL}
        rules = json.dumps(kept, sort_keys=True)
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    template = json.dumps(tokenizer.chat_template, sort_keys=True, default=str)
    return TokenizerDigest(_digest(f"{special}\n{rules}"), _digest(template))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _known_class(directory: Path) -> Any:
    """Return the tokenizer's class if it is known without AutoTokenizer, otherwise None."""
    model = readable_settings(directory / "config.json")
    tokenizer = readable_settings(directory / "tokenizer_config.json")
    if "auto_map" in model or "auto_map" in tokenizer:
        return None  # code of the model's own
    if not (directory / "tokenizer.json").is_file():
        return None
    name = _CLASSES.get(str(model.get("model_type")), {}).get(str(tokenizer.get("tokenizer_class")))
    if name is None:
        return None
    import transformers

    return getattr(transformers, name)


def special_ids(tokenizer: Any) -> set[int]:
    """Return the special tokens that `decode(..., skip_special_tokens=True)` leaves out.

    `all_special_ids` lacks those without a role, such as <|eot_id|> of a Llama 3 with another
    end-of-sequence token.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {*tokenizer.all_special_ids, *(int(one) for one, token in added if token.special)}


def model_stop_tokens(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a response, from the model's and the tokenizer's configuration.

    As in transformers, `eos_token_id` is read from generation_config.json, or else from
    config.json. Raises ModelError if a file is damaged or names an id that is not a token, or if
    there is none, since responses would then end only at the token limit.
    """
    found = set(_configured_stop_tokens(model_path))
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if not found:
        raise ModelError(
            f"{model_path!r} does not have an end-of-sequence token in generation_config.json, "
            'config.json or its tokenizer; add "eos_token" to tokenizer_config.json'
        )
    return tuple(sorted(found))


def _configured_stop_tokens(model_path: str) -> list[int]:
    folder = Path(model_path)
    if folder.is_dir():
        model = read_settings(folder / "config.json")
        text = model.get("text_config")
        model = text | model if isinstance(text, dict) else model
        generating = folder / "generation_config.json"
        sources = {str(generating): read_settings(generating), str(folder / "config.json"): model}
        size = model.get("vocab_size")
    else:
        from transformers import AutoConfig, GenerationConfig

        whole = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        described = whole.get_text_config()
        sources = {f"config.json of {model_path}": {"eos_token_id": described.eos_token_id}}
        with contextlib.suppress(OSError):  # a model without generation_config.json
            generation = GenerationConfig.from_pretrained(model_path)
            name = f"generation_config.json of {model_path}"
            sources = {name: {"eos_token_id": generation.eos_token_id}} | sources
        size = described.vocab_size
    for file, settings in sources.items():
        if (value := settings.get("eos_token_id")) is not None:
            return _token_ids(file, value, size if isinstance(size, int) else None)
    return []


def _token_ids(file: str, value: Any, size: int | None) -> list[int]:
    """Return `eos_token_id` of `file`, checked against the vocabulary `size`. Raises ModelError."""
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ModelError(f"{file}: eos_token_id must be a token id or a list of ids, got {value!r}")
    wrong = [one for one in ids if one < 0 or (size is not None and one >= size)]
    if wrong:
        known = "ids begin at 0" if size is None else f"the model knows the ids 0 to {size - 1:,}"
        raise ModelError(
            f"{file}: eos_token_id {wrong[0]} is not a token of the model ({known}, by vocab_size "
            "in config.json)"
        )
    return ids


def read_settings(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing. Raises ModelError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def readable_settings(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing or damaged."""
    try:
        return read_settings(path)
    except ModelError:
        return {}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
