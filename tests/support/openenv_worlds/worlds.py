"""Environments of the real OpenEnv behind one server: a game, a Python interpreter, tools."""

import contextlib
import io
import random
import socket
import threading

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_client import EnvClient, StepResult
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    """A number from 0 to `high`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, high=9, **_):
        self.number = random.Random(seed).randint(0, high)
        return Hint(hint=f"0 to {high}", done=False)

    def step(self, action, timeout_s=None, **_):
        guess = int(action.text)
        hint = "higher" if guess < self.number else "lower"
        right = guess == self.number
        return Hint(hint="right" if right else hint, done=right, reward=float(right))

    @property
    def state(self):
        return State()


class Code(Action):
    code: str


class Output(Observation):
    stdout: str = ""
    exit_code: int = 0


class Coding(Environment):
    """Runs Python, as OpenEnv's coding environment does; variables stay between steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.names = {"seed": seed}
        return Output()

    def step(self, action, timeout_s=None, **_):
        out, exit_code = io.StringIO(), 0
        with contextlib.redirect_stdout(out):
            try:
                exec(action.code, self.names)  # noqa: S102 - it is what the environment does
            except Exception as error:  # noqa: BLE001 - shown
                print(repr(error))
                exit_code = 1
        reward = -1.0 if exit_code else None
        return Output(stdout=out.getvalue(), exit_code=exit_code, reward=reward)

    @property
    def state(self):
        return State()


class CodeClient(EnvClient):
    """The client that a package of an environment brings."""

    def _step_payload(self, action):
        return {"code": action.code}

    def _parse_result(self, payload):
        output = Output(**payload["observation"])
        return StepResult(observation=output, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload):
        return State(**payload)


def code_of(text):
    """The turn's code block, as an action."""
    return Code(code=text.split("```")[1].removeprefix("python\n"))


class Shop(MCPEnvironment):
    """Offers tools; the one that is asked for twice ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("shop")
        self.bought = []

        @server.tool
        def price(item: str, count: int = 1) -> int:
            """Price of some items."""
            return len(item) * count

        @server.tool
        def buy(item: str) -> dict:
            """Buy one."""
            if item == "nothing":
                raise ValueError("there is no such item")
            self.bought.append(item)
            return {"bought": self.bought}

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, budget=5, **_):
        self.bought = []
        return Observation(done=False, metadata={"budget": budget})

    def step(self, action, timeout_s=None, **kwargs):
        observation = super().step(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and action.tool_name == "buy":
            observation.reward = float(len(self.bought))
            observation.done = len(self.bought) == 2
        return observation

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and action.tool_name == "buy":
            observation.reward = float(len(self.bought))
            observation.done = len(self.bought) == 2
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=False)

    @property
    def state(self):
        return State()


@contextlib.contextmanager
def served():
    """The address of a server of all of them."""
    application = FastAPI()
    worlds = (
        ("/guess", Guessing, Guess, Hint),
        ("/code", Coding, Code, Output),
        ("/shop", Shop, CallToolAction, CallToolObservation),
    )
    for path, *world in worlds:
        application.mount(path, create_fastapi_app(*world, max_concurrent_envs=8))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(application, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
