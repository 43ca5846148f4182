"""SGLang (0.5.23) with its own NGRAM, in its own interpreter, for `benchmarks.rollout.ngram`.

The command line has arguments of SGLang's `Engine`, as JSON. Then lines of JSON come from stdin,
and each is answered on stdout, to which nobody else writes:

    (when SGLang is ready)                     {"ready": true}
    {"id", "input_ids", "sampling_params"}     {"id", "tokens", "verified", "correct"}
    {"weights": directory}                     {"weights": success, "error"}

`tokens` is the length of the response, `verified` the steps of the request, `correct` its accepted
draft tokens. Imports nothing of this project. It is written from SGLang's sources and has never run
on a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, TextIO


async def serve(engine: Any, lines: asyncio.StreamReader, answers: TextIO) -> None:
    """Answer requests, which run together, until stdin ends."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    async def generate(asked: dict[str, Any]) -> None:
        found = await engine.async_generate(
            input_ids=asked["input_ids"], sampling_params=asked["sampling_params"]
        )
        about = found["meta_info"]
        say(
            {
                "id": asked["id"],
                "tokens": about["completion_tokens"],
                "verified": about.get("spec_verify_ct", 0),
                "correct": about.get("spec_num_correct_drafts", 0),
            }
        )

    say({"ready": True})
    running: set[asyncio.Task[None]] = set()
    while line := await lines.readline():
        asked = json.loads(line)
        if "weights" in asked:
            # Flushing would empty NGRAM's corpus too. No KV outlives its request.
            change = UpdateWeightFromDiskReqInput(model_path=asked["weights"], flush_cache=False)
            done, error = (await engine.tokenizer_manager.update_weights_from_disk(change, None))[
                :2
            ]
            say({"weights": bool(done), "error": error})
            continue
        task = asyncio.create_task(generate(asked))
        running.add(task)
        task.add_done_callback(running.discard)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints
    import sglang

    engine = sglang.Engine(
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        page_size=1,
        speculative_algorithm="NGRAM",
        **json.loads(sys.argv[1]),
    )

    async def run() -> None:
        lines = asyncio.StreamReader(limit=1 << 24)
        protocol = asyncio.StreamReaderProtocol(lines)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        await serve(engine, lines, answers)

    engine.loop.run_until_complete(run())
    engine.shutdown()


if __name__ == "__main__":
    main()
