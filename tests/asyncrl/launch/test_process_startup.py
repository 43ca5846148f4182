"""Bring-up of a child process: what it offers, and what the controller hears of a failure."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from fake_processes import generator_spec, relay_spec, spec
from msgspec.structs import replace

from asyncrl.config.run_config import load_config
from asyncrl.errors import ConfigError, UserError
from asyncrl.launch.child_spec import CONFIG_VARIABLE, ChildSpec, TrainerSpec, keys_of, read_spec
from asyncrl.launch.process_startup import Child, bring_up, without_collecting_the_start
from asyncrl.launch.start_order import configure_allocator
from asyncrl.monitoring.metrics.metrics import TrainerMetrics
from asyncrl.wire import Hub, RunKey
from asyncrl.wire.messages import from_trainer, to_trainer

RUN_KEY = RunKey.new()
KEYS = keys_of(RUN_KEY, "trainer", "trainer")


def failure(_spec: TrainerSpec, error: BaseException) -> from_trainer.Failure | None:
    """Only user errors are expected."""
    if not isinstance(error, UserError):
        return None
    return from_trainer.Failure(str(error), user_error=True)


def spec_in(directory: Path, **settings: Any) -> TrainerSpec:
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    return TrainerSpec(
        name="trainer",
        run_directory=str(directory),
        model_path="",
        control_address=f"ipc://{directory}/control",
        data_address="",
        parent=0,
        threads=1,
    )


def test_an_inline_configuration_is_read_without_the_run_directory(tmp_path: Path) -> None:
    config = load_config(None, ["run.name=inline", "sampling.stop=['\\n']"])
    spec = replace(spec_in(tmp_path, run={"name": "file"}), config_json=config.model_dump_json())
    sent = msgspec.json.encode(replace(spec, config_json="")).decode()
    environment = {CONFIG_VARIABLE: spec.config_json, "PATH": "/bin"}
    assert read_spec(sent, environment).config() == config
    assert environment == {"PATH": "/bin"}
    assert read_spec(sent, environment).config().run.name == "file"


@pytest.mark.parametrize("given", [spec(), generator_spec(), relay_spec()])
def test_each_role_reads_its_own_spec_from_the_command_line(given: ChildSpec) -> None:
    sent = msgspec.json.encode(given).decode()
    assert f'"role":"{given.role}"' in sent, "by which processes are found"
    assert read_spec(sent, {}) == given
    assert type(read_spec(sent, {})) is type(given)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_a_trainer_configures_torchs_allocator_unless_the_user_has(
    given: dict[str, str], found: str | None
) -> None:
    environment = dict(given)
    configure_allocator(environment)
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == found


def heard_from(
    spec: TrainerSpec,
    work: Callable[[Child[TrainerSpec, TrainerMetrics]], None],
    error: type[BaseException],
) -> list[Any]:
    """Run `work` in a child, expect it to fail, and give what the controller heard."""

    async def play() -> list[Any]:
        hub: Hub[Any] = Hub(spec.control_address, RUN_KEY.hub("control"), from_trainer.FromTrainer)
        try:
            with pytest.raises(error):
                async with bring_up(
                    spec, KEYS, to_trainer.ToTrainer, TrainerMetrics, failure
                ) as child:
                    work(child)
            heard: list[Any] = []
            try:
                async with asyncio.timeout(60 if error is not RuntimeError else 0.2):
                    heard.append((await hub.receive())[1])
            except TimeoutError:
                pass
            return heard
        finally:
            hub.close()

    return asyncio.run(play())


def fail_with(error: BaseException) -> Callable[[Any], None]:
    def work(_child: Any) -> None:
        raise error

    return work


def test_an_expected_error_is_reported_to_the_controller(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, monitoring={"metrics": False})
    heard = heard_from(spec, fail_with(UserError("no such model")), UserError)
    assert heard == [from_trainer.Failure("no such model", user_error=True)]


def test_of_an_exception_group_its_first_error_is_reported_and_raised(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, monitoring={"metrics": False})
    inner = BaseExceptionGroup("loops", [UserError("no such model"), ValueError()])
    heard = heard_from(spec, fail_with(BaseExceptionGroup("loops", [inner])), UserError)
    assert heard == [from_trainer.Failure("no such model", user_error=True)]


def test_an_unexpected_error_is_only_raised(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, monitoring={"metrics": False})
    assert heard_from(spec, fail_with(RuntimeError("a defect")), RuntimeError) == []


def test_a_configuration_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, trainer={"learning_rat": 1})
    (heard,) = heard_from(spec, fail_with(AssertionError("not reached")), ConfigError)
    assert "learning_rat" in heard.reason


def test_a_child_offers_metrics_and_a_time_line_and_closes_them(tmp_path: Path) -> None:
    seen: list[Any] = []

    def work(child: Child[TrainerSpec, TrainerMetrics]) -> None:
        seen.append(child)
        child.closing.callback(lambda: seen.append("closed"))
        assert child.metrics_port is not None
        with child.timeline.span("training", step=0):
            pass
        raise UserError("end")

    spec = spec_in(tmp_path, monitoring={"metrics": True, "port": 0})
    heard_from(spec, work, UserError)
    assert seen[1:] == ["closed"]
    assert (tmp_path / "timeline" / "trainer.jsonl").exists()


def test_collections_look_only_at_what_was_made_since_the_start() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    old = [Cycle()]
    gc.disable()  # as the entry point does
    with without_collecting_the_start():
        assert gc.isenabled()
        new = Cycle()
        tracked = gc.get_objects()
        assert any(one is new for one in tracked)
        assert not any(one is old or one is old[0] for one in tracked)
        gone = weakref.ref(new)
        del new, tracked
        gc.collect()
        assert gone() is None, "a cycle made since the start is still collected"
    assert any(one is old[0] for one in gc.get_objects())
    gc.freeze()  # as at the end of pytest's collection, for the tests after this one
