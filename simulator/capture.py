"""Run blocks of one kind again as the tensor operations they come to, without the Python that chose them.

Blocks that agree in phase, shapes and plain numbers do the same operations on other tensors. Once a process has run a kind
often enough, its operations are captured with ``torch.fx``; from then on they are replayed, the same kernels on the same shapes,
hence with the same bits. A capture is used once it has given exactly what the ordinary way gave, on the block it was made from
and on the next one. What depends on the values of tensors in another way than by tensor operations is not captured.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator import tree as T
from fedfleet.simulator.tree import Tree

AFTER = 100
"""Blocks of a kind before it is captured, which costs the time of 15 to 45 blocks and saves up to half of each later one."""
KINDS = 256  # that are remembered, the last used; few of them are ever captured
ALIASES = {"aten.alias.default", "aten.detach.default"}  # what is the same tensor, where nothing is differentiated

log = logging.getLogger(__name__)


TENSOR = object()
"""Stands in the shape of a tree for a tensor."""


@dataclass
class Graph:
    """A captured computation: from the distinct tensors of ``given`` to those of what it returns, shaped ``like`` this."""

    forward: Callable[..., list[Tensor]]
    like: Tree
    checked: bool = False

    def __call__(self, given: Tree) -> Tree:
        """Compute."""
        found = iter(self.forward(*_distinct(T.leaves(given))[0]))
        return T.map(lambda x: next(found) if x is TENSOR else x, self.like)


@dataclass
class _Kind:
    blocks: int = 0
    graph: Graph | None = None
    refused: bool = False


class Captures:
    """What a process has captured; never, where ``after`` is None."""

    def __init__(self, after: int | None = AFTER):
        self.after = after
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def __reduce__(self) -> Any:
        """Send no captures to another process."""
        return type(self), (self.after,)

    def key(self, kind: Hashable, given: Tree) -> Hashable:
        """Return what a block of a ``kind`` is remembered by; None where blocks like it cannot be captured."""
        if self.after is None:
            return None
        leaves = T.leaves(given)
        shapes = tuple((x.shape, x.dtype, x.stride(), x.device.type) if isinstance(x, Tensor) else x for x in leaves)
        key = (kind, T.structure(given), shapes, _distinct(leaves)[1])
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def replay(self, key: Hashable, given: Tree) -> Tree | None:
        """Return what a captured computation returns; None where there is none yet."""
        kind = None if key is None else self._kinds.get(key)
        if kind is None or kind.graph is None or not kind.graph.checked:
            return None
        return kind.graph(given)

    def ran(self, key: Hashable, compute: Callable[[Tree], Tree], given: Tree, found: Tree) -> None:
        """Take note that a block was computed in the ordinary way, and capture or check its kind where that is due."""
        if key is None or self.after is None:
            return
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)
        kind.blocks += 1
        if kind.refused or kind.blocks <= self.after:
            return
        try:
            if kind.graph is None:
                kind.graph = captured(compute, given)
                _compare(kind.graph(given), found)
            else:
                _compare(kind.graph(given), found)
                kind.graph.checked = True
        except Exception as e:  # whatever it is, the ordinary way works
            log.info("not captured: %s", e)
            kind.refused, kind.graph = True, None


class NotCapturable(Exception):
    """A computation depends on values that a list of operations does not know."""


def captured(compute: Callable[[Tree], Tree], given: Tree) -> Graph:
    """Capture ``compute``, at ``given``. Raises NotCapturable, or what torch raises."""
    from torch.fx.experimental.proxy_tensor import make_fx  # importing it takes a second

    like: Tree = None
    leaves = T.leaves(given)
    tensors, places = _distinct(leaves)

    def flat(*replaced: Tensor) -> list[Tensor]:
        nonlocal like
        filled = [x if at is None else replaced[at] for x, at in zip(leaves, places, strict=True)]
        found = compute(T.unflatten(given, filled))
        like = T.map(lambda x: TENSOR if isinstance(x, Tensor) else x, found)
        return [x for x in T.leaves(found) if isinstance(x, Tensor)]

    with _values_unseen():
        made: Any = make_fx(flat)(*tensors)
    for node in made.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(node.target.tags):
                raise NotCapturable(f"{node.target} depends on the values of a tensor")
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise NotCapturable(f"{node.target} draws from torch's global generator")
            if str(node.target) in ALIASES:
                node.replace_all_uses_with(node.args[0])
        node.meta.clear()
    made.graph.eliminate_dead_code()
    made.recompile()
    return Graph(made.forward, like)


def _distinct(leaves: list[Any]) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Return each tensor among the leaves once, and which of them each leaf is; None for a leaf that is no tensor."""
    found: dict[int, int] = {}
    tensors, places = [], []
    for x in leaves:
        if not isinstance(x, Tensor):
            places.append(None)
            continue
        if id(x) not in found:
            found[id(x)] = len(tensors)
            tensors.append(x)
        places.append(found[id(x)])
    return tensors, tuple(places)


def _compare(replayed: Tree, found: Tree) -> None:
    for a, b in zip(T.leaves(replayed), T.leaves(found), strict=True):
        same = torch.equal(a.nan_to_num(), b.nan_to_num()) if isinstance(b, Tensor) else a == b
        if not same or (isinstance(b, Tensor) and a.dtype != b.dtype):
            raise NotCapturable("it gives something else than it was captured from")


@contextmanager
def _values_unseen() -> Iterator[None]:
    """Refuse to hand out a tensor's values, which a capture would take for constants. Other threads may have them."""
    here, tensor = threading.get_ident(), torch.Tensor
    names = ("tolist", "numpy", "__array__")
    own = {name: tensor.__dict__[name] for name in names if name in tensor.__dict__}  # the others are inherited

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                raise NotCapturable("it reads the values of a tensor")
            return method(*args, **kwargs)

        return call

    for name in names:
        setattr(tensor, name, guarded(getattr(tensor, name)))
    try:
        yield
    finally:
        for name in names:
            if name in own:
                setattr(tensor, name, own[name])
            else:
                delattr(tensor, name)
