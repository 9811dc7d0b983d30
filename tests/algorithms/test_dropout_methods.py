"""Methods of their own for clients that drop out: golden traces, fixed points, and what each is for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import Bowl, Fixed, World, build, digits, flat, play, positions, records, rows, script
from scripted import BOWLS, HEARD, OPTIMUM, Scripted, scripted

from fedfleet.algorithms.clustered_sampling import drawn
from fedfleet.algorithms.fedasync import FedAsyncOptions
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.state import ClientStore
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.devices import Times
from fedfleet.simulator.fleet.policies import Deadline
from fedfleet.simulator.fleet.responses import Federation

ALL = CohortOptions(size=4)
TWO = {"steps": 2, "lr": 0.1, "batch_size": 1}
A, C = (1.0, 2.0, 1.0, 3.0), (0.0, 1.0, 4.0, -1.0)
UNEVEN = World(Bowl(), rows(*[[(a, c)] * n for a, c, n in zip(A, C, (2, 4, 1, 3), strict=True)]))
"""The clients with 2, 4, 1 and 3 examples, and so as many steps an epoch."""
EPOCH = {"steps": None, "epochs": 1}


def clustered(*domain: int) -> World:
    where = World(Bowl(), rows(*[[(a, c)] for a, c in zip(A, C, strict=True)]))
    where.population.domain[:] = torch.tensor(domain)
    return where


def w(z: Any) -> float:
    return float(z["x"]["w"])


def trace(name: str, where: World = BOWLS, heard: Any = HEARD, **options: Any) -> list[float]:
    made = build(name, where.task, ALL, **{**TWO, **options})
    on = [h for h in heard for _ in made.phases]
    asks = 3 if name in ("f3ast", "fedlaavg") else 2
    given = {"federation": Federation(availability=Scripted(on, asks=asks))}
    with pytest.MonkeyPatch.context() as patch:
        if asks == 3:  # ties go by the order of the invitations
            script(patch, [range(4)] * len(heard))
        return [w(z) for z in play(made, where, len(heard), **given)]


TRACES: list[tuple[str, World, dict[str, Any], list[float]]] = [
    ("feddyn", BOWLS, {"alpha": 0.5}, [1.277500, 1.095969, 0.984448, 0.615582, -0.100305, 0.360050]),
    ("fedawe", BOWLS, {}, [1.190000, 0.963900, 0.890379, -0.144150, -0.014299, 1.219698]),
    ("fedawe", BOWLS, {"clip": 1e9}, [1.190000, 0.963900, 0.890379, -0.144150, -0.014299, 1.219698]),
    ("amplified_fedavg", BOWLS, {"period": 3}, [1.190000, 0.963900, 0.818241, 0.656857, 0.171957, 0.617883]),
    ("amplified_scaffold", BOWLS, {"period": 3}, [1.190000, 0.963900, 0.818241, 0.472338, 0.233130, 0.402451]),
    (
        "fednova",
        UNEVEN,
        {**EPOCH, "weight": "uniform"},
        [1.153750, 0.934538, 0.815859, 0.736600, 0.173735, 0.804464],
    ),
    (
        "fedavg",
        UNEVEN,
        {**EPOCH, "weight": "uniform"},
        [1.055000, 0.854550, 0.816305, 0.378833, -0.110103, 0.423105],
    ),
    ("mime", BOWLS, {}, [1.019900, 1.017514, 1.004925, 0.963729, 0.858789, 0.798084]),
    ("mimelite", BOWLS, {}, [1.019900, 1.017514, 1.004901, 0.964156, 0.859446, 0.798779]),
    ("scaffold", BOWLS, {}, [1.190000, 1.234650, 1.265519, 0.727814, 0.615355, 0.625617]),
    (
        "f3ast",
        BOWLS,
        {"select": 1, "beta": 0.1},
        [0.853846, 0.750514, 0.830067, 1.400361, 0.164423, 0.410374],
    ),
    ("cluster_fedvarp", clustered(0, 0, 1, 1), {}, [1.190000, 1.343900, 1.552377, 0.754259, 0.235268, 0.730570]),
]


@pytest.mark.quick
def test_golden_traces(subtests):
    for name, where, options, expected in TRACES:
        with subtests.test(f"{name} {options}"):
            assert trace(name, where, **options) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("name", "options"), [("scaffold", {}), ("feddyn", {"alpha": 5.0})])
def test_control_variates_have_the_optimum_for_fixed_point_whoever_is_heard(name, options):
    """Of two local steps, which leave a drift in all methods that only weigh clients: 0.488 in the place of 3/7."""
    heard = [(0, 2), (1,), (0, 1), (0, 3), (0, 1, 2), (3,)] * 12
    made = build(name, BOWLS.task, ALL, **TWO, **options)
    assert w(scripted(made, BOWLS, heard, inner="batched")[-1]) == pytest.approx(OPTIMUM, abs=1e-6)


def test_feddyns_h_is_the_mean_of_what_clients_keep():
    """Of samples of clients with minibatches and unequal weights; also the mean of c_i in both forms of SCAFFOLD."""
    where = digits("classification", "quantity_skew", clients=12, alpha=1.0, min_size=4, dtype=torch.float64)
    n = where.population.num_examples(torch.arange(12)).double()
    given = {
        "z": T.map(torch.Tensor.double, where.task.init(0)),
        "federation": Federation(availability=Bernoulli(0.6)),
        "inner": "batched",
    }
    stage = ClientStore.stage
    for name, options, of, kept in (
        ("feddyn", {"alpha": 0.5}, lambda s: s.h, lambda client_state: client_state),
        ("scaffold", {}, lambda s: s.c, lambda client_state: client_state),
        ("amplified_scaffold", {"period": 100}, lambda s: s.c_next, lambda client_state: client_state["pending"]),
    ):
        for weight in ("uniform", "num_examples"):
            staged: dict[int, torch.Tensor] = {}

            def spy(self: ClientStore, clients: Any, states: Any, staged: Any = staged, kept: Any = kept) -> None:
                staged.update({c: flat(kept(T.index(states, i))) for i, c in enumerate(clients.tolist())})
                stage(self, clients, states)

            made = build(name, where.task, CohortOptions(size=5), steps=2, batch_size=3, weight=weight, **options)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ClientStore, "stage", spy)
                state = list(records(made, where, 5, **given))[-1].state
            share = n / n.sum() if weight == "num_examples" else torch.full((12,), 1 / 12, dtype=torch.float64)
            mean = sum(share[c] * y for c, y in staged.items())
            torch.testing.assert_close(flat(of(state)), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("momentum", "mu", "steps"), [(0.9, 0.0, 5), (0.0, 0.5, 4), (0.6, 0.4, 5)])
def test_fednova_divides_by_the_length_of_the_path(momentum, mu, steps):
    """|a|_1 of gradients that are all 1; of momentum 13.1441 at 5 steps and rho = 0.9."""
    where = World(BOWLS.task, rows([(0.0, 0.0)]))  # of curvature 0
    where = World(Line(), where.population)
    options = {"steps": steps, "lr": 0.1, "batch_size": 1, "momentum": momentum, "mu": mu}
    made = build("fednova", where.task, CohortOptions(size=1), **options)
    (record,) = records(made, where, 1)
    moved, speed, length = 0.0, 0.0, 0.0
    for _ in range(steps):
        speed = momentum * speed + 1 - 0.1 * mu * length
        length += speed
    moved = 1 - w(made.views["global"].params(record.state))
    tau = steps if mu else length
    assert moved == pytest.approx(0.1 * tau, rel=1e-12)  # d_i is lr times the gradient, 1
    assert record.metrics["tau_eff"] == pytest.approx(tau)
    if momentum == 0.9:
        assert length == pytest.approx(13.1441, abs=1e-4)


class Line(Bowl):
    """A loss of slope 1."""

    def _loss(self, z, batch, ctx, key):
        return z["x"]["w"] + 0.0 * batch.mean(batch.x[..., 0]), {}


def test_fednova_is_fedavg_where_all_work_alike_and_bends_with_weights():
    where = digits("classification", "quantity_skew", clients=6, alpha=1.0, min_size=4, dtype=torch.float64)
    z, options = T.map(torch.Tensor.double, where.task.init(0)), {"steps": 3, "batch_size": 4}
    a, b = (
        play(build(n, where.task, CohortOptions(size=4), **options), where, 2, z=z)[-1] for n in ("fedavg", "fednova")
    )
    torch.testing.assert_close(flat(a), flat(b), rtol=0, atol=1e-12)
    # unequal work, hand-made: d_i = s_i(tau) (c_i - x) / tau, by weights 2, 4 of clients 0 and 1
    found = trace("fednova", UNEVEN, [(0, 1)], **EPOCH)
    d = [(1 - (1 - 0.1 * a) ** tau) * (c - 1) / tau for a, c, tau in zip(A, C, (2, 4), strict=False)]
    assert found[0] == pytest.approx(1 + (2 / 6 * d[0] + 4 / 6 * d[1]) * (2 / 6 * 2 + 4 / 6 * 4), abs=1e-12)


def test_fednova_counts_the_steps_of_clients_that_stop_early():
    class Slow:
        def times(self, key: Any, clients: torch.Tensor, load: Any) -> Times:
            step = torch.tensor([1.0, 2.0], dtype=torch.float64)[clients]
            return Times(torch.zeros_like(step), step)

    where = World(BOWLS.task, rows([(1.0, 0.0)] * 4, [(2.0, 3.0)] * 4))
    federation = Federation(devices=Slow(), policy=Deadline(4.0), partial_work=True)
    made = build("fednova", where.task, CohortOptions(size=2), epochs=1, lr=0.1, batch_size=1)
    (record,) = records(made, where, 1, federation=federation)
    steps = (4, 2)
    d = [(1 - (1 - 0.1 * a) ** tau) * (c - 1) / tau for a, c, tau in zip((1, 2), (0, 3), steps, strict=True)]
    assert record.metrics["tau_eff"] == 3
    assert w(made.views["global"].params(record.state)) == pytest.approx(1 + 3 * sum(d) / 2, abs=1e-12)


def test_fedawe_hands_the_model_back_to_those_heard_alone():
    made = build("fedawe", BOWLS.task, ALL, **TWO)
    found = list(records(made, BOWLS, 3, federation=Federation(availability=Scripted([(0, 2), (0,), (0, 1)]))))
    (first,), (second,) = found[0].phases, found[1].phases
    assert (first.counts["floats_down"], second.counts["floats_down"]) == (2, 1)  # one float a model, nothing before
    assert (first.counts["floats_up"], second.counts["floats_up"]) == (2, 1)
    # client 1, heard first in round 2, starts from the initial model: 1 + 3 * 0.36 * (1 - 1) = 1
    x = w(found[1].state.z)
    assert w(found[2].state.z) == pytest.approx(((x + 0.19 * (0 - x)) + 1.0) / 2, abs=1e-12)


def test_the_mean_of_the_models_that_clients_keep_with_fedawe(monkeypatch):
    kept, made = positions(monkeypatch), build("fedawe", BOWLS.task, ALL, **TWO)
    list(records(made, BOWLS, 6, federation=Federation(availability=Scripted(HEARD))))
    client_state = kept[0].memory.store.get(
        torch.arange(4), lambda: {"z": BOWLS.task.init(0), "last": torch.tensor(-1.0, dtype=torch.float64)}
    )
    assert float(client_state["z"]["x"]["w"].mean()) == pytest.approx(0.602700, abs=2e-6)


def test_fedawe_is_fedavg_where_everybody_is_heard():
    everybody = [(0, 1, 2, 3)] * 3
    assert trace("fedawe", heard=everybody) == pytest.approx(trace("fedavg", heard=everybody), abs=1e-12)


def test_clients_that_are_not_heard_keep_what_they_have(subtests, monkeypatch):
    """Of each method whose clients keep state: after a round of all four, and one in which 0 and 2 are heard."""
    rows: list[tuple[str, dict[str, Any]]] = [
        ("fedavg", {"correction": "mifa"}),
        ("fedavg", {"correction": "fedvarp"}),
        ("scaffold", {}),
        ("feddyn", {}),
        ("fedawe", {}),
        ("amplified_scaffold", {"period": 1}),
    ]
    kept = positions(monkeypatch)
    for name, options in rows:
        with subtests.test(f"{name} {options}"):
            federation = Federation(availability=Scripted([(0, 1, 2, 3), (0, 2)]))
            owned = []
            for _ in records(build(name, BOWLS.task, ALL, **TWO, **options), BOWLS, 2, federation=federation):
                client_state = kept[-1].memory.store.get(torch.arange(4), dict)
                owned.append(torch.stack([leaf.double() for leaf in T.leaves(client_state)], 1))
            same = [torch.equal(before, after) for before, after in zip(*owned, strict=True)]
            assert same == [False, True, False, True]


def test_fedawe_bounds_echoes_and_changes():
    heard = [(0, 2), (0,), (0,), (2,)]
    x = trace("fedawe", heard=heard[:1])[0]
    delta = 0.19 * (4 - x)
    assert trace("fedawe", heard=heard)[3] == pytest.approx(x + 3 * delta, abs=1e-12)
    assert trace("fedawe", heard=heard, max_echo=2)[3] == pytest.approx(x + 2 * delta, abs=1e-12)
    # the norm that is cut is of (t - tau) G, and eta_g comes after
    assert trace("fedawe", heard=[(2,)], clip=0.1, global_lr=2.0)[0] == pytest.approx(1.2, abs=1e-12)
    assert trace("fedawe", heard=[(0,)], clip=0.5, global_lr=2.0)[0] == pytest.approx(1 - 2 * 0.19, abs=1e-12)


def test_amplification_of_one_is_the_method_underneath():
    assert trace("amplified_fedavg", period=2, amplification=1.0) == pytest.approx(
        trace("fedavg", weight="uniform"), abs=1e-12
    )


def test_amplified_scaffold_keeps_the_control_of_a_period_without_the_client():
    """Against the definition: c_i is the plain mean of all gradients of the last finished period with the client in it."""
    heard, period, gamma = [(0, 2), (0,), (1,), (0, 3), (2,), (0, 1), (1, 2), (3,)], 2, 1.3
    x, anchor, c, force = 1.0, 1.0, 0.0, [0.0] * 4
    now: list[list[float]] = [[] for _ in range(4)]
    expected = []
    for t, here in enumerate(heard):
        moved = []
        for i in here:
            y = x
            for _ in range(2):
                g = A[i] * (y - C[i])
                now[i].append(g)
                y -= 0.1 * (g - force[i] + c)
            moved.append(y - x)
        x += sum(moved) / len(moved)
        if t % period == period - 1:
            x = anchor = anchor + gamma * (x - anchor)
            force = [sum(g) / len(g) if g else f for g, f in zip(now, force, strict=True)]
            c, now = sum(force) / 4, [[] for _ in range(4)]
        expected.append(x)
    found = trace("amplified_scaffold", heard=heard, period=period, amplification=gamma)
    assert found == pytest.approx(expected, abs=1e-12)


def test_mime_asks_twice_and_mimelite_once_for_the_same_gradient():
    where = digits("classification", "quantity_skew", clients=8, alpha=1.0, min_size=4, dtype=torch.float64)
    z = T.map(torch.Tensor.double, where.task.init(0))
    same, options = CohortOptions(size=4, resample=False), {"steps": 1, "batch_size": 4, "beta": 0.7}
    full, lite = (build(n, where.task, same, **options) for n in ("mime", "mimelite"))
    a, b = (list(records(made, where, 1, z=z))[-1] for made in (full, lite))
    torch.testing.assert_close(flat(a.state.m), flat(b.state.m), rtol=0, atol=1e-12)
    assert [p.counts["completed"] for p in a.phases] == [4, 4]
    assert len(b.phases) == 1
    # one step of Mime is along c itself: x <- x - lr (1 - beta) c, with m = (1 - beta) c
    torch.testing.assert_close(flat(a.state.z), flat(T.axpy(-0.1, a.state.m, z)), rtol=0, atol=1e-12)


def test_clusters_of_one_client_are_fedvarp_and_one_of_all_is_fedavg():
    one = trace("cluster_fedvarp", clustered(0, 1, 2, 3), weight="uniform")
    assert one == pytest.approx(trace("fedavg", correction="fedvarp"), abs=1e-12)
    # of all: the mean of those heard, and what is remembered cancels
    whole = trace("cluster_fedvarp", clustered(0, 0, 0, 0), weight="uniform")
    assert whole == pytest.approx(trace("fedavg"), abs=1e-12)


def test_clusters_weigh_by_examples_and_by_chances():
    where = World(Bowl(), rows(*[[(a, c)] * n for a, c, n in zip(A, C, (2, 4, 1, 1), strict=True)]))
    where.population.domain[:] = torch.tensor([0, 0, 1, 1])
    s = [1 - (1 - 0.1 * a) ** 2 for a in A]
    d = [v * (c - 1) for v, c in zip(s, C, strict=True)]
    found = trace("cluster_fedvarp", where, [(0, 2), (1,)], batch_size=4)
    first = 1 + (2 * d[0] + d[2]) / 3
    y = [d[0], d[2]]
    after = first + (s[1] * (1 - first) - y[0]) + (6 * y[0] + 2 * y[1]) / 8
    assert found == pytest.approx([first, after], abs=1e-12)
    # Horvitz-Thompson: over those invited, 4, and 2 examples on average; p = (.9, .5, .3, .1)
    weighed = trace("cluster_fedvarp", where, [(0, 1)], batch_size=4, correction="known_p")
    assert weighed[0] == pytest.approx(1 + (2 * d[0] / 0.9 + 4 * d[1] / 0.5) / (4 * 2), abs=1e-12)


@dataclass(frozen=True)
class Since:
    """Clients are online from a moment of their own on."""

    seconds: tuple[float, ...]

    def online(self, key: Any, clients: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        return seconds >= torch.tensor(self.seconds, dtype=torch.float64)[clients]


def test_fedasync_mixes_models_in_as_they_come():
    """Arrivals (client, version): (0,0) (2,0) (0,1) (1,0) (3,2) (2,2); polynomial 0.5, alpha 0.6."""
    made = build("fedasync", BOWLS.task, None, **TWO, concurrency=4, mixing=0.6)
    federation = Federation(availability=Since((0.0, 0.0, 0.0, 1.2)), devices=Fixed((1.0, 2.2, 1.4, 1.1)))
    found = list(records(made, BOWLS, 6, federation=federation))
    assert [r.virtual_s for r in found] == pytest.approx([1.0, 1.4, 2.0, 2.2, 2.5, 2.8])
    assert [r.metrics["staleness"] for r in found] == [0, 1, 1, 3, 2, 3]
    trace = [0.886000, 1.176197, 0.981656, 0.987159, 0.668177, 0.981540]
    assert [w(r.state.z) for r in found] == pytest.approx(trace, abs=2e-6)


def test_what_methods_send(subtests):
    """Models that go down to a client and up from one, phase by phase; FedNova sends the length of its path besides."""
    where = digits("classification", clients=4)
    d = T.count(where.task.init(0))
    rows: list[tuple[str, dict[str, Any], list[int], list[int]]] = [
        ("fedavg", {"correction": "known_p"}, [1], [1]),
        ("fedavg", {"correction": "fedau"}, [1], [1]),
        ("cluster_fedvarp", {}, [1], [1]),
        ("scaffold", {}, [2], [2]),
        ("feddyn", {}, [1], [1]),
        ("amplified_fedavg", {}, [1], [1]),
        ("amplified_scaffold", {}, [2], [2]),
        ("mime", {}, [1, 3], [1, 1]),  # clients of the second phase need x, the momentum and c
        ("mimelite", {}, [2], [2]),
        ("f3ast", {"select": 4}, [1], [1]),
        ("fedlaavg", {"select": 4}, [1], [1]),
        ("fednova", {}, [1], [1]),
    ]
    for name, options, down, up in rows:
        with subtests.test(f"{name} {options}"):
            made = build(name, where.task, ALL, steps=1, batch_size=4, **options)
            federation = Federation(availability=Scripted([range(4)] * 8))
            record = list(records(made, where, 2, federation=federation))[-1]
            more = 1 if name == "fednova" else 0
            assert [p.counts["floats_down"] for p in record.phases] == [4 * d * k for k in down]
            assert [p.counts["floats_up"] for p in record.phases] == [4 * (d * k + more) for k in up]


def test_fedasync_is_fedbuff_with_a_buffer_of_one_where_nothing_is_stale():
    where = World(BOWLS.task, rows([(1.0, 0.0)], [(2.0, 1.0)]))
    found = {}
    for concurrency in (1, 2):
        given = {"federation": Federation(devices=Fixed((1.0, 2.5)))}
        made = [
            build(name, where.task, None, **TWO, concurrency=concurrency, **options)
            for name, options in (("fedasync", {"mixing": 0.6}), ("fedbuff", {"buffer": 1, "global_lr": 0.6}))
        ]
        found[concurrency] = [[w(z) for z in play(one, where, 4, **given)] for one in made]
    assert found[1][0] == pytest.approx(found[1][1], abs=1e-12)
    assert found[2][0] != pytest.approx(found[2][1], abs=1e-3)  # what is mixed in is the model, not its change


def test_fedasync_by_the_engine():
    """Clients 0 (1 s) and 1 (2.5 s) at work all the time: 0 answers at 1, 2, 3 s, 1 at 2.5 s from the first version."""
    where = World(BOWLS.task, rows([(1.0, 0.0)], [(2.0, 1.0)]))
    made = build("fedasync", where.task, None, **TWO, concurrency=2, mixing=0.6)
    given = {"federation": Federation(devices=Fixed((1.0, 2.5)))}
    found = list(records(made, where, 3, **given))
    came = [(0, 0), (0, 0), (1, 2)]  # client, staleness
    x, versions = 1.0, [1.0]
    for t, (client, stale) in enumerate(came):
        start = versions[t - stale]
        local = start + (1 - (1 - 0.1 * A[client]) ** 2) * (C[client] - start)
        x += 0.6 * (1 + stale) ** -0.5 * (local - x)
        versions.append(x)
    assert [w(r.state.z) for r in found] == pytest.approx(versions[1:], abs=1e-12)
    assert [r.metrics["staleness"] for r in found] == [0, 0, 2]


def test_how_much_stale_models_count():
    def shares(*taus: int, **options: Any) -> list[float]:
        return [FedAsyncOptions(mixing=1.0, **options).share(tau) for tau in taus]

    assert shares(0, 1, 3) == pytest.approx([1, 0.70711, 0.5], abs=1e-5)
    assert shares(0, 4, 5, 7, staleness="hinge") == pytest.approx([1, 1, 1 / 11, 1 / 31])
    assert shares(0, 9, staleness="constant") == [1, 1]
    for options, line in (({"staleness": "constant", "exponent": 1.0}, "exponent=1.0"), ({"hinge": 3}, "hinge=3")):
        with pytest.raises(ValueError, match=f"{line} is not for"):
            FedAsyncOptions(**options)


def test_samples_of_clients_are_played_by_all(subtests):
    """Two of four invited, each method against itself over all clients: the mean of equal clients moves alike."""
    where = World(Bowl(), rows(*[[(1.0, 3.0)]] * 4))
    for name, options in (("fednova", {}), ("amplified_fedavg", {"period": 2}), ("mimelite", {}), ("fedawe", {})):
        with subtests.test(name):
            made = [build(name, where.task, CohortOptions(size=size), **TWO, **options) for size in (2, 4)]
            with pytest.MonkeyPatch.context() as patch:
                script(patch, [(1, 3)])
                a = play(made[0], where, 1)[-1]
            assert w(a) == pytest.approx(w(play(made[1], where, 1)[-1]), abs=1e-12)
    assert list(itertools.islice(HEARD, 1)) == [(0, 2)]


def chosen(name: str, heard: Any, **options: Any) -> list[list[int]]:
    """Return which clients were invited in each round, of those online."""
    made = build(name, BOWLS.task, ALL, **TWO, **options)
    federation = Federation(availability=Scripted(heard, asks=3))
    with pytest.MonkeyPatch.context() as patch:
        script(patch, [range(4)] * len(heard))
        return [r.phases[0].clients.tolist() for r in records(made, BOWLS, len(heard), federation=federation)]


def test_f3ast_selects_those_that_are_selected_least():
    assert chosen("f3ast", HEARD, select=1, beta=0.1) == [[0], [0], [1], [2], [3], [1]]
    # a client that nobody selected loses rate as all do: both are the same to it
    assert chosen("f3ast", [(0, 1, 2, 3)] * 4, select=2, beta=0.3) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_f3asts_rates_are_those_of_the_loop():
    heard, beta = [(0, 2), (0,), (0, 1), (2, 3), (0, 3), (1, 2), (0, 1, 2, 3)], 0.25
    p = torch.tensor([2.0, 4.0, 1.0, 1.0], dtype=torch.float64) / 8
    where = World(Bowl(), rows(*[[(a, c)] * n for a, c, n in zip(A, C, (2, 4, 1, 1), strict=True)]))
    r, x, expected = 2 * p, 1.0, []
    for here in heard:
        mine = torch.tensor(here)
        best = mine[(p[mine] ** 2 / r[mine] ** 2).argsort(descending=True, stable=True)[:2]]
        r = (1 - beta) * r
        r[best] += beta
        x += sum(float(p[i] / r[i]) * (1 - (1 - 0.1 * A[i]) ** 2) * (C[i] - x) for i in best.tolist())
        expected.append(x)
    found = trace("f3ast", where, heard, select=2, beta=beta, batch_size=4)
    assert found == pytest.approx(expected, abs=1e-12)


def test_fedlaavg_asks_those_not_heard_for_longest_and_remembers_all():
    heard = [(0, 1, 2), (0, 1, 2), (0, 2, 3), (0, 1), (1, 3)]
    assert chosen("fedlaavg", heard, select=2) == [[0, 1], [0, 2], [0, 3], [0, 1], [1, 3]]
    s = [1 - (1 - 0.1 * a) ** 2 for a in A]
    first = 1 + s[0] * (0 - 1) / 4
    second = first + (s[0] * (0 - 1) + s[1] * (1 - first)) / 4
    assert trace("fedlaavg", heard=[(0, 1), (0, 1)], select=1) == pytest.approx([first, second], abs=1e-12)


def test_clusters_have_the_same_means_and_less_variance():
    """n = (10, 20, 30, 40), m = 2: the laws of either draw, variances of what clients count, chances to be drawn."""
    n, grid = torch.tensor([10, 20, 30, 40]), (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    pairs = [drawn("clustered", n, torch.stack([u, u])) for u in grid]
    law = torch.stack([torch.stack(pairs)[:, k].bincount(minlength=4) / 1000 for k in (0, 1)]).double()
    torch.testing.assert_close(law, torch.tensor([[0, 0, 0.2, 0.8], [0.2, 0.4, 0.4, 0]]).double(), rtol=0, atol=1e-9)
    assert (law * (1 - law)).sum(0).div(4).tolist() == pytest.approx([0.04, 0.06, 0.1, 0.04])
    assert (1 - (1 - law).prod(0)).tolist() == pytest.approx([0.2, 0.4, 0.52, 0.8])
    alone = drawn("multinomial", n, grid).bincount(minlength=4) / 1000
    assert alone.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert (alone * (1 - alone) / 2).tolist() == pytest.approx([0.045, 0.08, 0.105, 0.12])


def test_drawn_clients_count_one_of_m_each_over_their_chances(monkeypatch):
    for correction, heard, expected in (
        ("none", (0, 1), lambda d: (2 * d[0] + d[1]) / 3),  # client 0 was drawn twice
        ("none", (1,), lambda d: d[1]),
        ("known_p", (0, 1), lambda d: (2 * d[0] / 0.9 + d[1] / 0.5) / 4),
        ("known_p", (1,), lambda d: d[1] / 0.5 / 4),
    ):
        made = build("clustered_sampling", BOWLS.task, ALL, **TWO, correction=correction)
        with monkeypatch.context() as patch:
            patch.setattr(
                "fedfleet.algorithms.clustered_sampling.drawn", lambda law, n, u: torch.tensor([0, 0, 1, 2])[: len(u)]
            )
            (z,) = scripted(made, BOWLS, [heard])
        d = [(1 - (1 - 0.1 * a) ** 2) * (c - 1) for a, c in zip(A, C, strict=True)]
        assert w(z) == pytest.approx(1 + expected(d), abs=1e-12)


def test_a_period_ends_also_with_a_round_that_nobody_answers():
    for name, options in (("amplified_fedavg", {}), ("amplified_scaffold", {})):
        made = build(name, BOWLS.task, ALL, **TWO, period=2, amplification=2.0, **options)
        given = {"federation": Federation(availability=Scripted([(0, 2), (), (0,)])), "skip_aborted": True}
        found = list(records(made, BOWLS, 3, **given))
        first = w(found[0].state.z)
        assert w(found[1].state.z) == pytest.approx(1 + 2 * (first - 1), abs=1e-12)
        assert w(found[1].state.anchor) == w(found[1].state.z)
    # c of the first period is in force in the second: the mean of four, of two gradients each
    x, c, mine = w(found[1].state.z), 0.0, 0.0
    for i in (0, 2):
        g = [A[i] * (1 - C[i]), A[i] * (1 - 0.1 * A[i] * (1 - C[i]) - C[i])]
        c += sum(g) / 2 / 4
        mine = sum(g) / 2 if i == 0 else mine
    y = x
    for _ in range(2):
        y -= 0.1 * (A[0] * (y - C[0]) - mine + c)
    assert w(found[2].state.z) == pytest.approx(y, abs=1e-12)
