"""GPUs that Ray gave and torch does not find: an error, and no slow run on the CPU."""

from __future__ import annotations

import pytest
import torch
from fake_processes import spec
from msgspec.structs import replace

from asyncrl.errors import UserError
from asyncrl.launch.process_startup import check_given_gpus


@pytest.mark.parametrize(("given", "found"), [(0, 0), (0, 2), (1, 1), (2, 2), (1, 0), (2, 1)])
def test_a_process_finds_the_gpus_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, given: int, found: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    process = replace(spec(), gpus=given)
    if found >= given:
        check_given_gpus(process)
    else:
        with pytest.raises(UserError, match=rf"gave trainer {given} GPU.* finds {found} "):
            check_given_gpus(process)
