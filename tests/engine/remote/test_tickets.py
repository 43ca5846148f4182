"""Tickets: which row the tokens of a step's table belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.client.unreported import NEW, NO_ROW, Index, Tickets
from asyncrl.engine.remote.extras import NO_TICKET


def rows_of(tickets: Tickets, *asked: int) -> list[int]:
    return found(tickets, asked)[0].tolist()


def found(tickets: Tickets, asked: Sequence[int] | Index) -> tuple[Index, int, bool]:
    given = np.array(asked, np.int64)
    given.setflags(write=False)  # as when they are received
    return tickets.rows_of(given)


def test_the_most_tokens_of_a_row_and_new_rows_are_found() -> None:
    tickets = Tickets()
    mine, other = tickets.take(), tickets.take()
    tickets.set_row(mine, 7)
    assert found(tickets, [mine, mine, NO_TICKET, mine])[1:] == (2, False)
    assert found(tickets, [NO_TICKET, mine, other])[1:] == (1, True)
    assert found(tickets, [])[1:] == (0, False)


def test_a_ticket_has_no_row_at_first_and_none_at_last() -> None:
    tickets = Tickets()
    mine, other = tickets.take(), tickets.take()
    tickets.set_row(mine, 7)
    assert rows_of(tickets, mine, NO_TICKET, other, mine) == [7, NO_ROW, NEW, 7]
    tickets.give_back(mine)
    assert rows_of(tickets, mine, other) == [NO_ROW, NEW]


def test_a_slot_is_used_again_but_its_tickets_differ() -> None:
    """The core may still send tokens of a request that was ended from this side."""
    tickets = Tickets()
    old = [tickets.take() for _ in range(40)]
    for ticket in old:
        tickets.give_back(ticket)
        tickets.give_back(ticket)
    new = [tickets.take() for _ in range(40)]
    assert len(set(old) | set(new)) == 80
    assert {ticket & 0xFFFFFFF for ticket in old} == {ticket & 0xFFFFFFF for ticket in new}
    for row, ticket in enumerate(new):
        tickets.set_row(ticket, row)
    for ticket in old:
        tickets.give_back(ticket)  # long over
    assert rows_of(tickets, *new) == list(range(40))
    assert set(rows_of(tickets, *old)) == {NO_ROW}


def test_no_ticket_is_never_taken() -> None:
    tickets = Tickets()
    tickets.give_back(NO_TICKET)
    assert NO_TICKET not in {tickets.take() for _ in range(100)}
    assert rows_of(tickets, NO_TICKET) == [NO_ROW]


def test_more_than_a_million_requests_are_told_apart() -> None:
    """Slots of 20 bits gave two of them one slot, so that one got the tokens of the other."""
    tickets = Tickets()
    taken = np.array([tickets.take() for _ in range((1 << 20) + 5)], np.int64)
    assert len(np.unique(taken)) == len(taken)
    assert (taken > 0).all()
    tickets.set_row(int(taken[-1]), 3)
    assert rows_of(tickets, int(taken[-1]), int(taken[0])) == [3, NEW]
    assert int((found(tickets, taken)[0] == 3).sum()) == 1


def test_a_ticket_too_many_is_refused() -> None:
    tickets = Tickets(slot_bits=4)
    taken = [tickets.take() for _ in range(15)]
    with pytest.raises(EngineError, match="15 unfinished requests"):
        tickets.take()
    tickets.give_back(taken[3])
    assert tickets.take() not in taken
