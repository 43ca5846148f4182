"""Stands in for SGLang's processes: speaks our messages, generates nothing worth having.

Run in the place of `asyncrl.engine.sglang.worker.main` by this interpreter. What it does wrong is
said by the stop tokens of a request, or by `FAKE_SGLANG` in its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import numpy as np
import zmq

from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.engine.sglang.messages import (
    AddRequest,
    Answer,
    Call,
    End,
    EndRequests,
    Gauges,
    Outputs,
    Ready,
    Scored,
    Step,
    ToWorker,
    WorkerSettings,
)
from asyncrl.engine.sglang.worker.main import end_with

VOCAB = 10
DIE, HANG, GARBAGE, SHORT, ERROR = 1, 2, 3, 4, 5
"""Stop tokens of a request that has the worker do so."""


class Fake:
    """A worker: every request generates `max_tokens` tokens at once, and runs until it is ended if
    it has a stop token.
    """

    def __init__(self) -> None:
        settings = WorkerSettings.from_environment()
        context = zmq.Context()
        self.k = settings.top_k
        self.pull, self.push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.pull.connect(settings.requests)
        self.push.connect(settings.outputs)
        self.decoder: Any = msgspec.msgpack.Decoder(ToWorker)
        self.steps = 0
        self.version = 0

    def send(self, message: Any) -> None:
        self.push.send(msgspec.msgpack.encode(message))

    def run(self) -> None:
        self.send(Ready(VOCAB, os.getpid()))
        while True:
            message = self.decoder.decode(self.pull.recv())
            if isinstance(message, AddRequest):
                self.add(message)
            elif isinstance(message, EndRequests):
                self.send(Outputs(ends=[End(one, "abort") for one in message.request_ids]))
            else:
                self.call(message)

    def add(self, message: AddRequest) -> None:
        extra = RequestExtra.from_plain(message.extra)
        assert len(message.request_id) == 16
        stop = message.stop_tokens[0] if message.stop_tokens else 0
        if stop == DIE:
            print("the last words of a worker", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if stop == HANG:
            time.sleep(1000)
        if stop == GARBAGE:
            self.push.send(b"\x93not a message")
        if stop == ERROR:
            self.send(Outputs(ends=[End(message.request_id, "abort", error="too long")]))
        self.steps += 1
        width = 2 + self.k if extra.scored else 1 + self.k
        n = extra.scored or message.max_tokens
        ids = np.tile(np.arange(width, dtype="<i4"), (n, 1))
        logprobs = np.full((n, width), -1.0, "<f4")
        if extra.scored:
            ids[:, 1] = 0
            table = Scored(message.request_id, self.version, width, bytes(ids), bytes(logprobs))
            self.send(Outputs(scored=[table], gauges=self.gauges()))
            return
        tickets = bytes(np.full(n - (stop == SHORT), extra.ticket, "<i8"))
        step = Step(self.version, width, bytes(ids), bytes(logprobs), tickets)
        ends = [] if stop else [End(message.request_id, "length", accepted=n - 1)]
        self.send(Outputs(steps=[step], ends=ends, gauges=self.gauges()))

    def gauges(self) -> Gauges:
        return Gauges(steps=self.steps, drafted=7, accepted=5, running=1, kv_used=0.5)

    def call(self, message: Call) -> None:
        if message.method == "asyncrl_install":
            self.version = message.arguments[0]
        if message.method == "asyncrl_resume":
            self.send(Answer(message.number, error="it does not want to"))
            return
        result: Any = {"state": "staged"} if message.method == "asyncrl_staging" else None
        self.send(Answer(message.number, result))


def main() -> None:
    wrong = os.environ.get("FAKE_SGLANG")
    if wrong == "refuses":
        print("ValueError: it does not like this model", file=sys.stderr, flush=True)
        sys.exit(2)
    if wrong == "loads for ever":
        time.sleep(1000)
    end_with(int(sys.argv[2]), msgspec.json.decode(sys.argv[1])["folder"])
    rank = subprocess.Popen(["sleep", "1000"])  # as a scheduler process in the same session
    print(f"rank {rank.pid}", file=sys.stderr, flush=True)
    Fake().run()


if __name__ == "__main__":
    main()
