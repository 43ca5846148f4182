"""Where the reward servers of a run are: RUN/reward-servers.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.errors import UserError
from asyncrl.rewards import reward_model
from asyncrl.rewards.config import RewardConfig
from asyncrl.wire.transport.atomic_files import write_atomically

_FILE = "reward-servers.json"


def starts_servers(config: RewardConfig) -> bool:
    """Whether a run with these rewards starts reward servers."""
    return any(one.name == reward_model.NAME and "model" in one.args for one in config.functions)


def write_addresses(run: Path, urls: Mapping[int, str]) -> None:
    """Tell the generators of a run the addresses, by the functions' indices."""
    write_atomically(run / _FILE, msgspec.json.encode(urls).decode())


def with_servers(config: RewardConfig, run: Path) -> RewardConfig:
    """The configuration with the addresses that the controller of a run has written."""
    if not starts_servers(config):
        return config
    try:
        urls = msgspec.json.decode((run / _FILE).read_bytes(), type=dict[int, str])
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{run / _FILE} has no addresses of reward servers: {error}") from error
    return with_urls(config, urls)


def with_urls(config: RewardConfig, urls: Mapping[int, str]) -> RewardConfig:
    """A copy in which functions ask these servers, by the functions' indices."""
    own = reward_model.SERVER_ARGS
    functions = tuple(
        one.model_copy(
            update={"args": {k: v for k, v in one.args.items() if k not in own} | {"url": urls[i]}}
        )
        if i in urls
        else one
        for i, one in enumerate(config.functions)
    )
    return config.model_copy(update={"functions": functions})
