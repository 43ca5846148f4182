"""The settings of the cache."""

import pytest
from pydantic import ValidationError

from asyncrl.cache.config import CacheConfig


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_byte": 1}, "Extra inputs"),
        ({"max_bytes": 100}, "greater than or equal to 16384"),
        ({"max_bytes": 1 << 33}, "less than or equal to"),
        ({"min_match": 9}, "less than or equal to 8"),
        ({"min_probability": 1.5}, "less than or equal to 1"),
        ({"reuse": "lenient(2)"}, "'drafts' or 'lenient'"),
        ({"reuse": "lenient", "lenience": 0}, "greater than 0"),
        ({"reuse": "lenient", "lenience": float("nan")}, "less than or equal to"),
        ({"reuse": "lenient", "lenience": float("inf")}, "less than or equal"),
        ({"reuse": "lenient", "enabled": False}, "keeps none"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        CacheConfig(**settings)  # type: ignore[arg-type]


def test_the_default_is_exact_and_a_written_out_default_loads_again() -> None:
    assert CacheConfig().reuse == "drafts"
    written = CacheConfig().model_dump(mode="json")
    assert CacheConfig(**written) == CacheConfig()
    assert CacheConfig(reuse="lenient").lenience == pytest.approx(1.6487212707)


def test_every_setting_is_described() -> None:
    assert all(field.description for field in CacheConfig.model_fields.values())
