import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scheduler.errors import LedgerError, SchedulerError
from asyncrl.scheduler.ledger import Ledger


def filled(per_step=2, steps=2, first_step=0):
    ledger = Ledger(groups_per_step=per_step, first_step=first_step)
    groups = [ledger.issue() for _ in range(per_step * steps)]
    return ledger, groups


def test_a_step_is_consumed_exactly_once():
    ledger, _ = filled()
    ledger.arrive(0)
    ledger.arrive(1)
    ledger.consume(0, (1, 0))
    with pytest.raises(LedgerError, match="out of order"):
        ledger.consume(0, (0, 1))
    with pytest.raises(LedgerError, match="consumed already"):
        ledger.arrive(0)


@pytest.mark.parametrize("groups", [(0,), (0, 1, 2), (0, 2), (0, 0)])
def test_a_step_is_consumed_with_its_own_groups_only(groups):
    ledger, _ = filled()
    for group in range(3):
        ledger.arrive(group)
    with pytest.raises(LedgerError, match=r"members are \[0, 1\]"):
        ledger.consume(0, groups)
    assert ledger.counts().consumed == 0


def test_a_group_is_settled_once_and_only_if_issued():
    ledger, _ = filled()
    ledger.fail(0)
    for settle in (ledger.arrive, ledger.fail):
        with pytest.raises(LedgerError, match="settled already"):
            settle(0)
        with pytest.raises(LedgerError, match="never issued"):
            settle(4)
    with pytest.raises(SchedulerError, match="before all"):
        ledger.consume(0, ())


def test_withdrawn_groups_are_issued_again_and_count_as_issued():
    ledger, groups = filled(steps=3)
    ledger.fail(5)
    ledger.withdraw_from(ledger.end_of(0))
    assert ledger.next_group == 2
    assert ledger.issued_below == len(groups)
    assert ledger.counts().failed == 1
    assert list(ledger.unsettled()) == [0, 1]


@given(st.data(), st.integers(1, 4), st.integers(0, 3))
def test_memory_is_what_is_in_flight_and_counts_add_up(data, per_step, first_step):
    ledger = Ledger(groups_per_step=per_step, first_step=first_step)
    for step in range(first_step, first_step + 6):
        groups = [ledger.issue() for _ in range(per_step)]
        assert groups == list(ledger.groups_of(step))
        for group in data.draw(st.permutations(groups)):
            assert ledger.membership(step) is None
            (ledger.fail if data.draw(st.booleans()) else ledger.arrive)(group)
        ledger.consume(step, ledger.membership(step))
        assert not ledger._settled
        counts = ledger.counts()
        assert counts.issued == counts.consumed + counts.failed
