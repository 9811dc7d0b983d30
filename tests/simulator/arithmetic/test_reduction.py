from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fedfleet.simulator.arithmetic import rng, upload_matrix
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import (
    ByDomainMean,
    CollectUploads,
    DomainMeans,
    Mean,
    Merging,
    Rows,
    Total,
    merge,
)
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix

pytestmark = pytest.mark.quick

REDUCTIONS = [Total(), Mean(), Mean(weighted=False), ByDomainMean(), CollectUploads()]


def uploads(size: int, seed: int = 0) -> tuple[Any, Rows]:
    k = rng.key(seed)
    values = {
        "w": rng.normal(rng.fold(k, "w"), (size, 3, 2), torch.float64),
        "b": (rng.normal(rng.fold(k, "b"), (size,), torch.float64), None),
    }
    weight = 0.1 + rng.uniform(rng.fold(k, "weight"), size, torch.float64)
    domain = (5 * rng.uniform(rng.fold(k, "domain"), size, torch.float64)).to(torch.int64)
    return values, Rows(weight, domain, torch.ones_like(weight))


def blocks_of(values: Any, rows: Rows, cuts: list[int]) -> list[tuple[Any, Rows]]:
    size = len(rows.weight)
    edges = [0, *sorted(min(c, size) for c in cuts), size]
    slices = [slice(a, b) for a, b in pairwise(edges) if b > a]
    return [(T.index(values, s), T.index(rows, s)) for s in slices]


def matrix(values: Any) -> np.ndarray:
    return torch.cat([leaf.reshape(len(leaf), -1) for leaf in T.leaves(values)], 1).numpy()


def vector(tree: Any) -> np.ndarray:
    return torch.cat([leaf.flatten() for leaf in T.leaves(tree)]).numpy()


def whole(reduction: Any, value: Any) -> Any:
    """Compare stored uploads whatever blocks they lie in."""
    return (T.concat(value.blocks), value.weight) if isinstance(reduction, CollectUploads) else value


def close(reduction: Any, a: Any, b: Any) -> None:
    for x, y in zip(T.leaves(whole(reduction, a)), T.leaves(whole(reduction, b)), strict=True):
        assert_close(x, y)


splits = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), max_size=5), st.integers(0, 2**31))
)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=repr)
@given(split=splits)
def test_any_split_into_blocks_gives_the_same(reduction, split):
    size, cuts, seed = split
    values, rows = uploads(size, seed)
    at_once = reduction.final(reduction.block(values, rows))
    partial = None
    for block in blocks_of(values, rows, cuts):
        partial = merge(reduction, partial, reduction.block(*block))
    close(reduction, reduction.final(partial), at_once)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=repr)
@given(split=splits)
def test_merging_is_associative_and_none_is_neutral(reduction, split):
    size, cuts, seed = split
    parts = [reduction.block(*block) for block in blocks_of(*uploads(size, seed), cuts)]
    assert merge(reduction, None, None) is None
    assert merge(reduction, parts[0], None) is parts[0]
    assert merge(reduction, None, parts[0]) is parts[0]
    left = right = None
    for part in parts:
        left = merge(reduction, left, part)
    for part in reversed(parts):
        right = merge(reduction, part, right)
    close(reduction, reduction.final(left), reduction.final(right))


def added(parts: list[Any]) -> Any:
    """Add as the definition says: the largest tree there can be first, and what is left of it after that."""
    first = 1 << (len(parts).bit_length() - 1)
    if first == len(parts):
        first //= 2
    return parts[0] if len(parts) == 1 else merge(Mean(), added(parts[:first]), added(parts[first:]))


@given(number=st.integers(1, 40), lost=st.sets(st.integers(0, 39)), height=st.integers(0, 5))
def test_whoever_adds_blocks_the_bits_are_those_that_their_numbers_give(number, lost, height):
    values, rows = uploads(number)
    values = T.map(lambda x: x.float(), values)
    each = blocks_of(values, rows, list(range(number)))
    parts = [None if i in lost else Mean().block(*block) for i, block in enumerate(each)]
    whole, alone = Merging({"z": Mean()}), Merging({"z": Mean()})
    for at in range(0, number, 1 << height):
        together = parts[at : at + (1 << height)]
        of_a_task = Merging({"z": Mean()})
        for part in together:
            of_a_task.add({"z": part})
            alone.add({"z": part})
        whole.add(of_a_task.result(), len(together))
    expected = added(parts)
    for found in (whole.result()["z"], alone.result()["z"]):
        if expected is None:
            assert found is None
        else:
            assert all(torch.equal(x, y) for x, y in zip(T.leaves(found), T.leaves(expected), strict=True))


def test_blocks_are_added_in_a_tree_whose_last_part_comes_first():
    terms = [torch.tensor(x, dtype=torch.float64) for x in (1.0, 2.0**-53, 2.0**-53, 1.0, 2.0**-53, 2.0**-53, 2.0**-53)]
    merging = Merging({"z": Total()})
    for term in terms:
        merging.add({"z": term})
    pairs = (1.0 + 2.0**-53) + (2.0**-53 + 1.0)
    assert float(merging.result()["z"]) == pairs + (2 * 2.0**-53 + 2.0**-53)
    assert Merging({"z": Total()}).result() == {"z": None}


def test_total_and_means_are_the_textbook_ones():
    values, rows = uploads(9)
    flat, weight = matrix(values), rows.weight.numpy()
    found = {r: vector(r.final(r.block(values, rows))) for r in (Total(), Mean(), Mean(weighted=False))}
    np.testing.assert_allclose(found[Total()], flat.sum(0))
    np.testing.assert_allclose(found[Mean()], np.average(flat, axis=0, weights=weight))
    np.testing.assert_allclose(found[Mean(weighted=False)], flat.mean(0))


def test_a_mean_keeps_structure_and_type():
    values, rows = {"w": torch.ones(3, 2, 2), "b": (torch.ones(3, dtype=torch.float64), None)}, uploads(3)[1]
    found = Mean().final(Mean().block(values, rows))
    assert found["w"].shape == (2, 2)
    assert found["w"].dtype == torch.float32
    assert found["b"][0].dtype == torch.float64
    assert found["b"][1] is None


def test_domain_means_list_the_heard_domains_in_order():
    values, rows = uploads(9)
    rows = rows._replace(domain=torch.tensor([7, 10**12, 7, 3, 3, 3, 7, 10**12, 3]))
    found = ByDomainMean().final(ByDomainMean().block(values, rows))
    assert isinstance(found, DomainMeans)
    assert found.domain.tolist() == [3, 7, 10**12]
    flat, weight, domain = matrix(values), rows.weight.numpy(), rows.domain.numpy()
    for i, d in enumerate(found.domain.tolist()):
        mine = domain == d
        expected = np.average(flat[mine], axis=0, weights=weight[mine])
        np.testing.assert_allclose(vector(T.index(found.value, i)), expected)
        assert float(found.weight[i]) == pytest.approx(weight[mine].sum())


def test_a_mean_of_no_weight_does_not_exist():
    values, rows = uploads(3)
    rows = rows._replace(weight=torch.zeros(3, dtype=torch.float64))
    for mean in (lambda: Mean().final(Mean().block(values, rows)), lambda: CollectUploads().block(values, rows).mean()):
        with pytest.raises(ValueError, match="weights of all heard clients are zero"):
            mean()


def tile() -> Any:
    """Draw how many numbers are in memory at a time."""
    return st.sampled_from([1, 12, 24, 65536]).map(lambda floats: patch.object(upload_matrix, "_TILE", floats))


def kept(size: int, cuts: tuple[int, ...] = (2, 3), seed: int = 0) -> tuple[UploadMatrix, np.ndarray]:
    values, rows = uploads(size, seed)
    partial = None
    for block in blocks_of(values, rows, list(cuts)):
        partial = merge(CollectUploads(), partial, CollectUploads().block(*block))
    return CollectUploads().final(partial), matrix(values)


@given(tile(), st.sampled_from([1, 2, 5, 6, 10, 16, 17, 33]), st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.4, 0.49]))
def test_products_medians_and_means_are_those_of_the_whole_matrix(tile, size, trim):
    uploaded, flat = kept(size)
    weights = rng.normal(rng.key(8), size, torch.float64)
    cut = round(trim * 100) * size // 100
    with tile:
        gram, mean = uploaded.gram(), vector(uploaded.mean())
        assert gram.dtype == torch.float64
        np.testing.assert_allclose(gram.numpy(), flat @ flat.T)
        np.testing.assert_allclose(vector(uploaded.combine(weights)), weights.numpy() @ flat)
        np.testing.assert_allclose(mean, np.average(flat, axis=0, weights=uploaded.weight.numpy()))
        np.testing.assert_allclose(mean, vector(Mean().final(Mean().block(*uploads(size)))))
        np.testing.assert_allclose(vector(uploaded.median()), np.median(flat, axis=0))
        expected = np.sort(flat, axis=0)[cut : size - cut].mean(0)
        np.testing.assert_allclose(vector(uploaded.trimmed_mean(trim)), expected)


def test_gram_of_float32_uploads_is_summed_in_float64():
    big = torch.tensor([[4096.0, 1.0, 1.0]] * 2)  # 4096^2 + 2 is not a float32
    assert UploadMatrix((big,), (torch.ones(2),)).gram().tolist() == [[4096.0**2 + 2] * 2] * 2


def test_trimmed_mean_cuts_the_share_written_not_its_rounding_error():
    values = torch.arange(100.0, dtype=torch.float64) ** 2  # 0.29 * 100 is 28.999999999999996
    uploaded = UploadMatrix((values,), (torch.ones(100),))
    assert float(uploaded.trimmed_mean(0.29)) == pytest.approx(float(values[29:71].mean()))
    two = UploadMatrix((values[:2],), (torch.ones(2),))
    assert float(two.trimmed_mean(0.5 - 1e-12)) == 0.5


def krum_by_hand(flat: np.ndarray, byzantine: int, keep: int) -> np.ndarray:
    size = len(flat)
    scores = []
    for i in range(size):
        distances = sorted(((flat[i] - flat[j]) ** 2).sum() for j in range(size) if j != i)
        scores.append(sum(distances[: size - byzantine - 2]))
    return flat[np.argsort(scores, kind="stable")[:keep]].mean(0)


@given(tile(), st.sampled_from([(0, 1), (1, 1), (2, 1), (2, 3), (4, 7)]))
def test_krum_and_multi_krum(tile, given):
    uploaded, flat = kept(7, seed=3)
    with tile:
        np.testing.assert_allclose(vector(uploaded.krum(*given)), krum_by_hand(flat, *given))


def test_krum_ignores_a_lone_attacker():
    uploaded, flat = kept(7)
    uploaded.blocks[1]["w"][0] = 1e6
    chosen = vector(uploaded.krum(1))
    honest = np.delete(flat, 2, axis=0)
    assert min(np.abs(honest - chosen).max(1)) < 1e-12


def test_store_keeps_structure_order_and_weights():
    uploaded, _ = kept(6)
    assert len(uploaded.blocks) == 3
    values, rows = uploads(6)
    assert torch.equal(uploaded.weight, rows.weight)
    assert torch.equal(T.concat(uploaded.blocks)["w"], values["w"])
    found = uploaded.median()
    assert found["w"].shape == (3, 2)
    assert found["b"][0].shape == ()
    assert found["b"][1] is None


def test_impossible_numbers_are_refused():
    for trim in (-0.1, 0.5, 1.0):
        with pytest.raises(ValueError, match=r"below 0\.5"):
            kept(6)[0].trimmed_mean(trim)
    for byzantine, keep in ((4, 1), (5, 1), (0, 0), (0, 7)):
        with pytest.raises(ValueError, match="byzantine <= 3 and 1 <= keep <= 6"):
            kept(6)[0].krum(byzantine, keep)
