"""Models and datasets of the Hugging Face hub, including without a network.

Without a network, the hub's libraries retry each file of a model for minutes in all, and end with
the error of the last file. So one request with a time limit comes first, before any of them is
imported. If it fails, `HF_HUB_OFFLINE` is set for this process and its children: the cache is used
at once, and an error of one sentence names what is not cached.
"""

import functools
import http.client
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

from asyncrl.suggestions import looked_from, nearest_path

PROBE_SECONDS = 10.0
"""Time limit of the hub's answer, name resolution included."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")


def is_id(name: str) -> bool:
    """Return True if this can be an id of the hub, `name` or `owner/name`."""
    return _ID.fullmatch(name) is not None


@functools.cache
def unusable() -> str | None:
    """Say why the hub is unusable, and set HF_HUB_OFFLINE; return None if it answers."""
    for name in _OFFLINE:
        if os.environ.get(name, "").upper() in _TRUE:
            return f"{name} is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    problem = _probe(endpoint)
    if problem is None:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "huggingface_hub" in sys.modules:  # which has read the variable already
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True
    return f"{endpoint} cannot be reached ({problem})"


def cached_model(name: str) -> Path | None:
    """Return the folder of a model in the hub's cache, or None."""
    import huggingface_hub

    file = huggingface_hub.try_to_load_from_cache(name, "config.json")
    return Path(file).parent if isinstance(file, str) else None


def not_found(name: str, setting: str, kind: str, reason: str) -> str:
    """Return the error for an id that is neither a local path nor cached, without the hub."""
    near = nearest_path(Path(name))
    hint = near if near.startswith(" Did") else ""  # an id is rarely meant as a folder
    return (
        f"{setting}: {name!r} is neither a local {kind} {looked_from()} nor in the "
        f"hub's cache, and the hub cannot be used: {reason}.{hint}"
    )


def _probe(endpoint: str) -> str | None:
    """Say why the hub does not answer; None if it does, even with an HTTP error."""
    problems: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - the user's own
            with urllib.request.urlopen(request, timeout=PROBE_SECONDS / 2):  # noqa: S310
                problems.append(None)
        except urllib.error.HTTPError:
            problems.append(None)
        except (OSError, ValueError, http.client.HTTPException) as error:
            problems.append(str(getattr(error, "reason", error)))

    # A thread is needed because name resolution does not have a timeout.
    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return problems[0] if problems else f"no answer within {PROBE_SECONDS:g} s"
