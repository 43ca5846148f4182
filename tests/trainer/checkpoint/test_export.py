"""An exported model is the one that was trained. The tests of vLLM generate with one, too."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner
from whole_checkpoints import WEIGHTS, flip

from asyncrl.cli.app import app
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.tasks import exported_model
from asyncrl.tasks.config import ModelConfig
from asyncrl.tasks.model import resolve_model
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import CheckpointError, CheckpointUnwritable
from asyncrl.trainer.checkpoint import export as exports
from asyncrl.trainer.checkpoint import export_files
from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.checkpoint.format import tensors as checkpoint_tensors
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.learner import Learner
from asyncrl.wire.weights.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("_checked_once")

ModelPath = Callable[[str], str]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests' small models have several."""
    monkeypatch.setattr(exports, "_FILE_SIZE", "20KB")
    monkeypatch.setattr(checkpoint_tensors, "_FILE_BYTES", 10_000)


@pytest.fixture
def run(tmp_path: Path, model_path: ModelPath, group_of: Callable[..., list[Trajectory]]) -> Path:
    """A run with a checkpoint of step 1, of which weights were published as bfloat16."""
    _train(tmp_path / "run", model_path("qwen3"), group_of)
    return tmp_path / "run"


def _train(run: Path, model: str, group_of: Callable[..., list[Trajectory]]) -> Learner:
    learner = Learner(TrainerConfig(device="cpu", learning_rate=0.01), model, group_size=4, seed=1)
    learner.add_group(group_of(0, np.random.default_rng(1)), np.arange(4, dtype=np.float32))
    learner.step()
    learner.fingerprint(torch.bfloat16)
    learner.save(path_of(run / "checkpoints", 1))
    (run / "config.yaml").write_text("run: {name: run}\n")
    return learner


@pytest.mark.parametrize("name", ["qwen3", "llama", "granite", "gpt2"])
def test_an_exported_model_is_the_published_one_and_generates_like_it(
    name: str,
    model_path: ModelPath,
    group_of: Callable[..., list[Trajectory]],
    tmp_path: Path,
) -> None:
    learner = _train(tmp_path / "run", model_path(name), group_of)
    export(path_of(tmp_path / "run" / "checkpoints", 1), tmp_path / "exported")
    assert len(list((tmp_path / "exported").glob("model-*.safetensors"))) > 1
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    assert plain.dtype == torch.float32
    for dtype in (torch.float32, torch.bfloat16):
        found = fingerprint(plain.state_dict(keep_vars=True).items(), dtype)
        assert found == learner.fingerprint(dtype)
    live = learner.policy.model
    live.set_attn_implementation("eager")
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    prompt = torch.tensor([[3, 4, 5, 6]])
    written, drawn = (one.generate(prompt, greedy) for one in (plain.eval(), live))
    assert torch.equal(written, drawn)


def test_weights_that_were_not_those_of_the_engines_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = exports._read

    def wrong(*arguments: object) -> torch.Tensor:
        tensor = read(*arguments)
        tensor.view(-1)[-1] += 1
        return tensor

    monkeypatch.setattr(exports, "_read", wrong)
    with pytest.raises(CheckpointError, match=r"are not those that the run's engines received"):
        export(path_of(run / "checkpoints", 1), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_asyncrl_export_replaces_nothing_and_says_what_it_wrote(run: Path, tmp_path: Path) -> None:
    def asyncrl(*words: object) -> str:
        done = CliRunner().invoke(app, ["export", str(run), *map(str, words)])
        return done.output if done.exception is None else str(done.exception)

    place = run / "exports" / "step-000001"
    assert f"exported: {place} (step 1, float32, " in (said := asyncrl())
    assert re.search(r"[1-9]\d* KiB\)", said), "not 0.00 GB"
    assert f"already exported: {place}" in asyncrl("--step", 1)
    assert (place / "tokenizer.json").read_text() == '{"kept": true}'
    modes = {path.stat().st_mode & 0o777 for path in (place, *place.iterdir())}
    assert modes == {0o700, 0o600}, "others do not read the model"
    assert "(step 1, bfloat16, " in asyncrl("--dtype", "bfloat16")
    small = AutoModelForCausalLM.from_pretrained(f"{place}-bfloat16", dtype="auto")
    assert small.dtype == torch.bfloat16
    assert "intact checkpoints: 1" in asyncrl("--step", 7)
    assert f"{tmp_path} exists and is never replaced" in asyncrl("--output", tmp_path)
    assert "exported: " in asyncrl("--output", tmp_path / "given")
    flip(next(place.glob("model-*.safetensors")))
    assert f"remove or rename {place}" in asyncrl()
    flip(path_of(run / "checkpoints", 1) / WEIGHTS)
    assert f"{WEIGHTS} is damaged" in asyncrl("--output", tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "run"]


def test_a_checkpoint_is_a_model_to_start_from(run: Path) -> None:
    checkpoint = path_of(run / "checkpoints", 1)
    for path in (checkpoint, checkpoint / "model"):
        model = resolve_model(ModelConfig(path=str(path)), None)
        assert model == str(run / "exports" / "step-000001")
    (run / "exports" / "step-000001" / export_files.RECORD).write_text("{}")
    with pytest.raises(UserError, match=r"model\.path: .* remove or rename it"):
        resolve_model(ModelConfig(path=str(checkpoint)), None)


def test_a_checkpoint_of_an_earlier_format_is_refused_in_one_sentence(run: Path) -> None:
    checkpoint = path_of(run / "checkpoints", 1)
    (checkpoint / "manifest.json").write_text('{"format": 2}')
    with pytest.raises(UserError) as refused:
        exported_model.export_run(run, 1, None, None)
    assert f"--set model.path={checkpoint / 'model'}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_is_left_of_an_export_that_the_disk_does_not_take(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exports, "sync", full)
    with pytest.raises(CheckpointUnwritable, match=r"exported cannot be written: No space left"):
        export(path_of(run / "checkpoints", 1), tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


class _Hub(http.server.ThreadingHTTPServer):
    """As much of the hub as an upload asks for: files as text, weights through LFS."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.token, self.is_private, self.status = "hf_mine", True, 200
        self.asked: list[str] = []
        self.created: dict[str, Any] = {}
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}


class _Answer(http.server.BaseHTTPRequestHandler):
    server: _Hub

    def do_GET(self) -> None:
        answer = {"id": "me/mine", "private": self.server.is_private}
        self._answer(answer, 200 if self.server.status == 200 else 404)

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        hub.asked.append(self.path)
        if self.headers["Authorization"] != f"Bearer {hub.token}":
            self._answer({"error": "Invalid token"}, 401)
        elif self.path == "/api/repos/create":
            hub.created = json.loads(body)
            self._answer({"url": f"{hub.address}/me/mine"}, hub.status)
        elif self.path == "/api/models/me/mine/preupload/main":
            names = [one["path"] for one in json.loads(body)["files"]]
            kinds = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
            rows = zip(names, kinds, strict=True)
            files = [{"path": n, "uploadMode": k, "shouldIgnore": False} for n, k in rows]
            self._answer({"files": files})
        elif self.path == "/me/mine.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{hub.address}/objects/{one['oid']}"}}
            self._answer({"objects": objects, "transfer": "basic"})
        else:
            assert self.path == "/api/models/me/mine/commit/main"
            for line in body.splitlines():
                value = json.loads(line)["value"]
                if "oid" in value:
                    hub.files[value["path"]] = hub.objects[value["oid"]]
                    assert hashlib.sha256(hub.objects[value["oid"]]).hexdigest() == value["oid"]
                elif "content" in value:
                    hub.files[value["path"]] = base64.b64decode(value["content"])
            self._answer({"commitUrl": f"{hub.address}/me/mine/commit/abc", "commitOid": "abc"})

    def _body(self) -> bytes:
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, value: object, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Hub]:
    with _Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.address)  # HF_ENDPOINT, read at import
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server
        server.shutdown()
        thread.join()


def _push(run: Path, name: str, *words: str) -> str:
    command = ["export", str(run), "--push-to-hub", name, *words]
    done = CliRunner().invoke(app, command)
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # the hub's library
def test_an_export_is_pushed_to_a_hub_byte_for_byte(run: Path, hub: _Hub) -> None:
    assert f"uploaded: {hub.address}/me/mine/commit/abc" in _push(run, "me/mine", "--private")
    assert hub.created == {"organization": "me", "name": "mine", "visibility": "private"} | {
        key: hub.created[key] for key in hub.created if key == "type"
    }
    place = run / "exports" / "step-000001"
    written = {path.name: path.read_bytes() for path in place.iterdir()}
    assert "/" in json.loads(written.pop(export_files.RECORD))["checkpoint"], "of this machine"
    assert hub.files == written
    assert len(hub.objects) > 1
    hub.is_private = False
    with pytest.raises(UserError, match="me/mine is there already and is public, so nothing was"):
        _push(run, "me/mine", "--private")
    hub.asked.clear()
    assert "already exported: " in _push(run, "me/mine")
    assert "visibility" not in hub.created
    assert hub.asked[-1] == "/api/models/me/mine/commit/main"


def test_what_cannot_be_pushed_is_one_paragraph(
    run: Path, hub: _Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = run / "exports" / "step-000001"

    def refused(kind: type[AsyncrlError], name: str = "me/mine") -> str:
        with pytest.raises(AsyncrlError) as caught:
            _push(run, name)
        assert type(caught.value) is kind
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for name in ("mine", "me/mine/now", "/mine", "me/", "me/a--b", "me/mine.git"):
        assert f"--push-to-hub: {name!r} is not a hub repository" in refused(UserError, name)
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token of the hub; set HF_TOKEN" in refused(UserError)
    assert not place.exists(), "nothing was written"
    assert not hub.asked
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    for hub.status in (401, 403):  # of a token that is unknown, and of one that may not write
        said = refused(UserError)
        assert f"the export is in {place}, but was not uploaded to me/mine at {hub.address}" in said
        assert str(hub.status) in said
        assert "hf_" not in said
        monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    said = refused(AsyncrlError)
    assert f"the export is in {place}, but was not uploaded to me/mine at http://127.0.0" in said
    assert said.endswith(". The same command tries again")
    assert (place / "config.json").is_file()
