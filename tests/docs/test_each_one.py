"""A test of many names fails with all that are wrong."""

import pytest
from each_one import each_one


def check(names: list[str]) -> None:
    with each_one() as checking:
        for name in names:
            with checking(name):
                assert name == "two"
                with pytest.raises(TypeError):
                    str(name)


def test_all_failures_are_named() -> None:
    with pytest.raises(AssertionError) as failed:
        check(["one", "two", "three"])
    text = str(failed.value)
    assert "one: assert 'one' == 'two'" in text
    assert "three: assert 'three' == 'two'" in text
    assert "two: DID NOT RAISE" in text
    assert "3 are wrong" in text


def test_another_error_comes_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), each_one() as checking, checking("one"):
        print(1 / 0)
