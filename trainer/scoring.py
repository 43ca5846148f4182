"""The models of a learner, and one forward pass through them.

The reference of the KL penalty is the initial model, or one that follows the policy:

    reference_refresh_steps: N    a copy of the policy after every N steps
    reference_decay: d            after each step, d times itself plus 1 - d times the policy

A reference that follows the policy is part of each checkpoint, so a resumed run has the same one.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.rollout.truncation import Truncation
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.critic import Critic, Values, real_tokens
from asyncrl.trainer.lora.adapter import Adapter
from asyncrl.trainer.model.head import TokenScores
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.model.policy import Policy, check_routes
from asyncrl.trainer.ranks import World
from asyncrl.trainer.sharding.policy import ShardedPolicy
from asyncrl.trainer.sharding.weights import local

logger = logging.getLogger(__name__)


class Reference:
    """The reference model, a separate copy without gradients. Attribute: `policy`."""

    def __init__(self, config: TrainerConfig, policy: Policy) -> None:
        self.policy = policy
        self._every = config.reference_refresh_steps
        self._decay = config.reference_decay
        policy.model.requires_grad_(requires_grad=False)

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Return `[N]` of the response tokens; the caller disables gradients."""
        return self.policy.score(batch).logprobs

    @property
    def moves(self) -> bool:
        """True if it ever differs from the initial model."""
        return self._every is not None or self._decay is not None

    @torch.no_grad()
    def follow(self, trained: Policy, version: int) -> None:
        """Follow the policy at this version, right after a step."""
        if self._every is not None and version % self._every == 0:
            for mine, theirs in self._pairs(trained):
                mine.copy_(theirs)
        if self._decay is not None:
            for mine, theirs in self._pairs(trained):
                mine.lerp_(theirs, 1 - self._decay)

    def _pairs(self, trained: Policy) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair both models' parameters, or this rank's rows; their buffers are constants."""
        both = ([local(one) for one in p.model.parameters()] for p in (self.policy, trained))
        return zip(*both, strict=True)


class InitialAdapter(Reference):
    """The policy without its adapter, or with the adapter that training started from."""

    def __init__(self, policy: Policy, adapter: Adapter) -> None:
        self.policy, self._adapter = policy, adapter
        self._every = self._decay = None

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Return `[N]` under the initial adapter."""
        with self._adapter.initial():
            return super().logprobs(batch)


@dataclass(frozen=True, slots=True)
class Models:
    """The policy being trained, and the models it is trained with."""

    policy: Policy
    reference: Reference | None = None
    critic: Critic | None = None
    with_routes: bool = False
    """True if the loss needs the router logits of a mixture of experts."""

    def parameters(self) -> list[Tensor]:
        """Parameters that the policy's loss changes, including the value head of a shared trunk."""
        critic = self.critic
        head = critic.module.parameters() if critic and critic.config.shared_trunk else []
        return [*self.policy.model.parameters(), *head]

    def modules(self) -> list[nn.Module]:
        """All models; two of them may be the same object."""
        reference = None if self.reference is None else self.reference.policy.model
        critic = None if self.critic is None else self.critic.module
        return [one for one in (self.policy.model, reference, critic) if one is not None]

    def score(self, some: Sequence[Trajectory]) -> tuple[TokenScores, Values | None]:
        """Return log-probabilities of the samples' tokens, and values if there is a critic."""
        critic = self.critic
        if critic is None or not critic.config.shared_trunk:
            scores = self.policy.score(self._packed(some), with_routes=self.with_routes)
            return scores, None if critic is None else critic.values(some)
        return self.policy.within(self._from_trunk, critic, some)

    def _from_trunk(self, critic: Critic, some: Sequence[Trajectory]) -> tuple[TokenScores, Values]:
        states = critic.states(some)
        hidden = self.policy.hidden(states)
        values = critic.of_hidden(hidden, some)
        targets = states.targets
        if critic.bootstraps:
            drawn = real_tokens(some).to(hidden.device)
            hidden, targets = hidden[drawn], targets[drawn]
        return self.policy.score_hidden(hidden, targets), values

    @torch.no_grad()
    def reference_logprobs(self, some: Sequence[Trajectory]) -> Tensor | None:
        """Return `[N]` under the reference, if there is one."""
        if self.reference is None:
            return None
        return self.reference.logprobs(self._packed(some))

    def _packed(self, some: Sequence[Trajectory]) -> PackedBatch:
        return PackedBatch.of_samples(some, self.policy.device)


def load_models(
    config: TrainerConfig,
    model_path: str,
    world: World,
    *,
    temperature: float,
    truncation: Truncation,
    with_reference: bool,
    with_critic: bool,
) -> Models:
    """Load the policy, and the initial model and the critic if they are needed.

    Raises UnsupportedModelError if one cannot be loaded or trained packed, or does not fit.
    """
    kind: Callable[..., Policy] = Policy
    if config.sharding == "full":
        kind = partial(ShardedPolicy, world=world)
    load = partial(
        kind,
        dtype=config.compute_dtype,
        device=resolve_device(config.device),
        temperature=temperature,
        truncation=truncation,
        fused=config.fused,
        compiled=config.compile,
    )
    train = partial(load, gradient_checkpointing=config.gradient_checkpointing)
    policy = train(model_path, lora=config.lora if config.lora.enabled else None)
    check_routes(policy.model, config)
    reference: Reference | None = None
    if with_reference and policy.adapter is not None:
        reference = InitialAdapter(policy, policy.adapter)
    elif with_reference:
        reference = Reference(config, load(model_path))
    critic = Critic(config, model_path, policy, train, world) if with_critic else None
    return Models(policy, reference, critic, with_routes=config.router_loss_coefficient > 0)


def for_own_device(config: TrainerConfig, engines_dtype: str | None = None) -> TrainerConfig:
    """Resolve `dtype: auto` for this process's device, as `TrainerConfig.for_device` does."""
    if config.dtype != "auto":
        return config
    device = resolve_device(config.device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    resolved = config.for_device(capability, engines_dtype=engines_dtype)
    where = "a CPU" if capability is None else "a GPU of capability {}.{}".format(*capability)
    logger.info("trainer.dtype: auto is %s on %s", resolved.dtype, where)
    return resolved


def resolve_device(name: str) -> torch.device:
    """Resolve `auto` to a GPU if there is one, else the CPU; other names are torch's own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
