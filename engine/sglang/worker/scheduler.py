"""SGLang's scheduler, serving our client directly.

Rank 0 receives our messages, which SGLang broadcasts to the other ranks; each rank makes SGLang's
requests from them. Generated tokens go back as arrays, several steps in a message (`worker.steps`),
without SGLang's tokenizer and detokenizer processes.

Written against SGLang 0.5.23. Its `run_scheduler_process` instantiates the class that plug-ins have
put in place of `Scheduler`. Its model runner calls `sampler` for every step without drafts,
prefills included, after the output layer, so scoring happens there too.
"""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.scoring import Scorer
from asyncrl.engine.sampling.drawing import UNREPORTED_K
from asyncrl.engine.sampling.logits import warm_up as warm_up_drawing
from asyncrl.engine.sglang.messages import (
    AddRequest,
    Call,
    End,
    EndRequests,
    Gauges,
    Outputs,
    Ready,
    WorkerSettings,
)
from asyncrl.engine.sglang.worker.api import (
    AbortReq,
    ContinueGenerationReqInput,
    IdleSleeper,
    LogitsMetadata,
    LogitsProcessor,
    PauseGenerationReqInput,
    Req,
    Sampler,
    ScheduleBatch,
    Scheduler,
    TypeBasedDispatcher,
    get_parallel,
)
from asyncrl.engine.sglang.worker.calls import WorkerCalls, answer
from asyncrl.engine.sglang.worker.drafts.tree_drawing import TreeDrawing
from asyncrl.engine.sglang.worker.drawing import StepDrawing
from asyncrl.engine.sglang.worker.parts import (
    ClientReceiver,
    EndStreamer,
    Link,
    PrefillRequest,
    end_of,
    generate_input,
    isolated,
)
from asyncrl.engine.sglang.worker.requests import Requests, SchedulerBatch, entry_of
from asyncrl.engine.sglang.worker.steps import Outbox, Prefill, PrefillScoring, Reporting
from asyncrl.rollout.acceptance import warm_up_verification


class OutputLayer:
    """Computes logits of some hidden states that go into a `LogitsProcessor` (else TypeError)."""

    def __init__(self, model: torch.nn.Module) -> None:
        processors = [one for one in model.modules() if isinstance(one, LogitsProcessor)]
        if not processors:
            raise TypeError(
                f"{type(model).__name__} does not use SGLang's LogitsProcessor, so its kept tokens "
                "cannot be scored: use engine.kind: torch or vllm for this model"
            )
        self._processor = processors[0]
        self.scoring: PrefillScoring | None = None
        """Served from when it is set."""
        self._taken: tuple[torch.Tensor, Any, Any] | None = None
        self._processor.register_forward_pre_hook(self._take)

    def _take(self, _module: Any, arguments: tuple[Any, ...]) -> None:
        if self.scoring is not None and self.scoring.wanted:
            _, hidden, head, step, *_ = arguments
            self._taken = hidden, head, LogitsMetadata.from_forward_batch(step)

    def score(self) -> None:
        """Score what the last step took in, if required. Raises RuntimeError."""
        if self.scoring is None or not self.scoring.wanted:
            return
        if self._taken is None:
            raise RuntimeError(
                "SGLang ran a prefill without calling its output layer, so nothing can be scored. "
                "Start it with cuda_graph_backend_prefill=disabled"
            )
        self.scoring.compute(self._taken[0])
        self._taken = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[n, V]` for hidden states `[n, H]` of the running step; all ranks call it."""
        assert self._taken is not None  # noqa: S101 - only called by `score`
        _, head, metadata = self._taken
        found: torch.Tensor = self._processor._get_logits(  # noqa: SLF001
            hidden, head, metadata, use_logits_buffer=False
        )
        return found


class DrawingSampler(Sampler):
    """Draws for SGLang's model runner, in place of its sampler."""

    def __init__(self, drawing: StepDrawing, output_layer: OutputLayer) -> None:
        super().__init__()
        self._drawing = drawing
        self._output_layer = output_layer

    def forward(self, logits_output: Any, *_arguments: Any, **_named: Any) -> torch.Tensor:
        """Return the token of each row, `[B]` int64; attach the table to the logits' output."""
        self._output_layer.score()
        tokens, output = self._drawing(logits_output.next_token_logits)
        logits_output.auxiliary_device_output = output
        return tokens


_HEADROOM = 6
"""Places of the context that SGLang keeps free (`TpModelWorker.get_worker_info`)."""


class ClientScheduler(Scheduler):
    """Serves our client."""

    def __init__(self, server_args: Any, port_args: Any) -> None:
        self.settings = WorkerSettings.from_environment()
        self.link: Link | None = None
        self.requests = Requests()
        self.outbox = Outbox(self._send, self._gauges, self.settings.steps_per_message)
        self.reporting = Reporting(self.requests, self.outbox)
        self._prefix_asked = self._prefix_found = 0
        super().__init__(server_args, port_args)
        self._attach()

    def _attach(self) -> None:
        """Put our drawing and scoring into the model runner that SGLang has made."""
        settings, runner = self.settings, self.tp_worker.model_runner
        self.ranks = Ranks.of_group(get_parallel().tp_group)
        self.rows = SchedulerBatch(self.requests, settings.top_k or UNREPORTED_K)
        output_layer = OutputLayer(runner.model)
        size = self.model_config.vocab_size
        listed = self.rows.listed
        scorer = Scorer(output_layer.logits, size, self.ranks, settings.logits_bytes, listed)
        self.scoring = output_layer.scoring = PrefillScoring(self.rows, scorer, self.reporting)
        parts = self.rows, self.ranks, self.reporting, settings.logits_bytes
        runner.sampler = DrawingSampler(StepDrawing(*parts), output_layer)
        if self.draft_worker is not None and settings.drafting is not None:
            drawing = TreeDrawing(*parts)
            self.draft_worker.attach(drawing, self.rows, self.ranks, settings.drafting)
        self.calls = WorkerCalls(self, self.ranks, on_device=settings.stage_on_device)
        if self.ranks.leads:
            # SGLang gives float32, whatever the model computes in (layers/logits_processor.py).
            warm_up_drawing(torch.empty(1, size, device=runner.device), listed)
            warm_up_verification()
        self._delete_names()

    def _delete_names(self) -> None:
        """Unlink SGLang's files in /dev/shm: all ranks have them open, and signals leave them."""
        if self.load_snapshot_writer is not None:
            Path(self.load_snapshot_writer.path).unlink(missing_ok=True)
        queue = get_parallel().tp_group.mq_broadcaster
        if queue is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False  # else it is deleted again at the end

    # Called by SGLang's __init__ to make its parts.

    def init_ipc_channels(self, port_args: Any) -> None:
        """Connect to our client as well. SGLang's sockets stay, unused."""
        super().init_ipc_channels(port_args)
        if self.recv_from_tokenizer is not None:
            self.link = Link(self.settings.requests, self.settings.outputs)

    def init_idle_sleeper(self) -> None:
        """Wait for our messages when idle."""
        self.idle_sleeper = None if self.link is None else IdleSleeper([self.link.requests])

    def init_request_receiver(self) -> None:
        """Receive our messages."""
        super().init_request_receiver()
        theirs: Any = self.request_receiver
        same = {one.name: getattr(theirs, one.name) for one in fields(theirs)}
        self.request_receiver: Any = ClientReceiver(**same, link=self.link)

    def init_request_dispatcher(self) -> None:
        """Handle our messages."""
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher(
            [(AddRequest, self.add), (EndRequests, self.end), (Call, self.call)]
        )

    def get_output_streamer_class(self) -> type[EndStreamer]:
        """Report ends to our client."""
        return EndStreamer

    def init_output_streamer(self) -> None:
        """Report ends to our client."""
        super().init_output_streamer()
        self.output_streamer.report_end = self._report_end

    def run_event_loop(self) -> None:
        """Announce readiness to the client, and serve requests."""
        if self.link is not None:
            self.link.send(Ready(self.model_config.vocab_size, os.getpid()))
        super().run_event_loop()

    # Our messages.

    def add(self, message: AddRequest) -> None:
        """Give SGLang a request, or report why it cannot be served."""
        entry, name = entry_of(message), message.request_id
        most = self.max_req_len - _HEADROOM
        if entry.limit > most:
            error = f"{entry.limit} tokens are more than the {most} that SGLang can hold at once"
            self.outbox.add_end(End(name, "abort", error=error))
            self.outbox.flush()
            return
        self.requests.add(name, entry)
        self.handle_generate_request(generate_input(message, entry))

    def end(self, message: EndRequests) -> None:
        """End requests; SGLang runs one more step of them, whose token `StepOutput` drops."""
        for name in message.request_ids:
            if self.requests.interrupt(name):
                self.outbox.add_end(End(name, "abort", self._accepted(name)))
                self.abort_request(AbortReq(rid=name))
        self.outbox.flush()

    def call(self, message: Call) -> None:
        """Make a call, and answer it after all earlier outputs."""
        found = answer(self.calls, message, self.ranks)
        self.outbox.flush()
        if self.link is not None:
            self.link.send(found)

    # Between two steps.

    def stop(self) -> None:
        """Run no step from now on."""
        self.pause_generation(PauseGenerationReqInput(mode="in_place"))
        if self.enable_overlap and self.last_batch and self.result_queue:
            # `in_place` leaves the last result in the queue, and the loop takes one from there
            # after the pause: leave an empty one.
            self.process_batch_result(*self.result_queue.popleft())
            self.result_queue.append((ScheduleBatch(reqs=[]), None))
        self.cur_batch_for_debug = None  # otherwise SGLang's watchdog takes the pause for a hang
        self._rest(self._now())

    def resume_steps(self) -> None:
        """Run steps again."""
        self.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def advance(self, policy_version: int) -> None:
        """Draw under this version from now on."""
        self.rows.advance(policy_version)
        if self.draft_worker is not None:
            self.draft_worker.advance(policy_version)

    def save_cache(self) -> int:
        """Write the snapshot of the rollout cache; return its bytes."""
        return 0 if self.draft_worker is None else self.draft_worker.save()

    def _record_scheduler_state_for_paused_engine(self) -> None:
        """Wait for a message, as the loop of a paused scheduler polls this method."""
        super()._record_scheduler_state_for_paused_engine()
        self.maybe_sleep_on_idle()

    def on_idle(self) -> None:
        """Send what is left before waiting for messages."""
        self._rest(self._now())
        self.outbox.flush()
        super().on_idle()

    def get_next_batch_to_run(self, *args: Any, **kwargs: Any) -> Any:
        """Choose a batch. Preparing prompts is not part of the previous decode step."""
        began = self._now()
        plan = super().get_next_batch_to_run(*args, **kwargs)
        batch = plan.batch_to_run
        if batch is not None and batch.forward_mode.is_extend() and not self.enable_overlap:
            self._rest(began)  # if steps overlap, the previous one still runs
        return plan

    def _now(self) -> float:
        return 0.0 if self.draft_worker is None else self.draft_worker.now()

    def _rest(self, since: float) -> None:
        """Report the end of the last decode step to the drafter, if something else follows it."""
        if self.draft_worker is not None:
            self.draft_worker.rest(since)

    def _create_generation_req(self, recv_req: Any, *args: Any, **kwargs: Any) -> Req:
        """Make SGLang's request. Only our stop tokens end it, not those of the model's files."""
        kwargs["eos_token_ids"] = None
        entry = self.requests.entries[recv_req.rid]
        if not entry.extra.scored:
            return Req(*args, **kwargs)
        scored = PrefillRequest(*args, **kwargs)
        scored.entry = entry
        return scored

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        """Run a step of these rows."""
        self.rows.begin(batch)
        prefill = None
        if batch.forward_mode.is_extend():
            prefill = Prefill(batch.prefix_lens, batch.extend_lens)
            self._count_prefixes(batch)
        self.scoring.begin(prefill)
        return super().run_batch(batch, pp_proxy_tensors)

    def _forward_isolation(self, batch: Any, *, overlap: bool) -> Any:
        """Undo what a drafting step changes in its batch, as SGLang does, in less time."""
        if overlap or batch.spec_algorithm.is_none():
            return super()._forward_isolation(batch, overlap=overlap)
        return isolated(batch)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """Process the tokens of a step; they are sent when the message is full."""
        if result is None:  # `stop` has processed it
            return
        super().process_batch_result(batch, result)
        self.outbox.end_step()

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        """Report a request that ended outside of a step."""
        self._forget_drafts(req)
        if self.requests.forget(req.rid):
            reason = abort_req.finished_reason or {}
            error = str(reason.get("message") or "SGLang dropped the request")
            self.outbox.add_end(End(req.rid, "abort", req.spec_num_correct_drafts, error))

    # Reports.

    def _send(self, outputs: Outputs) -> None:
        if self.link is not None:
            self.link.send(outputs)

    def _forget_drafts(self, request: Any) -> None:
        """Report a request's end to the drafter; SGLang does so only in steps that decode."""
        if self.draft_worker is not None:
            self.draft_worker.note_request_finished(rid=request.rid, natural_stop=False)

    def _report_end(self, request: Any) -> None:
        self._forget_drafts(request)
        if self.requests.forget(request.rid):
            self.outbox.add_end(end_of(request))

    def _accepted(self, name: str) -> int:
        running = [*self.waiting_queue, *self.collect_inflight_reqs()]
        return next((one.spec_num_correct_drafts for one in running if one.rid == name), 0)

    def _count_prefixes(self, batch: Any) -> None:
        """Count the prompts that a step begins, and their tokens found in the radix cache."""
        for request, prefix in zip(batch.reqs, batch.prefix_lens, strict=True):
            if request.extend_batch_idx == 1 and not request.retracted_stain:
                self._prefix_asked += len(request.origin_input_ids)
                self._prefix_found += prefix

    def _gauges(self) -> Gauges:
        free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        waiting, drafter = len(self.waiting_queue), self.draft_worker
        return Gauges(
            steps=self.outbox.steps,
            drafted=0 if drafter is None else drafter.drafted,
            accepted=0 if drafter is None else drafter.accepted,
            running=len(self.requests.entries) - waiting,
            waiting=waiting,
            kv_used=1 - free / self.max_total_num_tokens,
            prefix_asked=self._prefix_asked,
            prefix_found=self._prefix_found,
        )
