from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fedfleet.simulator.arithmetic import tree as T

pytestmark = pytest.mark.quick


class Pair(NamedTuple):
    left: Any
    right: Any


shapes = st.recursive(
    st.one_of(st.none(), st.lists(st.integers(1, 3), max_size=2).map(tuple).map(torch.Size)),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)
"""Trees whose leaves are shapes (a torch.Size is a tuple, so it is wrapped by ``fill`` before the tree sees it)."""


def fill(shape: Any, generator: torch.Generator) -> Any:
    if isinstance(shape, torch.Size):
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if isinstance(shape, dict):
        return {k: fill(v, generator) for k, v in shape.items()}
    if isinstance(shape, Pair):
        return Pair(*(fill(v, generator) for v in shape))
    if isinstance(shape, tuple):
        return tuple(fill(v, generator) for v in shape)
    return None


@st.composite
def trees(draw: Any, count: int) -> list[Any]:
    shape = draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return [fill(shape, generator) for _ in range(count)]


def flat(tree: Any) -> Tensor:
    """Flatten without the functions under test."""
    if isinstance(tree, Tensor):
        return tree.flatten()
    children = list(tree.values()) if isinstance(tree, dict) else list(tree or ())
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(flat(c) for c in children)])


def same_structure(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_structure(a[k], b[k]) for k in a)
    return a is None or (len(a) == len(b) and all(map(same_structure, a, b)))


@given(trees(2), st.floats(-3, 3))
def test_algebra_is_that_of_the_flat_vectors(ab, s):
    a, b = ab
    for found, expected in (
        (T.add(a, b), flat(a) + flat(b)),
        (T.sub(a, b), flat(a) - flat(b)),
        (T.scale(s, a), s * flat(a)),
        (T.axpy(s, a, b), flat(b) + s * flat(a)),
        (T.mean([a, b, a]), (2 * flat(a) + flat(b)) / 3),
        (T.zeros_like(a), torch.zeros_like(flat(a))),
        (T.to(a, "cpu"), flat(a)),
    ):
        assert same_structure(found, a)
        assert_close(flat(found), expected)
    if len(T.leaves(a)):
        assert_close(T.dot(a, b), flat(a) @ flat(b))
        assert_close(T.norm(a), flat(a).norm())
        assert T.dot(a, b).shape == T.norm(a).shape == ()
    assert T.count(a) == len(flat(a))
    assert T.num_bytes(a) == 8 * len(flat(a))


@given(trees(2), st.booleans())
def test_where_takes_one_side_and_no_nan_from_the_other(ab, condition):
    a, b = ab
    poisoned = T.scale(float("nan"), b if condition else a)
    found = T.where(torch.tensor(condition), *((a, poisoned) if condition else (poisoned, b)))
    assert same_structure(found, a)
    assert torch.equal(flat(found), flat(a if condition else b))


@given(trees(3))
def test_stack_concat_and_index_invert_each_other(abc):
    a, b, c = abc
    stacked = T.stack([a, b])
    both = T.concat([stacked, T.stack([c])])
    for i, tree in enumerate((a, b, c)):
        row = T.index(both, i)
        assert same_structure(row, tree)
        assert torch.equal(flat(row), flat(tree))
    assert T.concat([stacked]) is stacked


@given(trees(1))
def test_unflatten_inverts_leaves(a):
    (a,) = a
    rebuilt = T.unflatten(a, T.leaves(a))
    assert same_structure(rebuilt, a)
    assert torch.equal(flat(rebuilt), flat(a))
    assert [leaf for _, leaf in T.named_leaves(a)] == T.leaves(a)
    names = [name for name, _ in T.named_leaves(a)]
    assert len(set(names)) == len(names)


def test_paths_are_dotted_through_dict_tuple_and_named_tuple():
    tree = {"x": Pair(torch.zeros(1), (torch.zeros(2), None)), "y": torch.zeros(3)}
    assert [(name, len(leaf)) for name, leaf in T.named_leaves(tree)] == [("x.left", 1), ("x.right.0", 2), ("y", 3)]
    assert [name for name, _ in T.named_leaves(tree, "z")] == ["z.x.left", "z.x.right.0", "z.y"]


def test_bytes_follow_the_type_of_each_leaf():
    tree = {"a": torch.zeros(3, dtype=torch.float16), "b": torch.zeros((), dtype=torch.int64), "c": None}
    assert (T.count(tree), T.num_bytes(tree)) == (4, 14)


def test_prefix_trees_scale_whole_branches():
    z = {"x": {"w": torch.ones(2), "b": Pair(torch.ones(()), None)}, "y": torch.ones(3)}
    scaled = T.scale({"x": 2.0, "y": torch.tensor(-1.0)}, z)
    assert [leaf.unique().item() for leaf in T.leaves(scaled)] == [2, 2, -1]
    deep = T.axpy({"x": {"w": 1.0, "b": 3.0}, "y": -0.5}, z, z)
    assert [leaf.unique().item() for leaf in T.leaves(deep)] == [2, 4, 0.5]
    assert T.neg({"x": {"w": 1.0, "b": 3.0}, "y": -0.5}) == {"x": {"w": -1.0, "b": -3.0}, "y": 0.5}


one = torch.ones(2)
MISMATCHES = {
    "other keys": ({"a": one}, {"b": one}),
    "a missing key": ({"a": one, "b": one}, {"a": one}),
    "a key too many": ({"a": one}, {"a": one, "b": one}),
    "other lengths": ((one, one), (one,)),
    "a leaf for a branch": ({"a": {"b": one}}, {"a": one}),
    "a branch for a leaf": ({"a": one}, {"a": {"b": one}}),
    "None for a leaf": ({"a": one}, {"a": None}),
    "a leaf for None": ({"a": None}, {"a": one}),
}


OPERATIONS = {
    "add": T.add, "sub": T.sub, "dot": T.dot, "axpy": lambda a, b: T.axpy(2.0, a, b),
    "where": lambda a, b: T.where(torch.tensor(True), a, b), "mean": lambda a, b: T.mean([a, b]),
    "stack": lambda a, b: T.stack([a, b]), "concat": lambda a, b: T.concat([a, b]),
    "axpy by a prefix": lambda a, b: T.axpy(dict.fromkeys(a, 1.0) if isinstance(a, dict) else 1.0, a, b),
}  # fmt: skip


def test_mismatching_trees_give_a_value_error(subtests):
    for name, operation in OPERATIONS.items():
        for how, (a, b) in MISMATCHES.items():
            with subtests.test(f"{name}, {how}"), pytest.raises(ValueError, match="tree"):
                operation(a, b)


def test_no_leaf_is_stretched_over_another():
    for f in (T.add, T.sub, lambda a, b: T.axpy(0.5, a, b)):
        with pytest.raises(ValueError, match=r"\(1, 3\)"):
            f({"w": torch.ones(1, 3)}, {"w": torch.ones(2, 3)})
        assert f({"w": torch.ones(())}, {"w": torch.ones(2, 3)})["w"].shape == (2, 3)


def test_what_does_not_fit_gives_a_value_error():
    for prefix in ({"x": 1.0}, {"x": 1.0, "y": 1.0, "z": 1.0}, {"x": {"q": 1.0}, "y": 1.0}):
        with pytest.raises(ValueError, match="prefix tree has"):
            T.scale(prefix, {"x": one, "y": one})
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match="leaves"):
            T.unflatten({"a": one, "b": one}, [one] * count)


@given(trees(3), st.floats(-3, 3))
def test_inside_vmap_gives_the_same_as_outside(first, s):
    def everything(a, b, go, step):
        out = {
            "add": T.add(a, b),
            "sub": T.sub(a, b),
            "axpy": T.axpy(step, a, T.scale(s, b)),
            "where": T.where(go, a, b),
            "mean": T.mean([a, b]),
            "zeros": T.zeros_like(a),
            "stack": T.index(T.concat([T.stack([a, b]), T.stack([b])]), 1),
        }
        if T.leaves(a):
            out |= {"dot": T.dot(a, b), "norm": T.norm(a)}
        return out

    if not T.leaves(first[0]):
        return
    a = T.stack(first)
    b = T.stack([first[1], first[2], first[0]])
    go, step = torch.tensor([True, False, True]), torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    together = [
        T.leaves(everything(T.unflatten(a, x), T.unflatten(b, y), g, t))
        for x, y, g, t in [
            ([leaf[i] for leaf in T.leaves(a)], [leaf[i] for leaf in T.leaves(b)], go[i], step[i]) for i in range(3)
        ]
    ]
    n = len(T.leaves(a))

    def program(*tensors):
        x, y = T.unflatten(a, tensors[:n]), T.unflatten(b, tensors[n : 2 * n])
        return tuple(T.leaves(everything(x, y, *tensors[2 * n :])))

    mapped = torch.func.vmap(program)(*T.leaves(a), *T.leaves(b), go, step)
    for column, rows in zip(mapped, zip(*together, strict=True), strict=True):
        assert_close(column, torch.stack(rows))


@given(trees(1), st.integers(0, 5), st.booleans())
def test_as_new_changes_no_number_and_lays_them_out_as_torch_does(given, before, turned):
    """A view begins after some numbers, its axes in the other order."""

    def view(leaf):
        room = torch.empty(before + leaf.numel(), dtype=leaf.dtype)[before:]
        odd = (
            room.view(leaf.shape[::-1]).permute(tuple(reversed(range(leaf.dim())))) if turned else room.view(leaf.shape)
        )
        return odd.copy_(leaf)

    views = T.map(view, given[0])
    result = T.as_new({"first": views, "again": [views, 1], "other": "text"})
    pairs = zip(T.leaves(result["first"]), T.leaves(result["again"][0]), strict=True)
    assert all(one is again for one, again in pairs)
    assert result["again"][1:] == [1]
    for new, odd in zip(T.leaves(result["first"]), T.leaves(views), strict=True):
        like = torch.empty(odd.shape, dtype=odd.dtype)
        assert torch.equal(new, odd)
        assert new.data_ptr() % 64 == 0
        assert new.stride() == like.stride()
        assert (new is odd) == (odd.data_ptr() % 64 == 0 and odd.stride() == like.stride())
