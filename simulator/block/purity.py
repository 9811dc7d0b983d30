"""What client code and evaluation must leave as it was, so that results do not depend on the order of work.

Three nets, each for what slips through the one before: the versions of the tensors that a computation is given; those of all
tensors that its functions hold, a net's buffers among them, looked at around every block; and, on a small trial before a process
runs its first block of a phase, every operation that writes, wherever the tensor comes from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.closures import parts, walk
from fedfleet.simulator.errors import ClientError

STATISTICS = ("native_batch_norm", "_batch_norm_impl_index", "cudnn_batch_norm", "miopen_batch_norm")
"""Operations (x, weight, bias, mean, variance, training, …) that write mean and variance without saying so."""
MEND = "use a net without statistics (GroupNorm or LayerNorm for BatchNorm), or its eval mode, in which they stay as they are"


class Impure(ClientError):
    """A computation changed what others see too."""


class Held:
    """The tensors that a setup's functions hold, and what a process has tried with it. Other processes find out for themselves."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str]] | None = None
        self._tried: set[str] = set()

    def __reduce__(self) -> Any:
        """Send nothing to another process."""
        return type(self), ()

    def first(self, what: str) -> bool:
        """Say whether this process comes to something for the first time."""
        new = what not in self._tried
        self._tried.add(what)
        return new

    def tensors(self, roots: Iterable[Any]) -> list[tuple[str, Tensor]]:
        """Return the tensors that are held now, by name; those of mappings and attributes as they are by now."""
        if self._places is None:
            self._places = []
            for x in walk(*roots):
                where = x if isinstance(x, dict) else getattr(x, "__dict__", {})
                if not isinstance(where, dict):  # a class
                    continue
                rest = {name: v for name, v in parts(x) if isinstance(v, Tensor) and name not in where}
                self._places += [(d, k) for d in (where, rest) for k, v in d.items() if isinstance(v, Tensor)]
        return [(str(key), where[key]) for where, key in self._places if isinstance(where.get(key), Tensor)]


class _Seen(NamedTuple):
    name: str
    tensor: Tensor
    version: int


def _seen(tensors: Iterable[tuple[str, Any]]) -> list[_Seen]:
    return [_Seen(name, t, t._version) for name, t in tensors if isinstance(t, Tensor)]


def _written(before: list[_Seen]) -> str | None:
    """Return the name of the first tensor that was written to."""
    return next((name for name, tensor, version in before if tensor._version != version), None)


class Purity:
    """What a computation, ``who``, must leave as it was: torch's generator, and the tensors it is given or holds."""

    def __init__(self, who: str, shared: Mapping[str, Any], given: Tree, held: Callable[[], list[tuple[str, Tensor]]]):
        self._who, self._find_held = who, held
        self._generator = torch.get_rng_state()
        self._shared, self._given = _seen(T.named_leaves(dict(shared))), _seen(T.named_leaves(given))
        self._held = _seen(held())

    def check(self) -> None:
        """Raise Impure where something has changed."""
        if not torch.equal(self._generator, torch.get_rng_state()):
            raise Impure(
                f"{self._who} drew from torch's global generator (as Dropout does in training mode), so results would depend on "
                f"the order of work: draw from the step's key with rng of fedfleet.simulator.author instead"
            )
        if (name := _written(self._shared)) is not None:
            raise Impure(
                f"{self._who} wrote in place into {name!r}, which all clients share, so results would depend on the order of "
                f"work: return new tensors instead"
            )
        if (name := _written(self._given)) is not None:
            raise Impure(
                f"{self._who} wrote in place into {name!r}, so the block could not be run a second time: return new tensors "
                f"instead"
            )
        now = dict.fromkeys(id(tensor) for _, tensor in self._find_held())
        replaced = next((s.name for s in self._held if id(s.tensor) not in now), None)
        if (name := _written(self._held) or replaced) is not None:
            self._refuse(repr(name))

    def _refuse(self, what: str) -> None:
        raise Impure(
            f"{self._who} wrote into {what}, a tensor that it holds from one client to the next, such as a net's buffer, so "
            f"results would depend on the order of work, and it is no part of the model: {MEND}"
        )

    def trial(self, compute: Callable[[], Any]) -> None:
        """Compute something small for nothing, and refuse all that it writes into and has not made. Raises Impure."""
        writes = Writes()
        with writes, contextlib.suppress(Exception):  # the ordinary way says why
            compute()
        self.check()
        if writes.into is not None:
            self._refuse(writes.into)


class Writes(TorchDispatchMode):
    """Watches every operation; ``into`` describes the first tensor written to that was there before.

    Operations run as ever; but since torch may compute a gradient in another way under such a mode, nothing computed is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into: str | None = None
        self._made: set[int] = set()  # by address: one that is free again can only be made again

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it writes into and what it makes."""
        kwargs = kwargs or {}
        for tensor in _targets(function, args, kwargs):
            if self.into is None and (at := _storage(tensor)) is not None and at not in self._made:
                self.into = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} (by {function})"
        found = function(*args, **kwargs)
        fresh = function is torch.ops.aten.lift_fresh.default  # what Python made of numbers
        given = set() if fresh else {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and (at := _storage(tensor)) is not None and at not in given:
                self._made.add(at)
        return found


def _targets(function: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes into."""
    name = function._schema.name.removeprefix("aten::")
    if name in STATISTICS:
        wanted = [args[3], args[4]] if args[5] else []
    else:
        arguments = function._schema.arguments if function._schema.is_mutable else []
        given = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(arguments)}
        wanted = [given[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves(wanted) if isinstance(t, Tensor)]


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse
        return None
