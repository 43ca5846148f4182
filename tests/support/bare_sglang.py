"""A model of SGLang's in one process: what becomes of its weights. Run by SGLang's interpreter.

python bare_sglang.py   prints a JSON object that `test_sglang_weights` judges
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sglang.worker.calls import WorkerCalls
from asyncrl.engine.weights import ModelShapes
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Fingerprint
from asyncrl.wire.weights.writer import published
from benchmarks.tiny_models import random_qwen3

EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
NORM, KEY = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"


def model_runner(path: str) -> Any:
    """SGLang's, as its own benchmark of one batch makes it (0.5.23, `benchmark/one_batch.py`)."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    arguments = ServerArgs(
        model_path=path,
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        skip_tokenizer_init=True,
        max_total_tokens=2048,
        max_running_requests=8,
        sampling_backend="pytorch",
    )
    arguments.resolve_once()
    ports = PortArgs.init_new(arguments)
    rank = one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    ranks = one_batch.SpawnRanks(world_rank=rank, gpu_id=0)
    one_batch.publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    with (
        patch.object(one_batch, "get_tokenizer", lambda *_, **__: None),
        patch.object(one_batch, "_TorchBenchRunner", lambda runner: runner),
    ):
        runner, _ = one_batch.load_model(arguments, ports, 0, 0)
    return runner


def scheduler_of(runner: Any) -> Any:
    """SGLang's bookkeeping of versions, over requests that are given."""
    from sglang.srt.managers.scheduler import Scheduler

    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        waiting_queue=[],
        chunked_req=None,
        hisparse_coordinator=None,
        running=[],
        advance=lambda _: None,
    )
    scheduler.collect_inflight_reqs = lambda: scheduler.running
    scheduler.record_weight_version_change = lambda new_version: (
        Scheduler.record_weight_version_change(scheduler, new_version)
    )
    return scheduler


class Running:
    """A request, as far as SGLang counts its tokens by version."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self.weight_version_events: list[Any] = []


class Weights:
    """Our calls, over a model runner.

    Args:
        runner: SGLang's.
        path: of its model.
    """

    def __init__(self, runner: Any, path: str) -> None:
        self.scheduler = scheduler_of(runner)
        self.calls = WorkerCalls(self.scheduler, Ranks(), on_device=False)
        self._shapes = ModelShapes.of_path(path).shapes

    def give(self, version: int, tensors: dict[str, torch.Tensor]) -> str:
        """Stage and install; why it was not copied."""
        with published(tensors.items(), version) as manifest:
            self.calls.asyncrl_begin_staging(msgspec.to_builtins(manifest))
            deadline = time.monotonic() + 60
            while (report := self.calls.asyncrl_staging())["state"] == "running":
                assert time.monotonic() < deadline
        assert report["state"] == "staged", report
        return self.calls.asyncrl_install(version)

    def differing(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Tensors of which the model holds something else."""
        self.calls.asyncrl_begin_fingerprint(self._shapes)
        while (found := self.calls.asyncrl_fingerprint()) is None:
            pass
        held, wanted = msgspec.convert(found, Fingerprint), fingerprint(tensors.items())
        return [name for name in tensors if held.tensors.get(name) != wanted.tensors[name]]


@contextmanager
def loading(model: Any, change: Callable[[Any, Any], Any]) -> Iterator[None]:
    """The model and its copies load what `change(module, tensors)` leaves of the tensors."""
    load = type(model).load_weights
    changed = lambda self, tensors: load(self, change(self, tensors))  # noqa: E731
    with patch.object(type(model), "load_weights", changed):
        yield


def of_a_mixture() -> dict[str, Any]:
    """The same questions about a model whose layers have four experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=8, hidden_size=32, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, num_experts=4, num_experts_per_tok=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        policy = Qwen3MoeForCausalLM(config)
        states.append(policy.state_dict())
    with tempfile.TemporaryDirectory() as path:
        policy.save_pretrained(path)
        runner = model_runner(path)
        weights = Weights(runner, path)
        found = {"differ": [weights.differing(states[1])], "why": []}
        for version in range(3):
            found["why"].append(weights.give(version, states[version % 2]))
            found["differ"].append(weights.differing(states[version % 2]))
        with torch.no_grad():
            runner.model.get_parameter("model.layers.1.mlp.experts.w13_weight")[2, 33, 5] += 1e-3
        found["one number"] = weights.differing(states[0])
    return found


def in_a_fork(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it returns: SGLang serves one model in a process, and is imported in this one."""
    from sglang.benchmark import one_batch  # noqa: F401

    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(call()).encode())
        except BaseException:  # noqa: BLE001 - the fork must not run on
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        said = told.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(said)
    return found


def main() -> None:
    found: dict[str, Any] = {"mixture": in_a_fork(of_a_mixture)}
    policies = [random_qwen3(seed, 8) for seed in range(3)]
    states = [policy.state_dict() for policy in policies]
    with tempfile.TemporaryDirectory() as path:
        policies[0].save_pretrained(path)
        runner = model_runner(path)
        weights = Weights(runner, path)
        found["differ at the start"] = weights.differing(states[0])
        request = Running()
        weights.scheduler.running = [request]
        found["copied"], found["differ after"] = [], []
        for version in (1, 2, 3):
            request.output_ids += [7] * version
            given = states[version % 3]
            why = weights.give(version, given)
            found["copied"].append([why, weights.calls._weights._twin is not None])
            found["differ after"].append(weights.differing(given))
        found["differs from another"] = weights.differing(states[1])
        found["spans"] = spans(request, 9)
        with torch.no_grad():
            qkv = runner.model.get_parameter("model.layers.1.self_attn.qkv_proj.weight")
            qkv[2 * 32 + 3, 5] += 1e-3  # after two query heads of 32
        found["one number"] = weights.differing(states[0])
        weights.give(4, states[0])  # those of its start, with which it is proved again

        def derive(module: Any, tensors: Any) -> Any:
            tensors = dict(tensors)
            module.model.norm.derived = 2 * tensors[NORM]
            return tensors.items()

        with loading(runner.model, derive):
            other = Weights(runner, path)
            found["derived"] = [other.give(version, states[version]) for version in (1, 2)]
            found["differ where derived"] = other.differing(states[2])
        with loading(runner.model, lambda _, tensors: ((n, t) for n, t in tensors if n != NORM)):
            try:
                Weights(runner, path).give(1, states[1])
            except WeightsError as error:
                found["skipped"] = str(error)
    print(json.dumps(found))


def spans(request: Running, tokens: int) -> list[tuple[str, int, int]]:
    """SGLang's own labels of a request's tokens."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    found = compute_weight_version_spans(
        request.weight_version_events,
        current_version=get_serving().weight_version,
        num_output_tokens=tokens,
    )
    return [(one.version, one.start, one.end) for one in found]


if __name__ == "__main__":
    main()
