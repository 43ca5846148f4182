"""Ids of the hub, with and without a hub that answers."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from asyncrl.errors import DataError, ModelError
from asyncrl.tasks.config import ModelConfig, TaskConfig
from asyncrl.tasks.data import hub
from asyncrl.tasks.loading import dataset_questions
from asyncrl.tasks.model import builtin_tokenizer, resolve_model


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.unusable.cache_clear()
    yield
    hub.unusable.cache_clear()


def test_an_id_is_left_alone_if_the_hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    path = resolve_model(ModelConfig(path="Qwen/Qwen3-0.6B"), None)
    thread.join(60)
    server.server_close()
    assert path == "Qwen/Qwen3-0.6B", "501 is an answer too"
    assert "HF_HUB_OFFLINE" not in os.environ


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(ModelError) as caught:
        resolve_model(ModelConfig(path="nobody/nothing"), None)
    message = str(caught.value)
    assert message.startswith("model.path: 'nobody/nothing' is neither a local model directory")
    assert f"http://127.0.0.1:{port} cannot be reached (" in message
    assert "refused" in message
    assert os.environ["HF_HUB_OFFLINE"] == "1", "its children do not try again"


def test_an_endpoint_that_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:abc")
    assert "nonnumeric port" in (hub.unusable() or "")


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        assert "cannot be reached" in (hub.unusable() or "")
        assert time.monotonic() - began < 30, "bounded"


def test_a_dataset_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = TaskConfig(kind="dataset", path="nobody/no-questions-here")
    with pytest.raises(DataError) as caught:
        dataset_questions(config, seed=0)
    message = str(caught.value)
    assert message.startswith("task.path: 'nobody/no-questions-here' is neither a local file or")
    assert "HF_HUB_OFFLINE is set" in message
    assert "\n" not in message


def test_a_mistyped_folder_that_could_be_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for typed in ("modles/llama", "models/lama"):
        with pytest.raises(ModelError, match=r"Did you mean models/llama\?"):
            resolve_model(ModelConfig(path=typed), None)


def test_a_cached_model_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "models--me--mine"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(file_download, "HF_HUB_CACHE", str(tmp_path), raising=False)
    with pytest.raises(ModelError, match="does not have a tokenizer"):
        resolve_model(ModelConfig(path="me/mine"), None)
    builtin_tokenizer().save_pretrained(snapshot)
    (snapshot / "model.safetensors").write_bytes(b"")
    assert resolve_model(ModelConfig(path="me/mine"), None) == str(snapshot)
    shutil.rmtree(repository)
    with pytest.raises(ModelError, match="nor in the hub's cache"):
        resolve_model(ModelConfig(path="me/mine"), None)
