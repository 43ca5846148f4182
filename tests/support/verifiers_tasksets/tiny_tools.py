"""A task with a tool server."""

import verifiers.v1 as vf

__all__ = ["Tools"]


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @vf.tool
    async def fail(self) -> int:
        """Never works."""
        raise ValueError("a tool that breaks")


class ToolTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float("12" in trace.messages[-1].content)

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]


class Tools(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self):
        yield ToolTask(vf.TaskData(prompt="5+7=?"), self.config.task)


if __name__ == "__main__":
    Calculator.run()
