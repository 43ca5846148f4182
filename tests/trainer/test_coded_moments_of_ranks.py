"""Moments in 8 bits, with the scales of their rows, are read by any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.checkpoint.format.index import STATE, merge
from asyncrl.trainer.checkpoint.format.tensors import held_by, load_tensors, write_tensors
from asyncrl.trainer.optimizer.coded_moments import CODES, SCALE
from asyncrl.trainer.optimizer.optimizer import SmallAdamW, Update
from asyncrl.trainer.optimizer.training_state import TrainingState
from asyncrl.trainer.ranks import World

ROWS, COLUMNS = 5, 700
"""Three ranks have 2, 2 and 1 rows; four have 2, 2, 1 and none. Three scales a row."""


def _state(rank: int, size: int) -> tuple[TrainingState, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(COLUMNS, ROWS)
    update = Update(model, TrainerConfig(optimizer_state="int8"), World(rank, size))
    assert isinstance(update.optimizer, SmallAdamW)
    state = TrainingState({"policy": model}, {"policy": update.optimizer}, sharding=update.sharding)
    return state, model


def _moments(state: TrainingState, model: nn.Module) -> dict[str, Tensor]:
    """Decoded, of this rank's rows of the weight."""
    own = state.sharding.own(model.get_parameter("weight"))
    kept = state.optimizers["policy"].state[own]
    return {name: code.decode(kept[name], kept[name + SCALE]) for name, code in CODES.items()}


def test_coded_moments_are_read_by_any_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / STATE).mkdir()
    grads = torch.randn(ROWS, COLUMNS) * torch.logspace(-3, 0, ROWS)[:, None]
    parts, whole = [], []
    for rank in range(3):
        state, model = _state(rank, 3)
        for own in state.optimizers["policy"].param_groups[0]["params"]:
            own.grad = grads[2 * rank : 2 * rank + 2].clone()
        state.optimizers["policy"].step()
        parts.append(write_tensors(tmp_path, held_by(state.boxes(rank), rank), rank))
        whole.append(_moments(state, model))
    index = merge(parts, state.plain())
    for size in (1, 2, 4):
        found = []
        for rank in range(size):
            state, model = _state(rank, size)
            targets, rest = state.targets(index, 0)
            load_tensors(tmp_path, index, targets)
            rest.apply()
            found.append(_moments(state, model))
        for name in CODES:
            want = torch.cat([one[name] for one in whole])
            assert torch.equal(torch.cat([one[name] for one in found]), want), (name, size)
            assert float(want.abs().min()) > 0
