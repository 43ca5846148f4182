"""Fixtures shared by all tests: tiny models on disk, and real engines.

And the order in which workers take files.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from forking_server import begin_session
from tiny_models import make_llama, make_qwen3, save

pytest_plugins = ["suite_outcome", "bounded_tests"]

gc.disable()  # until all is imported and collected: half a million objects, none of them garbage

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.register_profile("others", deadline=None)
hypothesis.settings.load_profile("suite")
"""How long an example takes says nothing on a machine that others use too. Every run of the suite
tries the same examples; `--hypothesis-profile others` tries others."""

_ENDS_THE_ENGINE = "test_remote_process_death"
"""The module that kills the engine of `served`."""
_SLOW, _LIGHT = 1, 2
"""The weights of files that take a minute, and seconds."""
_WAITING = {"asyncrl", "engine", "monitoring"}
"""Folders whose light tests wait more than they compute: for processes, and for time limits."""


def pytest_configure(config: pytest.Config) -> None:
    """Processes are forked from servers that all workers share."""
    config.add_cleanup(begin_session())


def _engine_of(item: pytest.Item) -> str | None:
    """The real engine that a test runs, or imports; None for those that run both."""
    kinds = [kind for kind in ("vllm", "sglang") if item.get_closest_marker(kind)]
    return kinds[0] if len(kinds) == 1 else None


def _weight(item: pytest.Item) -> int:
    """0 for the files that take longest: a worker must not begin one when the others are done."""
    if _engine_of(item) is not None:
        return 0
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


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names a test after the beginning of a long text: all of it may have 100,000 signs."""
    return f"{val[:8]}...{len(val)}" if isinstance(val, str) and len(val) > 120 else None


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Give pytest-xdist whole files (`_in_order`), and all of one engine to one worker.

    Of those, the one that kills the engine of the others comes last.

    Tests of one file share engines and runs, so they belong to one process. Tests of vLLM are one
    group, those of SGLang another: the two are about as long, and each begins at once. What
    imports an engine does so once for all of its group, also for the engines that a file has for
    itself, which are forked from it (`fork_server` of vLLM, `forked_sglang`).
    """
    import torch  # not by pytest-xdist's own process, which collects nothing

    if "peers" not in config.option.markexpr:  # their libraries are `make test-peers`'s
        peers = [item for item in items if item.get_closest_marker("peers") is not None]
        items[:] = [item for item in items if item not in peers]
        config.hook.pytest_deselected(items=peers)
    torch.set_num_threads(1)  # a second has a busy core, and the first one spins until it is there
    weights = dict[Path, int]()
    for item in items:
        weights[item.path] = min(weights.get(item.path, _LIGHT), _weight(item))
    place = {file: i for i, file in enumerate(_in_order(weights, Path(__file__).parent))}
    items.sort(key=lambda item: place[item.path])
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_engine_of(item) or str(item.path)))
    yield
    # pytest has brought together what shares a parameter of a session's fixture.
    items.sort(key=lambda item: item.path.stem == _ENDS_THE_ENGINE)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """From its end on the garbage collector looks only at what tests make.

    pytest attaches two handlers to each logger that does not propagate, three times for each test:
    torch has fifty.
    """
    try:
        return (yield)
    finally:
        for name in logging.root.manager.loggerDict:
            if name.startswith("torch.") and name != "torch.__trace":
                logging.getLogger(name).propagate = True
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """pytest collects garbage ten times more, which takes a second each.

    Triton's binding is unfrozen at the end: it reports the types of modules that outlive Python as
    leaked.
    """
    gc.collect()
    gc.freeze()
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random Qwen3: 10 tokens, 2 layers, tied embeddings."""
    return str(save(make_qwen3(), tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """What a command that ran in this process has set up logs to a file that is closed by then.

    And its files are private.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    os.umask(umask := os.umask(0o077))
    yield
    os.umask(umask)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random Llama: 10 tokens, 2 layers, separate output embeddings."""
    return str(save(make_llama(), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def served_by_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `served_engine.Served`, started once for all modules that ask for it.

    It is short of KV: 72 blocks of 128 tokens, where 32 responses of 390 tokens would need 128. So
    vLLM preempts. Prompts longer than 128 tokens are taken in by parts. `test_remote_process_death`
    kills it.
    """
    from served_vllm import serving

    path = tmp_path_factory.mktemp("vllm-model")
    with serving(path, kv_cache_gib=0.0044, max_prefill_tokens=128) as running:
        yield running


@pytest.fixture(scope="session")
def served_by_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As `served_by_vllm`, with 9,200 tokens, where 32 responses of 390 would need 12,480."""
    from served_sglang import serving

    path = tmp_path_factory.mktemp("sglang-model")
    with serving(path, kv_cache_gib=0.0044, max_prefill_tokens=128) as running:
        yield running


@pytest.fixture
def served(served_by_vllm: Any) -> Any:
    """VLLM. Tests of tests/engine/remote get every engine."""
    return served_by_vllm


@pytest.fixture
def _forked_runs() -> Iterator[None]:
    """Runs and parts of benchmarks are forked from a process that has imported torch."""
    from forked_runs import forking

    with forking():
        yield
