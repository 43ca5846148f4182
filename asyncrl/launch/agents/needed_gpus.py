"""How many GPUs a run's processes get. Where they are optional, its first agents decide. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.launch.agents.members import Agent


class NeededGpus:
    """GPUs of the trainer and of each generator.

    Args:
        wanted: by role.
        optional: roles that do without where the first agents have none (`device: auto`).
        agents: those that there are, by name.
        say: tells the user something.
    """

    def __init__(
        self,
        wanted: Mapping[str, int],
        optional: frozenset[str],
        agents: Mapping[str, Agent],
        say: Callable[[str], None],
    ) -> None:
        self._wanted = dict(wanted)
        self._optional = optional
        self._agents = agents
        self._say = say

    def of(self, role: str) -> int:
        """Of a process of this role. Optional ones count as long as any agent for it has them."""
        wanted = self._wanted.get(role, 0)
        if role not in self._optional:
            return wanted
        fitting = [one for one in self._agents.values() if one.hello.role in (role, "any")]
        return wanted if any(one.hello.gpus >= wanted for one in fitting) else 0

    def settle(self) -> None:
        """The run begins: what agents have now holds for agents that come later."""
        for role in sorted(self._optional):
            wanted, self._wanted[role] = self._wanted[role], self.of(role)
            if self._wanted[role] < wanted:
                self._say(
                    f"no agent for a {role} has the GPUs that it could use: it runs on the CPU, "
                    "also on machines that come later"
                )
        self._optional = frozenset()
