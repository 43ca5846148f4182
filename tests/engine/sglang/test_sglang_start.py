"""How SGLang is started: its interpreter, its arguments, its environment. Runs no SGLang."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineStartError
from asyncrl.engine.factory import create_engine
from asyncrl.engine.sglang.client.engine import server_settings, worker_settings
from asyncrl.engine.sglang.client.process import SglangFolder, environment_of
from asyncrl.engine.sglang.config import SGLANG_VERSION, SglangConfig, check_interpreter, path_of
from asyncrl.engine.sglang.messages import CPU_ATTENTION, ServerSettings, WorkerSettings
from asyncrl.engine.sglang.worker.main import Ranks, server_arguments
from asyncrl.engine.vllm.client.process import folder_for_sockets

GOOD = {
    "sglang": SGLANG_VERSION,
    "asyncrl": "0.1.0",
    **dict.fromkeys(("torch", "numba", "msgspec", "pyzmq", "pydantic", "transformers"), "1"),
}


def interpreter(
    folder: Path, says: dict[str, Any] | str, python: tuple[int, int] = (3, 11)
) -> SglangConfig:
    """A program that answers as an interpreter with these versions."""
    path = folder / "python"
    answer = says if isinstance(says, str) else f"echo '{json.dumps([python, says])}'"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return SglangConfig(python=str(path))


def test_a_fitting_interpreter(tmp_path: Path) -> None:
    versions = check_interpreter(interpreter(tmp_path, GOOD))
    assert versions == f"python 3.11, sglang {SGLANG_VERSION}, torch 1"


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (GOOD | {"sglang": "0.4.1"}, f"has sglang 0.4.1; {SGLANG_VERSION} is needed: `make setup"),
        ({}, f"does not have sglang; {SGLANG_VERSION} is needed"),
        ({k: v for k, v in GOOD.items() if k != "numba"}, "lacks numba, which asyncrl's part"),
        (GOOD | {"asyncrl": "0.0.9"}, r"has asyncrl 0\.0\.9, but this is asyncrl 0\.1\.0"),
        ("echo 'Unknown option: -P' >&2; exit 2", "not a working Python 3.11: Unknown option: -P"),
        ("echo hello", "is not a working Python interpreter"),
    ],
)
def test_an_interpreter_that_does_not_fit(
    tmp_path: Path, says: dict[str, Any] | str, message: str
) -> None:
    with pytest.raises(EngineStartError, match=message) as refused:
        check_interpreter(interpreter(tmp_path, says))
    assert str(refused.value).startswith(f"engine.sglang.python: {tmp_path}")


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"is Python 3\.10; asyncrl needs 3\.11"):
        check_interpreter(interpreter(tmp_path, GOOD, (3, 10)))


def test_no_interpreter_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert path_of(SglangConfig()) == ".venv-sglang/bin/python"
    with pytest.raises(EngineStartError, match=r"does not exist.*`make setup-sglang`"):
        create_engine(EngineConfig(kind="sglang"), "x", cache_config=CacheConfig(), seed=0)


@pytest.mark.parametrize(("letters", "too_long"), [("a" * 20, False), ("ä" * 40, True)])
def test_sockets_of_engines_do_not_lie_below_a_long_tmpdir(
    letters: str, too_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", suffix=letters) as long:
        monkeypatch.setattr(tempfile, "tempdir", long)
        folder = SglangFolder("ERROR")
        assert folder.path.is_relative_to(long) != too_long
        assert len(os.fsencode(folder.path)) <= 80
        folder.remove()
        assert folder_for_sockets() == ({"VLLM_RPC_BASE_PATH": "/tmp"} if too_long else {})  # noqa: S108
        monkeypatch.undo()


def settings(config: EngineConfig, tmp_path: Path, **cache: Any) -> ServerSettings:
    folder = SglangFolder("ERROR")
    try:
        return server_settings(config, "model", CacheConfig(**cache), 7, folder)
    finally:
        folder.remove()


def test_the_arguments_of_sglang_on_a_cpu_and_on_a_gpu(tmp_path: Path) -> None:
    config = EngineConfig(kind="sglang", slots=5, max_model_len=300)
    ours = settings(config, tmp_path, max_draft_tokens=8)
    gpu = server_arguments(ours, on_cpu=False)
    assert (gpu["device"], gpu["dtype"], gpu["max_running_requests"]) == ("cuda", "bfloat16", 5)
    assert (gpu["chunked_prefill_size"], gpu["max_prefill_tokens"]) == (4096, 4096)
    assert gpu["context_length"] >= 300 + 8 + 6
    assert "sampling_backend" not in gpu  # the scheduler replaces the sampler itself
    assert gpu["page_size"] == 1
    assert (gpu["speculative_algorithm"], gpu["speculative_num_draft_tokens"]) == ("ASYNCRL", 9)
    assert "max_total_tokens" not in gpu
    assert "attention_backend" not in gpu
    assert (gpu["enable_fp32_lm_head"], gpu["enable_deterministic_inference"]) == (True, False)
    plain = server_arguments(settings(config, tmp_path, enabled=False), on_cpu=False)
    assert "speculative_algorithm" not in plain


def test_sglang_is_told_how_logits_and_batches_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_the_model(monkeypatch)
    asked = EngineConfig(kind="sglang", logits_dtype="model", batch_invariant=True)
    ours = settings(asked, tmp_path)
    gpu = server_arguments(ours, on_cpu=False)
    assert (gpu["enable_fp32_lm_head"], gpu["enable_deterministic_inference"]) == (False, True)
    with pytest.raises(ValueError, match="needs a GPU, and SGLang runs on the CPU"):
        server_arguments(ours, on_cpu=True)
    plain = server_arguments(settings(EngineConfig(kind="sglang"), tmp_path), on_cpu=True)
    assert not plain["enable_fp32_lm_head"]


@pytest.mark.parametrize("drafts", [True, False])
def test_on_a_cpu_the_attention_is_ours_with_drafts_and_without(
    tmp_path: Path, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own computes a turn's new tokens as a square over all tokens before."""
    know_the_model(monkeypatch)
    ours = settings(EngineConfig(kind="sglang"), tmp_path, enabled=drafts)
    assert server_arguments(ours, on_cpu=True)["attention_backend"] == CPU_ATTENTION


def know_the_model(monkeypatch: pytest.MonkeyPatch, kv_bytes: int = 1 << 10) -> None:
    """Its KV has so many bytes a token, without SGLang, which would read that from its files."""
    start = ModuleType("asyncrl.engine.sglang.worker.start")
    start.kv_bytes = lambda *_: kv_bytes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, start.__name__, start)


def test_what_the_scheduler_process_is_told_survives_the_environment() -> None:
    folder = SglangFolder("ERROR")
    try:
        config = EngineConfig(kind="sglang", top_k_logprobs=3)
        told = worker_settings(config, CacheConfig(max_draft_tokens=4), CachePlace(), folder)
        assert WorkerSettings.from_environment(told.to_environment()) == told
        assert (told.top_k, told.steps_per_message, told.parent) == (3, 4, os.getpid())
        assert told.drafting is not None
        assert told.drafting.cache["max_draft_tokens"] == 4
        disabled = worker_settings(config, CacheConfig(enabled=False), CachePlace(), folder)
        assert disabled.drafting is None
    finally:
        folder.remove()


def test_the_environment_has_our_source_tree_and_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    folder = SglangFolder("ERROR")
    try:
        environment = environment_of(EngineConfig(threads=3), folder)
        ranks = {"kind": "sglang", "sglang": {"tensor_parallel_size": 4}}
        of_a_rank = environment_of(EngineConfig.model_validate(ranks | {"threads": 8}), folder)
        of_few = environment_of(EngineConfig.model_validate(ranks | {"threads": 3}), folder)
    finally:
        folder.remove()
    here = str(Path(sys.modules["asyncrl"].__file__ or "").parents[1])
    assert environment["PYTHONPATH"] == os.pathsep.join([here, "/elsewhere"])
    assert environment["OMP_NUM_THREADS"] == "3"
    assert of_a_rank["OMP_NUM_THREADS"] == of_a_rank["MKL_NUM_THREADS"] == "2"
    assert of_few["OMP_NUM_THREADS"] == "1"
    assert environment["SGLANG_LOGGING_CONFIG_PATH"].startswith(str(folder.path))


def test_a_socket_has_a_short_path_whatever_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = SglangFolder("ERROR")
    try:
        assert len(folder.requests) < 107
        assert list(deep.iterdir()) == []
    finally:
        folder.remove()
    assert not folder.path.exists()


def test_kv_memory_for_less_than_what_sglang_reserves_for_one_request_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_the_model(monkeypatch, 1 << 20)
    config = EngineConfig(kind="sglang", max_model_len=1000, sglang=SglangConfig(kv_cache_gib=1.0))
    fits = settings(config, tmp_path, max_draft_tokens=2)
    assert fits.max_model_len == 1018  # SGLang reserves 4 tokens more
    assert server_arguments(fits, on_cpu=True)["max_total_tokens"] == 1024
    with pytest.raises(
        ValueError, match="holds the KV of 1024 tokens, and one request may need 1034"
    ):
        server_arguments(settings(config, tmp_path, max_draft_tokens=8), on_cpu=True)


class Rank:
    """A scheduler process that ended with this exit code, or runs."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode

    def join(self, timeout: float | None = None) -> None:
        pass

    def kill(self) -> None:
        pass


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ([None, None], ["SGLang's watchdog ended it", "a step took longer than 120 s"]),
        ([None, -9], ["rank 1 was killed by signal 9"]),
    ],
)
def test_what_a_failure_of_sglang_is_called(
    codes: list[int | None],
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", ends.append)
    ranks = Ranks([Rank(code) for code in codes], lambda: None, step_seconds=120)
    ranks._on_failure(signal.SIGQUIT, None)
    text = capsys.readouterr().err
    assert all(one in text for one in said)
    assert ("watchdog" in text) == (codes == [None, None])
    assert ends == [1]
