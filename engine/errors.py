"""What can go wrong in an engine.

EngineError
├── EngineStartError     the model or the backend could not be brought up: fix the configuration
├── RequestError         one request is impossible (too long, bad sampling): fix that request
└── WeightsError         new weights do not fit the model: nothing was changed
    └── WeightsSupersededError  the trainer published newer ones meanwhile: install those
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of what an engine raises."""


class EngineStartError(EngineError):
    """The engine could not start; the message says what to change."""


class RequestError(EngineError):
    """One request cannot be served; the message names it and says why."""


class WeightsError(EngineError):
    """New weights were refused; the engine still serves the old ones."""


class WeightsSupersededError(WeightsError):
    """The version asked for was overwritten in shared memory; a newer one is on its way."""
