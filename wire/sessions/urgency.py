"""Which messages of a child wait in its relay for others, and which leave at once.

Urgent is what the scheduler or the trainer waits for before a device gets work. The rest only adds
to counts, or is about samples of run-ahead, whose slots are filled from a queue meanwhile. The
sender may know better than the table: the report of a finished run-ahead sample and the last
delivery of a generator are told so when they are sent.
"""

from __future__ import annotations

import msgspec

from asyncrl.wire.messages import from_generator, from_trainer

WAIT: frozenset[type] = frozenset(
    {
        from_generator.GeneratorReport,
        from_generator.SampleDelivered,
        from_generator.Rescored,
        from_trainer.TrainerReport,
        from_trainer.CheckpointWritten,
        from_trainer.CheckpointFailed,
    }
)
"""Messages that wait, up to `bundles.GATHER_SECONDS`. All others are urgent."""


def is_urgent(message: msgspec.Struct) -> bool:
    """Whether a message leaves at once."""
    return type(message) not in WAIT
