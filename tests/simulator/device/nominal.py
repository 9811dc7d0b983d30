"""A device in name only: it computes on the CPU, and refuses what a GPU would refuse, tensors of two devices in one operation.

Torch knows the device's name and has nothing behind it. ``placed`` keeps on record which storages are said to lie there: a dispatch
mode looks at every operation, and what is asked for there, or made of what lies there, lies there. Tensors stay plain ones of the
CPU, so that subclasses of them (the factored executor's), ``vmap`` and captures work as ever; a wrapper that is a subclass of its
own cannot be one of theirs. What Python makes is on the CPU unless it names the device. What torch's own C++ makes in passing is
on neither: it goes by the device that it sees, where all is on the CPU, and on a GPU would go by the GPU.

Where there is a GPU, the tests run on it instead: ``DEVICE`` is that, ``placed`` changes nothing, and the device in name only is
held to what the GPU refuses and does.

As on a GPU, a number on the CPU may take part in arithmetic, indices may come from the CPU, and copies go either way. A mode sees
one thread, so that ``UploadMatrix``, which computes in several, is made to use this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from enum import Enum
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fedfleet.simulator import ambient
from fedfleet.simulator.arithmetic import upload_matrix

REAL = torch.cuda.is_available()
DEVICE, CPU = torch.device("cuda" if REAL else "fpga", 0), torch.device("cpu")
PASSED_ON = torch.device("cpu", 0)
"""What operations are told instead of the device: the CPU as nobody else calls it, so that a captured one still says it."""
FORGET_AT = 1 << 15  # storages on record, before those that are gone are taken off it
FACTORIES = (
    *("zeros", "ones", "full", "empty", "arange", "eye", "linspace", "logspace", "empty_strided", "scalar_tensor"),
    *("rand", "randn", "randint", "randperm", "tril_indices", "triu_indices", "from_numpy", "frombuffer"),
)

aten: Any = torch.ops.aten
functorch: Any = torch._C._functorch
COPIES = {aten._to_copy, aten.copy_, aten.copy}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
FILLED = {aten.masked_fill, aten.masked_fill_, aten.fill, aten.fill_}
OF_ONE_DEVICE = {aten.lerp, aten.lerp_}  # though they go number by number


class Strangers(RuntimeError):
    """Tensors of two devices in one operation."""


TwoDevices = RuntimeError if REAL else Strangers


class Place(Enum):
    """Where a tensor is."""

    DEVICE = 1
    CPU = 2
    NEITHER = 3


class Record(dict[int, tuple[StorageWeakRef, Place]]):
    """Where storages are, by address; the CPU, if nothing is said. As long as one is referred to, nothing else has its address."""

    def put(self, t: Tensor, place: Place) -> None:
        """Take down where a tensor is."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = _bare(t).untyped_storage()
        self[storage._cdata] = StorageWeakRef(storage), place
        if len(self) > FORGET_AT:
            for at in [at for at, (storage, _) in self.items() if storage.expired()]:
                del self[at]

    def of(self, t: Tensor) -> Place:
        """Return where a tensor is."""
        found = self.get(_address(_bare(t)))
        return Place.CPU if found is None else found[1]


record = Record()


_address: Callable[[Tensor], int] = torch._C._storage_address  # pyright: ignore[reportAttributeAccessIssue]


def _bare(t: Tensor) -> Tensor:
    while functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t


def _tensors(x: Any) -> list[Tensor]:
    """Return the tensors in arguments or results."""
    if isinstance(x, Tensor):
        return [x]
    return [t for y in x for t in _tensors(y)] if isinstance(x, tuple | list) else []


def on_device(t: Tensor) -> bool:
    """Say whether a tensor is on the device."""
    return t.is_cuda if REAL else record.of(t) is Place.DEVICE


class Allocations:
    """Of a GPU; ``seen`` counts them."""

    @property
    def seen(self) -> int:
        """The number of tensors made there."""
        return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


class Watch(TorchDispatchMode):
    """Looks at every operation, and keeps the record. ``seen`` counts those on the device."""

    seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = _tensors((args, *kwargs.values()))
        places = [record.of(t) for t in tensors]
        here = Place.DEVICE in places
        if here and Place.CPU in places:
            strangers = [t for t, place in zip(tensors, places, strict=True) if place is Place.CPU]
            if not _allowed(function, args, strangers):
                shapes = ", ".join(str(tuple(t.shape)) for t in strangers)
                raise Strangers(f"tensors of two devices in {function}: on the CPU are those of shape {shapes}")
        if kwargs.get("device") in (DEVICE, PASSED_ON):
            kwargs["device"], here = PASSED_ON, True
        given = {_address(t) for t in tensors}
        found = function(*args, **kwargs)
        self.seen += here
        for t in _tensors(found):
            if _address(t) not in given:
                record.put(t, Place.DEVICE if here else Place.CPU if Place.CPU in places else Place.NEITHER)
        return found


def _allowed(function: Any, args: Any, strangers: list[Tensor]) -> bool:
    """Say whether a GPU would do an operation in which the ``strangers`` are on the CPU, and others are not."""
    packet = function.overloadpacket
    if packet in COPIES:
        return True
    first_is_strange = any(t is args[0] for t in strangers)
    if packet in INDEXED:
        value = args[2] if len(args) > 2 else None
        return not first_is_strange and (value is None or value.dim() == 0 or all(t is not value for t in strangers))
    number_by_number = packet in FILLED or (torch.Tag.pointwise in function.tags and packet not in OF_ONE_DEVICE)
    return (
        number_by_number
        and all(t.dim() == 0 for t in strangers)
        and not (function._schema.is_mutable and first_is_strange)
    )


def _device(t: Tensor, real: Any = torch._C.TensorBase.device) -> torch.device:
    return DEVICE if on_device(t) else real.__get__(t)


def _to(real: Callable[..., Tensor], self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    copy = kwargs.pop("copy", False)
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    dtype = dtype or self.dtype
    if device is None or device.type == self.device.type:
        return real(self, dtype=dtype, copy=copy)
    found = aten._to_copy(self, device=DEVICE if device.type == DEVICE.type else CPU, dtype=dtype)
    record.put(found, Place.DEVICE if device.type == DEVICE.type else Place.CPU)
    return found


def _numpy(real: Callable[..., Any], self: Tensor, *args: Any, **kwargs: Any) -> Any:
    if on_device(self):
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first.")
    return real(self, *args, **kwargs)


def _made(real: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    found = real(*args, **kwargs)
    if not on_device(found):
        record.put(found, Place.CPU)
    return found


def _of_values(real: Callable[..., Tensor], data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    found = real(data, **kwargs)
    return found if device is None else found.to(device)


class Here(Executor):
    """Threads that are none."""

    def map(self, fn: Callable[..., Any], *of: Any, **_: Any) -> Iterator[Any]:
        """Compute in this thread."""
        return map(fn, *of)


@contextmanager
def placed() -> Iterator[Watch | Allocations]:
    """Have the device for as long as this lasts."""
    if REAL:
        torch.cuda.reset_accumulated_memory_stats()
        yield Allocations()
        return
    of_tensors = {
        "device": property(_device),
        "is_cuda": property(on_device),
        "to": functools.partialmethod(functools.partial(_to, Tensor.to)),
        "cpu": lambda self: self.to(CPU),
        "numpy": functools.partialmethod(functools.partial(_numpy, Tensor.numpy)),
    }
    of_torch = {name: functools.partial(_made, getattr(torch, name)) for name in FACTORIES}
    of_torch |= {name: functools.partial(_of_values, getattr(torch, name)) for name in ("tensor", "as_tensor")}
    with (
        patch.multiple(torch, **of_torch),
        patch.multiple(upload_matrix, _threads=Here),
        patch.multiple(ambient, _mode=lambda: None),  # a run refuses modes around it; this one stands for the device
        Watch() as watch,
    ):
        before = {
            name: Tensor.__dict__[name] for name in of_tensors if name in Tensor.__dict__
        }  # the others are inherited
        for name, new in of_tensors.items():
            setattr(Tensor, name, new)
        try:
            yield watch
        finally:
            for name in of_tensors:
                if name in before:
                    setattr(Tensor, name, before[name])
                else:
                    delattr(Tensor, name)
            record.clear()
