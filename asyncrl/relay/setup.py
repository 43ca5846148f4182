"""Builds a relay and serves the controller. Imports no torch: it is there within a second."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from asyncrl.errors import first_error
from asyncrl.launch.child_spec import ChildSpec, RelayKeys
from asyncrl.launch.shared_memory import weights_id
from asyncrl.monitoring.errors import MonitoringError
from asyncrl.monitoring.metrics.instruments import new_registry
from asyncrl.monitoring.metrics.relay_metrics import RelayMetrics
from asyncrl.relay.control import ControlRelay, RelayLine
from asyncrl.relay.files import RelayFiles
from asyncrl.relay.process import RelayProcess
from asyncrl.relay.weights import RelayWeights
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages import from_relay, to_relay
from asyncrl.wire.transport.addresses import MeetingPlace


async def run_relay(spec: ChildSpec, keys: RelayKeys) -> None:
    """Start the parts of a relay, and serve until told to shut down."""
    registry = new_registry()
    metrics = RelayMetrics.register(registry, spec.name)
    with contextlib.ExitStack() as closing:
        closing.callback(MeetingPlace(spec.relay_address).close)
        passing = ControlRelay(
            spec.relay_address,
            keys.children.secret,
            spec.control_address,
            keys.control,
            to_relay.ToRelay,
            metrics,
        )
        closing.callback(passing.close)
        control = passing.line
        control.refusals.count = metrics.count_refused
        try:
            exporter = spec.exporter(spec.config().monitoring, registry)
            if exporter is not None:
                closing.callback(exporter.close)
            weights = RelayWeights(
                spec.name,
                spec.bind_to(0),
                keys.weights,
                node_address=spec.bind_to(1),
                directory=Path(spec.weights_directory),
                files_id=weights_id(spec.run_id, spec.name),
                say=control.send_soon,
                metrics=metrics,
            )
            closing.callback(weights.close)
            files = RelayFiles(
                Path(spec.run_directory),
                shares=spec.shares_run_directory,
                address=spec.bind_to(2),
                keys=keys.files,
                say=control.send_soon,
            )
            closing.callback(files.close)
            port = None if exporter is None else exporter.port
            await RelayProcess(passing, weights, files, metrics, port, spec.reached_at).run()
        except BaseExceptionGroup as group:
            error = first_error(group)
            await _report(control, error)
            raise error from group
        except Exception as error:
            await _report(control, error)
            raise


async def _report(control: RelayLine[Any], error: BaseException) -> None:
    """Say why this process ends; the traceback of an unexpected error is in its log."""
    if isinstance(error, MonitoringError | WireError):
        await control.send(from_relay.Failure(str(error), user_error=False))
