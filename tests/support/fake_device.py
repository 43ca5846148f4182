"""A device "cuda" on a machine without one, which counts what would make the host wait for it.

Tensors on it hold their numbers in host memory, so all code runs, data-dependent code too. What
code does to them is seen as a GPU would see it:

    with FakeDevice() as device:
        x = torch.from_numpy(rows).to(torch.device("cuda", 0))   # "copy to the device"
        x[x > 0]                                                 # "nonzero"
        x.sum().item()                                           # "read"
    assert device.waits == {"copy to the device": 1, "nonzero": 1, "read": 1}

The device needs its number: without it torch asks the driver for the current one.

Not simulated: Triton's kernels (`fake_kernels`), streams, events, and what happens inside of an
operation. Kernels that torch has for GPUs only are not there either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

TO_DEVICE, TO_HOST, READ = "copy to the device", "copy to the host", "read"
NONZERO, SYNCHRONIZE = "nonzero", "synchronize"
_STAGED = 1 << 16
"""Bytes. CUDA copies as much from pageable memory before it returns from a non-blocking call,
without waiting for what was queued before."""
_HOST, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_ATEN = torch.ops.aten
_SIZED_BY_NUMBERS = (
    _ATEN.nonzero, _ATEN.masked_select, _ATEN._unique2, _ATEN.unique_dim, _ATEN.unique_consecutive,
    _ATEN.repeat_interleave, _ATEN.bincount, _ATEN.equal,
)  # fmt: skip
"""The host waits for the size of the result, or for the result."""
_INDEXING = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)
_MASKS = (torch.bool, torch.uint8)


class _There(Tensor):
    """A tensor on the device."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Self:
        one: Self = Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device="meta",  # to torch itself, which without CUDA refuses "cuda"; it is not "cpu"
            requires_grad=numbers.requires_grad,
        )
        one.numbers = numbers.detach()
        return one

    device = property(lambda _: _CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_meta = property(lambda _: False)  # type: ignore[assignment]

    def tolist(self) -> Any:
        """As torch's, which copies to the host first."""
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"there({self.numbers})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{func} of a tensor of a FakeDevice, outside of it")


class FakeDevice(TorchDispatchMode):
    """The device, inside a `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """What made the host wait for the device since the last `clear`."""
        self._pinned: set[int] = set()
        """Addresses of page-locked memory."""
        self._kept: list[Tensor] = []
        """So that no address is used again."""
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for name, stand_in in (
            ("torch.cuda._lazy_init", lambda: None),
            ("torch.cuda.is_available", lambda: True),
            ("torch.cuda.cudart", lambda: self),
            ("torch.cuda.synchronize", lambda *_: self.waits.update([SYNCHRONIZE])),
            ("torch.Tensor.pin_memory", lambda one, *_: self._pin(one)),
            ("torch.Tensor.is_pinned", lambda one, *_: self._is_pinned(one)),
        ):
            self._patches.enter_context(patch(name, stand_in))
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, named = func.overloadpacket, dict(kwargs or {})
        flat, _ = tree_flatten((args, named))
        given = [one for one in flat if isinstance(one, Tensor)]
        there = any(isinstance(one, _There) for one in given)
        if named.get("device") is not None:
            there = torch.device(named["device"]).type == "cuda"
            named["device"] = _HOST
        self._note(packet, args, named, to_device=there)
        pins = named.pop("pin_memory", None)
        out = func(*tree_map(_numbers, args), **tree_map(_numbers, named))
        if packet is _ATEN.empty:
            out.zero_()  # what no stand-in of a kernel has written
        if pins:
            self._lock(out)
        if func._schema.is_mutable and not func.overloadpacket.__name__.startswith("_fused"):
            changed = named.get("out", args[0] if args else None)
            return changed if isinstance(out, Tensor) else out
        return tree_map(_there, out) if there else out

    def cudaHostRegister(self, address: int, _nbytes: int, _flags: int) -> int:  # noqa: N802
        """As CUDA's runtime: page-lock memory of the host."""
        self._pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """As CUDA's runtime."""
        self._pinned.discard(address)
        return 0

    def _note(self, packet: Any, args: Any, named: dict[str, Any], *, to_device: bool) -> None:
        """Count an operation if it waits."""
        if packet in (_ATEN._to_copy, _ATEN.copy_):
            source = args[1] if packet is _ATEN.copy_ else args[0]
            target = isinstance(args[0], _There) if packet is _ATEN.copy_ else to_device
            at = args[2] if len(args) > 2 else named.get("non_blocking", False)
            self._note_copy(source, to_device=target, non_blocking=bool(at))
        elif packet is _ATEN._local_scalar_dense:
            self._count(READ, isinstance(args[0], _There))
        elif packet in _SIZED_BY_NUMBERS:
            sized = "output_size" not in named or named["output_size"] is None
            self._count(NONZERO, sized and any(isinstance(one, _There) for one in args))
        elif packet in _INDEXING and isinstance(args[0], _There):
            for index in args[1]:
                if index is not None:
                    self._count(TO_DEVICE, not isinstance(index, _There))
                    self._count(NONZERO, index.dtype in _MASKS)

    def _note_copy(self, source: Tensor, *, to_device: bool, non_blocking: bool) -> None:
        if isinstance(source, _There) and not to_device:
            self._count(TO_HOST, not non_blocking)  # torch then copies to page-locked memory
        elif to_device and not isinstance(source, _There):
            free = self._is_pinned(source) or source.nbytes <= _STAGED
            self._count(TO_DEVICE, not (non_blocking and free))

    def _count(self, kind: str, waits: bool) -> None:
        if waits:
            self.waits[kind] += 1

    def _pin(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self._lock(copy)
        return copy

    def _lock(self, tensor: Tensor) -> None:
        self._pinned.add(tensor.untyped_storage().data_ptr())
        self._kept.append(tensor)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, _There) and (
            tensor.untyped_storage().data_ptr() in self._pinned
        )


def _numbers(one: Any) -> Any:
    return one.numbers if isinstance(one, _There) else one


def _there(one: Any) -> Any:
    return _There(one) if isinstance(one, Tensor) and not isinstance(one, _There) else one


class _Launches:
    """In place of a Triton kernel: does nothing, so what it would write stays 0."""

    def __getitem__(self, _grid: Any) -> Any:
        return lambda *_arguments, **_constants: None


@contextmanager
def fake_kernels() -> Iterator[None]:
    """Inside, the kernels of `asyncrl.engine.sampling.logits_triton` do nothing."""
    from asyncrl.engine.sampling import logits_triton

    with ExitStack() as stack:
        for name in ("draw_kernel", "summarise_kernel", "cut_kernel", "look_up_kernel"):
            stack.enter_context(patch.object(logits_triton, name, _Launches()))
        yield
