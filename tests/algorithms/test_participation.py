"""Corrections for unequal participation: golden traces, the tables of the papers, identities, limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from harness import World, build, digits, flat, play, records, rows, script, xy
from hypothesis import given
from hypothesis import strategies as st
from limits import Bowls, cohorts, law
from scripted import BOWLS, GAMES, HEARD, HEARD_1, HEARD_2, P_GAME, SADDLE, P, Scripted, drawn, origin, scripted

from fedfleet.algorithms.fedau import Counts
from fedfleet.algorithms.fedsam import State as MoFedSam
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.participation import Correction, correcting
from fedfleet.simulator.algorithm import layer
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.state import ClientStore
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.responses import Federation
from tests.parts import slow_but

ALL = CohortOptions(size=4)
TWO = {"steps": 2, "lr": 0.1, "batch_size": 1}
EVERY_KIND: dict[str, Any] = {
    "known_p": "known_p",
    "hajek": {"kind": "known_p", "normalise": True},
    "fedau": {"kind": "fedau", "cutoff": None},
    "fedau, K=2": {"kind": "fedau", "cutoff": 2},
    "fedau, normalised": {"kind": "fedau", "normalise": True},
    "fedau, invitations": {"kind": "fedau", "count": "invitations"},
    "mifa": "mifa",
    "mifa, completed": {"kind": "mifa", "start": "completed"},
    "mifa, wait": {"kind": "mifa", "start": "wait"},
    "fedvarp": "fedvarp",
    "fedvarp, known p": {"kind": "fedvarp", "chances": True},
}


def w(z: Any) -> float:
    return float(z["x"]["w"])


def bowl(correction: Any, name: str = "fedavg", **options: Any) -> list[float]:
    made = build(name, BOWLS.task, ALL, correction=correction, **{**TWO, **options})
    return [w(z) for z in scripted(made, BOWLS, HEARD)]


TRACES: dict[str, list[float]] = {
    "none": [1.190000, 0.963900, 0.878827, 0.696238, 0.197555, 0.703227],
    "known_p": [1.422222, 1.347160, 1.213572, -1.167548, -0.892304, 0.222926],
    "hajek": [1.380000, 1.117800, 1.014687, 0.385872, -0.257575, 0.417785],
    "fedau": [1.095000, 1.042987, 0.989577, 0.878901, -0.121086, 0.573110],
    "fedau, K=2": [1.095000, 1.042987, 0.985708, 0.694121, 0.229149, 0.583597],
    "mifa": [1.095000, 1.185488, 1.254983, 1.024856, 0.831701, 0.690492],
    "mifa, completed": [1.190000, 1.361950, 1.422259, 1.138596, 0.901709, 0.730970],
    "mifa, wait": [1, 1, 1, 1, 0.840000, 0.702000],
    "fedvarp": [1.190000, 1.248900, 1.284477, 0.735687, 0.680376, 0.690441],
    "fedvarp, known p": [1.422222, 1.494938, 1.476956, -1.729735, 2.217466, 2.220667],
}


@pytest.mark.quick
def test_golden_traces(subtests):
    for name, trace in TRACES.items():
        with subtests.test(name):
            assert bowl(EVERY_KIND.get(name, "none")) == pytest.approx(trace, abs=2e-6)


def test_a_sum_without_chances_is_divided_by_the_number_invited():
    """Told that everybody is always online, the server adds up those heard and divides by all."""
    made = build("fedavg", BOWLS.task, ALL, correction="known_p", **TWO)
    trace = [1.095000, 1.042987, 0.989577, 0.878901, 0.597593, 0.795424]
    assert [w(z) for z in scripted(made, BOWLS, HEARD, (1.0,) * 4)] == pytest.approx(trace, abs=2e-6)


def test_hajek_is_fedavg_where_chances_are_equal():
    made = build("fedavg", BOWLS.task, ALL, correction=EVERY_KIND["hajek"], **TWO)
    assert [w(z) for z in scripted(made, BOWLS, HEARD, (0.3,) * 4)] == pytest.approx(bowl("none"), abs=1e-12)


def test_mifa_remembers_gradients_not_steps():
    """The same correction of a mean that is not told the rates keeps steps as they were, and is not MIFA."""
    falling = {"lr_schedule": {"kind": "power", "exponent": 1.0}}
    trace = [1.095000, 1.139559, 1.163886, 1.103412, 1.056588, 1.019873]
    assert bowl("mifa", **falling) == pytest.approx(trace, abs=2e-6)
    plain = build("fedavg", BOWLS.task, ALL, **TWO, **falling)
    raw = correcting(Correction(kind="mifa"), plain, "train", "z", model=True)
    steps = [1.095000, 1.210809, 1.326673, 1.249057, 1.197450, 1.139560]
    assert [w(z) for z in scripted(raw, BOWLS, HEARD)] == pytest.approx(steps, abs=2e-6)


GAME_TRACES: dict[str, tuple[str, dict[str, Any], list[tuple[float, float]]]] = {
    "one": ("cdma_one", {}, [(0.095, 0.1), (-0.294287, -0.111518), (0.081574, 0.163938)]),
    "one, known p": (
        "cdma_one",
        {"correction": "known_p"},
        [(0.265278, 0.223611), (0.072525, 0.141809), (0.759643, 0.668426)],
    ),
    "one, hajek in both": (
        "cdma_one",
        {"correction": EVERY_KIND["hajek"], "weigh_models": True},
        [(0.238750, 0.201250), (-0.194218, -0.002603), (0.370056, 0.397773)],
    ),
    "one, mifa": ("cdma_one", {"correction": "mifa"}, [(0.0475, 0.05), (0.036890, 0.097332), (0.195470, 0.262563)]),
    "one, fedvarp": ("cdma_one", {"correction": "fedvarp"}, [(0.095, 0.1), (0.025542, 0.116791), (0.253015, 0.326156)]),
    "ada": ("cdma_ada", {"alpha": 0.5}, [(0.095, 0.1), (-0.103958, 0.040054), (0.009237, 0.146731)]),
    "local": ("local_sgda", {}, [(0.090625, 0.08875), (-0.298600, -0.126454), (0.069223, 0.129477)]),
    "local, known p": (
        "local_sgda",
        {"correction": "known_p"},
        [(0.257986, 0.204861), (0.064965, 0.120831), (0.739839, 0.621878)],
    ),
    "local, mifa": (
        "local_sgda",
        {"correction": "mifa"},
        [(0.045312, 0.044375), (0.030676, 0.081104), (0.183903, 0.232218)],
    ),
    "local, fedvarp": (
        "local_sgda",
        {"correction": "fedvarp"},
        [(0.090625, 0.08875), (0.018156, 0.094440), (0.240801, 0.291552)],
    ),
    "nc is local": (
        "cdma_nc",
        {"correction": "fedvarp"},
        [(0.090625, 0.08875), (0.018156, 0.094440), (0.240801, 0.291552)],
    ),
}


def alike(of: str, name: str, **options: Any) -> dict[str, tuple[str, dict[str, Any], list[tuple[float, float]]]]:
    """Return the traces of one of these methods as those of another, which is the same with these options."""
    return {
        f"{name}: {row}": (name, {**options, **given}, trace)
        for row, (_, given, trace) in GAME_TRACES.items()
        if row.partition(", ")[0] == of and "weigh_models" not in given
    }


GAME_TRACES |= (
    alike("local", "local_sgda_plus", snapshot_refresh="every_step")
    | alike("local", "coda_plus", stage_iterations=10**9)
    | alike("one", "mime", beta=0.0)  # y <- y - lr (c + g(y) - g(x)), as CDMA's second phase
)


@pytest.mark.quick
def test_golden_traces_of_a_game(subtests):
    for row, (name, options, trace) in GAME_TRACES.items():
        with subtests.test(row):
            made = build(name, GAMES.task, ALL, steps=2, lr=0.05, batch_size=1, **options)
            heard = HEARD_1
            if len(made.phases) == 2:
                heard = itertools.chain.from_iterable(zip(HEARD_1, HEARD_2, strict=True))
            points = [xy(z) for z in scripted(made, GAMES, heard, P_GAME, z=origin())]
            for found, expected in zip(points[::2], trace, strict=True):
                assert found == pytest.approx(expected, abs=2e-6)


def test_parallel_sgda_is_cdma_one_of_one_step_with_every_correction(subtests):
    """Where the server takes CDMA's step itself, so that rounds have one exchange."""
    for name, how in EVERY_KIND.items():
        with subtests.test(name):
            given = {"lr": 0.05, "correction": how}
            made = [
                build("parallel_sgda", GAMES.task, ALL, **given),
                build("cdma_one", GAMES.task, ALL, steps=1, **given),
            ]
            scripts = [HEARD_1, [*HEARD_1, *HEARD_1]]
            a, b = (
                [xy(z) for z in scripted(m, GAMES, s, P_GAME, z=origin())] for m, s in zip(made, scripts, strict=True)
            )
            assert a == b
            assert a[-1] != xy(origin())


def test_mofedsam_of_whole_gradients_at_the_model_is_fedavg_with_every_correction(subtests):
    for name, trace in TRACES.items():
        with subtests.test(name):
            found = bowl(EVERY_KIND.get(name, "none"), "mofedsam", share=1.0, rho=0.0)
            assert found == pytest.approx(trace, abs=2e-6)


def test_mofedsam_divides_by_the_steps_of_the_mean_client_where_it_is_corrected():
    """Clients 0 and 2 take one step and two; a client with the mean number of examples, two, takes two."""
    for correction, steps in (("none", (1 + 2 * 2) / 3), ("fedvarp", 2)):
        made = build(
            "mofedsam", SIZES.task, ALL, epochs=1, lr=0.1, batch_size=1, share=1.0, rho=0.0, correction=correction
        )
        (record,) = records(made, SIZES, 1, federation=Federation(availability=Scripted([(0, 2)])))
        before = layer(record.state, MoFedSam).before
        assert w(before) == pytest.approx((1 - w(made.views["global"].params(record.state))) / (0.1 * steps), abs=1e-12)


def test_mifa_remembers_gradients_of_other_local_methods_too():
    falling = {"steps": 2, "lr": 0.05, "batch_size": 1, "lr_schedule": {"kind": "power", "exponent": 1.0}}
    rows = [("local_sgda", {}), ("local_sgda_plus", {"snapshot_refresh": "every_step"}), ("coda_plus", {})]
    ends = [
        scripted(build(name, GAMES.task, ALL, correction="mifa", **falling, **options), GAMES, HEARD_1, z=origin())[-1]
        for name, options in rows
    ]
    assert xy(ends[1]) == pytest.approx(xy(ends[0]), abs=1e-12)
    assert xy(ends[2]) == pytest.approx(xy(ends[0]), abs=1e-12)


def counted(pattern: list[bool], cutoff: int | None) -> Iterator[float]:
    """FedAU's weights of one client at the rounds in which it answers, counted round by round as the paper does."""
    since, total, complete = 0, 0, 0
    for heard in pattern:
        since += 1
        if heard:
            yield total / complete if complete else 1.0
        if heard or since == cutoff:
            total, complete, since = total + since, complete + 1, 0


@given(st.lists(st.booleans(), max_size=60), st.one_of(st.none(), st.integers(1, 7)))
def test_counts_are_those_of_the_loop(pattern, cutoff):
    counts, client = Counts.nothing().with_new(torch.tensor([5, 2])), torch.tensor([5])
    found = []
    for t, heard in enumerate(pattern):
        if heard:
            now = torch.tensor([t])
            found.append(float(counts.weights(client, now, cutoff)))
            counts = counts.answered(client, now, cutoff)
    assert found == pytest.approx(list(counted(pattern, cutoff)), rel=1e-12)
    assert float(counts.weights(torch.tensor([2]), torch.tensor([0]), cutoff)) == 1.0


def test_weights_of_the_golden_rounds():
    """In the order of the clients heard."""
    rows = {
        None: [(1, 1), (1,), (1, 1), (1, 1), (1, 4), (3, 2)],
        2: [(1, 1), (1,), (1, 2), (1.5, 2), (1, 2), (5 / 3, 4 / 3)],
    }
    for cutoff, expected in rows.items():
        counts, found = Counts.nothing().with_new(torch.arange(4)), []
        for t, heard in enumerate(HEARD):
            clients, now = torch.tensor(heard), torch.full((len(heard),), t)
            found.append(counts.weights(clients, now, cutoff).tolist())
            counts = counts.answered(clients, now, cutoff)
        assert found == [pytest.approx(w, rel=1e-12) for w in expected]


def test_an_interval_is_one_over_the_chance_but_for_the_cutoff():
    """(1 - (1-p)^K) / p: 2,000 intervals, evenly from the quantiles of the geometric law."""
    rows = {
        None: [*(1 / p for p in P), 50.0],
        5: [1.1111, 1.9375, 2.7731, 4.0951, (1 - 0.98**5) / 0.02],
        50: [1.1111, 2.0, 3.3333, (1 - 0.9**50) / 0.1, 31.79],
    }
    quantiles = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    rates = torch.tensor([*P, 0.02], dtype=torch.float64)
    intervals = (torch.log1p(-quantiles)[:, None] / torch.log1p(-rates)).ceil().long()
    clients = torch.arange(5)
    for cutoff, expected in rows.items():
        counts, now = Counts.nothing().with_new(clients), torch.full((5,), -1)
        for interval in intervals:
            now = now + interval
            counts = counts.answered(clients, now, cutoff)
        assert counts.weights(clients, now + 1, cutoff).tolist() == pytest.approx(expected, rel=1e-3)


SIZES = World(BOWLS.task, rows([(1.0, 0.0)], [(2.0, 1.0)] * 3, [(1.0, 4.0)] * 2, [(3.0, -1.0)] * 2))
"""The clients again, with one to three examples, two on average."""
SHARE = torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64) / 2
A, C = torch.tensor([1.0, 2.0, 1.0, 3.0], dtype=torch.float64), torch.tensor([0.0, 1.0, 4.0, -1.0], dtype=torch.float64)


def table(kind: str, share: torch.Tensor, heard_in: Any, p: torch.Tensor, start: str = "zeros") -> Iterator[float]:
    """The papers' N x d table at the server; clients count by their shares, of mean 1."""
    y, seen, x, mean = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.bool), 1.0, share / 4
    for heard in heard_in:
        here = torch.tensor(heard)
        delta = (1 - (1 - 0.1 * A) ** 2) * (C - x)
        before, waits = float(mean @ y), not bool(seen.all())
        e = (delta - y)[here]
        y[here], seen[here] = delta[here], True
        if kind == "mifa":
            x += (
                0.0
                if start == "wait" and waits
                else float(mean @ y) / (float(mean[seen].sum()) if start == "completed" else 1.0)
            )
        elif kind == "fedvarp":
            x += before + float(share[here] @ e / share[here].sum())
        else:
            x += before + float((mean / p)[here] @ e)
        yield x


def test_differences_are_the_table_at_the_server(subtests):
    heard_in = [h for h in itertools.product(range(4), repeat=2) if h[0] < h[1]] * 3
    for weight, share in (("uniform", torch.ones(4, dtype=torch.float64)), ("num_examples", SHARE)):
        for name in ("mifa", "mifa, completed", "mifa, wait", "fedvarp", "fedvarp, known p"):
            with subtests.test(f"{name}, {weight}"):
                options = {**TWO, "batch_size": 3, "weight": weight, "correction": EVERY_KIND[name]}
                found = [w(z) for z in scripted(build("fedavg", SIZES.task, ALL, **options), SIZES, heard_in)]
                start = name.rpartition(", ")[2]
                kind = name if name == "fedvarp, known p" else name.split(",")[0]
                expected = list(table(kind, share, heard_in, torch.tensor(P, dtype=torch.float64), start))
                assert found == pytest.approx(expected, abs=1e-12)


def test_what_the_server_keeps_is_the_mean_of_what_clients_keep():
    """Also with minibatches, and of samples of the clients."""
    where = digits("classification", "quantity_skew", clients=12, alpha=1.0, min_size=4, dtype=torch.float64)
    options = {"steps": 2, "batch_size": 3, "correction": "fedvarp", "weight": "num_examples"}
    made = build("fedavg", where.task, CohortOptions(size=5), **options)
    z = T.map(torch.Tensor.double, where.task.init(0))
    given = {"z": z, "federation": Federation(availability=Bernoulli(0.6)), "inner": "batched"}
    staged: dict[int, torch.Tensor] = {}
    stage = ClientStore.stage

    def spy(self: ClientStore, clients: torch.Tensor, states: Any) -> None:
        for i, c in enumerate(clients.tolist()):
            staged[c] = flat(T.index(states["last"], i))
        stage(self, clients, states)

    n = where.population.num_examples(torch.arange(12)).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientStore, "stage", spy)
        for record in records(made, where, 6, **given):
            mean = sum(n[c] * y for c, y in staged.items()) / n.sum()
            torch.testing.assert_close(flat(record.state.memory.mean), mean, rtol=0, atol=1e-12)
    assert 5 < len(staged) <= 12


def test_the_mean_is_kept_in_double_precision():
    where = digits("classification", clients=12)
    made = build("fedavg", where.task, CohortOptions(size=5), steps=1, batch_size=4, correction="mifa")
    state = list(records(made, where, 1))[-1].state
    assert {leaf.dtype for leaf in T.leaves(state.memory.mean)} == {torch.float64}
    assert {leaf.dtype for leaf in T.leaves(made.views["global"].params(state))} == {torch.float32}


def test_all_forms_are_fedavg_where_everybody_is_heard(subtests):
    where = digits("classification", "quantity_skew", clients=6, alpha=1.0, min_size=4, dtype=torch.float64)
    z, options = T.map(torch.Tensor.double, where.task.init(0)), {"steps": 2, "batch_size": 3}
    plain = play(build("fedavg", where.task, CohortOptions(size=6), **options), where, 3, z=z)
    for name, correction in EVERY_KIND.items():
        if name == "mifa, wait":  # whose first round is for waiting
            continue
        with subtests.test(name):
            made = build("fedavg", where.task, CohortOptions(size=6), correction=correction, **options)
            for a, b in zip(plain, play(made, where, 3, z=z), strict=True):
                torch.testing.assert_close(flat(a), flat(b), rtol=0, atol=1e-12)


def test_over_all_cohorts_the_mean_step_is_the_full_one():
    full = float(((1 - (1 - 0.1 * A) ** 2) * (C - 1)).mean())
    made = build("fedavg", BOWLS.task, ALL, **TWO, correction="known_p")
    steps = [chance * (w(scripted(made, BOWLS, [heard])[0]) - 1) for chance, heard in cohorts(P)]
    assert sum(steps) == pytest.approx(full, abs=1e-12)
    # from a state in which some are remembered; nobody heard is a step by what is remembered
    made = build("fedavg", BOWLS.task, ALL, **TWO, correction=EVERY_KIND["fedvarp, known p"])
    x = w(scripted(made, BOWLS, [(0, 2)])[0])
    nobody = 0.1 * 0.5 * 0.7 * 0.9
    remembered = (-0.19 + 0.19 * 3) / 4
    second = [chance * (w(scripted(made, BOWLS, [(0, 2), heard])[1]) - x) for chance, heard in cohorts(P)]
    full = float(((1 - (1 - 0.1 * A) ** 2) * (C - x)).mean())
    assert sum(second) + nobody * remembered == pytest.approx(full, abs=1e-12)


NOBODY = 0.1 * 0.5 * 0.7 * 0.9


def moments(
    values: Sequence[float], correction: Any, told: Sequence[float] = P, among: Any = None
) -> tuple[float, float]:
    """Return the mean of an estimate over all cohorts but the empty one, and that of its squared error."""
    where = World(Bowls(), rows(*[[(1.0, 1.0 + v)] for v in values]))  # one step of rate 1 goes to c
    made = build("fedavg", where.task, ALL, steps=1, lr=1.0, batch_size=1, correction=correction)
    found = law(made, where, [(chance, [heard]) for chance, heard in among or cohorts(P)], told, 1)
    v = found.a[:, 0, 0] + found.b[:, 0] - 1
    return float(found.chance @ v), float(found.chance @ (v - sum(values) / 4) ** 2)


def test_moments_of_the_estimators():
    """v = (0, 1, 4, -1), mean 1, and ten more; Hajek's error does not move with them."""
    for more, variance in ((0.0, 2.9583333), (10.0, 82.402778)):
        values = [more + v for v in (0.0, 1.0, 4.0, -1.0)]
        mean, error = moments(values, "known_p")
        assert (mean, error + NOBODY * (1 + more) ** 2) == pytest.approx((1 + more, variance), abs=1e-6)
        mean, error = (each / (1 - NOBODY) for each in moments(values, EVERY_KIND["hajek"]))
        assert (mean, error) == pytest.approx((more + 0.94489988, 1.48736580), abs=1e-7)
    mean, error = (each / (1 - NOBODY) for each in moments((0.0, 1.0, 4.0, -1.0), "none"))
    assert (mean, error) == pytest.approx((0.74186887, 0.82825675), abs=1e-7)
    for kind, expected in (  # how much each client counts in the mean
        ("none", [0.57885906, 0.24432112, 0.13487352, 0.04194631]),
        ("hajek", [0.45827919, 0.27232355, 0.18839472, 0.08100254]),
    ):
        how = EVERY_KIND.get(kind, "none")
        counts = [moments([float(i == j) for j in range(4)], how)[0] / (1 - NOBODY) for i in range(4)]
        assert counts == pytest.approx(expected, abs=1e-7)


def failing(up: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Who may be heard, with its probability, where clients 0 and 1, and 2 and 3, share a region that is up so often."""
    for first, second in itertools.product((0.0, 1.0), repeat=2):
        chance = (up if first else 1 - up) * (up if second else 1 - up)
        if first or second:
            p = [here * region for here, region in zip(P, (first, first, second, second), strict=True)]
            yield from ((chance * part, heard) for part, heard in cohorts(p))


def test_outages_that_clients_share_change_the_variance_and_not_the_mean():
    """Horvitz-Thompson with chances .8 p; values of opposite sign in one region gain, equal ones lose."""
    m = [0.8 * p for p in P]
    for values, apart, shared in (
        ((0.0, 1.0, 4.0, -1.0), 3.9791667, 3.8541667),
        ((1.0, 1.0, 1.0, 1.0), 1.0347222, 1.0972222),
    ):
        for among, variance in ((list(cohorts(m)), apart), (list(failing(0.8)), shared)):
            mean, error = moments(values, "known_p", m, among)
            nobody = 1 - sum(chance for chance, _ in among)
            assert (mean, error + nobody) == pytest.approx((1.0, variance), abs=1e-6)


def test_two_of_four_invited_the_mean_is_right():
    """(1/S) sum_H v_i / p_i over uniform invitations and then who is online, v = (0, 1, 4, -1): mean 1, variance 7.0833333."""
    where = World(BOWLS.task, rows(*[[(1.0, 1.0 + v)] for v in (0.0, 1.0, 4.0, -1.0)]))  # one step of rate 1 goes to c
    made = build("fedavg", where.task, CohortOptions(size=2), steps=1, lr=1.0, batch_size=1, correction="known_p")
    values = [0.0, 0.0]
    for pair in itertools.combinations(range(4), 2):
        for online in itertools.product((False, True), repeat=2):
            heard = tuple(c for c, on in zip(pair, online, strict=True) if on)
            chance = 1 / 6
            for c, on in zip(pair, online, strict=True):
                chance *= P[c] if on else 1 - P[c]
            with pytest.MonkeyPatch.context() as patch:
                script(patch, [pair])
                v = w(scripted(made, where, [heard])[0]) - 1 if heard else 0.0
            values[0] += chance * v
            values[1] += chance * v**2
    assert values == pytest.approx([1.0, 7.0833333 + 1.0], abs=1e-6)


@pytest.mark.parametrize("name", ["cdma_one", "cdma_ada"])
@pytest.mark.parametrize("kind", slow_but(["fedvarp", "mifa"], "mifa"))
def test_cdma_with_memory_comes_to_the_saddle(name, kind):
    """Also where the same clients are heard in both phases, which biases plain CDMA even at equal chances."""
    options = {"alpha": 0.7} if name == "cdma_ada" else {}
    made = build(name, GAMES.task, ALL, steps=2, lr=0.1, batch_size=1, correction=kind, **options)
    same = itertools.chain.from_iterable((h, h) for h in [*itertools.combinations(range(4), 2)] * 14)
    z = scripted(made, GAMES, same, P_GAME, z=origin(), inner="batched")[-1]
    assert xy(z) == pytest.approx(SADDLE, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fedvarp", "mifa"])
def test_cdma_with_memory_comes_to_the_saddle_of_clients_drawn_by_their_chances(kind):
    made = build("cdma_one", GAMES.task, ALL, steps=5, lr=0.05, batch_size=1, correction=kind)
    z = drawn(made, GAMES, 500, P_GAME, z=origin(), inner="batched")[-1]
    assert xy(z) == pytest.approx(SADDLE, abs=1e-9)


def test_memory_takes_no_traffic():
    for name, task in (("fedavg", "classification"), ("cdma_one", "auc")):
        where = digits(task, clients=12)
        sizes = []
        for correction in ("none", "fedvarp", "mifa"):
            made = build(name, where.task, CohortOptions(size=5), steps=2, batch_size=4, correction=correction)
            (record,) = records(made, where, 1)
            sizes.append([(p.counts["bytes_up"], p.counts["bytes_down"]) for p in record.phases])
        assert sizes[0] == sizes[1] == sizes[2]


def test_a_chance_below_the_bound_is_cut_and_counted():
    made = build("fedavg", BOWLS.task, ALL, **TWO, correction={"kind": "known_p", "cap": 4.0})
    (record,) = records(made, BOWLS, 1, federation=Federation(availability=Scripted([(3,)])))
    assert record.metrics["capped"] == 1
    step = (1 - 0.7**2) * (-1 - 1)
    assert w(made.views["global"].params(record.state)) == pytest.approx(1 + step * 4 / 4, abs=1e-12)


def test_invitations_are_counted_of_those_invited():
    """Two of four invited: a client answers its first, then its fourth invitation: weights 1, 1; then (1 + 3) / 2."""
    asked = [(0, 1), (0, 2), (0, 3), (0, 1), (0, 2)]
    heard = [(0, 1), (2,), (3,), (0,), (0,)]
    made = build("fedavg", BOWLS.task, CohortOptions(size=2), **TWO, correction=EVERY_KIND["fedau, invitations"])
    with pytest.MonkeyPatch.context() as patch:
        script(patch, asked)
        found = [1.0, *(w(z) for z in scripted(made, BOWLS, heard))]
    weights = [{0: 1.0, 1: 1.0}, {2: 1.0}, {3: 1.0}, {0: 1.0}, {0: 2.0}]
    for x, after, of in zip(found, found[1:], weights, strict=False):
        delta = ((1 - (1 - 0.1 * A) ** 2) * (C - x)).tolist()
        assert after - x == pytest.approx(sum(v * delta[c] for c, v in of.items()) / 2, abs=1e-12)


def test_invitations_are_counted_by_domain():
    """Clients 0 and 1, and 2 and 3, are counted together: invitations by answers before the round, 1 where there is none."""
    where = World(BOWLS.task, rows([(1.0, 0.0)], [(2.0, 1.0)], [(1.0, 4.0)], [(3.0, -1.0)]))
    where.population.domain[:] = torch.tensor([0, 0, 1, 1])
    asked, heard = [(0, 1), (1, 2), (0, 3), (2, 3), (0, 1)], [(0,), (1,), (3,), (2, 3), (0, 1)]
    weights = [{0: 1.0}, {1: 2.0}, {3: 1.0}, {2: 2.0, 3: 2.0}, {0: 2.0, 1: 2.0}]
    how = {"kind": "fedau", "count": "invitations", "pool": "domain"}
    made = build("fedavg", where.task, CohortOptions(size=2), **TWO, correction=how)
    with pytest.MonkeyPatch.context() as patch:
        script(patch, asked)
        found = [1.0, *(w(z) for z in scripted(made, where, heard))]
    for x, after, of in zip(found, found[1:], weights, strict=False):
        delta = ((1 - (1 - 0.1 * A) ** 2) * (C - x)).tolist()
        assert after - x == pytest.approx(sum(v * delta[c] for c, v in of.items()) / 2, abs=1e-12)


def test_rounds_that_nobody_answers_are_counted_by_domain_too():
    how = {"kind": "fedau", "count": "invitations", "pool": "domain"}
    made = build("fedavg", BOWLS.task, ALL, **TWO, correction=how)
    given = {"federation": Federation(availability=Scripted(SILENT)), "skip_aborted": True}
    tally = list(records(made, BOWLS, 3, **given))[-1].state.memory
    assert (tally.asked.tolist(), tally.heard.tolist()) == ([12], [3])
    x = silent(how)[1]
    assert silent(how)[2] == pytest.approx(x + 4.0 * float((1 - (1 - 0.1 * A[0]) ** 2) * (0 - x)) / 4, abs=1e-12)


def test_buffers_are_averaged_and_never_remembered():
    where = digits("classification", clients=6, net={"model": "cnn_bn"})
    for name in ("known_p", "fedvarp", "mifa"):
        made = build("fedavg", where.task, CohortOptions(size=6), steps=1, batch_size=4, correction=EVERY_KIND[name])
        plain = build("fedavg", where.task, CohortOptions(size=6), steps=1, batch_size=4)
        a, b = (play(x, where, 2)[-1] for x in (made, plain))
        torch.testing.assert_close(flat(a["b"]), flat(b["b"]), rtol=1e-5, atol=1e-6)


SILENT = [(0, 2), (), (0,)]
"""The second round is answered by nobody."""


def silent(correction: Any, **options: Any) -> list[float]:
    made = build("fedavg", BOWLS.task, ALL, **TWO, correction=correction, **options)
    availability = Scripted(SILENT)
    given = {"federation": Federation(availability=availability), "skip_aborted": True}
    return [w(z) for z in play(made, BOWLS, 3, **given)]


def test_mifa_steps_by_what_is_remembered_where_nobody_is_heard():
    s = (1 - (1 - 0.1 * A) ** 2).tolist()
    y0, y2 = s[0] * (0 - 1), s[2] * (4 - 1)
    first = 1 + (y0 + y2) / 4
    assert silent("mifa")[:2] == pytest.approx([first, first + (y0 + y2) / 4], abs=1e-12)
    heard = 1 + (y0 + y2) / 2
    assert silent(EVERY_KIND["mifa, completed"])[:2] == pytest.approx([heard, heard + (y0 + y2) / 2], abs=1e-12)
    assert silent(EVERY_KIND["mifa, wait"]) == [1, 1, 1]
    falling = {"lr_schedule": {"kind": "power", "exponent": 1.0}}
    assert silent("mifa", **falling)[1] == pytest.approx(first + (y0 + y2) / 4 / 2, abs=1e-12)


def test_the_others_stay_and_count_the_round():
    for correction in ("none", "known_p", "fedvarp", EVERY_KIND["fedau"], EVERY_KIND["fedau, invitations"]):
        found = silent(correction)
        assert found[0] == found[1] != found[2]
    for name, divisor in (("fedau", 4), ("fedau, invitations", 4)):
        x = silent(EVERY_KIND[name])[1]
        delta = float((1 - (1 - 0.1 * A[0]) ** 2) * (0 - x))
        assert silent(EVERY_KIND[name])[2] == pytest.approx(x + 1.0 * delta / divisor, abs=1e-12)
    # client 0's second interval is of two rounds, and shows the time after
    made = build("fedavg", BOWLS.task, ALL, **TWO, correction=EVERY_KIND["fedau, invitations"])
    given = {"federation": Federation(availability=Scripted(SILENT)), "skip_aborted": True}
    counts = list(records(made, BOWLS, 3, **given))[-1].state.memory
    assert (counts.asked.tolist(), counts.last.tolist()) == ([3] * 4, [2, -1, 0, -1])


def test_a_cutoff_that_is_not_reached_changes_no_weight_of_either_phase():
    """In the second phase, clients are weighed that have answered in this round already."""
    heard = [(0, 2), (0, 2), (1,), (0, 2), (0, 2), (0, 2)]
    ends = []
    for cutoff in (None, 50):
        how = {"kind": "fedau", "cutoff": cutoff}
        made = build("cdma_one", GAMES.task, ALL, steps=2, lr=0.05, batch_size=1, correction=how, weigh_models=True)
        ends.append(xy(scripted(made, GAMES, heard, P_GAME, z=origin())[-1]))
    assert ends[0] == ends[1]


def test_options_that_a_kind_does_not_have_are_refused():
    for options, line in (
        ({"kind": "mifa", "chances": True}, "chances=True is not for mifa: leave it out"),
        ({"kind": "fedau", "cap": 9.0}, "cap=9.0 is not for fedau"),
        ({"kind": "known_p", "cutoff": None}, "cutoff=None is not for known_p"),
        ({"kind": "fedvarp", "cap": 9.0}, "cap=9.0 is not for fedvarp: leave it out"),
        ({"count": "invitations"}, "count=invitations is not for none"),
        ({"kind": "fedau", "pool": "domain"}, "pool=domain: it counts invitations"),
        ({"kind": "fedau", "count": "invitations", "pool": "domain", "cutoff": 9}, "cutoff=9 is not for fedau"),
    ):
        with pytest.raises(ValueError, match=line):
            build("fedavg", BOWLS.task, correction=options)
    made = build("fedavg", BOWLS.task, correction={"kind": "fedvarp", "chances": True, "cap": 9.0})
    assert made.chances == "absolute"
