"""What the routers of a mixture of experts say, from transformers' outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.trainer.algorithms.base import Routes
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import UnsupportedModelError


def has_experts(model: PreTrainedModel) -> bool:
    """Whether a model is a mixture of experts."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def why_no_routes(model: PreTrainedModel) -> str | None:
    """Why the loss of routers cannot be computed for a model; None: it can."""
    name, config = type(model).__name__, model.config.get_text_config()
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    if "router_logits" not in recorded:
        return f"{name} has no routers of experts"
    if getattr(config, "router_aux_loss_coef", None) is None:
        return f"{name} balances its experts in another way (a bias or groups), without such a loss"
    return None


def check_routes(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Raise UnsupportedModelError if the loss of routers is wanted and cannot be computed."""
    if config.router_loss_coefficient == 0:
        return
    reason = why_no_routes(model)
    if config.algorithm == "ppo" and config.critic.shared_trunk:
        reason = "with trainer.critic.shared_trunk it is not built"
    if reason is not None:
        raise UnsupportedModelError(f"trainer.router_loss_coefficient: {reason}; set it to 0")


def routes_of(model: PreTrainedModel, output: Any, predictors: Tensor) -> Routes:
    """At `predictors` `[N]`, of an output that was computed with `output_router_logits`."""
    config: Any = model.config.get_text_config()
    logits = tuple(one.flatten(0, -2)[predictors] for one in output.router_logits)
    return Routes(logits, int(config.num_experts_per_tok))
