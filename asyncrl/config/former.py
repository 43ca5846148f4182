"""Former settings. Files that give them the value that every run now has are still read."""

from collections.abc import Mapping
from typing import Any

FORMER: dict[str, Any] = {
    "task.map_timeout_seconds": 10.0,
    "engine.vllm.steps_per_message": 4,
    "engine.vllm.lora_rank": 0,
    "engine.vllm.startup_timeout_seconds": None,
    "engine.vllm.call_timeout_seconds": 120.0,
    "engine.sglang.steps_per_message": 4,
    "engine.sglang.startup_timeout_seconds": None,
    "engine.sglang.call_timeout_seconds": 120.0,
    "cache.max_bytes_per_prompt": 32 << 20,
    "cache.max_match": 8,
    "cache.version_half_life": 128.0,
    "cache.max_candidates": 24,
    "cache.doubt": 0.1,
    "cache.calibrate": True,
    "cache.lenient_max_bytes": 1 << 30,
    "launcher.stop_seconds": 60.0,
    "launcher.agents.lost_seconds": 60.0,
}
"""The value that every run has now, by dotted path; None: it follows another setting."""


def without_former(values: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Remove former settings with their only value; others stay, and are refused later."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{outer}{key}"
        if path in FORMER:
            same_kind = isinstance(value, bool) == isinstance(FORMER[path], bool)
            if same_kind and value == FORMER[path]:
                continue
        kept[key] = without_former(value, f"{path}.") if isinstance(value, Mapping) else value
    return kept


def refusal(path: str) -> str | None:
    """Return the error for another value of a former setting, or None for other keys."""
    if path not in FORMER:
        return None
    value = FORMER[path]
    if value is None:
        return "is not a setting any more; it follows launcher.startup_seconds. Leave it out"
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
    return f"is not a setting any more: it is {shown} in every run. Leave it out"
