"""The sinks, by name. Each file imports its package only when the sink is opened."""

from asyncrl.monitoring.sinks.config import SinkConfig
from asyncrl.monitoring.sinks.sink import Sink, SinkRun


def open_sink(config: SinkConfig, run: SinkRun) -> Sink:
    """Open a sink. Raises whatever its package raises."""
    match config.kind:
        case "wandb":
            from asyncrl.monitoring.sinks.kinds.wandb import WandbSink

            return WandbSink(config, run)
        case "tensorboard":
            from asyncrl.monitoring.sinks.kinds.tensorboard import TensorBoardSink

            return TensorBoardSink(run)
        case "mlflow":
            from asyncrl.monitoring.sinks.kinds.mlflow import MlflowSink

            return MlflowSink(config, run)
