"""A tiny random sequence classifier, and servers that answer as a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web


def save_classifier(folder: Path, *, labels: int = 1, positions: int = 64) -> tuple[Any, Any]:
    """Save a random Llama classifier with a byte tokenizer; the model and the tokenizer.

    Its heads are as wide as vLLM's attention on a CPU wants them.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1} | {letter: i + 2 for i, letter in enumerate(letters)}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", model_max_length=positions
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}"
    )
    torch.manual_seed(3)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=positions,
            num_labels=labels,
            pad_token_id=0,
            bos_token_id=1,
            initializer_range=0.5,
        )
    ).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def own_score(model: Any, tokenizer: Any, prompt: str, response: str) -> float:
    """What transformers says of one text alone."""
    import torch

    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    tokens = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        return float(model(**tokens).logits[0, 0])


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[str]:
    """The address of a server in this process that answers every request so."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
