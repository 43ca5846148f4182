"""The error tree of engines.

EngineError
├── EngineStartError     the model or the backend could not be brought up: fix the configuration
├── RequestError         one request is impossible (too long, bad sampling): fix that request
└── WeightsError         new weights were refused or are not staged: nothing was changed
    └── WeightsSupersededError  they were overwritten by newer ones, or removed with their
        trainer
"""


class EngineError(Exception):
    """Base class of everything that an engine raises."""


class EngineStartError(EngineError):
    """The engine could not start; the message says what to change."""


class RequestError(EngineError):
    """One request cannot be served; the message names it and says why."""


class WeightsError(EngineError):
    """New weights were refused or are not staged; the engine keeps its weights."""


class WeightsSupersededError(WeightsError):
    """The version to stage was overwritten in shared memory, or removed with its trainer."""
