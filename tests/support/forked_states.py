"""Training states of several ranks, and writers that are killed, in forked processes.

    python -m forked_states FOLDER

`ranks` saves on 2 ranks of FSDP2 and loads on 1, 3 and 4; `kills` kills a writer at each of its
file operations. It loads torch once and forks. It exits with 1 and says what was wrong.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.checkpoint.checkpoint import Contents, Pending, Place, Snapshot, read
from asyncrl.trainer.checkpoint.format.files import choose, path_of
from asyncrl.trainer.checkpoint.format.tensors import held_by
from asyncrl.trainer.optimizer.training_state import TrainingState

_OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link")
SECONDS = 120


class Model(nn.Module):
    """Parameters whose rows do not divide: some ranks hold none of `scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return out


def state_of(seed: int, *, sharded: bool, steps: int) -> TrainingState:
    """A model and its optimizer after some steps."""
    torch.manual_seed(seed)
    model = Model()
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model.first, model.second, model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for step in range(steps):
        model(torch.arange(10.0).view(2, 5) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen += 1
    return TrainingState({"policy": model}, {"policy": optimizer}, values={"rounds": steps})


def whole(state: TrainingState) -> dict[str, Tensor]:
    """Every tensor of a state, gathered from all ranks."""
    (model,) = state.modules.values()
    (optimizer,) = state.optimizers.values()
    named = {name: one.detach() for name, one in model.state_dict().items()}
    names = {id(one): name for name, one in model.named_parameters()}
    for parameter, of in optimizer.state.items():
        named |= {f"{names[id(parameter)]}/{key}": value for key, value in of.items()}
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).clone()
        for name, one in named.items()
    }


def pending(state: TrainingState, version: int, place: Place, folder: Path) -> Pending:
    """A copied state, to be written."""
    config = SimpleNamespace(save_pretrained=lambda _: None)
    model: Any = SimpleNamespace(config=config, generation_config=None)
    contents = Contents(state, model, str(folder), version, {}, "")
    return Pending(contents, held_by(state.boxes(place.rank), place.rank), Snapshot(), place)


def save(folder: Path, rank: int) -> None:
    """Save on 2 ranks; the weights change while the checkpoint is written."""
    state = state_of(1, sharded=True, steps=2)
    torch.save(whole(state), folder / "expected.pt") if rank == 0 else whole(state)
    place = Place(rank, 2, "a-word", SECONDS)
    writing = pending(state, 2, place, folder / "model")
    writing._snapshot.wait()
    (model,) = state.modules.values()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    writing.write(path_of(folder / "checkpoints", 2))


def load(folder: Path, rank: int) -> None:
    """Load on as many ranks as there are, and compare bit for bit."""
    state = state_of(7, sharded=dist.get_world_size() > 1, steps=1)
    settings = TrainerConfig().model_dump(mode="json")
    loaded = read(path_of(folder / "checkpoints", 2), state, settings, rank)
    assert (loaded.policy_version, loaded.values) == (2, {"rounds": 2})
    expected = torch.load(folder / "expected.pt", weights_only=True)
    found = whole(state)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, one in expected.items():
        assert one.dtype == found[name].dtype, name
        assert torch.equal(one, found[name]), name


def on_ranks(size: int, work: Callable[[Path, int], None], folder: Path) -> None:
    """Fork `size` processes that are ranks of one group."""
    meeting = tempfile.mktemp(dir=folder)  # noqa: S306 - a folder of the test

    def one(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(meeting, size)
        limit = timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        work(folder, rank)
        dist.barrier()
        dist.destroy_process_group()

    children = [fork(lambda rank=rank: one(rank)) for rank in range(size)]
    ended = [os.waitpid(child, 0)[1] for child in children]
    assert not any(ended), f"{work.__name__} on {size} ranks: {ended}"


def ranks(folder: Path) -> None:
    """Save on 2 ranks, load on others."""
    (folder / "model").mkdir()
    on_ranks(2, save, folder)
    files = sorted(path.name for path in path_of(folder / "checkpoints", 2).rglob("*.safetensors"))
    assert [name.split("-")[1] for name in files] == ["00000", "00001"] * 2, files
    for size in (1, 3, 4):
        on_ranks(size, load, folder)


def kills(folder: Path) -> None:
    """Kill a writer at its first file operation, another at its second, until one ends."""
    (folder / "model").mkdir()
    checkpoints = folder / "checkpoints"
    state = state_of(1, sharded=False, steps=1)
    pending(state, 1, Place(), folder / "model").write(path_of(checkpoints, 1))
    found = []
    for at in range(1000):
        child = fork(lambda at=at: _write_and_die(checkpoints, at))
        code = os.waitpid(child, 0)[1]
        assert code in (0, signal.SIGKILL), code
        found.append(choose(checkpoints).step)
        if not code:
            break
    assert found[-1] == 2, "the one that was not killed"
    assert set(found) == {1, 2}
    assert len(found) > 15, f"killed {len(found)} times only"
    left = [path.name for path in checkpoints.glob(".*")]
    assert not left, f"what the killed ones left: {left}"
    sys.stdout.write(f"killed at {len(found) - 1} file operations\n")


def _write_and_die(checkpoints: Path, at: int) -> None:
    state = state_of(2, sharded=False, steps=2)
    writing = pending(state, 2, Place(), checkpoints.parent / "model")
    seen = 0

    def count(event: str, _arguments: object) -> None:
        nonlocal seen
        if event in _OPERATIONS:
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(count)
    writing.write(path_of(checkpoints, 2))


def fork(work: Callable[[], None]) -> int:
    """Do this in a child process, whose id is returned."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:  # noqa: BLE001 - the child's edge
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in (ranks, kills):
        own = Path(sys.argv[1]) / job.__name__
        own.mkdir()
        job(own)
