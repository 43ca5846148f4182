import pytest

from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.metrics.occupancy import (
    SlotLog,
    SlotPiece,
    SlotUse,
    read_slots,
    slot_shares,
)


def test_what_is_not_used_is_idle():
    piece = SlotPiece(10.0, 12.0, 8, {"primary": 3.0, "run_ahead": 1.0})
    assert piece.slot_seconds() == {"primary": 6.0, "run_ahead": 2.0, "idle": 8.0}
    assert SlotPiece(0.0, 1.0, 2, {"primary": 2.0}).slot_seconds() == {"primary": 2.0}


def test_shares_count_the_parts_of_pieces_inside_and_follow_the_order_of_uses():
    pieces = [
        SlotPiece(0.0, 4.0, 2, {"run_ahead": 2.0}),
        SlotPiece(4.0, 6.0, 2, {"verifying": 1.0, "primary": 1.0}),
    ]
    shares = slot_shares(pieces, 3.0, 5.0)
    assert shares == {"primary": 0.25, "verifying": 0.25, "run_ahead": 0.5}
    assert list(shares) == ["primary", "verifying", "run_ahead"]
    assert slot_shares(pieces, 7.0, 9.0) == {}


def test_a_log_keeps_every_slot_second_of_many_short_additions(tmp_path):
    seen = []
    log = SlotLog(tmp_path / "slots" / "generator-0.jsonl", seen.append)
    expected = {}
    at = 100.0
    for step in range(200):
        used = {"primary": step % 5, "run_ahead": (step // 7) % 3}
        log.add(at, at + 0.05, 8, used)
        for use, count in {**used, "idle": 8 - sum(used.values())}.items():
            expected[use] = expected.get(use, 0.0) + 0.05 * count
        at += 0.05
    log.close()
    log.close()
    got = {}
    for piece in seen:
        for use, seconds in piece.slot_seconds().items():
            got[use] = got.get(use, 0.0) + seconds
    assert got == pytest.approx(expected)
    pieces = read_slots(tmp_path / "slots" / "generator-0.jsonl")
    assert slot_shares(pieces, 0.0, at)["idle"] == pytest.approx(expected["idle"] / 80, abs=1e-3)
    assert 30 <= len(pieces) <= 50  # 10 s in pieces of a quarter of a second and a little more


def test_what_stays_the_same_is_one_piece_and_a_gap_begins_another(tmp_path):
    log = SlotLog(tmp_path / "s.jsonl")
    for at in range(100):
        log.add(float(at), at + 1.0, 4, {"primary": 4})
    log.add(200.0, 201.0, 4, {"primary": 4})
    log.add(201.0, 202.0, 6, {"primary": 4})
    log.close()
    assert [(p.start, p.end, p.slots) for p in read_slots(tmp_path / "s.jsonl")] == [
        (0.0, 100.0, 4), (200.0, 201.0, 4), (201.0, 202.0, 6),
    ]  # fmt: skip


def test_impossible_use_is_refused():
    log = SlotLog(None)
    with pytest.raises(ValueError, match="4 slots"):
        log.add(0.0, 1.0, 4, {"primary": 5})
    with pytest.raises(ValueError, match="4 slots"):
        log.add(0.0, 1.0, 4, {"primary": 2, "idle": -1})


def test_a_file_that_is_not_there_and_a_broken_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_slots(tmp_path / "none.jsonl")
    (tmp_path / "s.jsonl").write_text('{"start":0}\n{"start":1,"end":2,"slots":1,"used":{}}\n')
    with pytest.raises(RecordError, match="line 1"):
        read_slots(tmp_path / "s.jsonl")


def test_idle_is_listed_last():
    assert [use.value for use in SlotUse][-1] == "idle"
