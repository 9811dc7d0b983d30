"""Parameter trees and their algebra.

A tree is a nested dict / tuple / NamedTuple whose leaves are tensors (``None`` is an empty tree). Algorithms combine trees
only through the functions below, so that the engine may hand them leaves that are not plain tensors: a leaf needs
``+``, ``-``, and ``*`` by a scalar, nothing else.

Scalars may be *prefix trees*: in ``axpy({"x": -eta, "y": -gamma}, d, z)`` every leaf under ``"x"`` is scaled by ``-eta``.
Nothing here reduces over clients: a tree inside client code is one client's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

Tree = Any
"""A nested dict / tuple / NamedTuple of leaves."""
Scalar = Any
"""A Python number, a zero-dimensional tensor, or a prefix tree of them."""


ALIGNED = 64
"""Bytes whose multiples are where torch has its own tensors begin."""
_LEAF, _NAMED, _PLAIN, _MAPPING, _EMPTY = range(5)
"""What a node is: a leaf, a NamedTuple, a tuple, a mapping, or None."""


@cache
def _kind(of: type) -> int:
    """Return what nodes of a type are. Trees are gone through all the time, and asking whether a type is a ``Mapping`` is slow."""
    if issubclass(of, tuple):
        return _NAMED if hasattr(of, "_fields") else _PLAIN
    if issubclass(of, Mapping):
        return _MAPPING
    return _EMPTY if of is type(None) else _LEAF


def _children(node: Tree) -> list[tuple[str, Tree]] | None:
    """Return the named children of a node, or None for a leaf."""
    kind = _kind(type(node))
    if kind == _LEAF:
        return None
    if kind == _MAPPING:
        return [(str(k), v) for k, v in node.items()]
    if kind == _EMPTY:
        return []
    return list(zip(node._fields if kind == _NAMED else _strings(len(node)), node, strict=True))


@cache
def _strings(count: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(count))


def _rebuild(node: Tree, values: Sequence[Tree]) -> Tree:
    kind = _kind(type(node))
    if kind == _MAPPING:
        return dict(zip(node, values, strict=True))
    if kind == _EMPTY:
        return None
    return type(node)(*values) if kind == _NAMED else tuple(values)


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply ``fn`` leaf by leaf; ``rest`` must have the structure of ``tree``. Raises ValueError where it has not."""
    if not rest:
        return _mapped(fn, tree)
    children = _children(tree)
    if children is None:
        for other in rest:
            if (branch := _children(other)) is not None:
                raise ValueError(f"trees differ: one has a leaf, another {[n for n, _ in branch]}")
        return fn(tree, *rest)
    names = [n for n, _ in children]
    others = [_children(r) for r in rest]
    for other in others:
        if other is None or [n for n, _ in other] != names:
            result = "a leaf" if other is None else [n for n, _ in other] or "nothing"
            raise ValueError(f"trees differ: one has {names}, another {result}")
    return _rebuild(
        tree, [map(fn, child, *(cast(Any, o)[i][1] for o in others)) for i, (_, child) in enumerate(children)]
    )


def _mapped(fn: Callable[[Any], Any], node: Tree) -> Tree:
    kind = _kind(type(node))
    if kind == _LEAF:
        return fn(node)
    if kind == _MAPPING:
        return {k: _mapped(fn, v) for k, v in node.items()}
    return _rebuild(node, [_mapped(fn, v) for v in node or ()])


def map_prefix(fn: Callable[..., Any], prefix: Scalar, tree: Tree, *rest: Tree) -> Tree:
    """Apply ``fn(p, leaf, ...)`` with ``p`` the prefix tree's value that stands above the leaf."""
    if not isinstance(prefix, Mapping):
        return map(lambda *leaves: fn(prefix, *leaves), tree, *rest)
    if not isinstance(tree, Mapping) or list(prefix) != list(tree):
        raise ValueError(
            f"prefix tree has {list(prefix)}, the tree {list(tree) if isinstance(tree, Mapping) else 'a leaf'}"
        )
    for other in rest:
        if not isinstance(other, Mapping) or list(other) != list(tree):
            result = list(other) if isinstance(other, Mapping) else "a leaf"
            raise ValueError(f"trees differ: one has {list(tree)}, another {result}")
    return {k: map_prefix(fn, prefix[k], tree[k], *(r[k] for r in rest)) for k in tree}


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves in structural order."""
    result: list[Any] = []
    _collect(tree, result)
    return result


def _collect(node: Tree, result: list[Any]) -> None:
    kind = _kind(type(node))
    if kind == _LEAF:
        result.append(node)
    elif kind == _MAPPING:
        for child in node.values():
            _collect(child, result)
    elif kind != _EMPTY:
        for child in node:
            _collect(child, result)


def named_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted path, leaf)`` in structural order."""
    children = _children(tree)
    if children is None:
        yield prefix, tree
        return
    for name, child in children:
        yield from named_leaves(child, f"{prefix}.{name}" if prefix else name)


def structure(tree: Tree) -> Any:
    """Return the shape of a tree without its leaves, hashable: nested names, None for a leaf."""
    kind = _kind(type(tree))
    if kind == _LEAF:
        return None
    if kind == _MAPPING:
        return tuple([(str(name), structure(child)) for name, child in tree.items()])
    return tuple([(name, structure(child)) for name, child in _children(tree) or ()])


def unflatten(like: Tree, new_leaves: Sequence[Any]) -> Tree:
    """Build a tree of the structure of ``like`` from leaves in structural order. Raises ValueError for too few or too many."""
    places = len(leaves(like))
    if places != len(new_leaves):
        raise ValueError(f"{len(new_leaves)} leaves do not fill a tree of {places}")
    it = iter(new_leaves)
    return map(lambda _: next(it), like)


def _checked(x: Any, y: Any) -> Any:
    """Return x. Raises ValueError where torch would stretch one tensor over the other: a tree has no such leaves."""
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape and x.dim() and y.dim():
        raise ValueError(f"trees differ: one has a leaf of shape {tuple(x.shape)}, another of {tuple(y.shape)}")
    return x


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b. Raises ValueError where leaves differ in shape, as ``sub`` and ``axpy`` do."""
    return map(lambda x, y: _checked(x, y) + y, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a - b."""
    return map(lambda x, y: _checked(x, y) - y, a, b)


def scale(s: Scalar, a: Tree) -> Tree:
    """Return s * a; ``s`` may be a prefix tree."""
    return map_prefix(lambda p, x: x * p, s, a)


def axpy(s: Scalar, a: Tree, b: Tree) -> Tree:
    """Return b + s * a; ``s`` may be a prefix tree."""
    return map_prefix(lambda p, x, y: y + _checked(x, y) * p, s, a, b)


def neg(s: Scalar) -> Scalar:
    """Return -s for a scalar or a prefix tree of them."""
    return {k: neg(v) for k, v in s.items()} if isinstance(s, Mapping) else -s


def dot(a: Tree, b: Tree) -> Tensor:
    """Return the Euclidean inner product, a zero-dimensional tensor."""
    return torch.stack(leaves(map(lambda x, y: (x * y).sum(), a, b))).sum()


def norm(a: Tree) -> Tensor:
    """Return the Euclidean norm over all leaves."""
    return dot(a, a).sqrt()


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """Return a where the zero-dimensional ``condition`` holds, else b; a NaN on the side not taken does no harm."""
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def zeros_like(a: Tree) -> Tree:
    """Return a tree of zeros."""
    return map(torch.zeros_like, a)


def mean(trees: Sequence[Tree]) -> Tree:
    """Return the unweighted mean of a non-empty sequence of trees, summed in the order given."""
    total = trees[0]
    for t in trees[1:]:
        total = add(total, t)
    return scale(1.0 / len(trees), total)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees leaf by leaf along a new first axis."""
    return map(lambda *xs: torch.stack(xs), trees[0], *trees[1:])


def concat(trees: Sequence[Tree]) -> Tree:
    """Concatenate stacked trees along their first axis."""
    return trees[0] if len(trees) == 1 else map(lambda *xs: torch.cat(xs), trees[0], *trees[1:])


def index(a: Tree, i: Any) -> Tree:
    """Index every leaf of a stacked tree along its first axis."""
    return map(lambda x: x[i], a)


def column(numbers: Tensor, v: Tensor) -> Tensor:
    """Shape ``numbers`` (C,) to multiply stacked values ``v`` (C, ...)."""
    return numbers.reshape(-1, *([1] * (v.dim() - 1)))


def count(a: Tree) -> int:
    """Return the number of scalars in the tree."""
    return sum(x.numel() for x in leaves(a))


def num_bytes(a: Tree) -> int:
    """Return the number of bytes of the tree's leaves."""
    return sum(x.numel() * x.element_size() for x in leaves(a))


def to(a: Tree, device: torch.device | str) -> Tree:
    """Move every leaf to a device."""
    return map(lambda x: x.to(device), a)


def as_new(a: Tree) -> Tree:
    """Return the tree with its tensors laid out as torch lays out new ones; one in several places is still one.

    A product's last bits may depend on where its factors begin and on their strides. A view begins anywhere, and so does
    what a file or a message held.
    """
    result: dict[int, Tensor] = {}

    def new(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [map(new, item) for item in leaf]
        if not isinstance(leaf, Tensor) or _is_as_new(leaf):
            return leaf
        if id(leaf) not in result:
            result[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
        return result[id(leaf)]

    return a if all(_is_as_new(leaf) for leaf in leaves(a)) else map(new, a)


def _is_as_new(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return not isinstance(leaf, list)
    if leaf.data_ptr() % ALIGNED:
        return False
    stride = 1
    for size, given in zip(reversed(leaf.shape), reversed(leaf.stride()), strict=True):
        if given != stride:
            return False
        stride *= max(size, 1)
    return True
