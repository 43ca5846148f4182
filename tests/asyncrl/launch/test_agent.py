"""An agent, with a real child and a controller that the test plays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_processes import generator_spec
from msgspec.structs import replace

from asyncrl import health as health_module
from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.health import Health
from asyncrl.launch import node_child
from asyncrl.launch.agents import agent as agent_module
from asyncrl.launch.agents import hosting
from asyncrl.launch.agents.agent import Agent, AgentLine, Settings
from asyncrl.launch.agents.hosting import Ports
from asyncrl.launch.agents.launcher import AgentsLauncher
from asyncrl.launch.agents.registry import Needs
from asyncrl.launch.agents.secret import HUB
from asyncrl.launch.child_spec import keys_of
from asyncrl.launch.nodes import NodeInfo
from asyncrl.wire import RunKey
from benchmarks.chaos.agents_run import free_ports

KEY = RunKey.new()
SECONDS = 60.0


@pytest.fixture(autouse=True)
def _stubborn_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node_child, "CHILD_MODULE", "stubborn_child")
    monkeypatch.setattr(node_child, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(hosting, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(agent_module, "REFUSED", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    support = Path(__file__).parents[2] / "support"
    monkeypatch.setenv("PYTHONPATH", f"{support}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def config(port: int) -> RunConfig:
    agents = {"listen": f"127.0.0.1:{port}", "key_file": "unused"}
    return parse_config({"launcher": {"kind": "agents", "agents": agents}}, source="the test")


def launcher(port: int, run: Path, *, lost_seconds: float = 60.0, **changes: Any) -> AgentsLauncher:
    question = {
        "token_file": str(run / ".nodes"), "token": "t", "model": str(run),
        "weights_directory": str(run),
    }  # fmt: skip
    facts = node_child.node_facts(question) | {"id": "controller", "ip": ""}
    ours = replace(NodeInfo(**facts), **changes)
    needs = Needs(
        "test", json.dumps(question), ours, str(run), str(run),
        {"trainer": 0, "generator": 0}, frozenset(), "mark",
        silence_seconds=20.0, silence_setting="s", lost_seconds=lost_seconds, relay_per_node=False,
    )  # fmt: skip
    return AgentsLauncher(
        config(port), needs, KEY, print, listen=f"127.0.0.1:{port}", advice="of the test"
    )


@asynccontextmanager
async def agent(port: int, **changes: Any) -> AsyncIterator[asyncio.Task[None]]:
    settings = {"controller": f"127.0.0.1:{port}", "role": "any", "secret": KEY} | changes
    running = asyncio.create_task(Agent(Settings(**settings)).run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.wait([running])


async def until(condition: Callable[[], Any], what: str) -> Any:
    ends = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < ends, f"waited for {what}"
        await asyncio.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


async def started(found: AgentsLauncher, run: Path, name: str) -> list[int]:
    """Start a child, which needs no engine; its process ids."""
    run.joinpath("logs").mkdir(exist_ok=True)
    run.joinpath(".nodes").write_text("t", encoding="utf-8")
    what = replace(generator_spec(name), run_directory=str(run))
    found.start(what, keys_of(RunKey.new(), name, "generator"))
    log = run / "logs" / f"{name}.log"
    text = await until(lambda: log.exists() and log.read_text(encoding="utf-8"), "its log")
    pids: list[int] = json.loads(text)["pids"]
    return pids


def test_children_of_a_controller_that_is_gone_end_before_another_is_served(tmp_path: Path) -> None:
    port = free_ports(2)

    async def check() -> None:
        (tmp_path / ".nodes").write_text("t", encoding="utf-8")
        async with agent(port):
            first = launcher(port, tmp_path)
            pids = await started(first, tmp_path, "generator-0")
            handle = first.roster.agents and next(iter(first.roster.agents.values())).work
            assert handle
            assert handle.exit_code() is None
            await until(lambda: str(pids[0]) in handle.log_tail(), "the end of its log")
            for task in first._tasks:  # as if it was killed: it says no goodbye
                task.cancel()
            first._hub.close()
            second = launcher(port, tmp_path)
            await until(lambda: second.roster.could_begin_with()[1] >= 0 and second.roster.agents
                        and second.roster.free("generator"), "the agent")  # fmt: skip
            await until(lambda: not any(map(is_alive, pids)), "the end of the child")
            again = await started(second, tmp_path, "generator-1")
            assert all(map(is_alive, again))
            await second.close()
        await until(lambda: not any(map(is_alive, again)), "the end of its children")

    asyncio.run(check())


def test_an_agent_that_was_cut_off_for_a_while_joins_again(tmp_path: Path) -> None:
    port = free_ports(2)

    async def check() -> None:
        (tmp_path / ".nodes").write_text("t", encoding="utf-8")
        found = launcher(port, tmp_path)
        async with agent(port):
            await until(lambda: found.roster.free("generator"), "the agent")
            pids = await started(found, tmp_path, "generator-0")
            (known,) = found.roster.agents.values()
            lost = known.work
            assert lost
            known.heard -= 100.0
            found.roster.look(time.monotonic())
            assert lost.lost_with_machine
            await until(lambda: found.roster.free("generator"), "the agent, once more")
            await until(lambda: not any(map(is_alive, pids)), "the end of the lost child")
        await found.close()

    asyncio.run(check())


def test_a_port_that_closes_connections_may_be_a_proxy_of_a_controller_to_come(
    tmp_path: Path,
) -> None:
    """As Docker's, `ssh -L`, or a mesh: it is no other secret."""
    port, accepted = free_ports(2), 0

    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()

    async def check() -> None:
        (tmp_path / ".nodes").write_text("t", encoding="utf-8")
        proxy = await asyncio.start_server(closes, "127.0.0.1", port)
        watched = AgentLine(f"127.0.0.1:{port}", KEY.line(HUB, "b"))
        await until(lambda: watched.refused >= 2, "connections that are closed")
        assert "by a proxy" in await watched.trouble()
        watched.close()
        async with agent(port) as running:
            before = accepted
            await until(lambda: accepted > before + 15 or running.done(), "attempts of the agent")
            assert not running.done()
            proxy.close()
            await proxy.wait_closed()
            found = launcher(port, tmp_path)
            await until(lambda: found.roster.free("generator") or running.done(), "the agent")
            assert not running.done()
            await found.close()

    asyncio.run(check())


def test_what_a_proxy_refused_does_not_count_once_the_controller_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        line, there = AgentLine(f"127.0.0.1:{free_ports(2)}", KEY.line(HUB, "b")), False

        async def is_a_hub() -> bool:
            return there

        monkeypatch.setattr(line, "is_a_hub", is_a_hub)
        line.refused = 9
        assert not await line.is_refused(5)
        there = True
        assert not await line.is_refused(5)  # all nine may have been the proxy's
        line.refused += 4
        assert not await line.is_refused(5)
        line.refused += 1
        assert await line.is_refused(5)
        line.close()

    asyncio.run(check())


def test_an_agent_that_waits_for_a_controller_is_known_by_its_address_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's name is not known at first, as in Compose and Kubernetes; then we move."""
    port, asked = free_ports(2), 0

    def address(_: str) -> str:
        nonlocal asked
        asked += 1
        return {1: "", 2: "", 3: "127.0.0.7"}.get(asked, "127.0.0.8")

    assert agent_module._own_address("255.255.255.255:5900") == ""  # no way to there
    monkeypatch.setattr(agent_module, "_own_address", address)
    monkeypatch.setattr(agent_module, "BEAT_SECONDS", 0.1)

    async def check() -> None:
        (tmp_path / ".nodes").write_text("t", encoding="utf-8")
        async with agent(port):
            await until(lambda: asked >= 6, "attempts of the agent")
            found = launcher(port, tmp_path)
            await until(lambda: found.roster.free("generator"), "the agent")
            (known,) = found.roster.agents.values()
            assert known.hello.address == "127.0.0.8"
            await found.close()

    asyncio.run(check())


def test_an_agent_for_one_run_ends_if_its_controller_is_gone_without_a_word(
    tmp_path: Path,
) -> None:
    port = free_ports(2)

    async def check() -> None:
        (tmp_path / ".nodes").write_text("t", encoding="utf-8")
        found = launcher(port, tmp_path, lost_seconds=0.5)
        async with agent(port, once=True) as running:
            await until(lambda: found.roster.free("generator"), "the agent")
            for task in found._tasks:
                task.cancel()
            with pytest.raises(AsyncrlError, match=r"was silent for .* ends with the run"):
                await asyncio.wait_for(running, SECONDS)
        found._hub.close()

    asyncio.run(check())


def test_a_probe_may_ask_while_children_come_and_go() -> None:
    async def check() -> None:
        found = hosting.Hosting(lambda _: pytest.fail("nothing starts"), Ports(""), lambda: None)

        class Ended(asyncio.Event):
            def is_set(self) -> bool:  # meanwhile, in the loop's thread
                found._hosted[f"relay-{len(found._hosted)}"] = hosting._Hosted("r", "relay")
                return True

        for name in ("generator-0", "generator-1"):
            one = hosting._Hosted(name, "generator", ready=True, ended=Ended())
            found._hosted[name] = one
        assert found.work == []
        assert not found.is_ready

    asyncio.run(check())


def test_a_probe_asks_no_proxy_and_understands_no_nonsense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    found = Health("127.0.0.1", 0)
    health_module.ask(found.port, "127.0.0.1", ready=False)
    with pytest.raises(UserError, match=r"/readyz: not ready \(503\)"):
        health_module.ask(found.port, "127.0.0.1", ready=True)
    found.close()
    with pytest.raises(UserError, match=r"/readyz: \[Errno \d+\] Connection refused"):
        health_module.ask(found.port, "127.0.0.1", ready=True)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection = other.accept()[0]
            connection.recv(999)
            connection.sendall(b"nonsense\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UserError, match="nonsense"):
            health_module.ask(other.getsockname()[1], "127.0.0.1", ready=False)
        thread.join()


def test_a_child_that_does_not_leave_in_time_is_killed_and_named(tmp_path: Path) -> None:
    port = free_ports(2)

    async def check() -> None:
        (tmp_path / ".nodes").write_text("t", encoding="utf-8")
        found = launcher(port, tmp_path)
        async with agent(port, grace_seconds=1.0) as running:
            await until(lambda: found.roster.free("generator"), "the agent")
            pids = await started(found, tmp_path, "generator-0")
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(AsyncrlError, match=r"generator-0 did not leave within 1 s"):
                await running
            await until(lambda: not any(map(is_alive, pids)), "the end of the child")
        await found.close()

    asyncio.run(check())


def test_an_agent_that_cannot_take_part_says_why_and_ends(tmp_path: Path) -> None:
    port = free_ports(2)

    async def check() -> None:
        found = launcher(port, tmp_path)
        async with agent(port, secret=RunKey.new()) as running:
            with pytest.raises(UserError, match="does not have the same secret"):
                await asyncio.wait_for(running, SECONDS)
        with pytest.raises(UserError, match=r"cannot listen for agents at 127\.0\.0\.1:.* in use"):
            launcher(port, tmp_path)
        await found.close()
        other = launcher(port, tmp_path, asyncrl="0.0.9 (abc)")
        async with agent(port) as running:
            with pytest.raises(UserError, match=r"refuses this agent: .* has asyncrl 0\.0\.9"):
                await asyncio.wait_for(running, SECONDS)
        await other.close()

    asyncio.run(check())


def test_a_loop_that_hangs_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(health_module, "BEAT_SECONDS", 0.01)
    found = Health("127.0.0.1", 0)
    is_ready = False

    def get(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{found.port}{path}", timeout=30) as got:
                return int(got.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    async def check() -> None:
        nonlocal is_ready
        beating = asyncio.create_task(found.beat(lambda: is_ready))
        await until(lambda: found._turned is not None, "the first turn")
        assert await asyncio.to_thread(get, "/healthz") == 200
        assert await asyncio.to_thread(get, "/readyz") == 503
        is_ready = True
        assert await asyncio.to_thread(get, "/readyz") == 200
        ends = time.monotonic() + SECONDS
        while get("/healthz") != 503:  # this blocks the loop
            assert time.monotonic() < ends
        assert get("/readyz") == 503
        beating.cancel()

    assert get("/healthz") == 200, "no loop yet"
    asyncio.run(check())
    assert get("/other") == 404
    assert get("/readyz") == 503
    found.close()
