"""What a child process is told when it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.config import RunConfig, parse_config

Role = Literal["generator", "trainer"]


class ChildSpec(msgspec.Struct, frozen=True):
    """The arguments of a child process, as JSON on its command line."""

    role: Role
    name: str
    """Unique in the run, e.g. "generator-0"; a replacement is "generator-0.1"."""
    run_directory: str
    model_path: str
    control_address: str
    """Where the controller listens."""
    data_address: str
    """Where the trainer listens for trajectories."""
    parent: int
    """Process id of the launcher."""
    threads: int
    """Threads for tensor work."""
    process_index: int = 1
    """Index of the process in the run; the controller is 0. Determines its metrics port."""
    stop_tokens: tuple[int, ...] = ()
    resume_from: int | None = None
    """The trainer continues from the checkpoint after this many steps; None: from the model."""
    first: bool = True
    """False if it replaces a process that died."""

    def config(self) -> RunConfig:
        """Read the run's resolved configuration from the run directory."""
        import yaml

        path = Path(self.run_directory) / "config.yaml"
        return parse_config(yaml.safe_load(path.read_text(encoding="utf-8")), source=str(path))
