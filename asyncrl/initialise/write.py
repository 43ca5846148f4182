"""Writes a configuration, a reward function and data to start from; overwrites nothing."""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.tasks.builtin.arithmetic import arithmetic_questions
from asyncrl.tasks.config import TaskConfig

QUESTIONS = 576
"""Rows of the data; 64 of them are held out."""


_MONITORING = ("prometheus.yml", "rules/asyncrl.yaml", "dashboards/asyncrl.json")


def initialise(folder: Path) -> list[Path]:
    """Write run.yaml, rewards.py and questions.jsonl to `folder`, and return their paths.

    Raises UserError, with nothing changed, if one of them exists or the folder cannot be written.
    """
    return _write(folder, _texts())


def write_monitoring(folder: Path) -> list[Path]:
    """Write what Prometheus and Grafana need for the runs in `folder`/runs, as `initialise` does.

    These are the files of asyncrl.monitoring. They name each other and `../runs`, so they follow
    the runs of any folder that they lie in.
    """
    source = resources.files("asyncrl.monitoring")
    return _write(
        folder,
        {f"monitoring/{name}": (source / name).read_text("utf-8") for name in _MONITORING},
    )


def _write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    files = {folder / name: text for name, text in texts.items()}
    there = [path for path in files if path.is_symlink() or path.exists()]
    if there:
        raise UserError(
            f"{', '.join(map(str, there))} {'is' if len(there) == 1 else 'are'} there already, and "
            "init overwrites nothing. Give another folder: asyncrl init FOLDER"
        )
    written: list[Path] = []
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise UserError(
            f"{folder} cannot be written: {error.strerror}. Give another folder: "
            "asyncrl init FOLDER"
        ) from error
    return written


def _texts() -> dict[str, str]:
    """Return the contents by file name."""
    templates = resources.files("asyncrl.initialise") / "templates"
    return {
        "run.yaml": (templates / "run.yaml").read_text(encoding="utf-8"),
        "rewards.py": (templates / "rewards.py").read_text(encoding="utf-8"),
        "questions.jsonl": "".join(f"{json.dumps(row)}\n" for row in _questions()),
    }


def _questions() -> list[dict[str, str]]:
    """Return distinct problems of the built-in task, the same at each call."""
    config = TaskConfig(train_size=QUESTIONS, evaluation_size=1)
    questions, _ = arithmetic_questions(config, seed=0)
    rows = (one.example for one in questions)
    return [{"question": row["prompt"], "answer": row["answer"]} for row in rows]
