import json
import re
from pathlib import Path

import pytest

from asyncrl.monitoring.dashboards.grafana import as_text, dashboard
from asyncrl.monitoring.dashboards.panels import ROWS, series_of
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, all_specs

FILE = Path(__file__).parents[2] / "monitoring" / "dashboards" / "asyncrl.json"
PANELS = [panel for _, panels in ROWS for panel in panels]


def test_the_file_is_up_to_date():
    assert FILE.read_text() == as_text(), "run: python -m asyncrl.monitoring.dashboards"


def test_there_are_few_panels_and_each_says_what_to_do():
    assert len(PANELS) <= 26
    assert len({panel.title for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        for text in (panel.shows, panel.if_wrong):
            assert text.endswith("."), panel.title
            assert len(text) > 30, panel.title


def test_panels_do_not_overlap_and_ids_are_unique():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_queries_use_declared_metrics_of_the_chosen_runs():
    """What they return is tested on a real run, in tests/asyncrl/run/test_end_to_end.py."""
    declared = {spec.name for _, spec in all_specs()} | {"process_resident_memory_bytes"}
    declared |= {f"{name}_{part}" for name in declared for part in ("bucket", "sum", "count")}
    for panel in PANELS:
        for query in panel.queries:
            names = re.findall(r"(\w+)\{([^}]*)\}", query.expr)
            assert names, query.expr
            for name, matchers in names:
                assert name in declared, query.expr
                assert 'run=~"$run"' in matchers, query.expr


def test_a_label_that_does_not_exist_is_refused():
    metrics = series_of(GeneratorMetrics)
    assert 'reason=~"stop"' in str(metrics["samples_finished"].where(reason="stop"))
    with pytest.raises(ValueError, match="cause is not a label"):
        metrics["samples_finished"].where(cause="stop")
    for wrong in (metrics["slots"].mean, lambda: metrics["slots"].quantile(0.5)):
        with pytest.raises(ValueError, match="not a histogram"):
            wrong()


def test_lines_with_another_unit_have_an_axis_of_their_own():
    (panel,) = [one for one in dashboard()["panels"] if one["title"] == "Rewards"]
    (override,) = panel["fieldConfig"]["overrides"]
    letter = override["matcher"]["options"]
    (target,) = [one for one in panel["targets"] if one["refId"] == letter]
    assert "asyncrl_rewards_waiting_samples" in target["expr"]
    assert json.dumps(override).count('"right"') == 1
