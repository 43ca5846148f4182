"""The calls from the generator's process to SGLang's scheduler process (`messages.Call`)."""

from __future__ import annotations

from asyncrl.engine.remote.calls import RemoteWorker


class SglangWorker(RemoteWorker):
    """The calls, by the names of these methods. All ranks execute them; rank 0 answers."""

    def asyncrl_pause(self) -> None:
        """Run no step from now on; requests stay as they are.

        All that was generated has been sent before the answer.
        """
        raise NotImplementedError

    def asyncrl_resume(self) -> None:
        """Run steps again."""
        raise NotImplementedError
