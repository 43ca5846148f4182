"""The runs that are audited: an example of this repository, and what is set in it."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    example: str
    """In `examples/`, without its ending."""
    settings: tuple[str, ...] = ()
    steps: int = 3
    resume_after: int | None = None
    """The run is ended after so many steps, and resumed."""


COMMON = (
    "run.log_samples=jsonl",
    "run.log_sample_tokens=true",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=1000",
    "evaluation.prompts=1",
    "monitoring.live=off",
    "scheduler.groups_per_step=4",
    "scheduler.group_size=4",
    "engine.slots=16",
)
_STALE = ("scheduler.on_update=recompute", "scheduler.max_off_policy_steps=1")
_LOOSE = ("sampling.temperature=1.2", "sampling.max_tokens=32", "trainer.learning_rate=1e-3")
"""Samples that differ, some of which are cut off, and policies that move far in a step."""
_OLDER = ("cispo", "gspo", "corrections")
"""Examples with stale tokens. In theirs, the engines read KV of older weights (`keep`), which no
checkpoint has; here it is computed again."""
_CORRECTIONS = (
    "token_truncated",
    "token_masked",
    "sequence_truncated",
    "sequence_masked",
    "sequence_rejected",
    "none",
)


def _of(name: str, *settings: str) -> Case:
    return Case(f"algorithms/{name}", (*_LOOSE, *settings))


QUICK = {
    "grpo": _of("grpo"),
    "dapo": _of("dapo", *_STALE, "trainer.overlong_buffer=8"),
    "ppo": _of("ppo", "trainer.ppo_epochs=2", "trainer.minibatches=2"),
    "turns": Case("calculator", ("sampling.temperature=1.3", "trainer.learning_rate=1e-3")),
    "ranks": _of("ppo", "trainer.ranks=2", "trainer.critic.passes=2"),
    "resumed": Case(
        "algorithms/grpo", (*_LOOSE, "trainer.reference_refresh_steps=2"), 4, resume_after=2
    ),
}
SMOKE = ("grpo",)
ALL = {
    **QUICK,
    "nucleus": _of(
        "dapo",
        *_STALE,
        "sampling.top_p=0.9",
        "sampling.top_k=12",
        "sampling.min_p=0.02",
        "trainer.kl_coefficient=0.05",
        "trainer.reference_decay=0.5",
        "trainer.max_grad_norm=0.05",
        "trainer.weight_decay=0.1",
        "trainer.optimizer_state=bfloat16",
    ),
    "lora": Case("lora", (*_LOOSE, "trainer.kl_coefficient=0.05")),
    "turns_ppo": Case(
        "calculator",
        (
            "sampling.temperature=1.3",
            "trainer.learning_rate=1e-3",
            "trainer.algorithm=ppo",
            "trainer.advantage_normalization=std",
            "trainer.critic.truncated=bootstrap",
        ),
    ),
    **{
        name: _of(name, *(_STALE if name in _OLDER else ()))
        for name in ("cispo", "dr_grpo", "gpg", "gspo", "reinforce", "rloo", "corrections")
    },
    "reinforce_plus_plus_baseline": _of("reinforce_plus_plus"),
    "reinforce_plus_plus": _of(
        "reinforce_plus_plus",
        "trainer.algorithm=reinforce_plus_plus",
        "trainer.kl_coefficient=0.1",
        "trainer.kl_estimator=k3",
    ),
    "ppo_streamed": _of("ppo", "trainer.critic.truncated=bootstrap", "trainer.critic.gamma=0.99"),
    **{
        one: _of(
            "dr_grpo",
            *_STALE,
            "scheduler.max_off_policy_steps=2",
            f"trainer.correction={one}",
            "trainer.importance_cap=1.1",
        )
        for one in _CORRECTIONS
    },
}
