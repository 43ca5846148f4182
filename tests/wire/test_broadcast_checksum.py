from __future__ import annotations

import torch

from asyncrl.wire.weights.broadcast import sending as checksum_module
from asyncrl.wire.weights.broadcast.sending import checksum
from asyncrl.wire.weights.fingerprint import pseudo_random


def test_the_checksum_is_the_same_by_each_way_and_shows_one_bit() -> None:
    words = torch.randint(-(2**62), 2**62, (3 * checksum_module._BLOCK + 8,))
    part = words.view(torch.uint8)
    numbers = pseudo_random(0, checksum_module._BLOCK, torch.device("cpu")) | 1
    assert torch.equal(
        checksum_module._by_dot(words, numbers), checksum_module._by_product(words, numbers)
    )
    before = checksum(part)
    for place in (0, 12345, len(part) - 1):
        part[place] ^= 1
        assert not torch.equal(checksum(part), before)
        part[place] ^= 1
    swapped = torch.cat([part[64:128], part[:64], part[128:]])
    assert not torch.equal(checksum(swapped), before)
    assert torch.equal(checksum(part), before)
