"""Tasks without an end, and two agents: one solves, the other one has the last word."""

import itertools

import verifiers.v1 as vf

__all__ = ["PairEnv", "Pairs"]


class Pairs(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield vf.Task(vf.TaskData(prompt=f"question {number}"), self.config.task)


class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        solved = await agents.solver.run(task)
        question = vf.Task(vf.TaskData(prompt=f"Is {solved.last_reply} right?"))
        said = await agents.critic.run(question)
        solved.record_reward("critic", float(said.last_reply.startswith("yes")), 3.0)
