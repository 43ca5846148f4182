"""The settings and messages of the generator's process for SGLang's processes.

Two one-way sockets under a folder that only this user may enter. A frame is one msgpack message;
arrays travel as little-endian bytes. Nothing is pickled, and SGLang's own messages do not cross:
the worker makes SGLang's requests from ours.

`asyncrl.engine.sglang.worker.main` gets a `ServerSettings` on its command line. SGLang starts its
scheduler processes and passes them nothing of ours, so `WorkerSettings` travel in the environment,
which they inherit.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.remote.extras import DrafterSettings, RemoteWorker

VARIABLE = "ASYNCRL_SGLANG_SETTINGS"
"""Environment variable with a `WorkerSettings` as JSON."""
CPU_ATTENTION = "asyncrl_torch"
"""Name of `worker.drafts.speculation.TreeAttention` in SGLang's `attention_backend`."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and settings of our part of the scheduler process."""

    requests: str
    """Address of the client's PUSH socket, from which `ToWorker` messages come. The client binds
    both sockets before it starts the process; rank 0 connects."""
    outputs: str
    """Address of the client's PULL socket, to which `ToClient` messages go."""
    parent: int
    """Id of the generator's process. SGLang's processes exit when it has ended."""
    top_k: int
    """K of the reported lists (engine.top_k_logprobs); 0: none is reported."""
    logits_bytes: int
    """Memory that drawing and scoring may hold at once (engine.logits_mib)."""
    stage_on_device: bool
    """True if new weights wait on the model's device (engine.weight_staging)."""
    steps_per_message: int
    drafting: DrafterSettings | None = None

    def to_environment(self) -> dict[str, str]:
        """Return the variable that SGLang's processes read."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read what `to_environment` made, or raise KeyError."""
        return msgspec.json.decode(environment[VARIABLE], type=cls)


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings from which SGLang's `ServerArgs` are made."""

    folder: str
    """Private to this engine; removed when its generator has ended."""
    model_path: str
    seed: int
    max_model_len: int
    """Most tokens of a request, including room for drafts."""
    draft_tokens: int
    """Most draft tokens of a request in a step; 0: no speculation."""
    config: dict[str, Any]
    """An `EngineConfig` as JSON."""

    @property
    def engine(self) -> EngineConfig:
        """The settings of the engine, or ValueError."""
        return EngineConfig.model_validate(self.config)


class SglangWorker(RemoteWorker):
    """The calls, by the names of these methods. All ranks execute them; rank 0 answers."""

    def asyncrl_pause(self) -> None:
        """Run no step from now on, after sending all that was generated."""
        raise NotImplementedError

    def asyncrl_resume(self) -> None:
        """Run steps again."""
        raise NotImplementedError


class AddRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Generate or score."""

    request_id: str
    """Never used twice, and of the same length as all others: SGLang ends requests by prefix."""
    tokens: bytes
    """`[n]` int32, the tokens to continue or score."""
    max_tokens: int
    """0 scores only."""
    temperature: float
    top_p: float
    stop_tokens: list[int]
    priority: int
    """Lower is served first; ties by arrival."""
    salt: str
    """Prefix KV is shared only among requests of the same salt, so of the same weights."""
    extra: dict[str, Any]
    """A `RequestExtra` as plain values; it has top-k, min-p and the seed."""


class EndRequests(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End requests before the next step, after reporting what was drawn; ended ones are ignored."""

    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call a method of the worker in all ranks, between two steps. It is answered by `Answer`."""

    number: int
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result of a call."""

    number: int
    result: Any = None
    error: str = ""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one step of the model: a `StepTable`."""

    policy_version: int
    width: int
    """1 + K."""
    ids: bytes
    """`[N, 1 + K]` int32"""
    logprobs: bytes
    """`[N, 1 + K]` float32"""
    tickets: bytes
    """`[N]` int64"""


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """The table of a scored request, with the columns of `ScoreColumns`."""

    request_id: str
    policy_version: int
    width: int
    ids: bytes
    """`[n, width]` int32"""
    logprobs: bytes
    """`[n, width]` float32"""


class End(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request; it is the last message about it."""

    request_id: str
    reason: Literal["stop", "length", "abort"]
    accepted: int = 0
    """Draft tokens accepted in all of its steps, those cut off at the end included."""
    error: str = ""
    """Why SGLang refused or lost it; "" otherwise."""


class Gauges(msgspec.Struct, frozen=True, array_like=True):
    """Counters since the start, and the state after the last step."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """0 to 1."""
    prefix_asked: int = 0
    """Context tokens of new requests."""
    prefix_found: int = 0
    """Those whose KV was found in the radix cache."""


class Outputs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Steps in order; the ends and scores come after their tokens."""

    steps: list[Step] = []
    scored: list[Scored] = []
    ends: list[End] = []
    gauges: Gauges = Gauges()


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker accepts requests from now on."""

    vocab_size: int
    pid: int


ToWorker = AddRequest | EndRequests | Call
ToClient = Outputs | Answer | Ready
