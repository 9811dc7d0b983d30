import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, poisson

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.batches import OVERFLOW, BatchSchedule, capacity, least_first, schedule
from fedfleet.simulator.work import Batch, BatchPlan

pytestmark = pytest.mark.quick

START = 1000
"""Client c holds rows START * (c + 1), START * (c + 1) + 1, ..."""


def block(counts: list[int], width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded with each client's first row, as a population gives them; ``width`` pads further."""
    width = width or max(counts)
    rows = [[START * (c + 1) + (j if j < n else 0) for j in range(width)] for c, n in enumerate(counts)]
    return torch.tensor(rows), torch.tensor(counts)


def keys_of(clients: int) -> torch.Tensor:
    return rng.fold(rng.key(3), torch.arange(clients))


def walk(plan: BatchPlan, counts: list[int], steps: int | None = None) -> BatchSchedule:
    return schedule(plan, *block(counts), keys_of(len(counts)), steps)


def visits(found: BatchSchedule, client: int) -> list[list[int]]:
    """The real rows of each active step."""
    return [
        [int(r) for r, w in zip(found.rows[client, t], found.weight[client, t], strict=True) if w > 0]
        for t in range(found.rows.shape[1])
        if found.active[client, t]
    ]


def own_rows(client: int, count: int) -> list[int]:
    return [START * (client + 1) + j for j in range(count)]


def flatten(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4)
plans = st.builds(
    lambda size, length, per_step, shuffle: BatchPlan(size=size, per_step=per_step, shuffle=shuffle, **length),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.integers(1, 7).map(lambda k: {"steps": k}), st.integers(1, 3).map(lambda e: {"epochs": e})),
    st.integers(1, 2),
    st.booleans(),
)


@given(sizes, st.one_of(st.none(), st.integers(1, 12)), st.integers(1, 3), st.booleans())
def test_every_epoch_visits_every_example_exactly_once(counts, size, epochs, shuffle):
    found = walk(BatchPlan(size=size, epochs=epochs, shuffle=shuffle), counts)
    assert set(found.weight.unique().tolist()) <= {0.0, 1.0}
    for c, n in enumerate(counts):
        batches = visits(found, c)
        a_batch = min(size or n, n)
        assert len(batches) == epochs * math.ceil(n / a_batch)
        for e in range(epochs):
            mine = batches[e * len(batches) // epochs : (e + 1) * len(batches) // epochs]
            assert sorted(flatten(mine)) == own_rows(c, n)
            assert [len(b) for b in mine[:-1]] == [a_batch] * (len(mine) - 1)
            assert len(mine[-1]) == (n % a_batch or a_batch)
            if not shuffle:
                assert flatten(mine) == own_rows(c, n)


@given(sizes, plans)
def test_padding_only_ever_repeats_a_row_of_the_client(counts, plan):
    found = walk(plan, counts)
    for c, n in enumerate(counts):
        assert set(found.rows[c].unique().tolist()) <= set(own_rows(c, n))


@given(sizes, plans, st.integers(0, 6), st.data())
def test_what_a_client_sees_depends_neither_on_its_block_nor_on_its_place(counts, plan, extra, data):
    found = walk(plan, counts)
    keys = keys_of(len(counts))
    rows, n = block(counts, max(counts) + extra)
    order = torch.tensor(data.draw(st.permutations(range(len(counts)))))
    shuffled = schedule(plan, rows[order], n[order], keys[order])
    for place, c in enumerate(order.tolist()):
        alone = schedule(plan, rows[c : c + 1, : counts[c]], n[c : c + 1], keys[c : c + 1])
        steps = int(alone.active.sum())
        assert visits(found, c) == visits(shuffled, place) == visits(alone, 0)
        for field in ("epoch", "epoch_end", "key"):
            expected = getattr(alone, field)[0, :steps]
            assert torch.equal(getattr(found, field)[c, :steps], expected)
            assert torch.equal(getattr(shuffled, field)[place, :steps], expected)


def test_epochs_are_reshuffled_and_clients_and_keys_differ():
    found = walk(BatchPlan(size=8, epochs=3), [8, 8])
    orders = [tuple(r - START * (c + 1) for r in batch) for c in range(2) for batch in visits(found, c)]
    assert len(set(orders)) == 6
    rows, counts = block([8, 8])
    other = schedule(BatchPlan(size=8, epochs=1), rows, counts, rng.fold(keys_of(2), "stage", 1))
    assert not torch.equal(other.rows, found.rows[:, :1])


def test_all_orders_of_an_epoch_are_alike(p_value):
    clients = 3000
    rows, counts = torch.arange(3).expand(clients, 3), torch.full((clients,), 3)
    found = schedule(BatchPlan(size=1, epochs=1), rows, counts, keys_of(clients))
    assert p_value(list(Counter(map(tuple, found.rows[..., 0].tolist())).values())) > 1e-3


def test_unequal_clients_are_padded_to_the_longest():
    found = walk(BatchPlan(size=2, epochs=1), [5, 1, 4])
    assert found.rows.shape == found.weight.shape == (3, 3, 2)
    assert found.active.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert found.weight[0].tolist() == [[1, 1], [1, 1], [1, 0]]
    assert found.weight[1, 0].tolist() == [1, 0]
    assert found.epoch_end[0].tolist() == [False, False, True]
    assert found.epoch_end[2, :2].tolist() == [False, True]
    assert found.weight.dtype == torch.float32


def test_more_steps_than_an_epoch_go_on_into_the_next():
    found = walk(BatchPlan(size=2, steps=7), [5, 2])
    assert found.active.all()
    assert found.epoch.tolist() == [[0, 0, 0, 1, 1, 1, 2], list(range(7))]
    assert found.epoch_end.tolist() == [[False, False, True, False, False, True, False], [True] * 7]
    assert sorted(flatten(visits(found, 0)[3:6])) == own_rows(0, 5)
    assert [len(b) for b in visits(found, 0)] == [2, 2, 1, 2, 2, 1, 2]


def test_steps_of_a_round_replace_those_of_the_plan():
    for plan in (BatchPlan(size=2, steps=3), BatchPlan(size=2, epochs=4)):
        found = walk(plan, [5, 2], steps=5)
        assert found.active.shape == (2, 5)
        assert found.active.all()
    short = walk(BatchPlan(size=2, steps=3), [5, 2], steps=2)
    assert torch.equal(short.rows, walk(BatchPlan(size=2, steps=3), [5, 2]).rows[:, :2])


def test_two_batches_a_step_are_the_single_ones_in_pairs():
    pairs = walk(BatchPlan(size=2, steps=3, per_step=2), [5, 2])
    single = walk(BatchPlan(size=2, steps=6), [5, 2])
    assert pairs.rows.shape == (2, 3, 4)
    assert torch.equal(pairs.rows.reshape(2, 6, 2), single.rows)
    assert torch.equal(pairs.weight.reshape(2, 6, 2), single.weight)
    assert pairs.epoch[0].tolist() == [0, 0, 1]  # of the first batch
    assert pairs.epoch_end[0].tolist() == [False, True, True]  # of either
    one, two = Batch({"row": pairs.rows[0, 0]}, pairs.weight[0, 0]).split(2)
    assert torch.equal(one.data["row"], single.rows[0, 0])
    assert torch.equal(two.data["row"], single.rows[0, 1])
    assert torch.equal(two.weight, single.weight[0, 1])


def test_an_odd_number_of_batches_makes_the_last_pair_borrow_from_the_next_epoch():
    pairs = walk(BatchPlan(size=2, epochs=1, per_step=2), [5])
    assert int(pairs.active.sum()) == 2
    assert sorted(flatten(visits(pairs, 0))[:5]) == own_rows(0, 5)


@pytest.mark.parametrize("size", [None, 5, 100])
def test_a_batch_of_the_whole_set(size):
    found = walk(BatchPlan(size=size, steps=2), [5, 3])
    assert found.rows.shape == (2, 2, 5)
    assert found.weight.sum(-1).tolist() == [[5, 5], [3, 3]]
    assert found.epoch.tolist() == [[0, 1], [0, 1]]
    assert found.epoch_end.all()


def test_each_step_and_client_has_a_key_of_its_own():
    found = walk(BatchPlan(size=2, steps=9), [5, 2, 3])
    assert len(found.key.unique()) == 27


def test_a_small_client_beside_a_large_one_does_not_blow_up_memory():
    counts = [
        1,
        200_000,
    ]  # if the small one were shuffled for all of the large one's steps: 20,000 epochs of 200,000 rows
    found = walk(BatchPlan(size=10, epochs=1), counts)
    assert found.active.sum(1).tolist() == [1, 20_000]


@pytest.mark.parametrize("length", [{}, {"steps": 1, "epochs": 1}])
def test_a_plan_has_steps_or_epochs(length):
    with pytest.raises(ValueError, match="exactly one"):
        BatchPlan(size=1, **length)


def test_the_least_values_are_found_in_the_order_of_a_stable_sort():
    many = torch.randint(0, 2**60, (3, 2, 5000), generator=torch.Generator().manual_seed(0))
    for values in (many, many % 50):
        whole = values.argsort(dim=-1, stable=True)
        for wanted in (1, 7, 600, 5000):
            found = least_first(values, wanted)
            torch.testing.assert_close(found[..., :wanted], whole[..., :wanted], rtol=0, atol=0)
    assert least_first(many, 600).shape[-1] == 600


@given(
    counts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any), min_size=1, max_size=4),
    size=st.one_of(st.none(), st.integers(1, 12)),
    steps=st.integers(1, 7),
    per_step=st.integers(1, 2),
    shuffle=st.booleans(),
)
def test_stratified_batches_go_through_each_kind_by_itself(counts, size, steps, per_step, shuffle):
    """(labelled, unlabelled) examples of each client; every batch has its share of both, and every pass all of a kind."""
    totals = [a + b for a, b in counts]
    plan = BatchPlan(size=size, steps=steps, per_step=per_step, shuffle=shuffle, stratified="proportional")
    labelled = torch.tensor([a for a, _ in counts])
    found = schedule(plan, *block(totals), keys_of(len(counts)), labelled=labelled)
    width = found.rows.shape[2] // per_step
    for c, (a, b) in enumerate(counts):
        full = min(max(totals) if size is None else size, max(totals), a + b)
        first = full * a // (a + b)
        batches = [
            row for step in visits(found, c) for row in (step[: len(step) // per_step], step[len(step) // per_step :])
        ]
        batches = batches if per_step == 2 else visits(found, c)
        assert all(len(rows) == full <= width for rows in batches)
        kinds = {0: [r for rows in batches for r in rows[:first]], 1: [r for rows in batches for r in rows[first:]]}
        for kind, of in ((0, own_rows(c, a + b)[:a]), (1, own_rows(c, a + b)[a:])):
            seen = kinds[kind]
            assert set(seen) <= set(of)
            for i in range(0, len(seen) - len(of) + 1, max(1, len(of))):
                assert sorted(seen[i : i + len(of)]) == of
            if not shuffle and of:
                assert seen == [of[i % len(of)] for i in range(len(seen))]


@given(
    counts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any), min_size=1, max_size=4),
    size=st.one_of(st.none(), st.integers(1, 12)),
    shuffle=st.booleans(),
)
def test_spread_passes_hold_every_example_once_and_both_kinds_all_along(counts, size, shuffle):
    """(labelled, unlabelled) examples of each client; after k rows of a pass so many labelled ones, to within one, are through."""
    totals = [a + b for a, b in counts]
    plan = BatchPlan(size=size, epochs=2, shuffle=shuffle, stratified="spread")
    found = schedule(plan, *block(totals), keys_of(len(counts)), labelled=torch.tensor([a for a, _ in counts]))
    plain = walk(BatchPlan(size=size, epochs=2, shuffle=shuffle), totals)
    assert torch.equal(found.weight, plain.weight)
    for c, (a, b) in enumerate(counts):
        own, seen = own_rows(c, a + b), flatten(visits(found, c))
        for one in (seen[: a + b], seen[a + b :]):
            assert sorted(one) == own
            through = [sum(row in own[:a] for row in one[:k]) for k in range(a + b + 1)]
            assert all(abs(n - k * a / (a + b)) <= 1 for k, n in enumerate(through))
            if not shuffle:
                assert [row for row in one if row in own[:a]] == own[:a]
        if not (a and b):
            assert seen == flatten(visits(plain, c))


def test_stratified_passes_are_shuffled_anew_and_by_client():
    plan = BatchPlan(size=6, steps=8, stratified="proportional")
    found = schedule(plan, *block([24, 24]), keys_of(2), labelled=torch.tensor([12, 12]))
    passes = [
        [[r % START for r in flatten(b[:3] for b in visits(found, c)[i : i + 4])] for i in (0, 4)] for c in (0, 1)
    ]
    assert len({tuple(p) for each in passes for p in each}) == 4
    others = [
        [[r % START - 12 for r in flatten(b[3:] for b in visits(found, c)[i : i + 4])] for i in (0, 4)] for c in (0, 1)
    ]
    assert not {tuple(p) for each in passes for p in each} & {tuple(p) for each in others for p in each}


@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=4),
    size=st.integers(3, 9),
    steps=st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_batches_by_domain_hold_as_many_of_each_and_go_through_each_by_itself(counts, size, steps, shuffle):
    """Examples of each of three domains, of which a client may lack some."""
    plan = BatchPlan(size=size, steps=steps, stratified="domains", shuffle=shuffle)
    by_domain = torch.tensor(counts)
    totals = [sum(c) for c in counts]
    found = schedule(plan, *block(totals), keys_of(len(counts)), by_domain=by_domain)
    for c, mine in enumerate(counts):
        there = [d for d, n in enumerate(mine) if n]
        each = max(1, min(size, totals[c], found.weight.shape[2]) // len(there))
        first = int(block(totals)[0][c, 0])
        seen: dict[int, list[int]] = {d: [] for d in there}
        for rows, weight in zip(found.rows[c], found.weight[c], strict=True):
            places = (rows[weight > 0] - first).tolist()
            assert len(places) == each * len(there)
            for k, d in enumerate(there):
                part = [p - sum(mine[:d]) for p in places[k * each : (k + 1) * each]]
                assert all(0 <= p < mine[d] for p in part)
                seen[d] += part
        for d, passed in seen.items():
            for start in range(0, len(passed) - mine[d] + 1, mine[d]):
                assert sorted(passed[start : start + mine[d]]) == list(range(mine[d]))  # each pass has all
            assert shuffle or passed == [i % mine[d] for i in range(len(passed))]


def test_passes_by_domain_are_shuffled_anew_and_apart():
    plan = BatchPlan(size=24, steps=2, stratified="domains")
    found = schedule(plan, *block([24, 24]), keys_of(2), by_domain=torch.tensor([[12, 12], [12, 12]]))
    one, two = (found.rows[:, t] - torch.tensor([[0], [24]]) for t in (0, 1))
    orders = [*one[:, :12].tolist(), *(one[:, 12:] - 12).tolist(), *two[:, :12].tolist()]
    assert len({tuple(order) for order in orders}) == 6


def test_all_labelled_batches_are_as_ever():
    plan, both = BatchPlan(size=4, steps=5), BatchPlan(size=4, steps=5, stratified="proportional")
    for a, b in zip(walk(plan, [7, 9]), walk(both, [7, 9]), strict=True):
        assert torch.equal(a, b)


DRAWN = BatchPlan(size=4, epochs=2, drawn=True)


def test_drawn_batches_have_each_example_for_itself():
    """A share of 4/n each, whatever else is in a batch; all of those of a client with no more than 4."""
    counts, clients = [12, 3, 7], 800
    found = schedule(DRAWN, *block(counts * clients), keys_of(3 * clients))
    for which, n in enumerate(counts):
        mine = [b for c in range(which, 3 * clients, 3) for b in visits(found, c)]
        steps = 2 * -(-n // 4)
        assert len(mine) == steps * clients
        assert all(b == sorted(set(b)) for b in mine)
        inside = torch.zeros(len(mine), n)
        for i, b in enumerate(mine):
            inside[i, [r % START for r in b]] = 1
        share = min(1.0, 4 / n)
        assert torch.allclose(
            inside.mean(0), torch.full((n,), share), atol=5 * (share * (1 - share) / len(mine)) ** 0.5
        )
        if share < 1:
            assert inside.T.corrcoef().fill_diagonal_(0).abs().max() < 5 / len(mine) ** 0.5
            size = inside.sum(1)
            assert size.var() == pytest.approx(n * share * (1 - share), rel=0.15)


def test_what_is_drawn_depends_on_nobody_else_and_draws_apart_from_step_to_step():
    alone, beside = schedule(DRAWN, *block([40]), keys_of(1)), schedule(DRAWN, *block([40, 90]), keys_of(2))
    assert visits(alone, 0) == visits(beside, 0)
    assert len({tuple(b) for b in visits(beside, 0)}) == 20
    assert [b for b in visits(beside, 0)] != [[r - START for r in b] for b in visits(beside, 1)][:20]


@pytest.mark.parametrize("size", [1, 4, 10, 64, 500])
def test_a_drawn_batch_overflows_hardly_ever(size):
    rows = capacity(size)
    for n in (size + 1, 2 * size, 10 * size, 1000 * size):
        assert binom.sf(rows, n, size / n) <= OVERFLOW
    assert poisson.sf(rows - 1, size) > OVERFLOW
    assert schedule(BatchPlan(size=size, steps=1, drawn=True), *block([1000]), keys_of(1)).rows.shape[-1] == min(
        rows, 1000
    )


def test_a_drawn_batch_may_have_nothing():
    found = schedule(BatchPlan(size=1, steps=200, drawn=True), *block([50]), keys_of(1))
    assert 0 < visits(found, 0).count([]) < 200
    assert found.rows.min() >= START


@pytest.mark.parametrize("given", [{"size": None}, {"per_step": 2}, {"shuffle": False}, {"stratified": "spread"}])
def test_drawn_batches_have_no_other_order(given):
    with pytest.raises(ValueError, match="drawn for themselves"):
        BatchPlan(**{"size": 4, "steps": 1, "drawn": True, **given})
