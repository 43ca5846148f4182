"""A run's own reward server: a sequence classifier of transformers behind vLLM's `/classify`.

    POST /classify   {"messages": [...]} or {"input": "..."} ──► {"data": [{"probs": [logits]}]}

`python -m asyncrl.reward_server.server` inherits the listening socket and ends with the controller.
It computes on the CPU, which vLLM's build for GPUs cannot: the run's GPUs are taken. A request has
one text, and those that wait while the model computes form its next batch.
"""

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
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from asyncrl.errors import RenderingError, UserError
from asyncrl.tasks.model_tokenizer import wants_own_code
from asyncrl.tasks.templates.chat_template import ChatTemplate
from asyncrl.user_code.process_tree import end_with_parent

logger = logging.getLogger(__name__)

BATCH_TOKENS = 16_384
"""Most tokens of a batch, padding included; a longer text is a separate batch."""
_END_SECONDS = 3


class Question(msgspec.Struct):
    """The supported fields of vLLM's request. The answer always has logits."""

    messages: list[dict[str, str]] | None = None
    input: str = ""
    truncate_prompt_tokens: int | None = None
    """Any number: the beginning of a longer text is left out."""


class TooLongError(Exception):
    """A text has more tokens than the model takes."""


class Classifier:
    """A loaded model. `encode` may be called from several threads, `score` from one.

    `folder` may be a hub id; by default, `max_tokens` of a text is the number of the model's
    positions. Raises UserError if it cannot be served as a reward model.
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
                    f"{folder} needs its own code (auto_map in its files), which is not supported"
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
        """True if the model takes several texts at once."""
        positions = getattr(model.config, "max_position_embeddings", None)
        self.max_tokens: int = max_tokens or positions or 1 << 20
        self._encoding = threading.Lock()  # tokenizers change their own state

    def encode(self, question: Question) -> list[int]:
        """Return the tokens of a text, or of messages: by the chat template, else as a text pair.

        Raises RenderingError if the template refuses the messages, and TooLongError.
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
                "lower sampling.max_tokens, or leave out the beginning (args.truncate: left)"
            )
        return tokens[-self.max_tokens :]

    def score(self, batch: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the outputs for the tokens of each text; one text, if the model does not pad."""
        texts = [torch.tensor(tokens, dtype=torch.long) for tokens in batch]
        pad = self._model.config.pad_token_id or 0
        ids = pad_sequence(texts, batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits
        scores: list[list[float]] = logits.float().tolist()
        return scores


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
        """Answer with the outputs for one text."""
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
        """Compute batches as texts arrive."""
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
        """Take waiting texts that fit into one batch; drop those whose caller has disconnected."""
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
