import pytest
from pydantic import ValidationError

from asyncrl.monitoring.config import MonitoringConfig, TracingConfig, WebConfig


def test_ports_follow_the_base_port():
    assert [MonitoringConfig(port=9100).port_of(i) for i in range(3)] == [9100, 9101, 9102]
    assert MonitoringConfig(port=0).port_of(5) == 0


def test_a_port_beyond_the_last_one_says_what_to_do():
    with pytest.raises(ValueError, match="choose a lower base port"):
        MonitoringConfig(port=65_535).port_of(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", -1), ("port", 70_000), ("live", "fancy"), ("host", "http://x"), ("host", ""),
     ("host", "localhost:80"), ("host", "[]"),
     ("report_samples", -1), ("prot", 1)],
)  # fmt: skip
def test_impossible_values_are_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        MonitoringConfig(**{field: value})


def test_an_address_of_this_machine_may_have_its_brackets():
    assert MonitoringConfig(host="[::1]").host == "::1"
    assert WebConfig(host="[::1]").host == "::1", "no token is asked for"


def test_every_field_is_described():
    fields = MonitoringConfig.model_fields.values()
    sections = (TracingConfig, WebConfig)  # described by their classes
    assert all(field.description for field in fields if field.annotation not in sections)
