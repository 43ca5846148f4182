"""The actor of one bundle, which runs `asyncrl agent`; the agent ends with it.

The class is sent to the workers by value, so it can report what is wrong on a node that has another
asyncrl or none. So this module imports only the standard library.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections import deque

NODE_VARIABLE = "ASYNCRL_AGENT_NODE"
"""`asyncrl.launch.agents.agent.NODE_VARIABLE`, which this module must not import."""
PROBE_SECONDS = 5.0
_LINES = 2
"""Lines of an agent's output that are kept."""
_AGENT = (
    "import sys; from asyncrl.user_code.process_tree import end_with_parent; "
    "end_with_parent(int(sys.argv.pop(1)), 9); from asyncrl.cli import main; main()"
)
"""The `asyncrl` command, killed by the kernel when the thread that started it ends. Its child then
gets SIGTERM from the kernel; its keeper ends what is left (`asyncrl.launch.node_child`)."""


class AgentActor:
    """The actor. It has several threads, so a call that waits does not delay the others."""

    def __init__(self) -> None:
        self._worker = secrets.token_hex(8)
        self._agent: subprocess.Popen[str] | None = None
        self._said: deque[str] = deque(maxlen=_LINES)
        self._lock = threading.Lock()

    def where(self, controller: str) -> tuple[str, str, str]:
        """Return Ray's id of this node, this worker's name, and what `cannot_reach` returns."""
        import ray

        node = str(ray.get_runtime_context().get_node_id())
        return node, self._worker, cannot_reach(controller)

    def serve(self, arguments: list[str], secret: bytes) -> tuple[int, str]:
        """Run an agent, or join the running one; return its exit code and last lines at its end.

        `arguments` are those of `asyncrl agent`. The secret goes to its standard input, since other
        users can read command lines and environments.
        """
        with self._lock:
            starts = self._agent is None
            if self._agent is None:
                self._agent = self._start(arguments, secret)
            agent = self._agent
        if starts:
            assert agent.stdout is not None  # noqa: S101
            with agent.stdout:
                for line in agent.stdout:
                    print(line, end="", flush=True)  # to the worker's log
                    self._said.append(line.strip())
        code = agent.wait()
        with self._lock:
            self._agent = None if self._agent is agent else self._agent
        return code, " ".join(self._said)

    def _start(self, arguments: list[str], secret: bytes) -> subprocess.Popen[str]:
        import ray

        context = ray.get_runtime_context()
        gpus = [str(one) for one in context.get_accelerator_ids().get("GPU", [])]
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), NODE_VARIABLE: str(context.get_node_id())}
        key_file = ["--key-file", "/dev/stdin"]
        self._said.clear()
        agent = subprocess.Popen(
            [sys.executable, "-P", "-c", _AGENT, str(os.getpid()), "agent", *key_file, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | own,
            text=True,
            errors="replace",
        )
        assert agent.stdin is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError), agent.stdin:  # it may have ended already
            agent.stdin.write(secret.hex())
        return agent

    def leave(self) -> None:
        """End this worker; this works without a head, too."""
        os._exit(0)


def cannot_reach(address: str) -> str:
    """Return why no connection to this address can be made; empty if one can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), PROBE_SECONDS).close()
    except OSError as error:
        return str(error)
    return ""
