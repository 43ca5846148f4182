"""Sums of one turn and games with a scripted user, with several rewards each."""

import asyncio

import verifiers.v1 as vf

__all__ = ["Mixed", "MixedEnv"]


class MixedData(vf.TaskData):
    answer: str = ""
    number: int | None = None


class Sceptic(vf.Judge[bool]):
    prompt = "Is {response} what {answer} says? yes or no"

    def parse(self, response):
        return response.text.startswith("yes")


class MixedConfig(vf.TaskConfig):
    sceptic: vf.JudgeConfig | None = None


class MixedTasksetConfig(vf.TasksetConfig):
    task: MixedConfig = MixedConfig()


class MixedTask(vf.Task[MixedData, vf.State, MixedConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.messages[-1].content == self.data.answer)

    @vf.reward(weight=0.25)
    async def keyed(self, task: MixedData, trace: vf.Trace) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"short": float(len(trace.messages[-1].content) < 3), "turns": 1 / trace.num_turns}

    @vf.reward(weight=2.0)
    async def judged(self, trace: vf.Trace) -> float:
        if self.config.sceptic is None:
            return 0.0
        reply = trace.messages[-1].content
        answer = await Sceptic(self.config.sceptic).evaluate(
            trace=trace, response=reply, answer=self.data.answer
        )
        return float(answer.parsed)

    @vf.reward
    async def breaks(self, trace: vf.Trace) -> float:
        if trace.messages[-1].content == "break":
            raise ValueError("a reward that breaks")
        if trace.messages[-1].content == "sleep":
            await asyncio.sleep(600)
        return 0.0

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.messages))

    @vf.stop
    async def said_stop(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"


class Mixed(vf.Taskset[MixedTask, MixedTasksetConfig]):
    def load(self):
        for a in range(3):
            data = MixedData(prompt=f"{a}+1=?", answer=str(a + 1), system_prompt="be brief")
            yield MixedTask(data, self.config.task)
        yield MixedTask(MixedData(prompt="guess", answer="5", number=5), self.config.task)
        messages = [vf.UserMessage(content="hi"), vf.AssistantMessage(content="hello")]
        prompt = [*messages, vf.UserMessage(content="what is 1+1?")]
        yield MixedTask(MixedData(prompt=prompt, answer="2"), self.config.task)


class MixedEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class MixedEnv(vf.Env[MixedEnvConfig]):
    async def run(self, task, agents):
        if task.data.number is None:
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as game:
            segment = await game.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number):
                said = segment.last_reply
                lower = said.isdigit() and int(said) > task.data.number
                segment = await game.turn("lower" if lower else "higher")
