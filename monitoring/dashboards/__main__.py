"""Write the dashboard: `python -m asyncrl.monitoring.dashboards`."""

from pathlib import Path

from asyncrl.monitoring.dashboards.grafana import as_text

FILE = Path(__file__).with_name("asyncrl.json")

if __name__ == "__main__":
    FILE.write_text(as_text(), encoding="utf-8")
