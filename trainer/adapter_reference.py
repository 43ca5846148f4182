"""The reference of the KL penalty with LoRA: the same model as its initial policy, in no memory."""

from __future__ import annotations

from torch import Tensor

from asyncrl.trainer.lora.adapter import Adapter
from asyncrl.trainer.model.packed_batch import PackedBatch
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.reference import Reference


class InitialAdapter(Reference):
    """The policy without its adapter, or with the one that training started from."""

    def __init__(self, policy: Policy, adapter: Adapter) -> None:
        self.policy = policy
        self._adapter = adapter

    @property
    def moves(self) -> bool:
        """Never."""
        return False

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """As `Reference.logprobs`."""
        with self._adapter.initial():
            return super().logprobs(batch)

    def follow(self, trained: Policy, version: int) -> None:
        """Nothing: it does not move."""
