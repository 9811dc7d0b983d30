"""Checks for side effects of authors' code, so that results depend neither on the order of work nor on earlier runs.

Each check is for what slips through the one before:

1. The versions of the tensors that a computation is given.
2. The versions of all tensors that its functions hold, such as a net's buffers, around every block.
3. A small trial, before a process runs its first block of a phase. It watches every operation that writes, wherever the
   tensor comes from, and all else that the functions hold (counters, lists, generators). It also asks whether they give
   the same twice, whatever is in the rows that do not count.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.errors import ClientError
from fedfleet.simulator.object_graph import walk
from fedfleet.simulator.state_copy import StateCopy

STATISTICS = ("native_batch_norm", "_batch_norm_impl_index", "cudnn_batch_norm", "miopen_batch_norm")
"""Operations (x, weight, bias, mean, variance, training, …) that write mean and variance without saying so."""
FIX = "use a net without statistics (GroupNorm or LayerNorm for BatchNorm), or its eval mode, in which they stay as they are"
KEYS = (
    "draw from keys with rng of fedfleet.author, keep in the state what has to last, and return what is to be recorded"
)
CLOSE = 100  # units in the last place of the largest value, by which results may differ where sums are shifted


class Impure(ClientError):
    """A computation changed what others see too."""


class ClosureTensors:
    """The tensors that a setup's functions hold, and what a process has tried with it. Other processes find out for themselves.

    Where it never ``tries``, all code is known to be pure.
    """

    def __init__(self, *, tries: bool = True) -> None:
        self.tries = tries
        self._places: list[tuple[dict[str, Any], str]] | None = None
        self._tried: set[str] = set()

    def __reduce__(self) -> Any:
        """Send nothing to another process."""
        return partial(type(self), tries=self.tries), ()

    def first(self, what: str) -> bool:
        """Say whether this process comes to something for the first time, and is to try it."""
        new = self.tries and what not in self._tried
        self._tried.add(what)
        return new

    def tensors(self, roots: Iterable[Any]) -> list[tuple[str, Tensor]]:
        """Return the tensors that are held now, by name; those of mappings and attributes as they are by now."""
        if self._places is None:
            self._places = []
            for x, held in walk(*roots):
                where = x if isinstance(x, dict) else getattr(x, "__dict__", {})
                if not isinstance(where, dict):  # a class
                    continue
                rest = {name: v for name, v in held if isinstance(v, Tensor) and name not in where}
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


class SideEffects:
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
                f"the order of work: draw from the step's key with rng of fedfleet.author instead"
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
            f"results would depend on the order of work, and it is no part of the model: {FIX}"
        )

    def trial(self, compute: Callable[[], Tree], padded: Callable[[], Tree] | None = None, *, holds: Any = ()) -> None:
        """Compute something small for nothing. Raises Impure where it writes into what it has not made, or changes ``holds``.

        It is computed twice, the second time with something else in the rows that do not count, if ``padded`` does that: the
        result must be the same.
        """
        writes = Writes()

        def tried(once: Callable[[], Tree]) -> Tree:
            with writes, contextlib.suppress(Exception):  # the ordinary way says why
                return once()
            return None

        first = tried(compute)
        before = StateCopy(generators(), holds)
        second = None if first is None else tried(padded or compute)
        self.check()
        if writes.into is not None:
            self._refuse(writes.into)
        _unchanged(self._who, before)
        if second is None or _alike(first, second) or any(t.device.type != "cpu" for t in _tensors(first)):
            return  # elsewhere sums may be added in any order; every run is tried on the CPU first
        if not _alike(first, tried(compute)):
            raise Impure(f"{self._who} {NOT_TWICE}")
        if not _close(first, second):
            raise Impure(
                f"{self._who} lets rows of weight 0, which only fill a batch up, change what comes of the others (as BatchNorm's "
                f"statistics of a batch do, or a mean over all rows), so that a client's result would depend on those it shares "
                f"a block with: use GroupNorm or LayerNorm, and average with batch.mean or batch.weight"
            )


NOT_TWICE = (
    f"does not give the same twice (as where it draws, or asks for the time), so no run could be repeated: {KEYS}"
)


def generators() -> dict[str, Any]:
    """Return the generators that a process has, by name."""
    result: dict[str, Any] = {
        "random's global generator": random.random.__self__,  # pyright: ignore[reportFunctionMemberAccess]
        "torch's global generator": torch.default_generator,
    }
    if "numpy.random" in sys.modules:
        result["numpy's global generator"] = sys.modules["numpy.random"].get_state.__self__
    return result


def repeated(who: str, compute: Callable[[], Any], holds: Any = (), result: Callable[[Any], Tree] = lambda x: x) -> Any:
    """Compute twice, and return what came of it last. Raises Impure where the results differ, or where what is held changes."""
    first = result(compute())
    before = StateCopy(generators(), holds)
    second = compute()
    _unchanged(who, before)
    if not _alike(first, result(second)):
        raise Impure(f"{who} {NOT_TWICE}")
    return second


def _unchanged(who: str, before: StateCopy) -> None:
    if (name := before.changed()) is not None:
        raise Impure(
            f"{who} changed {name}, which outlives the call and which no checkpoint keeps, so that results would "
            f"depend on what ran before: {KEYS}"
        )


@contextlib.contextmanager
def untouched(who: str, given: Tree) -> Iterator[None]:
    """Refuse a change of what a computation is given, its tensors or the mappings and lists they are in. Raises Impure."""
    before = StateCopy(given)

    def check() -> None:
        if (name := before.changed()) is not None:
            raise Impure(
                f"{who} changed {name} of what it was given in place, so that a round could not be tried again, and an evaluation "
                f"would see what comes after it: return new tensors and a new state, such as {{**state, 'z': z}}"
            )

    try:
        yield
    except Impure:  # which says more
        raise
    except Exception:
        check()
        raise
    check()


def _tensors(tree: Tree) -> list[Tensor]:
    return [leaf for leaf in T.leaves(tree) if isinstance(leaf, Tensor)]


def _alike(a: Tree, b: Tree) -> bool:
    """Say whether two trees are the same bit for bit, but for the sign of zero."""
    first, second = T.leaves(a), T.leaves(b)
    return len(first) == len(second) and all(map(_same, first, second))


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return repr(a) == repr(b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is NaN


def _close(a: Tree, b: Tree) -> bool:
    """Say whether two trees are the same but for last digits."""
    for x, y in zip(_tensors(a), _tensors(b), strict=True):
        if x.shape != y.shape:
            return False
        if not (x.is_floating_point() and x.numel() and bool(x.isfinite().all() & y.isfinite().all())):
            continue
        if float((x - y).abs().max()) > CLOSE * torch.finfo(x.dtype).eps * float(x.abs().max()):
            return False
    return True


class Writes(TorchDispatchMode):
    """Watches every operation; ``into`` describes the first tensor written to that was there before.

    Operations run as ever; but since torch may compute a gradient in another way under such a mode, nothing computed is kept.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that nothing here is compiled: to leave it out torch would import its compiler, a second in every worker."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.into: str | None = None
        self._made: set[int] = set()  # by address: one that is free again can only be made again

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it writes into and what it makes."""
        kwargs = kwargs or {}
        for tensor in _in(_targets(function, args, kwargs)):
            if self.into is None and (at := _storage(tensor)) is not None and at not in self._made:
                self.into = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} (by {function})"
        result = function(*args, **kwargs)
        fresh = function is torch.ops.aten.lift_fresh.default  # what Python made of numbers
        given = set() if fresh else {_storage(t) for t in _in((args, *kwargs.values()))}
        self._made.update(at for t in _in(result) if (at := _storage(t)) is not None and at not in given)
        return result


def _in(x: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation, or its results."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for part in x:
            yield from _in(part)


def _targets(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return what an operation writes into."""
    if _counts(function):
        return (args[3], args[4]) if args[5] else ()
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(function)]


@cache
def _counts(function: Any) -> bool:
    return function._schema.name.removeprefix("aten::") in STATISTICS


@cache
def _written_arguments(function: Any) -> list[tuple[int, str]]:
    """Return place and name of each argument that an operation writes into."""
    arguments = function._schema.arguments if function._schema.is_mutable else []
    return [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse
        return None
