"""`asyncrl gpu-check` works with torch 2.11 too, older than the one here."""

from __future__ import annotations

import torch_names


def test_nothing_that_torch_2_11_lacks_is_used() -> None:
    """By a committed list, as no test installs a second torch."""
    known = set(torch_names.KNOWN.read_text().split())
    new = {name: where for name, where in torch_names.names_used().items() if name not in known}
    assert new.pop("torch.ops.asyncrl.linear") == "trainer/cpu/layers.py"  # our own
    assert not new, (
        f"{new}: if torch 2.11 has them, add them to {torch_names.KNOWN.name} with its Python "
        "(tests/support/torch_names.py --write); otherwise do without where they are missing"
    )


def test_a_name_an_argument_and_a_missing_one_are_found() -> None:
    assert torch_names.exists("torch.nn.attention.varlen.varlen_attn")
    assert torch_names.exists("torch.nn.attention.varlen.varlen_attn(scale=)")
    assert torch_names.exists("torch.zeros(device=)")  # not written in Python
    assert not torch_names.exists("torch.nn.attention.varlen.varlen_attn(colour=)")
    assert not torch_names.exists("torch.nn.attention.colour")
