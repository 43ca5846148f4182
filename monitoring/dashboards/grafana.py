"""Grafana's dashboard JSON, schema version 39 (Grafana from 10.4 on); see `make grafana-schema`."""

import json
from collections.abc import Iterator
from typing import Any

from asyncrl.monitoring.dashboards.panels import ROWS, Panel

SCHEMA_VERSION = 39
COLUMNS = 3
_WIDTH, _HEIGHT = 24 // COLUMNS, 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}

Json = dict[str, Any]


def dashboard() -> Json:
    """The whole dashboard."""
    return {
        "uid": "asyncrl",
        "title": "asyncrl",
        "description": "A run of asyncrl. Made by `python -m asyncrl.monitoring.dashboards`.",
        "tags": ["asyncrl"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_source(), _run()]},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }


def as_text() -> str:
    """The dashboard as text of its file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _source() -> Json:
    return {
        "name": "source",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "includeAll": False,
        "multi": False,
    }


def _run() -> Json:
    """The variable that selects runs. `.*` also matches series without the label."""
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(asyncrl_policy_version, run)",
        "refresh": 2,
        "sort": 1,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[Json]:
    number, top = 0, 0
    for title, panels in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            "panels": [],
        }
        top += 1
        for place, panel in enumerate(panels):
            number += 1
            row, column = divmod(place, COLUMNS)
            yield _panel(panel, number, column * _WIDTH, top + row * _HEIGHT)
        top += -(-len(panels) // COLUMNS) * _HEIGHT


def _panel(panel: Panel, number: int, x: int, y: int) -> Json:
    drawn = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 0,
        "showPoints": "auto",
        "spanNulls": True,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": f"{panel.shows}\n\nIf it looks wrong: {panel.if_wrong}",
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": drawn},
            "overrides": list(_overrides(panel)),
        },
        "options": {
            "legend": {
                "displayMode": "list",
                "placement": "bottom",
                "showLegend": True,
                "calcs": ["lastNotNull"],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": _letter(index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _overrides(panel: Panel) -> Iterator[Json]:
    for index, query in enumerate(panel.queries):
        if query.unit is not None:
            yield {
                "matcher": {"id": "byFrameRefID", "options": _letter(index)},
                "properties": [
                    {"id": "unit", "value": query.unit},
                    {"id": "custom.axisPlacement", "value": "right"},
                ],
            }
