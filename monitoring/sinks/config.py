"""The settings of the sinks."""

import contextlib
import importlib.util
import netrc
import os
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

SinkKind = Literal["wandb", "tensorboard", "mlflow"]


class SinkConfig(BaseModel):
    """One sink. `- wandb` is short for `- kind: wandb`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: SinkKind
    """`wandb`, `tensorboard` or `mlflow`; each needs `pip install 'asyncrl[KIND]'`."""
    project: str | None = Field(default=None, min_length=1, max_length=128)
    """W&B: the project. MLflow: the experiment. null: `asyncrl`."""
    entity: str | None = Field(default=None, min_length=1, max_length=128)
    """W&B: the user or team; null: your default."""
    offline: bool = False
    """W&B: write to RUN/sinks/wandb only; `wandb sync` uploads it later. Otherwise WANDB_API_KEY
    must be in the environment, or `wandb login` done."""
    uri: str | None = Field(default=None, min_length=1)
    """MLflow: the tracking server, or a file: or sqlite: URI; null: RUN/sinks/mlflow. A server's
    user name and password are read from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> Self:
        fits = {"wandb": {"project", "entity", "offline"}, "mlflow": {"project", "uri"}}
        given = {name for name in self.model_fields_set if getattr(self, name)} - {"kind"}
        wrong = sorted(given - fits.get(self.kind, set()))
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: not a setting of the sink {self.kind}")
        url = urlsplit(self.uri or "")
        if url.password is not None or url.username is not None:
            raise ValueError(
                "uri has a user name or a password, which would be written to config.yaml; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
            )
        return self


def missing_credentials(config: SinkConfig) -> str | None:
    """Describe what W&B needs to upload, if it is missing."""
    if config.kind != "wandb" or config.offline or os.environ.get("WANDB_MODE") == "offline":
        return None
    if os.environ.get("WANDB_API_KEY"):
        return None
    where = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if where in netrc.netrc().hosts:
            return None
    return (
        f"monitoring.sinks has wandb, but a key for {where} is missing: set WANDB_API_KEY, run "
        "`wandb login`, or write {kind: wandb, offline: true} and upload later with `wandb sync`"
    )


def missing_package(kind: SinkKind) -> str | None:
    """Describe how to install the package of a sink, if it is missing."""
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(kind) is not None:
            return None
    return (
        f"monitoring.sinks has {kind}, which is not installed: pip install 'asyncrl[{kind}]', or "
        "remove the sink"
    )
