"""Gymnasium environments, played in text: `gymnasium:ID`.

Before the first sample, a trial with a few random actions finds out how samples can go back: by
`snapshot` and `restore` if copies of the environment (`copy.deepcopy`) are independent, else by
"deterministic" replay if the same seed and actions give the same observations. Otherwise samples
start over, and the log says so.
"""

import copy
import importlib
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

from asyncrl.environments.adapters.tool_turns import passed_on, refuse_unknown
from asyncrl.environments.protocol import Action, Replay, StepResult
from asyncrl.errors import RewardError

log = logging.getLogger(__name__)


class GoesBack(NamedTuple):
    """The ways in which an environment can go back."""

    copies: bool
    """Copies of the environment are independent."""
    replays: bool
    """A new environment with the same seed and actions gives the same observations."""


_TRIAL_SEED = 20261123
_TRIAL_ACTIONS = 8
_NUMBER = re.compile(r"-?\d+")
_ARGUMENTS = ("make", "prompt", "observation", "actions", "invalid_reward", "imports")


class GymnasiumText:
    """One Gymnasium environment and the text around it."""

    def __init__(
        self,
        make: Callable[[], Any],
        goes_back: GoesBack,
        *,
        prompt: str = "",
        observation: str = "{observation}",
        actions: Sequence[str] = (),
        invalid_reward: float = 0.0,
    ) -> None:
        self._make = make
        self._prompt = prompt
        self._observation = observation
        self._words = [word.casefold() for word in actions]
        self._invalid_reward = invalid_reward
        self._environment: Any = None
        self.replay: Replay | None = "deterministic" if goes_back.replays else None
        if goes_back.copies:
            self.snapshot = lambda: copy.deepcopy(self._environment)
            self.restore = self._go_back

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Begin an episode. The row may have a `seed`, and `options` for Gymnasium's reset."""
        own = row.get("seed", seed)
        self._environment = self._make()
        observation, _ = self._environment.reset(seed=own % 2**31, options=row.get("options"))
        return "\n".join(part for part in (self._prompt, self._shown(observation)) if part)

    def step(self, action: Action) -> StepResult:
        """Advance the environment by one step."""
        chosen = self._action(action.text)
        if chosen is None:
            return StepResult(self._help(), reward=self._invalid_reward)
        observation, reward, ended, cut, _ = self._environment.step(chosen)
        return StepResult(self._shown(observation), bool(ended or cut), float(reward))

    def close(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            self._environment.close()

    def _go_back(self, state: Any) -> None:
        self._environment = copy.deepcopy(state)  # the state may be gone back to again

    def _shown(self, observation: Any) -> str:
        return self._observation.format(observation=_plain(observation))

    def _action(self, text: str) -> Any:
        space = self._environment.action_space
        if not hasattr(space, "n"):
            return text
        found: list[int] = []
        if self._words:
            words = "|".join(map(re.escape, sorted(self._words, key=len, reverse=True)))
            pattern = rf"(?<!\w)(?:{words})(?!\w)"
            found = [self._words.index(word) for word in re.findall(pattern, text.casefold())]
        numbers = found or [int(number) for number in _NUMBER.findall(text)]
        first = int(getattr(space, "start", 0))
        action = numbers[-1] + (first if found else 0) if numbers else None
        return action if action is not None and space.contains(action) else None

    def _help(self) -> str:
        space = self._environment.action_space
        if self._words:
            return f"answer with one of: {', '.join(self._words)}"
        first = int(getattr(space, "start", 0))
        return f"answer with a number from {first} to {first + int(space.n) - 1}"


def how_it_goes_back(make: Callable[[], Any]) -> GoesBack:
    """Try copies and seeded replays of an environment with a few random actions."""
    with closing(make()) as environment:
        environment.action_space.seed(_TRIAL_SEED)
        environment.reset(seed=_TRIAL_SEED)
        actions = [environment.action_space.sample() for _ in range(_TRIAL_ACTIONS)]
        try:
            twins = [copy.deepcopy(environment) for _ in "ab"]
        except Exception:  # noqa: BLE001 - whatever a library's objects raise
            twins = []
        played = [_play(twin, actions) for twin in twins]
        again = []
        for _ in "ab":
            with closing(make()) as other:
                other.reset(seed=_TRIAL_SEED)
                again.append(_play(other, actions))
        return GoesBack(
            copies=bool(twins) and played[0] == played[1] == _play(environment, actions),
            replays=again[0] == again[1],
        )


def _plain(observation: Any) -> Any:
    """Convert numpy numbers to Python's, which print as plain numbers."""
    if isinstance(observation, dict):
        return {key: _plain(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(map(_plain, observation))
    return observation.item() if getattr(observation, "shape", None) == () else observation


def _play(environment: Any, actions: list[Any]) -> list[str]:
    seen = []
    for action in actions:
        observation, reward, ended, cut, _ = environment.step(action)
        seen.append(f"{observation} {reward} {ended} {cut}")
        if ended or cut:
            break
    return seen


def adapt(rest: str, args: dict[str, Any]) -> Callable[[], GymnasiumText]:
    """Return a factory for `rest`, an id of Gymnasium's registry. Raises RewardError."""
    name = f"environment gymnasium:{rest}"
    refuse_unknown(args, f"gymnasium:{rest}", _ARGUMENTS)
    try:
        import gymnasium
        from gymnasium import spaces
    except ImportError as error:
        raise RewardError(f"{name} needs Gymnasium: pip install gymnasium ({error})") from error
    for module in args.get("imports", ()):  # modules that register environments
        importlib.import_module(module)
    make = partial(gymnasium.make, rest, **passed_on(args, "make", f"gymnasium:{rest}", "id"))
    try:
        tried = make()
    except (gymnasium.error.Error, TypeError) as error:
        raise RewardError(f"{name} cannot be made: {error}") from error
    space = tried.action_space
    tried.close()
    if not isinstance(space, spaces.Text | spaces.Discrete):
        raise RewardError(f"{name} has {type(space).__name__} actions, not Text or Discrete ones")
    words = args.get("actions", ())
    if words and (not isinstance(space, spaces.Discrete) or len(words) != space.n):
        raise RewardError(f"{name}: `actions` names {len(words)} actions, but they are {space}")
    settings = {key: args[key] for key in _ARGUMENTS[1:5] if key in args}
    goes_back = how_it_goes_back(make)
    if not any(goes_back):
        log.warning(
            "%s answers the same seed and actions differently and cannot be copied: its samples "
            "start over instead of being verified",
            name,
        )
    return partial(GymnasiumText, make, goes_back, **settings)
