"""Our part of SGLang's scheduler process, spoken to by messages, with any arguments of SGLang's.

The engine's own client starts SGLang as its settings say. What they do not offer on a CPU
(overlapping steps, several ranks) is reached here.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked_sglang
import msgspec
import numpy as np
import zmq
from served_sglang import FAULTY, SUPPORT, sglang_python

from asyncrl.engine.protocol import GenerateRequest
from asyncrl.engine.remote.extras import DrafterSettings, RequestExtra, ScoreColumns
from asyncrl.engine.sglang.messages import (
    AddRequest,
    Answer,
    Call,
    End,
    Outputs,
    Ready,
    ToClient,
    ToWorker,
    WorkerSettings,
)
from asyncrl.engine.sglang.worker.plugin import CPU_VARIABLES, MARK_VARIABLE

TOP_K = 4
_READY_SECONDS, _MESSAGE_SECONDS = 300, 60
_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_total_tokens": 4096,
    "max_running_requests": 24,
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "disable_priority_preemption": True,
    "disable_cuda_graph": True,
    "page_size": 1,
    "log_level": "warning",
}


@dataclass
class Reports:
    """What has come."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By ticket."""
    lists: dict[int, list[list[int]]] = field(default_factory=dict)
    """By ticket: the K most probable tokens at each place."""
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    """By id: of scored tokens."""
    ends: dict[str, End] = field(default_factory=dict)
    """By id."""
    versions: list[int] = field(default_factory=list)
    """Of the steps, in order."""
    accepted: int = 0
    """Drafts, since the start."""

    def take(self, message: Outputs) -> None:
        """Add a message; tokens and scores of a request come before its end."""
        self.accepted = message.gauges.accepted
        self.versions += [step.policy_version for step in message.steps]
        for step in message.steps:
            tickets = np.frombuffer(step.tickets, "<i8").tolist()
            rows = np.frombuffer(step.ids, "<i4").reshape(-1, step.width).tolist()
            for ticket, (token, *listed) in zip(tickets, rows, strict=True):
                self.tokens.setdefault(ticket, []).append(token)
                self.lists.setdefault(ticket, []).append(listed)
        for scored in message.scored:
            assert scored.request_id not in self.ends
            table = np.frombuffer(scored.logprobs, "<f4").reshape(-1, scored.width)
            self.logprobs[scored.request_id] = table[:, ScoreColumns(TOP_K).own].tolist()
        for end in message.ends:
            assert end.request_id not in self.ends
            self.ends[end.request_id] = end


class RawSglang:
    """A running worker and what it has reported."""

    def __init__(self, process: forked_sglang.Popen, log: Path, push: Any, pull: Any) -> None:
        self.reports = Reports()
        self._process, self._log = process, log
        self._push, self._pull = push, pull
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self._calls = 0
        self.salt = "the first weights"

    def send(self, message: ToWorker) -> None:
        """Send a message."""
        self._push.send(msgspec.msgpack.encode(message))

    def add(self, request_id: str, request: GenerateRequest, ticket: int, **extra: Any) -> None:
        """Have it generate, or score the last `scored` tokens of the prompt."""
        sampling = request.sampling
        fields = RequestExtra(
            seed=sampling.seed or 0,
            top_k=sampling.top_k,
            top_k_logprobs=TOP_K,
            ticket=ticket,
            **extra,
        )
        self.send(
            AddRequest(
                request_id,
                request.prompt_tokens.astype("<i4").tobytes(),
                0 if fields.scored else sampling.max_tokens,
                sampling.temperature,
                sampling.top_p,
                list(sampling.stop_tokens),
                request.priority,
                self.salt,
                fields.to_plain(),
            )
        )

    def receive(self, seconds: float = _MESSAGE_SECONDS) -> ToClient:
        """The next message."""
        waited = 0.0
        while not self._pull.poll(200):
            waited += 0.2
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert waited < seconds, f"no message for {seconds} s"
        message: ToClient = self._decoder.decode(self._pull.recv())
        if isinstance(message, Outputs):
            self.reports.take(message)
        return message

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker; its result."""
        self._calls += 1
        self.send(Call(self._calls, method, list(arguments)))
        while not isinstance(answer := self.receive(), Answer):
            pass
        assert answer.number == self._calls
        assert not answer.error, answer.error
        return answer.result

    def is_silent(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        return not self._pull.poll(1000 * seconds)

    def drain(self) -> None:
        """Take what has come."""
        while self._pull.poll(0):
            self.receive()

    def wait_for(self, request_ids: Sequence[str]) -> None:
        """Wait for the ends of requests."""
        while not self.reports.ends.keys() >= set(request_ids):
            self.receive()


@contextmanager
def serving(
    folder: Path,
    model_path: str,
    environment: dict[str, str],
    drafting: DrafterSettings | None = None,
    **arguments: Any,
) -> Iterator[RawSglang]:
    """A worker in SGLang, started with these arguments of `ServerArgs`."""
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    addresses = [f"ipc://{folder / name}" for name in ("requests", "outputs")]
    for socket, address in zip((push, pull), addresses, strict=True):
        socket.linger = 0
        socket.bind(address)
    settings = WorkerSettings(
        requests=addresses[0],
        outputs=addresses[1],
        parent=os.getpid(),
        top_k=TOP_K,
        logits_bytes=1 << 12,  # several slabs
        stage_on_device=False,
        steps_per_message=3,
        drafting=drafting,
    )
    variables = os.environ | settings.to_environment()
    variables |= CPU_VARIABLES | {
        MARK_VARIABLE: "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), SUPPORT]),
    }
    log = folder / "log"
    with log.open("wb") as written:
        process = forked_sglang.Popen(
            [
                sglang_python(),
                "-W",
                "ignore",
                "-m",
                FAULTY,
                "raw",
                json.dumps(_ARGUMENTS | {"model_path": model_path} | arguments),
                str(folder),
            ],
            env=variables | environment,
            stdout=written,
            stderr=forked_sglang.STDOUT,
            start_new_session=True,
        )
    try:
        running = RawSglang(process, log, push, pull)
        assert isinstance(running.receive(_READY_SECONDS), Ready)
        yield running
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        context.destroy(linger=0)
