"""The cache's settings and how its kernels are kept."""

import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

import cache.jit
from cache.config import CacheConfig
from cache.store import SPAN


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_byte": 1}, "Extra inputs"),
        ({"max_bytes": 100}, "greater than or equal to 16384"),
        ({"max_bytes": 1 << 33}, "less than or equal to"),
        ({"min_match": 5, "max_match": 4}, "must not be longer than the longest"),
        ({"max_match": SPAN + 1}, "less than or equal to 40"),
        ({"min_probability": 1.5}, "less than or equal to 1"),
        ({"version_half_life": 0}, "greater than 0"),
        ({"reuse": "lenient(2)"}, "'drafts' or 'lenient'"),
        ({"reuse": "lenient", "lenience": 0}, "greater than 0"),
        ({"reuse": "lenient", "lenience": float("nan")}, "finite"),
        ({"reuse": "lenient", "lenience": float("inf")}, "finite"),
        ({"lenience": 2.0}, "does nothing with reuse: drafts"),
        ({"reuse": "lenient", "enabled": False}, "keeps none"),
        ({"reuse": "lenient", "lenient_max_bytes": 1}, "greater than or equal"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        CacheConfig(**settings)  # type: ignore[arg-type]


def test_a_small_total_budget_bounds_each_prompt_too() -> None:
    assert CacheConfig(max_bytes=1 << 20).max_bytes_per_prompt == 1 << 20


def test_the_default_is_exact_and_a_written_out_default_loads_again() -> None:
    assert CacheConfig().reuse == "drafts"
    written = CacheConfig().model_dump(mode="json")
    assert CacheConfig(**written) == CacheConfig()
    assert CacheConfig(reuse="lenient").lenience == pytest.approx(1.6487212707)


def test_every_setting_is_described() -> None:
    assert all(field.description for field in CacheConfig.model_fields.values())


def test_kernels_survive_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = Path(cache.jit.__file__).parent
    blocked = tmp_path / "a file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert cache.jit.code_directory(package, str(blocked)) is None
    assert "NUMBA_CACHE_DIR" in caplog.text
    monkeypatch.setattr(cache.jit, "_DIRECTORY", None)

    @cache.jit.kernel
    def plus_one(value: int) -> int:
        return value + 1

    assert plus_one(1) == 2


def test_other_sources_get_another_directory(tmp_path: Path) -> None:
    for name in cache.jit._SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    first = cache.jit.code_directory(tmp_path, str(tmp_path))
    (tmp_path / "store.py").write_text("# moved a word")
    second = cache.jit.code_directory(tmp_path, str(tmp_path))
    assert first is not None
    assert second is not None
    assert first != second
