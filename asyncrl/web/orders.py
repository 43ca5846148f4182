"""Orders of the API, converted to requests to the controller."""

import json
from collections.abc import Callable
from typing import Annotated

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from asyncrl.wire.messages import control

_Text = Annotated[str, Field(max_length=1000)]


class NoArguments(BaseModel):
    """`{}`."""

    model_config = ConfigDict(extra="forbid")


class ScaleArguments(BaseModel):
    """The new number of generators."""

    model_config = ConfigDict(extra="forbid", strict=True)

    generators: Annotated[int, Field(ge=1, le=100_000)]


class SetArguments(BaseModel):
    """A setting and its new value, as in a configuration."""

    model_config = ConfigDict(extra="forbid", strict=True)

    key: Annotated[str, Field(min_length=1, max_length=200, examples=["trainer.learning_rate"])]
    value: Annotated[_Text | int | float | bool | None, Field(examples=[1e-5])]


class Taken(BaseModel):
    """The controller carries the order out."""

    accepted: str
    step: int | None
    """Number of trained steps when it took effect, if the order is recorded."""


SIMPLE: dict[str, tuple[Callable[[], control.Request], str]] = {
    "stop": (control.StopRequest, "Finish the current step, write a checkpoint, end the run."),
    "pause": (control.PauseRequest, "Stop generating tokens; everything is kept."),
    "resume": (control.ResumeRequest, "Continue after a pause."),
    "drain": (control.DrainRequest, "Train what is started, start nothing more, then end the run."),
    "checkpoint": (control.CheckpointRequest, "Write a checkpoint after the current step."),
}


def set_request(arguments: SetArguments) -> control.SetRequest:
    """Make the request for a setting. Its value is YAML, which includes JSON.

    >>> set_request(SetArguments(key="trainer.learning_rate", value=1e-05)).value
    '1e-05'
    """
    value = arguments.value
    text = value if isinstance(value, str) else json.dumps(value)
    return control.SetRequest(arguments.key.strip(), text)


def name_of(request: control.Request) -> str:
    """Format an order for a log: `scale generators=3`."""
    name = type(request).__name__.removesuffix("Request").lower()
    arguments = [f"{key}={value}" for key, value in msgspec.structs.asdict(request).items()]
    return repr(" ".join([name, *arguments]))[1:-1]
