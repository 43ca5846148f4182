from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scheduler.placement import MinIndex


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 4) | st.none())))
def test_the_first_has_the_lowest_key_and_is_the_longest_unchanged(changes):
    index, model = MinIndex(), {}
    for clock, (name, key) in enumerate(changes):
        if key is None:
            index.discard(name)
            model.pop(name, None)
        else:
            index.set(name, key)
            if name not in model or model[name][0] != key:
                model[name] = (key, clock)
        expected = min(model, key=model.__getitem__) if model else None
        assert index.first() == expected
        assert len(index) == len(model)


def test_memory_of_the_index_does_not_grow_with_changes():
    index = MinIndex()
    for i in range(10_000):
        index.set("a", 0)
        index.set("b", i)
    assert len(index._heap) <= 2 * 2 + 65
