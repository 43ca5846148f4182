"""Writes docker/chart/values.schema.json: `python docker/chart/schema/generate.py`.

The part of the chart is values.yaml beside this file. That of `config` comes from the configuration
itself, without the settings that the chart decides, so that Helm refuses a mistyped key of either
before anything starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.run_config import RunConfig

SCHEMA = Path(__file__).resolve().parents[1] / "values.schema.json"
OWNED = {
    "RunSection": ["directory"],
    "LauncherConfig": [
        *("kind", "generators", "ray", "weights", "trusted_network"),
        *("gpus", "colocate", "pin_cores"),
    ],
    "TrainerConfig": ["ranks", "rank_network"],
    "AgentsConfig": [
        *("listen", "control_port", "key_file", "max_generators", "place_seconds"),
        "weights_directory",
    ],
    "MonitoringConfig": ["host", "port", "metrics"],
}
"""What the chart decides (templates/_helpers.tpl), by class."""


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` for each object that says nothing of them."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if result.get("type") == "object" and "additionalProperties" not in result:
        result["additionalProperties"] = False
    return result


def plain(schema: Any) -> Any:
    """Without what Helm does not need: titles, and `discriminator`, which is OpenAPI's."""
    if isinstance(schema, list):
        return [plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = {"discriminator"} | ({"title"} if isinstance(schema.get("title"), str) else set())
    return {key: plain(value) for key, value in schema.items() if key not in dropped}


def values_schema() -> dict[str, Any]:
    """The JSON schema of the chart's values."""
    text = Path(__file__).with_name("values.yaml").read_text(encoding="utf-8")
    chart: dict[str, Any] = closed(yaml.safe_load(text))
    run = plain(RunConfig.model_json_schema(ref_template="#/$defs/config.{model}"))
    definitions = run.pop("$defs")
    for name, keys in OWNED.items():
        for key in keys:
            del definitions[name]["properties"][key]
    chart["$defs"] |= {f"config.{name}": schema for name, schema in definitions.items()}
    chart["properties"]["config"] = run
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | chart


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(values_schema(), indent=1) + "\n", encoding="utf-8")
