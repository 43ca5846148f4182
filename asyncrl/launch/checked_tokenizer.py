"""Loads a process's tokenizer and compares it with the one of the run's prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from asyncrl.errors import WrongPolicyError
from asyncrl.launch.process_startup import Child
from asyncrl.tasks.model_tokenizer import load_tokenizer, tokenizer_digest
from asyncrl.wire.records.wrong_policy import WrongPolicy, compare_tokenizers


async def load_checked_tokenizer(
    child: Child[Any, Any], report: Callable[[WrongPolicy], msgspec.Struct]
) -> Any:
    """The tokenizer of the process's model.

    Args:
        child: the process.
        report: the message to the controller about another tokenizer than that of the prompts.

    Raises:
        ModelError: there is none.
        WrongPolicyError: it is another one, and `run.on_wrong_policy` is stop.
    """
    spec = child.spec
    tokenizer = load_tokenizer(spec.model_path)
    if spec.tokenizer is None:
        return tokenizer
    found = tokenizer_digest(tokenizer)
    wrong = compare_tokenizers(spec.name, expected=spec.tokenizer, found=found)
    if wrong is not None:
        await child.control.send(report(wrong))
        if child.config.run.on_wrong_policy == "stop":
            raise WrongPolicyError(wrong.text)
    return tokenizer
