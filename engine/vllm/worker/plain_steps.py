"""Makes a step without drafts as cheap as one without speculation, in every rank.

vLLM treats a step without drafts as one with drafts of length 0: it prepares their verification.
"""

from __future__ import annotations

from typing import Any


def prepare_plainly(runner: Any) -> None:
    """Hide speculation from `runner._prepare_inputs` in steps that have no drafts."""
    if runner.model_config.is_hybrid:
        return  # recurrent layers need the speculative path for rows without drafts as well
    prepare = runner._prepare_inputs  # noqa: SLF001

    def prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.scheduled_spec_decode_tokens:
            return prepare(scheduler_output, *args, **kwargs)
        config, runner.speculative_config = runner.speculative_config, None
        try:
            return prepare(scheduler_output, *args, **kwargs)
        finally:
            runner.speculative_config = config

    runner._prepare_inputs = prepare_inputs  # noqa: SLF001


class FollowingDrafter:
    """The drafter of ranks other than 0: rank 0's drafts come with the scheduler's output."""

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def propose(self, sampled_token_ids: list[list[int]], *_args: Any, **_kwargs: Any) -> Any:
        """No drafts; vLLM asks rank 0 only."""
        return [[] for _ in sampled_token_ids]
