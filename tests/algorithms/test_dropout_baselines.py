"""FedFix, REFL and clustered sampling by similarity, against their authors' code; and what FedDyn and FedAWE evaluate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import Bowl, Fixed, World, build, play, positions, records, rows
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scripted import BOWLS, HEARD, Scripted, scripted
from torch import Tensor

from fedfleet.algorithms.clustered_sampling import angles, bins, drawn_of, groups
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.refl import stale_weights
from fedfleet.simulator.algorithm import Problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import Deadline
from fedfleet.simulator.fleet.responses import Federation

ALL = CohortOptions(size=4)
TWO = {"steps": 2, "lr": 0.1, "batch_size": 1}
A, C = (1.0, 2.0, 1.0, 3.0), (0.0, 1.0, 4.0, -1.0)
S = [1 - (1 - 0.1 * a) ** 2 for a in A]
UNEVEN = World(Bowl(), rows(*[[(a, c)] * n for a, c, n in zip(A, C, (2, 4, 1, 3), strict=True)]))


def w(z: Any) -> float:
    return float(z["x"]["w"])


def ends(name: str, where: World, rounds: int, federation: Federation, **options: Any) -> list[float]:
    made = build(name, where.task, ALL, **{**TWO, **options})
    return [w(z) for z in play(made, where, rounds, federation=federation)]


def fedfix(seconds: Sequence[float], period: float, part: Sequence[float], steps: int) -> list[float]:
    """FedFix as its authors' code has it: when clients return, and the models they were sent."""
    weights = [math.ceil(t / period) * p for t, p in zip(seconds, part, strict=True)]
    returns, sent, x, found = list(seconds), [1.0] * len(seconds), 1.0, []
    for n in range(steps):
        here = [i for i, at in enumerate(returns) if at <= (n + 1) * period]
        x += sum(weights[i] * S[i] * (C[i] - sent[i]) for i in here)
        for i in here:
            returns[i], sent[i] = (n + 1) * period + seconds[i], x
        found.append(x)
    return found


def test_fedfix_steps_at_fixed_times_as_its_authors_code():
    seconds = (1.0, 0.75, 0.5)
    assert [math.ceil(t / 0.4) for t in seconds] == [3, 2, 2]
    for where, weight, part in (
        (World(Bowl(), rows([(1.0, 0.0)], [(2.0, 1.0)], [(1.0, 4.0)])), "uniform", (1 / 3, 1 / 3, 1 / 3)),
        (World(Bowl(), rows([(1.0, 0.0)] * 3, [(2.0, 1.0)], [(1.0, 4.0)] * 2)), "num_examples", (3 / 6, 1 / 6, 2 / 6)),
    ):
        made = build("fedfix", where.task, None, **{**TWO, "batch_size": 3}, period_s=0.4, weight=weight)
        found = list(records(made, where, 12, federation=Federation(devices=Fixed(seconds))))
        assert [w(r.state.z) for r in found] == pytest.approx(fedfix(seconds, 0.4, part, 12), abs=1e-12)
        assert [r.virtual_s for r in found] == pytest.approx([0.4 * (t + 1) for t in range(12)])
        assert [r.metrics["answers"] for r in found[:4]] == [0, 2, 1, 2]
        assert found[2].metrics["staleness_mean"] == 2


@dataclass(frozen=True)
class Since:
    """Clients are online from a moment of their own on."""

    seconds: tuple[float, ...]

    def online(self, key: Any, clients: Tensor, seconds: Tensor) -> Tensor:
        return seconds >= torch.tensor(self.seconds, dtype=torch.float64)[clients]


def test_fedfix_makes_up_for_steps_that_a_client_was_offline():
    """Client 3 is invited first at the step that begins at 1.2, and heard at 2.0: it counts five times."""
    only = World(Bowl(), rows([(A[3], C[3])]))
    federation = Federation(availability=Since((0.9,)), devices=Fixed((0.5,)))
    found = ends("fedfix", only, 7, federation, period_s=0.4)
    first, second = 1 + 5 * S[3] * (C[3] - 1), 2
    assert found[:4] == [1.0] * 4
    assert found[4:6] == pytest.approx([first, first], abs=1e-12)
    assert found[6] == pytest.approx(first + second * S[3] * (C[3] - first), abs=1e-12)


def test_fedfix_is_fedavg_where_all_answer_within_a_period():
    federation = Federation(devices=Fixed((1.0, 0.2, 0.7, 1.0)))
    for weight in ("uniform", "num_examples"):
        a, b = (ends(n, UNEVEN, 3, federation, weight=weight, **o) for n, o in (("fedfix", {}), ("fedavg", {})))
        assert a == pytest.approx(b, abs=1e-12)


def test_fedfix_has_so_many_at_work_and_its_own_rate():
    federation = Federation(devices=Fixed((0.9,) * 4))
    made = build("fedfix", BOWLS.task, None, **TWO, concurrency=3, global_lr=0.5)
    (record,) = records(made, BOWLS, 1, federation=federation)
    assert record.metrics["answers"] == 3
    moved = [S[i] * (C[i] - 1) for i in record.phases[0].clients.tolist()]
    assert w(record.state.z) == pytest.approx(1 + 0.5 * sum(moved) / 4, abs=1e-12)


def refl_weight(u: Sequence[float], fresh: Sequence[Sequence[float]], others: Any, age: int, damping: float) -> float:
    """A late answer's weight, as the authors' code reckons it."""
    n, total = len(fresh), [sum(v) for v in zip(*fresh, strict=True)]

    def ratio(u: Sequence[float]) -> float:
        apart = sum((a / (n + 1) + p / (n + 1) - p / n) ** 2 for a, p in zip(u, total, strict=True))
        return apart / sum((p / n) ** 2 for p in total)

    told = ratio(u) / max(map(ratio, others))
    return (1 - 0.35) / (age + 1) + 0.35 * (1 - math.exp(-told) / damping)


def test_refls_weights_are_those_of_the_authors_code():
    fresh, late = [(1.0, 2.0, 0.5), (0.0, -1.0, 2.0)], [(3.0, 0.0, 1.0), (0.4, 0.4, 1.0), (-2.0, 5.0, 0.0)]
    ages = (1, 4, 2)
    updates = torch.tensor([*fresh, *late], dtype=torch.float64)
    for damping in (1.0, 10.0):
        found = stale_weights(updates @ updates.T, torch.tensor([0, 0, *ages]).double(), 0.35, damping)
        expected = [refl_weight(u, fresh, late, age, damping) for u, age in zip(late, ages, strict=True)]
        assert found.tolist() == pytest.approx([1.0, 1.0, *expected], rel=1e-12)


def test_late_answers_that_are_as_this_rounds_go_by_their_age_alone():
    gram = torch.ones(3, 3, dtype=torch.float64)
    found = stale_weights(gram, torch.tensor([0.0, 1.0, 3.0]).double(), 0.35, 1.0)
    assert found.tolist() == pytest.approx([1.0, 0.65 / 2, 0.65 / 4])


def test_refl_uses_late_answers_in_a_later_round():
    """Client 3 takes 2.5 s of the 1.5 s that a round waits: round 1 has what it made of the first model."""
    federation = Federation(devices=Fixed((1.0, 1.0, 1.0, 2.5)), policy=Deadline(1.5))
    made = build("refl", BOWLS.task, CohortOptions(size=4, late="keep"), **TWO, select=4, damping=4.0)
    found = list(records(made, BOWLS, 2, federation=federation, stale_discount=0.5))
    x = 1 + sum(S[i] * (C[i] - 1) for i in range(3)) / 3
    assert w(found[0].state) == pytest.approx(x, abs=1e-12)
    late = 0.65 / 2 + 0.35 * (1 - math.exp(-1) / 4)
    step = sum(S[i] * (C[i] - x) for i in range(3)) + late * S[3] * (C[3] - 1)
    assert w(found[1].state) == pytest.approx(x + step / (3 + late), abs=1e-12)
    assert [r.metrics["late"] for r in found] == [0, 1]


def test_refl_selects_those_online_that_are_online_least():
    made = build("refl", BOWLS.task, ALL, **TWO, select=2)
    heard = [(0, 1, 2, 3), (0, 1, 2), (0, 3), (1,)]
    federation = Federation(availability=Scripted(heard, (0.9, 0.3, 0.5, 0.1), asks=3))
    found = list(records(made, BOWLS, 4, federation=federation))
    assert [sorted(r.phases[0].clients.tolist()) for r in found] == [[1, 3], [1, 2], [0, 3], [1]]


def test_refl_leaves_no_other_discount():
    with pytest.raises(ConfigError, match=r"stale_discount=0\.9"):
        build("refl", BOWLS.task, CohortOptions(size=4, late="keep", stale_discount=0.9), select=4)


def masses(tree: Any, n: Tensor) -> Any:
    """Return Ward's tree with the parts of all examples in the place of distances, as the authors' code has them."""
    held, tree = (n.double() / n.sum()).tolist(), tree.copy()
    for row in tree:
        held.append(held[int(row[0])] + held[int(row[1])])
        row[2] = held[-1]
    return tree


sizes = st.lists(st.integers(1, 9), min_size=2, max_size=9)


@given(sizes, st.integers(1, 5), st.integers(0, 10**6))
def test_groups_are_those_of_the_authors_code(n, m, seed):
    examples, found = torch.tensor(n), rng.uniform(rng.key(seed), (len(n), len(n)), torch.float64)
    labels = fcluster(masses(linkage(found.numpy(), "ward"), examples), 1 / m + 1e-9, criterion="distance").tolist()
    expected = sorted([i for i, k in enumerate(labels) if k == label] for label in set(labels))
    grouped = groups(found, examples, m)
    assert sorted(grouped) == expected
    held = [sum(n[i] for i in group) for group in grouped]
    assert held == sorted(held)


@given(sizes, st.integers(1, 5), st.integers(0, 10**6))
def test_clusters_hold_as_much_and_clients_their_part(n, m, seed):
    examples, found = torch.tensor(n), rng.uniform(rng.key(seed), (len(n), len(n)), torch.float64)
    grouped = groups(found, examples, m)
    held = bins(grouped, examples, m)
    assert held.sum(1).tolist() == [sum(n)] * m
    assert held.sum(0).tolist() == [m * v for v in n]
    for k, group in enumerate(grouped[-m:]):  # the m largest keep a cluster each
        assert held[k, group].tolist() == [min(m * n[i], sum(n)) for i in group]


def test_a_client_of_more_than_a_cluster_fills_others_with_the_rest():
    assert bins([[1], [2], [0]], torch.tensor([8, 1, 1]), 2).tolist() == [[6, 2, 2], [10, 0, 0]]
    assert bins([[0, 1]], torch.tensor([3, 1]), 2).tolist() == [[4, 0], [2, 2]]


def test_clients_with_updates_of_one_direction_are_drawn_one_each():
    updates = torch.tensor([[1.0, 0], [0, 2], [2, 0.1], [-1, 0], [0.1, 1], [-3, 0.1]], dtype=torch.float64)
    examples = torch.full((6,), 10)
    found = angles(updates @ updates.T)
    assert float(found[0, 1]) == pytest.approx(math.pi / 2)
    assert float(found[0, 3]) == pytest.approx(math.pi)
    grouped = groups(found, examples, 3)
    assert sorted(grouped) == [[0, 2], [1, 4], [3, 5]]
    held = bins(grouped, examples, 3)
    grid = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    each = torch.stack([drawn_of(held, u.expand(3)) for u in grid])
    assert [sorted(each[:, k].unique().tolist()) for k in range(3)] == grouped
    assert (each.flatten().bincount() / 60).tolist() == [0.5] * 6
    assert angles(torch.zeros(2, 2).double()).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_last_updates_are_kept_of_those_heard(monkeypatch):
    """Clients 0, 0, 1 and 2 are drawn in the first round, of whom 0 and 2 are heard, and then 3."""
    d = [s * (c - 1) for s, c in zip(S, C, strict=True)]
    for correction, first in (("none", (2 * d[0] + d[2]) / 3), ("known_p", (2 * d[0] / 0.9 + d[2] / 0.3) / 4)):
        made = build("clustered_sampling", BOWLS.task, ALL, **TWO, law="similarity", correction=correction)
        turns = iter([[0, 0, 1, 2], [3, 3, 3, 3]])
        with monkeypatch.context() as patch:
            name = "fedfleet.algorithms.clustered_sampling.drawn_of"
            patch.setattr(name, lambda held, u, turns=turns: torch.tensor(next(turns)))
            found = list(records(made, BOWLS, 2, federation=Federation(availability=Scripted([(0, 2), (3,)]))))
        x = w(found[0].state.z)
        assert x == pytest.approx(1 + first, abs=1e-12)
        assert found[0].state.last["x"]["w"].tolist() == pytest.approx([d[0], 0, d[2], 0], abs=1e-12)
        last = [d[0], 0, d[2], S[3] * (C[3] - x)]
        assert found[1].state.last["x"]["w"].tolist() == pytest.approx(last, abs=1e-12)


def test_so_many_clients_are_not_compared():
    made = build("clustered_sampling", BOWLS.task, ALL, law="similarity")
    with pytest.raises(ConfigError, match="law='similarity'"):
        made.init(BOWLS.task.init(0), rng.key(0), Problem(2001, 1.0))
    made.init(BOWLS.task.init(0), rng.key(0), Problem(2000, 1.0))


def test_feddyn_evaluates_what_it_sends_or_the_mean_of_those_heard():
    sent, heard = (
        list(records(build("feddyn", BOWLS.task, ALL, **TWO, alpha=0.5, evaluate=what), BOWLS, 6, federation=of))
        for what, of in ((what, Federation(availability=Scripted(HEARD))) for what in ("sent", "completed"))
    )
    for a, b in zip(sent, heard, strict=True):
        assert w(a.state.z) == w(b.state.z)
        assert w(b.state.mean) == pytest.approx(w(a.state.z) + float(a.state.h["x"]["w"]) / 0.5, abs=1e-12)
    made = build("feddyn", BOWLS.task, ALL, **TWO, alpha=0.5, evaluate="completed")
    path = scripted(made, BOWLS, HEARD)
    assert [w(z) for z in path] == [w(r.state.mean) for r in heard]
    local = [1.0] * 4  # two steps each, along f_i - g_i x + alpha / 2 |x - 1|^2 with g_i = 0
    for _ in range(2):
        local = [y - 0.1 * (a * (y - c) + 0.5 * (y - 1)) for y, a, c in zip(local, A, C, strict=True)]
    assert w(path[0]) == pytest.approx((local[0] + local[2]) / 2, abs=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_fedawe_evaluates_the_mean_of_all_clients_models(monkeypatch, clip):
    kept = positions(monkeypatch)
    made = build("fedawe", BOWLS.task, ALL, **TWO, clip=clip, evaluate="clients")
    found = list(records(made, BOWLS, 6, federation=Federation(availability=Scripted(HEARD))))
    first = {"z": BOWLS.task.init(0), "last": torch.tensor(-1.0, dtype=torch.float64)}
    client_state = kept[0].memory.store.get(torch.arange(4), lambda: first)
    end = w(made.views["global"].params(found[-1].state))
    assert end == pytest.approx(float(client_state["z"]["x"]["w"].mean()), abs=1e-12)
    server = w(found[-1].state.z)
    if clip is None:
        assert (end, server) == pytest.approx((0.602700, 1.219698), abs=2e-6)
    assert [p.counts["floats_up"] for p in found[0].phases] == [4]  # x_i and its change, of two clients
    plain = build("fedawe", BOWLS.task, ALL, **TWO, clip=clip)
    assert w(scripted(plain, BOWLS, HEARD)[-1]) == pytest.approx(server, abs=1e-12)
