"""The Grafana dashboard, made from the declarations in `asyncrl.monitoring.metrics.metrics`.

    python -m asyncrl.monitoring.dashboards            write monitoring/dashboards/asyncrl.json

panels     what is shown: queries, and what to do if a panel looks wrong
grafana    panels as Grafana's JSON
"""
