"""A reward worker: `python -m asyncrl.rewards.worker PARENT STATUS PROCESSES`.

The user's functions run here, below a supervisor (`user_code.supervisor`): one that hangs can
be killed with all that it has started, and one that crashes takes nothing with it. Calls queue up
in the worker's input. They are answered one after the other, or, if a function is async, run
concurrently in one event loop. The functions' own output goes to the supervisor; the frames have
descriptors of their own. The module is import-light (no torch, no pydantic), so a killed worker is
replaced in a fraction of a second.
"""

from __future__ import annotations

import msgspec

from asyncrl.errors import RewardError
from asyncrl.rewards import protocol
from asyncrl.rewards.scoring import LoadedTerm, finish, score
from asyncrl.user_code.loading import search
from asyncrl.user_code.streams import last_lines
from asyncrl.user_code.supervisor import begin


def main() -> None:
    """Serve until standard input ends."""
    streams = begin()
    decoder = msgspec.msgpack.Decoder(protocol.ToWorker)

    def read() -> protocol.ToWorker | None:
        frame = streams.read()
        return None if frame is None else decoder.decode(frame)

    setup = read()
    if not isinstance(setup, protocol.Setup):
        return
    search(setup.search_path)
    try:
        terms = [LoadedTerm.load(term) for term in setup.terms]
    except RewardError as error:
        streams.send(protocol.Refused(str(error)))
        return
    except (Exception, SystemExit):  # noqa: BLE001 - process edge: reported to the pool
        names = ", ".join(term.name for term in setup.terms)
        streams.send(protocol.Refused(f"loading the rewards ({names}) failed:\n{last_lines()}"))
        return
    asynchronous = any(term.asynchronous for term in terms)
    streams.send(protocol.Ready(asynchronous))
    if asynchronous:
        from asyncrl.rewards.concurrent_calls import serve_concurrently

        serve_concurrently(read, streams.send, terms, setup.timeout_seconds)
        return
    while isinstance(message := read(), protocol.Call):
        streams.send(finish(score(message, terms, streams.send)))


if __name__ == "__main__":
    main()
