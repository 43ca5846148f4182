"""What is asked of generators: which prompt a group is, and the randomness of each sample."""

from __future__ import annotations

import hashlib

from asyncrl.tasks.prompts import Prompt, prompt_order
from wire.frames import encode_tokens
from wire.messages.to_generator import PromptPayload


class DataOrder:
    """Which prompt the group-th group is."""

    def __init__(self, prompts: int, seed: int) -> None:
        self._prompts = prompts
        self._seed = seed

    def index(self, group: int) -> int:
        """Index of the prompt that this group visits."""
        return prompt_order(self._prompts, self._seed, group)


def sample_seed(seed: int, *what: object) -> int:
    """A seed for one sample: 63 bits that differ for every run seed, purpose and sample."""
    text = ":".join(str(part) for part in (seed, *what))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def payload_of(prompt: Prompt) -> PromptPayload:
    """A prompt as it travels to a generator."""
    return PromptPayload(prompt.prompt_id, encode_tokens(prompt.tokens), prompt.example)
