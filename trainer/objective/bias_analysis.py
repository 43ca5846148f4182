"""Analysis of what a configuration's gradient estimates. Pure; no torch.

The policy gradient is that of the expected reward, a prompt's samples being drawn by the policy
being trained. An estimator is unbiased if its expectation is a positive multiple of it, the same
for all prompts. tests/trainer/test_estimators.py checks this module against exact expectations.
"""

from asyncrl.trainer.base.algorithm_registry import entry_of
from asyncrl.trainer.base.config import TrainerConfig

_CLIPS_TOWARDS_THE_STEP = ("dapo", "dr_grpo", "grpo", "ppo")
"""Biased with `proximal_policy: current`."""
_SCALED_BY_GROUP = ("cispo", "dapo", "grpo", "gspo")
_OTHER_OBJECTIVES = (
    *("overlong_buffer", "mask_truncated_completions", "kl_coefficient", "router_loss_coefficient"),
)
"""Settings with which the expected reward of the task alone is not what is maximised."""


def biases_of(config: TrainerConfig, *, stale: bool) -> tuple[str, ...]:
    """Return why the estimator of asyncrl's own algorithm is biased, as in docs/algorithms.md.

    `stale` tokens may be of an older policy than the step's, as are those after its first update.
    """
    kind = config.loss_normalization
    found = ["" if kind == "sample" else f"loss_normalization: {kind}", _of_advantages(config)]
    found += [name for name in _OTHER_OBJECTIVES if getattr(config, name)]
    if entry_of(config.algorithm).critic:
        found.append(_of_values(config))
    if stale or config.updates_per_step > 1:
        found.append(_of_stale_tokens(config))
    if config.ppo_epochs > 1:
        found.append("samples seen before")
    return tuple(one for one in found if one)


def _of_advantages(config: TrainerConfig) -> str:
    if config.normalises_over_step:
        return "advantages normalised over the step"
    if config.algorithm in _SCALED_BY_GROUP and config.advantage_normalization == "std":
        return "advantage_normalization: std"
    if config.algorithm == "gpg":
        return "its factor for groups without signal"
    return ""


def _of_values(config: TrainerConfig) -> str:
    """Bias of a critic's values; with gamma and lambda 1 a value is only a baseline."""
    if config.critic.gamma < 1:
        return "critic.gamma"
    if config.critic.truncated == "bootstrap":
        return "critic.truncated: bootstrap"
    if config.critic.shared_trunk:
        return "critic.shared_trunk"
    return "critic.gae_lambda" if config.critic.gae_lambda < 1 else ""


def _of_stale_tokens(config: TrainerConfig) -> str:
    clips = config.updates_per_step > 1 and config.algorithm in _CLIPS_TOWARDS_THE_STEP
    if config.proximal_policy == "behaviour" or clips:
        return "clipped ratios of stale tokens"
    if config.correction == "none":
        return "stale tokens without a correction"
    if config.correction == "sequence_truncated":
        return "" if config.importance_cap >= 1e6 else "stale samples beyond importance_cap"
    if config.correction == "sequence_masked":
        return "stale samples outside correction_band"
    return "stale tokens weighed one by one"
