"""TensorBoard event files, written with the package's own protocol buffers (no torch)."""

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.monitoring.records.samples import SampleRecord
from asyncrl.monitoring.sinks.sink import COLUMNS, Sink, SinkRun, row_of


class TensorBoardSink(Sink):
    """Event files in RUN/sinks/tensorboard; those of evaluations in its folder `evaluation`.

    On a session start TensorBoard drops everything from a step on. If a run repeats its steps from
    index v on, the evaluation of version v stays.
    """

    run_id = "tensorboard"

    def __init__(self, run: SinkRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folders = run.folder, run.folder / "evaluation"
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._steps, self._evaluations = (EventFileWriter(str(folder)) for folder in folders)
        if run.next_step:
            self.went_back(run.next_step)

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step, or of an evaluation."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        writer = self._writer_of(next(iter(numbers), ""))
        writer.add_event(Event(step=step, wall_time=time, summary=Summary(value=values)))

    def went_back(self, step: int) -> None:
        """Make TensorBoard drop this step and later ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        for writer, first in ((self._steps, step), (self._evaluations, step + 1)):
            writer.add_event(Event(step=first, session_log=SessionLog(status=SessionLog.START)))

    def table(self, name: str, samples: list[SampleRecord]) -> None:
        """Log each sample as a Markdown table of its columns."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.util.tensor_util import make_tensor_proto

        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        for sample in samples:
            rows = zip(COLUMNS, row_of(sample), strict=True)
            text = "\n".join(["| | |", "|---|---|", *(f"| {k} | {_cell(v)} |" for k, v in rows)])
            tensor = make_tensor_proto([text.encode()])
            value = Summary.Value(tag=name, metadata=about, tensor=tensor)
            event = Event(step=sample.step, summary=Summary(value=[value]))
            self._writer_of(name).add_event(event)

    def flush(self) -> None:
        """Write what waits."""
        for writer in (self._steps, self._evaluations):
            writer.flush()

    def close(self) -> None:
        """Close the files."""
        for writer in (self._steps, self._evaluations):
            writer.close()

    def _writer_of(self, name: str) -> Any:
        return self._evaluations if name.startswith("evaluation/") else self._steps


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", "<br>")
