"""pytest-xdist keeps the groups that tests/conftest.py sets."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ, reason="this pytest runs without pytest-xdist"
)
def test_a_test_belongs_to_the_group_of_its_file(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith(f"@{request.node.path}"), (
        "this pytest and this pytest-xdist do not work together: several vLLM engines would run "
        "at once"
    )
