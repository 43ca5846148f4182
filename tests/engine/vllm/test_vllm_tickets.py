"""Tickets: which row the tokens of a step's table belong to."""

from __future__ import annotations

import numpy as np

from engine.vllm.client.tickets import NEW, NO_ROW, Tickets
from engine.vllm.extras import NO_TICKET


def rows_of(tickets: Tickets, *asked: int) -> list[int]:
    return tickets.rows_of(np.array(asked, np.int64)).tolist()


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
    assert {ticket & 0xFFFFF for ticket in old} == {ticket & 0xFFFFF for ticket in new}
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
