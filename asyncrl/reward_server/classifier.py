"""A sequence classifier of transformers: texts to tokens, batches of tokens to scores."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.errors import UserError
from asyncrl.rewards.reward_model import no_classifier
from asyncrl.tasks.model_tokenizer import wants_own_code
from asyncrl.tasks.templates.chat_template import ChatTemplate

Apply = Literal["none", "sigmoid", "softmax"]


@dataclass(frozen=True, slots=True)
class ClassifierSettings:
    """Which model is served, and what its score is."""

    model: str
    """A folder or a hub id."""
    label: int | None = None
    """Which output is the score; None: the model has one."""
    apply: Apply = "none"
    """What is done to the outputs first; `none`: the score is the logit."""
    max_tokens: int | None = None
    """Longest text; None: as many positions as the model has."""
    truncate: Literal["refuse", "left"] = "refuse"
    """What happens to a longer one; `left` leaves out its beginning."""
    device: str = "auto"
    """`cpu`, `cuda` or `auto`."""
    dtype: str | None = None
    """None: float32 on a CPU, else that of the checkpoint."""
    threads: int | None = None
    """For tensor work on a CPU."""


class TooLongError(Exception):
    """A text has more tokens than the model takes."""


class Classifier:
    """A loaded model. `encode` and `score` may be called from different threads, each from one."""

    def __init__(self, settings: ClassifierSettings, model: Any, tokenizer: Any) -> None:
        self.settings = settings
        self._model, self._tokenizer = model, tokenizer
        positions = getattr(model.config, "max_position_embeddings", None)
        self.max_tokens: int = settings.max_tokens or positions or 1 << 20
        self.labels: int = model.config.num_labels
        self.pads = model.config.pad_token_id is not None
        """Whether it takes several texts at once."""
        self._encoding = threading.Lock()

    @classmethod
    def load(cls, settings: ClassifierSettings) -> Classifier:
        """Load the model. Raises UserError: it is no reward model that can be served so."""
        if (reason := no_classifier(settings.model)) is not None:
            raise UserError(f"--model: {reason}")
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = settings.dtype or ("float32" if device == "cpu" else "auto")
        try:
            tokenizer = AutoTokenizer.from_pretrained(settings.model, trust_remote_code=False)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                settings.model, dtype=dtype, output_loading_info=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            if wants_own_code(error):
                raise UserError(
                    f"--model: {settings.model} has code of its own (auto_map in its files); "
                    "models with code of their own are not supported"
                ) from error
            raise UserError(f"--model: {settings.model} cannot be loaded: {error}") from error
        if missing := sorted(info.get("missing_keys", ())):
            raise UserError(
                f"--model: {settings.model} has no weights for {', '.join(missing[:5])}, so its "
                "scores would be random; it is not a trained reward model"
            )
        _check_label(settings, model.config.num_labels)
        if model.config.pad_token_id is None and tokenizer.pad_token_id is not None:
            model.config.pad_token_id = tokenizer.pad_token_id
        return cls(settings, model.to(device).eval(), tokenizer)

    @property
    def described(self) -> str:
        """The model in a few words."""
        dtype = str(self._model.dtype).removeprefix("torch.")
        of = "" if self.labels == 1 else f"output {self.settings.label} of {self.labels}, "
        return (
            f"{self.settings.model} ({type(self._model).__name__}, {of}{dtype}, "
            f"{self._model.device}, at most {self.max_tokens} tokens)"
        )

    def encode(self, prompt: str, response: str) -> list[int]:
        """The tokens of an answer to a prompt: by the chat template, else as a pair of texts.

        Raises:
            RenderingError: the chat template refuses the texts.
            TooLongError: there are more than the model takes.
        """
        tokenizer = self._tokenizer
        with self._encoding:  # tokenizers change their own state
            if tokenizer.chat_template:
                messages = [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": response},
                ]
                text = ChatTemplate(tokenizer).render(messages, None, generation_prompt=False)
                tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            else:
                tokens = list(tokenizer(prompt, response)["input_ids"])
        if len(tokens) <= self.max_tokens:
            return tokens
        if self.settings.truncate == "refuse":
            raise TooLongError(
                f"the text has {len(tokens)} tokens, and the reward model takes {self.max_tokens}; "
                "lower sampling.max_tokens, or have the beginning left out (truncate: left)"
            )
        return tokens[-self.max_tokens :]

    def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        """The score of each text.

        Args:
            batch: tokens of texts; one, if the model does not pad.
        """
        import torch

        model, longest = self._model, max(len(tokens) for tokens in batch)
        pad = model.config.pad_token_id or 0
        ids = torch.full((len(batch), longest), pad, dtype=torch.long)
        mask = torch.zeros((len(batch), longest), dtype=torch.long)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            device = model.device
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
            if self.settings.apply == "sigmoid":
                logits = logits.sigmoid()
            elif self.settings.apply == "softmax":
                logits = logits.softmax(-1)
            return [float(value) for value in logits[:, self.settings.label or 0].cpu()]


def _check_label(settings: ClassifierSettings, labels: int) -> None:
    if settings.label is None and labels != 1:
        raise UserError(
            f"{settings.model} has {labels} outputs; say which one is the score: "
            "--label (args.label)"
        )
    if settings.label is not None and settings.label >= labels:
        raise UserError(f"--label {settings.label}: {settings.model} has {labels} outputs, from 0")
    if settings.apply == "softmax" and labels == 1:
        raise UserError("--apply softmax: the softmax of one output is always 1; use sigmoid")
