"""Digests of a run's input files, so that a resume notices changes.

The rows of the data decide the order of visits and the held-out rows; reward, environment and map
functions decide the meaning of results. run.json keeps digests of all of them.

- Changed rows are refused, unless the user accepts them (`--changed-data`).
- Changed functions are named. A file is compared without what it imports.
- After a change of held-out rows, of functions or of `sampling`, the accuracy before training is
  not comparable, so the difference is left out.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.tasks.prompts import Prompt, Task, held_out_sets

TRAINING_ROWS = "training rows"


class RunInputs(msgspec.Struct, frozen=True):
    """Digests of a run's inputs, 32 hexadecimal digits each."""

    rows: dict[str, str]
    """Digests of the training rows and of each set of held-out rows, by what they are."""
    code: dict[str, str]
    """Digests of the files with functions, by setting and name, and settings of sampling."""


def inputs_of(config: RunConfig, task: Task) -> RunInputs:
    """Identify the rows and functions of a run that is about to begin or to be resumed."""
    rows = {TRAINING_ROWS: _digest_of_rows(task.train)}
    for name, prompts in held_out_sets(task).items():
        rows[f"held-out rows ({name})"] = _digest_of_rows(prompts)
    code = {what: _digest([file.read_bytes()]) for what, file in _files(config)}
    code |= {f"sampling.{key}": repr(one) for key, one in config.sampling.model_dump().items()}
    code["evaluation.temperature"] = repr(config.evaluation.temperature)
    return RunInputs(rows, code)


def changes_since(before: RunInputs | None, now: RunInputs) -> tuple[list[str], list[str]]:
    """Return changed rows, and changed functions or sampling, since the run's last start."""
    if before is None:
        return [], []
    return _different(before.rows, now.rows), _different(before.code, now.code)


def refuse_changed_rows(folder: Path, rows: Sequence[str]) -> None:
    """Refuse to resume with the changed `rows`. Raises UserError."""
    if rows:
        raise UserError(
            f"cannot resume {folder}: the {' and the '.join(rows)} have changed since the run was "
            "started last, and the data order and the held-out rows depend on them. Restore the "
            "data, start a new run under another name, or accept the new rows with --changed-data; "
            "then the accuracy before training is left out"
        )


def _different(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [name for name in now if name in before and before[name] != now[name]]


def _digest_of_rows(prompts: Iterable[Prompt]) -> str:
    encode = msgspec.json.Encoder(enc_hook=str, order="deterministic").encode
    return _digest(encode((one.prompt_id, one.example)) + b"\n" for one in prompts)


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    names = [("rewards.functions", one.name) for one in config.rewards.functions]
    if config.environment.name is not None:
        names.append(("environment.name", config.environment.name))
    if config.task.map is not None:
        names.append(("task.map", config.task.map))
    for setting, name in names:
        if (file := _file_of(name)) is not None:
            yield f"{setting} {name}", file


def _file_of(name: str) -> Path | None:
    """Return the file of `path/to/file.py:function` or `my.module:function`; import nothing."""
    source, separator, _ = name.rpartition(":")
    source = source.removeprefix("agent:").removeprefix("gymnasium:")
    if not separator or not source:
        return None
    if source.endswith(".py"):
        return Path(source) if Path(source).is_file() else None
    inner = Path(*source.split("."))
    for place in (*sys.path, str(Path.cwd())):  # as in the process that imports it
        for file in (Path(place) / inner.with_suffix(".py"), Path(place) / inner / "__init__.py"):
            if file.is_file():
                return file
    return None
