"""Fixtures shared by all tests: tiny models on disk, and real engines.

And the order in which workers take files.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from tiny_models import make_llama, make_qwen3, save

pytest_plugins = ["suite_outcome", "bounded_tests"]

hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")
"""How long an example takes says nothing on a machine that others use too."""

_ENDS_THE_ENGINE = "test_remote_process_death"
"""The module that kills the engine of `served`."""
_SLOW, _LIGHT = 2, 3
"""The weights of files that take a minute, and seconds."""
_WAITING = {"asyncrl", "engine", "monitoring"}
"""Folders whose light tests wait more than they compute: for processes, and for time limits."""


def _engine_of(item: pytest.Item) -> str | None:
    """The real engine of another process that a test runs."""
    return next((kind for kind in ("vllm", "sglang") if item.get_closest_marker(kind)), None)


def _shared_engine_of(item: pytest.Item) -> str | None:
    """The real engine of a test if it is one that several modules share."""
    kind = _engine_of(item)
    names: list[str] = getattr(item, "fixturenames", [])
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    shared = any(name.startswith("served_by_") for name in names)
    values = [value for value in parameters.values() if isinstance(value, str)]
    return kind if shared or kind in values else None


def _weight(item: pytest.Item) -> int:
    """0 for the files that take longest: a worker must not begin one when the others are done."""
    if _engine_of(item) is not None:
        return 0 if _shared_engine_of(item) is not None else 1
    return _SLOW if item.get_closest_marker("slow") is not None else _LIGHT


def _in_order(files: dict[Path, int], tests: Path) -> list[Path]:
    """The heaviest first; among the slow ones, which need all cores, those that wait.

    Args:
        files: their weights.
        tests: the folder of all.
    """
    waiting = [
        file
        for file, weight in files.items()
        if weight == _LIGHT and file.relative_to(tests).parts[0] in _WAITING
    ]
    slow = [file for file, weight in files.items() if weight == _SLOW]
    places = {
        file: (i + 0.5) / len(kind) for kind in (slow, waiting) for i, file in enumerate(kind)
    }
    weights = files | dict.fromkeys(waiting, _SLOW)
    return sorted(files, key=lambda file: (weights[file], places.get(file, 0.0)))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Give pytest-xdist whole files (`_in_order`), and all of a shared engine to one worker.

    Of those, the one that kills the engine of the others comes last.

    Tests of one file share engines and runs, so they belong to one process; those of
    tests/engine/remote run on two engines, which are two groups. A file that starts an engine of
    its own goes to the worker that is free: the shared engines of a kind take less than half of
    the time, all engines of a kind may take more. No worker starts two of its own at once.
    """
    import torch  # not by pytest-xdist's own process, which collects nothing

    torch.set_num_threads(1)  # a second has a busy core, and the first one spins until it is there
    weights = dict[Path, int]()
    for item in items:
        weights[item.path] = min(weights.get(item.path, _LIGHT), _weight(item))
    place = {file: i for i, file in enumerate(_in_order(weights, Path(__file__).parent))}
    items.sort(key=lambda item: place[item.path])
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_shared_engine_of(item) or str(item.path)))
    yield
    # pytest has brought together what shares a parameter of a session's fixture.
    items.sort(key=lambda item: item.path.stem == _ENDS_THE_ENGINE)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random Qwen3: 10 tokens, 2 layers, tied embeddings."""
    return str(save(make_qwen3(), tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random Llama: 10 tokens, 2 layers, separate output embeddings."""
    return str(save(make_llama(), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def served_by_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `served_engine.Served`, started once for all modules that ask for it (half a minute).

    It has KV space for all slots, and takes prompts in whole. `test_remote_process_death` kills it.
    """
    from served_vllm import serving

    with serving(tmp_path_factory.mktemp("vllm-model")) as running:
        yield running


@pytest.fixture(scope="session")
def served_by_vllm_in_small_kv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Another one, with 32 blocks of 128 tokens, where 16 responses of 390 tokens would need 64.

    So vLLM preempts. Prompts longer than 128 tokens are taken in by parts.
    """
    from served_vllm import serving

    path = tmp_path_factory.mktemp("vllm-small-kv")
    with serving(path, kv_cache_gib=0.002, max_prefill_tokens=128) as running:
        yield running


@pytest.fixture(scope="session")
def served_by_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As `served_by_vllm`."""
    from served_sglang import serving

    with serving(tmp_path_factory.mktemp("sglang-model")) as running:
        yield running


@pytest.fixture(scope="session")
def served_by_sglang_in_small_kv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Another one, with 4,600 tokens, where 16 responses of 390 tokens would need 6,240.

    Prompts longer than 128 tokens are taken in by parts.
    """
    from served_sglang import serving

    path = tmp_path_factory.mktemp("sglang-small-kv")
    with serving(path, kv_cache_gib=0.0022, max_prefill_tokens=128) as running:
        yield running


@pytest.fixture
def served(served_by_vllm: Any) -> Any:
    """VLLM, with KV space for all slots. Tests of tests/engine/remote get every engine."""
    return served_by_vllm


@pytest.fixture
def served_in_small_kv(served_by_vllm_in_small_kv: Any) -> Any:
    """VLLM, with less."""
    return served_by_vllm_in_small_kv
