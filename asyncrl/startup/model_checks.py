"""Refuses, before a process starts, inputs that cannot be trained on.

These are rows that a reward cannot judge, an unsuitable algorithm, sequences longer than the model
reads, and a critic with another vocabulary.
"""

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import DataError, ModelError, UserError
from asyncrl.programs.tests import Asserted, Test, read_tests
from asyncrl.rewards.code import TESTS
from asyncrl.rewards.config import RewardFunctionConfig
from asyncrl.startup.model_check import check_files, description_of
from asyncrl.tasks.builtin.warm_start_recipe import POSITIONS
from asyncrl.tasks.model import check_directory
from asyncrl.tasks.model_tokenizer import load_tokenizer, tokenizer_digest
from asyncrl.tasks.prompts import Prompt, Task, held_out_sets
from asyncrl.trainer.base.algorithm_registry import is_own

_NEED_ANSWERS = ("arithmetic", "exact_match", "math_verify")


def check_rows(config: RunConfig, task: Task) -> list[str]:
    """Check all rows for each reward; return a warning for tests that a wrong program can pass.

    Raises DataError if a row lacks what a reward needs and a failed reward ends the run.
    """
    warnings = []
    for function in config.rewards.functions:
        forms = Counter[type]()
        for prompt in task.train:
            forms.update(map(type, _tests_of(config, function, prompt)))
        for prompt in itertools.chain(*held_out_sets(task).values()):
            _tests_of(config, function, prompt)
        if forms[Asserted]:
            warnings.append(
                f"WARNING: reward 'code': {forms[Asserted]:,} of {forms.total():,} tests are an "
                "`assert` that is judged in the program's process, so a wrong program can pass "
                "them. Give them as call, args and returns, or as input and output "
                "(docs/rewards.md)"
            )
    return warnings


def _tests_of(config: RunConfig, function: RewardFunctionConfig, prompt: Prompt) -> list[Test]:
    """Return the tests by which a reward judges a row's programs. Raises DataError."""
    why, tests, column = None, list[Test](), function.args.get("tests", TESTS)
    if function.name in _NEED_ANSWERS and prompt.example.get("answer") is None:
        why = "it lacks a reference answer; name its field with task.answer_field"
    if function.name == "code":
        try:
            tests = read_tests(prompt.example.get("row", {}).get(column), column)
        except ValueError as error:
            why = str(error)
    if why is not None and config.rewards.on_error == "stop":
        raise DataError(
            f"reward {function.name!r} cannot judge responses to prompt {prompt.prompt_id}: {why}"
        )
    return tests


_SECONDS = 120.0


def check_algorithm(config: RunConfig) -> None:
    """Load and try the class of `trainer.algorithm`, if it is the user's. Raises UserError."""
    name = config.trainer.algorithm
    if not is_own(name):
        return
    try:
        done = subprocess.run(
            (sys.executable, "-P", "-m", "asyncrl.trainer_process.custom_algorithm"),
            input=config.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
        reason = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"trainer.algorithm {name!r}: importing and trying it takes more than {_SECONDS:g} s"
        ) from error
    except (subprocess.CalledProcessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()[-2000:]
        raise UserError(
            f"trainer.algorithm {name!r}: the process that tried it ended unexpectedly:\n{said}"
        ) from error
    if reason is not None:
        raise UserError(reason)


_BY_LENGTH = {"dynamic", "longrope", "su"}
"""Rotary embeddings whose angles differ in long sequences; su is longrope's former name."""
_ORIGINAL = "original_max_position_embeddings"


def check_builtin_positions(config: RunConfig) -> None:
    """Refuse sequences too long for all built-in models, before one is made. Raises UserError."""
    if config.model.path.startswith("builtin:"):
        _check(config, POSITIONS)


def check_positions(config: RunConfig, model: Path) -> None:
    """Refuse sequences too long for the torch engine's model. Raises UserError.

    vLLM and SGLang have their own rules for models with scaled positions.
    """
    described = description_of(model)
    if any(engine.kind == "torch" for engine in config.engines):
        longest = described.get("max_position_embeddings")
        if isinstance(longest, int):
            _check(config, longest)
    _check_angles(config, described)


def _check_angles(config: RunConfig, described: dict[str, Any]) -> None:
    """Refuse lengths at which rotary angles depend on the batch instead of the position."""
    wanted = config.engine.max_model_len
    found = described.get("rope_parameters") or described.get("rope_scaling") or {}
    for one in (found, *found.values()):  # of some models one for each kind of layer
        kind = one.get("rope_type", one.get("type")) if isinstance(one, dict) else None
        if kind not in _BY_LENGTH:
            continue
        of_model = described.get("max_position_embeddings")
        of_training = one.get(_ORIGINAL, described.get(_ORIGINAL, of_model))
        limit = of_model if kind == "dynamic" else of_training
        if isinstance(limit, int) and wanted > limit:
            raise UserError(
                f"engine.max_model_len: with {wanted:,} tokens the positions of {config.model.path}"
                f" (rope_type: {kind}) are scaled by the longest sequence of a batch, so a token's "
                f"probability depends on what is computed next to it, in engine and trainer; set "
                f"it to {limit}, up to which they are not, or choose another model"
            )


def _check(config: RunConfig, longest: int) -> None:
    wanted = config.engine.max_model_len
    if wanted > longest:
        raise UserError(
            f"engine.max_model_len: {wanted:,} tokens are more than {config.model.path} reads, "
            f"which are {longest:,}; set it to {longest}, or choose another model"
        )


_SETTING = "trainer.critic.model"


def with_critic(config: RunConfig, model_path: str, tokenizer: Any) -> RunConfig:
    """Return the configuration with the critic's directory as an absolute path.

    `model_path` and `tokenizer` are the policy's. Raises UserError if the critic is not a model
    directory, has another vocabulary or tokenizer, or reads only shorter sequences.
    """
    given = config.trainer.critic.model
    if given is None:
        return config
    directory = Path(given)
    if not directory.is_dir():
        raise ModelError(
            f"{_SETTING}: there is no directory {given!r} (looked from {Path.cwd()}); give a "
            "Hugging Face model directory, or leave it out to start from model.path"
        )
    check_directory(directory, _SETTING)
    check_files(directory, _SETTING, needs_head=False)
    described = description_of(directory)
    theirs, own = description_of(Path(model_path)).get("vocab_size"), described.get("vocab_size")
    if isinstance(own, int) and isinstance(theirs, int) and own < theirs:
        raise UserError(
            f"{_SETTING}: {directory} has a vocabulary of {own:,} tokens, the policy one of "
            f"{theirs:,}; the value model must know every token that the policy may draw"
        )
    expected, found = tokenizer_digest(tokenizer), tokenizer_digest(load_tokenizer(str(directory)))
    if expected.vocabulary != found.vocabulary:
        raise UserError(
            f"{_SETTING}: {directory} has another tokenizer than {config.model.path}, so its "
            "values would be of other texts; choose a value model of the policy's family"
        )
    longest, needed = described.get("max_position_embeddings"), config.engine.max_model_len
    if isinstance(longest, int) and longest < needed:
        raise UserError(
            f"{_SETTING}: {directory} reads at most {longest:,} tokens, and sequences may have "
            f"{needed:,} (engine.max_model_len); lower it, or choose another value model"
        )
    critic = config.trainer.critic.model_copy(update={"model": str(directory.resolve())})
    return config.with_values("trainer", critic=critic)
