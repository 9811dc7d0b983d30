"""Run blocks of one kind again as the tensor operations they come to, without the Python that chose them.

Blocks that agree in phase, shapes and plain numbers do the same operations on other tensors. Once a process has run a kind
often enough, its operations are captured with ``torch.fx``; from then on they are replayed, the same kernels on the same shapes,
hence with the same bits. Where numbers differ from block to block, as falling rates do, blocks that agree in the rest are a
family, whose capture computes its numbers anew (``numbers.py``).

A capture is used once it has given exactly what the ordinary way gives: on the block it was made from, on that block with all its
numbers altered, several times, so that a number taken for a constant shows, and on the next block. What depends on the values of
tensors in another way than by tensor operations is not captured.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import getitem
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.compiled import compiled
from fedfleet.simulator.block.cuda_graph import CudaGraph, gpu_of, move
from fedfleet.simulator.block.numbers import Otherwise, Recipe, far, free

AFTER = 100
"""Blocks of a kind before it is captured, which costs the time of 14 to 66 blocks and saves up to two fifths of each later one."""
SOONER = 5  # so many times as soon on a GPU, where it saves most of each later block
KINDS, GRAPHS = 1024, 16
"""Kinds that are counted, and captures that are kept: the last used."""
ALTERED = 4  # blocks with altered numbers on which a capture is checked
ALIASES = {"aten.alias.default", "aten.detach.default"}  # what is the same tensor, where nothing is differentiated
SILENT = ALIASES | {
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "expand.default", "unsqueeze.default", "squeeze.dim", "slice.Tensor"),
        *("select.int", "permute.default", "transpose.int", "t.default", "as_strided.default", "unbind.int"),
        *("clone.default", "_to_copy.default", "zeros_like.default", "new_zeros.default", "scalar_tensor.default"),
        *("mul.Tensor", "add.Tensor", "sub.Tensor", "neg.default", "div.Tensor", "sum.default", "sum.dim_IntList"),
        *("bitwise_and.Scalar", "bitwise_xor.Scalar", "bitwise_xor.Tensor", "__rshift__.Scalar", "empty.memory_format"),
        *("where.self", "relu.default", "threshold_backward.default", "mm.default", "bmm.default", "ones_like.default"),
        "zeros.default",
    )
}
"""Operations that can be left out where nothing uses what they return: they do nothing else, and cannot fail on other values."""
TENSOR = object()
"""Stands in the shape of a tree for a tensor."""
_one_at_a_time = threading.Lock()

log = logging.getLogger(__name__)


@dataclass
class Graph:
    """A captured computation: from the distinct tensors of ``given``, and numbers that a ``recipe`` makes of its numbers, to the
    tensors of what it returns, shaped ``like`` this.
    """

    forward: Callable[..., list[Tensor]]
    like: Tree
    recipe: Recipe | None = None

    def __call__(self, given: Tree) -> Tree:
        """Compute. Raises Otherwise where the numbers would take another way."""
        leaves = T.leaves(given)
        numbers = [] if self.recipe is None else self.recipe([*filter(free, leaves)])
        result = iter(self.forward(*_distinct(leaves)[0], *numbers))
        return T.map(lambda x: next(result) if x is TENSOR else x, self.like)


@dataclass
class _Kind:
    blocks: int = 0
    graph: Graph | None = None
    recorded: Graph | None = None
    checked: bool = False
    refused: bool = False

    def serves(self, given: Tree) -> bool:
        """Say whether the numbers of ``given`` lie where the capture has been compared."""
        recipe = None if self.graph is None else self.graph.recipe
        return recipe is None or recipe.near(_numbers(given))


class Key(NamedTuple):
    """A block's kind, and its family, whose blocks may have other numbers; None where it has no such numbers."""

    kind: Hashable
    family: Hashable


class Captures:
    """Captures of a process; none, where ``after`` is None.

    Those that are trusted are compiled, where that is asked for, and on a GPU become CUDA graphs, as long as memory is enough.
    """

    def __init__(self, after: int | None = AFTER, compiles: bool = False):
        self.after, self.compiles = after, compiles
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._records = True

    def __reduce__(self) -> Any:
        """Send no captures to another process."""
        return type(self), (self.after, self.compiles)

    @property
    def ready(self) -> int:
        """The kinds that are replayed."""
        return sum(kind.checked for kind in self._kinds.values())

    def key(self, kind: Hashable, given: Tree) -> Key | None:
        """Return what a block of a ``kind`` is remembered by; None where blocks like it cannot be captured."""
        if self.after is None:
            return None
        leaves = T.leaves(given)
        if not all(isinstance(x, Tensor | int | float | str) for x in leaves):
            return None
        shapes = tuple(map(_shape, leaves))
        rest = kind, T.structure(given), _distinct(leaves)[1]
        loose = tuple((float, x > 0) if free(x) else shape for x, shape in zip(leaves, shapes, strict=True))
        return Key((*rest, shapes), None if loose == shapes else (*rest, loose))

    def replay(self, key: Key | None, given: Tree) -> Tree | None:
        """Return what a captured computation returns; None where there is none, or where it fails: the ordinary way says why."""
        for each in () if key is None else key:
            kind = self._kinds.get(each)
            if kind is None or kind.graph is None or not kind.checked:
                continue
            self._kinds.move_to_end(each)
            try:
                return (kind.recorded or kind.graph)(given)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                return None
        return None

    def ran(self, key: Key | None, compute: Callable[[Tree], Tree], given: Tree, result: Tree) -> None:
        """Take note that a block was computed in the ordinary way, and capture or check its kind, or its family, if that is due."""
        if key is None or self.after is None:
            return
        kind, family = (None if each is None else self._counted(each) for each in key)
        assert kind is not None
        if family is not None and family.graph is not None and not family.serves(given):
            family.graph, family.checked = None, False  # to be captured anew, at numbers as they are now
        due = [k for k in (kind, family) if k is not None and self._due(k, given)]
        if due and (
            due[0] is kind or due[0].blocks >= 2 * kind.blocks
        ):  # else most blocks of the family are of this kind
            try:
                self._learn(due[0], compute, given, result, due[0] is family)
            except Exception as e:  # whatever it is, the ordinary way works
                log.info("not captured: %s", e)
                due[0].refused, due[0].graph = True, None
        while len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)

    def _counted(self, key: Hashable) -> _Kind:
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        kind.blocks += 1
        return kind

    def _due(self, kind: _Kind, given: Tree) -> bool:
        assert self.after is not None
        return not kind.refused and not kind.checked and kind.blocks * (SOONER if gpu_of(given) else 1) > self.after

    def release(self) -> bool:
        """Give the memory of CUDA graphs back, and record no more; return whether there were any."""
        self._records, mine = False, [kind for kind in self._kinds.values() if kind.recorded is not None]
        for kind in mine:
            kind.recorded = None
        return bool(mine)

    def _learn(self, kind: _Kind, compute: Callable[[Tree], Tree], given: Tree, result: Tree, of_family: bool) -> None:
        if kind.graph is not None:
            _compare(kind.graph(_copied(given)), result)
            if not of_family:  # whose numbers a compiled capture or a CUDA graph would keep
                kind.graph = _compiled(kind.graph, given) if self.compiles else kind.graph
                self._record(kind, kind.graph, given)
            kind.checked = True
            return
        with _one_at_a_time:
            recipe = Recipe(_numbers(given)) if of_family else None
            kind.graph = captured(compute, _copied(given), recipe)
            if recipe is not None and (other := recipe.better()) is not None:
                kind.graph = captured(compute, _copied(given), other)
        _compare(kind.graph(_copied(given)), result)
        for time in range(ALTERED):
            other = _altered(given, time, of_family)
            with suppress(Otherwise):
                _compare(kind.graph(_copied(other)), compute(other))
        with_graph = [key for key, kind in self._kinds.items() if kind.graph is not None]
        for key in with_graph[:-GRAPHS]:
            del self._kinds[key]

    def _record(self, kind: _Kind, graph: Graph, given: Tree) -> None:
        """Make a CUDA graph of a capture, if there is a GPU and it can be recorded."""
        if not self._records or gpu_of(given) is None:
            return
        try:
            others = (k.recorded.forward for k in self._kinds.values() if k.recorded is not None)
            with _one_at_a_time:
                made = Graph(CudaGraph(graph.forward, _distinct(T.leaves(given))[0], next(others, None)), graph.like)
            _compare(made(_copied(given)), graph(_copied(given)))
            kind.recorded = made
        except torch.OutOfMemoryError:
            self.release()
        except Exception as e:  # whatever it is, the capture works
            log.info("no CUDA graph: %s", e)


def _compiled(graph: Graph, given: Tree) -> Graph:
    """Return a capture compiled; itself where that is not to be had."""
    try:
        with _one_at_a_time:
            return Graph(compiled(graph.forward, _distinct(T.leaves(_copied(given)))[0]), graph.like)
    except Exception as e:  # whatever it is, the capture works
        log.warning("not compiled: %s", e)
        return graph


def _shape(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.stride(), x.device
    return type(x), x.hex() if isinstance(x, float) else x


class NotCapturable(Exception):
    """A computation depends on values that a list of operations does not know."""


def captured(compute: Callable[[Tree], Tree], given: Tree, recipe: Recipe | None = None) -> Graph:
    """Capture ``compute``, at ``given``; with a recipe for other numbers, too. Raises NotCapturable, or what torch raises."""
    from torch.fx.experimental.proxy_tensor import make_fx  # importing it takes a second

    like: Tree = None
    if recipe is not None:
        given = _numbered(given, recipe.given)

    def flat(*replaced: Tensor) -> list[Tensor]:
        nonlocal like
        result = compute(_with(given, replaced))
        like = T.map(lambda x: TENSOR if isinstance(x, Tensor) else x, result)
        return [x for x in T.leaves(result) if isinstance(x, Tensor)]

    with _values_unseen():
        made: Any = make_fx(flat)(*_distinct(T.leaves(given))[0])
    for node in made.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(node.target.tags):
                raise NotCapturable(f"{node.target} depends on the values of a tensor")
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise NotCapturable(f"{node.target} draws from torch's global generator")
            if str(node.target) in ALIASES:
                node.replace_all_uses_with(node.args[0])
    made.graph.eliminate_dead_code(is_impure_node=lambda n: str(n.target) not in SILENT and n.target is not getitem)
    if recipe is not None:
        if any(map(recipe.knows, T.leaves(like))):
            raise NotCapturable("it returns a number that may be another one")
        recipe.put_into(made)
    if (device := gpu_of(given)) is not None:
        move(made, device)
    made.recompile()
    constants = {node.target: getattr(made, node.target) for node in made.graph.nodes if node.op == "get_attr"}
    # The function alone, since the graph takes far more memory.
    return Graph(partial(type(made).forward, SimpleNamespace(**constants)), like, recipe)


def _distinct(leaves: list[Any]) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Return each tensor among the leaves once, and which of them each leaf is; None for a leaf that is no tensor."""
    result: dict[int, int] = {}
    tensors, places = [], []
    for x in leaves:
        if not isinstance(x, Tensor):
            places.append(None)
            continue
        if id(x) not in result:
            result[id(x)] = len(tensors)
            tensors.append(x)
        places.append(result[id(x)])
    return tensors, tuple(places)


def _with(given: Tree, tensors: Sequence[Tensor]) -> Tree:
    """Return ``given`` with others for its distinct tensors."""
    leaves = T.leaves(given)
    places = _distinct(leaves)[1]
    return T.unflatten(given, [x if at is None else tensors[at] for x, at in zip(leaves, places, strict=True)])


def _numbers(given: Tree) -> list[float]:
    """Return the numbers of ``given`` that may be others in the next block."""
    return [x for x in T.leaves(given) if free(x)]


def _numbered(given: Tree, numbers: Sequence[float]) -> Tree:
    """Return ``given`` with others for its numbers."""
    others = iter(numbers)
    return T.unflatten(given, [next(others) if free(x) else x for x in T.leaves(given)])


def _copied(given: Tree) -> Tree:
    """Return copies of all tensors, so that client code that writes into them does no harm."""
    return _replaced(given, lambda t: t)


def _altered(given: Tree, time: int, numbers: bool) -> Tree:
    """Return copies with other numbers in every tensor of floats, in one way at a ``time``, and other plain numbers if asked."""

    def other(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        waves = torch.arange(t.numel(), device=t.device).add(time + 1).mul(0.7 + time).sin().to(t.dtype)
        return (t * (1.0 + 0.25 * waves.view(t.shape)) + 0.01 * (time + 1)).to(t.dtype)

    if numbers:
        given = _numbered(given, [far(x, time, place) for place, x in enumerate(_numbers(given))])
    return _replaced(given, other)


def _replaced(given: Tree, new: Callable[[Tensor], Tensor]) -> Tree:
    # A copy has the strides of what it is of; one that overlaps itself cannot be written to, and raises.
    result = []
    for t in _distinct(T.leaves(given))[0]:
        result.append(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(new(t)))
    return _with(given, result)


def _compare(replayed: Tree, result: Tree) -> None:
    """Raise NotCapturable where two results are not equal to the bit; one NaN is as good as another."""
    same = T.structure(replayed) == T.structure(result)
    if not same or not all(map(_equal, T.leaves(replayed), T.leaves(result))):
        raise NotCapturable("it gives something else than it was captured from")


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    gaps = a.isnan()
    a, b, missing = a.masked_fill(gaps, 0), b.masked_fill(gaps, 0), b.isnan()
    return torch.equal(gaps, missing) and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


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
