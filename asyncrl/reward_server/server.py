"""A run's own reward server: a sequence classifier of transformers behind vLLM's `/classify`.

    POST /classify   {"messages": [...]} or {"input": "..."} ──► {"data": [{"probs": [logits]}]}

`python -m asyncrl.reward_server.server` inherits the listening socket and ends with the controller.
It is no vLLM since it takes the CPU: the GPUs are handed out, and vLLM's build for GPUs computes
nowhere else. It does what a reward needs and no more: rewards are asked one text at a time, and
those that wait while the model computes are its next batch.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from asyncrl.errors import RenderingError, UserError
from asyncrl.tasks.model_tokenizer import wants_own_code
from asyncrl.tasks.templates.chat_template import ChatTemplate
from asyncrl.user_code.process_tree import end_with_parent

logger = logging.getLogger(__name__)

BATCH_TOKENS = 16_384
"""Most tokens of a batch, padding included; a longer text is a batch of its own."""
_END_SECONDS = 3


class Question(msgspec.Struct):
    """The fields of vLLM's request that are understood; logits are given whatever it asks for."""

    messages: list[dict[str, str]] | None = None
    input: str = ""
    truncate_prompt_tokens: int | None = None
    """Any number: a text that is too long loses its beginning."""


class TooLongError(Exception):
    """A text has more tokens than the model takes."""


class Classifier:
    """A loaded model. `encode` may be called from several threads, `score` from one.

    Args:
        folder: or hub id.
        max_tokens: of a text; None: as many as the model has positions.

    Raises:
        UserError: it is no reward model that can be served.
    """

    def __init__(self, folder: str, max_tokens: int | None = None) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype="float32", output_loading_info=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            if wants_own_code(error):
                raise UserError(
                    f"{folder} has code of its own (auto_map in its files); models with code of "
                    "their own are not supported"
                ) from error
            raise UserError(f"{folder} cannot be loaded: {error}") from error
        if missing := sorted(info.get("missing_keys", ())):
            raise UserError(
                f"{folder} has no weights for {', '.join(missing[:5])}, so its scores would be "
                "random; it is not a trained reward model"
            )
        self._model: Any = model.eval()
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self._tokenizer.pad_token_id
        self.pads = model.config.pad_token_id is not None
        """Whether it takes several texts at once."""
        positions = getattr(model.config, "max_position_embeddings", None)
        self.max_tokens: int = max_tokens or positions or 1 << 20
        self._encoding = threading.Lock()  # tokenizers change their own state

    def encode(self, question: Question) -> list[int]:
        """The tokens of a text, or of messages: by the chat template, else as a pair of texts.

        Raises:
            RenderingError: the chat template refuses the messages.
            TooLongError: there are more than the model takes.
        """
        tokenizer, messages = self._tokenizer, question.messages
        with self._encoding:
            if messages is None:
                tokens = list(tokenizer(question.input)["input_ids"])
            elif tokenizer.chat_template:
                text = ChatTemplate(tokenizer).render(messages, None, generation_prompt=False)
                tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            else:
                tokens = list(tokenizer(*(one["content"] for one in messages))["input_ids"])
        if len(tokens) > self.max_tokens and question.truncate_prompt_tokens is None:
            raise TooLongError(
                f"the text has {len(tokens)} tokens, and the reward model takes {self.max_tokens}; "
                "lower sampling.max_tokens, or have the beginning left out (truncate: left)"
            )
        return tokens[-self.max_tokens :]

    def score(self, batch: Sequence[Sequence[int]]) -> list[list[float]]:
        """The outputs for each text.

        Args:
            batch: tokens of texts; one, if the model does not pad.
        """
        longest = max(len(tokens) for tokens in batch)
        ids = torch.full((len(batch), longest), self._model.config.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits
        return [[float(value) for value in row] for row in logits.float()]


@dataclass(slots=True, eq=False)
class _Text:
    tokens: list[int]
    request: Request
    outputs: asyncio.Future[list[float]]


class App:
    """Answers requests, from one event loop."""

    def __init__(self, classifier: Classifier) -> None:
        self._classifier = classifier
        self._waiting: deque[_Text] = deque()
        self._arrived = asyncio.Event()

    async def classify(self, request: Request) -> JSONResponse:
        """The outputs for one text."""
        try:
            question = msgspec.json.decode(await request.body(), type=Question)
            tokens = await asyncio.to_thread(self._classifier.encode, question)
        except (msgspec.MsgspecError, RenderingError, TooLongError) as error:
            return JSONResponse({"error": str(error)}, 422)
        text = _Text(tokens, request, asyncio.get_running_loop().create_future())
        self._waiting.append(text)
        self._arrived.set()
        try:
            outputs = await text.outputs
        except Exception as error:  # noqa: BLE001 - logged where it happened
            return JSONResponse({"error": f"the model failed: {error}"}, 500)
        if not all(map(math.isfinite, outputs)):
            return JSONResponse({"error": f"the model's outputs are {outputs}"}, 422)
        return JSONResponse({"data": [{"index": 0, "probs": outputs}]})

    async def run(self) -> None:
        """Compute what arrives."""
        while True:
            await self._arrived.wait()
            batch = await self._next()
            if not batch:
                self._arrived.clear()
                continue
            try:
                tokens = [text.tokens for text in batch]
                scores = await asyncio.to_thread(self._classifier.score, tokens)
            except Exception as error:
                logger.exception("a batch of %d texts failed", len(batch))
                for text in batch:
                    text.outputs.set_exception(error)
            else:
                for text, outputs in zip(batch, scores, strict=True):
                    text.outputs.set_result(outputs)

    async def _next(self) -> list[_Text]:
        """Texts that wait and fit into one batch; those that nobody waits for are dropped."""
        batch: list[_Text] = []
        longest = 0
        while self._waiting:
            text = self._waiting[0]
            longest = max(longest, len(text.tokens))
            full = longest * (len(batch) + 1) > BATCH_TOKENS or not self._classifier.pads
            if batch and full:
                break
            self._waiting.popleft()
            if await text.request.is_disconnected():
                text.outputs.set_result([])
            else:
                batch.append(text)
        return batch


async def serve(classifier: Classifier, listening: socket.socket) -> None:
    """Answer until SIGTERM."""
    app = App(classifier)
    server = uvicorn.Server(
        uvicorn.Config(
            Starlette(routes=[Route("/classify", app.classify, methods=["POST"])]),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_END_SECONDS,
        )
    )
    running = asyncio.create_task(app.run())
    await server.serve([listening])
    running.cancel()


def main() -> None:
    """Serve the model that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    end_with_parent(given.parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        classifier = Classifier(given.model, given.max_tokens)
    except UserError as error:
        sys.exit(" ".join(str(error).split()))  # one line, which the controller quotes
    asyncio.run(serve(classifier, socket.socket(fileno=given.socket)))


if __name__ == "__main__":
    main()
