"""What is left of a decode loop that ends by an exception."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import TokenChunk
from asyncrl.engine.torch.engine import DecodeThread


def breaks() -> list[TokenChunk]:
    raise ZeroDivisionError("division by zero")


def test_the_trace_of_a_step_that_raised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Without it nobody can say which of a thousand divisions it was."""

    async def run() -> Exception:
        failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        thread = DecodeThread(
            breaks,
            may_step=lambda: True,
            deliver=lambda _chunks: None,
            failed=failed.set_result,
            prepare=lambda: None,
        )
        error = await asyncio.wait_for(failed, 60)
        with pytest.raises(EngineError, match="the decode loop failed: ZeroDivisionError"):
            await thread.run(lambda: None)
        await thread.close(list)
        return error

    assert isinstance(asyncio.run(run()), ZeroDivisionError)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "in breaks" in (caplog.text)
