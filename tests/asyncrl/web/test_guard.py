"""Which requests are refused, from their heads alone."""

from __future__ import annotations

import pytest

from asyncrl.web.guard import MAX_BODY_BYTES, Policy, denial

TOKEN = "a-token-of-some-length"
LOCAL = Policy(is_loopback=True, token=TOKEN)
ELSEWHERE = Policy(is_loopback=False, token=TOKEN)
ENDED = Policy(is_loopback=True, token=None)


def asked(
    policy: Policy, method: str = "GET", path: str = "/api/status", **headers: str | None
) -> int | None:
    """The status with which a request is refused; None if it passes."""
    given: dict[str, str | None] = {"host": "127.0.0.1:8080"}
    if method == "POST":
        given |= {
            "content_type": "application/json",
            "content_length": "2",
            "authorization": f"Bearer {TOKEN}",
        }
    given |= headers
    pairs = [
        (name.replace("_", "-").encode(), value.encode("latin-1"))
        for name, value in given.items()
        if value is not None
    ]
    found = denial(policy, method, path, pairs)
    return None if found is None else found.status


def order(policy: Policy = LOCAL, **headers: str | None) -> int | None:
    return asked(policy, "POST", "/api/orders/stop", **headers)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8080", "localhost:8080", "localhost", "[::1]:8080", "127.8.8.8", "LOCALHOST:1"],
)
def test_a_name_of_this_machine_may_read(host: str) -> None:
    assert asked(LOCAL, host=host) is None
    assert asked(LOCAL, path="/", host=host) is None


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("127.0.0.1.evil.example:8080", 403), ("localhost.evil.example", 403),
     ("evil.example@127.0.0.1x", 403), ("10.0.0.1", 403), ("[::ffff", 403), ("0.0.0.1", 403),
     ("", 400), (None, 400)],
)  # fmt: skip
def test_other_names_are_refused_on_loopback(host: str | None, status: int) -> None:
    assert asked(LOCAL, host=host) == status
    assert asked(LOCAL, path="/", host=host) == status
    assert order(host=host) == status


def test_elsewhere_any_name_will_do_with_the_token() -> None:
    bearer = f"Bearer {TOKEN}"
    assert asked(ELSEWHERE, host="train.example:443", authorization=bearer) is None
    assert asked(ELSEWHERE, host="train.example:443") == 401
    assert asked(ELSEWHERE, path="/", host="train.example") is None, "the page holds no data"
    assert asked(ELSEWHERE, path="/api/events") == 401
    assert order(ELSEWHERE) is None


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}",
     TOKEN, "Bearer \xff"],
)  # fmt: skip
def test_orders_need_the_token(authorization: str | None) -> None:
    assert order(authorization=authorization) == 401
    assert asked(ELSEWHERE, authorization=authorization) == 401


def test_an_empty_token_opens_nothing() -> None:
    assert asked(Policy(is_loopback=False, token=None), authorization="Bearer ") == 401
    assert asked(Policy(is_loopback=False, token=""), authorization="Bearer ") == 401


def test_the_token_of_an_order_passes() -> None:
    assert order() is None
    assert order(authorization=f"bearer {TOKEN}") is None
    assert order(origin="http://127.0.0.1:8080", sec_fetch_site="same-origin") is None
    assert order(origin="https://train.example", host="train.example", policy=ELSEWHERE) is None


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8080", "file://", "",
     "http://127.0.0.1:8080.evil.example", "ftp://127.0.0.1:8080", "http://[::1"],
)  # fmt: skip
def test_pages_of_other_sites_get_nothing(origin: str) -> None:
    assert order(origin=origin) == 403
    assert asked(LOCAL, origin=origin) == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "nonsense"])
def test_browsers_say_that_another_site_asks(site: str) -> None:
    assert order(sec_fetch_site=site) == 403
    assert asked(LOCAL, sec_fetch_site=site) == 403
    assert asked(LOCAL, path="/", sec_fetch_site="cross-site") is None, "a link to the page"


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"content_type": "text/plain"}, 415), ({"content_type": None}, 415),
     ({"content_type": "application/x-www-form-urlencoded"}, 415),
     ({"content_type": "application/json; charset=utf-8"}, None),
     ({"content_length": None}, 411), ({"content_length": "-1"}, 411),
     ({"content_length": "1e3"}, 411), ({"transfer_encoding": "chunked"}, 411),
     ({"content_length": str(MAX_BODY_BYTES + 1)}, 413),
     ({"content_length": "9" * 30}, 413), ({"content_length": str(MAX_BODY_BYTES)}, None)],
)  # fmt: skip
def test_bodies_are_short_json(headers: dict[str, str | None], status: int | None) -> None:
    assert order(**headers) == status


def test_what_reads_has_no_body() -> None:
    assert asked(LOCAL, content_length="5") == 413
    assert asked(LOCAL, transfer_encoding="chunked") == 413


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH"])
def test_other_methods_are_refused(method: str) -> None:
    assert asked(LOCAL, method) == 405


def test_a_header_that_is_there_twice_decides_nothing() -> None:
    twice = [(b"host", b"127.0.0.1"), (b"host", b"evil.example")]
    found = denial(LOCAL, "GET", "/", twice)
    assert found is not None
    assert found.status == 400


def test_an_ended_run_needs_no_token_to_refuse_orders() -> None:
    assert order(ENDED, authorization=None) is None
