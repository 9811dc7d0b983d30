"""Noise on what clipped messages come to: rounds by hand, who has spent what, however many rounds noise is correlated over."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.algorithms.options import CohortOptions
from fedfleet.middleware.privacy.hidden import NORM, SHARE, WITHIN, Hidden
from fedfleet.middleware.privacy.noise import Adaptive, Ledger, Mechanism, Private, hiding, inverted, mixing, private
from fedfleet.simulator.algorithm import Cohort
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.noise import normals
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.fleet.selection import Poisson
from tests.algorithms.harness import Bowl, World, build, digits, flat, records, rows, script

MEANS = (4.0, -1.0, 1.2, 0.7)
"""Where the clients' models are after their round, whatever they were sent."""
BOWL = World(Bowl(), rows(*([(1, m)] for m in MEANS)))


def mechanism(**given: Any) -> Mechanism:
    clip = Hidden(norm=0.5, noisy=given.get("shares") is not None, tells=given.get("follows") is not None)
    return Mechanism(**{"clip": clip, "norm": 0.5, "multiplier": 2.0, "divide_by": 3.0, "sent": SHARE, **given})


def averaging(world: World = BOWL, **options: Any) -> Any:
    given = {"lr": 1.0, "steps": 1, "batch_size": 1, "weight": "uniform"} if world is BOWL else options
    return build("fedavg", world.task, CohortOptions(size=4), **given)


def played(m: Mechanism, rounds: int, world: World = BOWL, algorithm: Any = None, **given: Any) -> list[Any]:
    """The private state after each round, the metrics beside it."""
    algorithm = private(algorithm or averaging(world), m, rounds)
    return [(hiding(r.state), r.metrics) for r in records(algorithm, world, rounds, **given)]


def model(at: Private) -> float:
    return float(at.state.z["x"]["w"])


def drawn(at: Private, t: int) -> float:
    return float(normals(rng.fold(at.key, "noise", t, "x.w")))


def clipped(z: float, clients: Any, norm: float = 0.5) -> float:
    return sum(max(-norm, min(norm, MEANS[i] - z)) for i in clients)


def test_rounds_by_hand(monkeypatch):
    script(monkeypatch, [[0, 1], [2, 3, 1]])
    (one, first), (two, second) = played(mechanism(), 2)
    z1 = 1.0 + (clipped(1.0, [0, 1]) + 2.0 * 0.5 * drawn(one, 0)) / 3
    assert model(one) == pytest.approx(z1)
    assert model(two) == pytest.approx(z1 + (clipped(z1, [1, 2, 3]) + 2.0 * 0.5 * drawn(one, 1)) / 3)
    assert drawn(one, 0) != drawn(one, 1)
    assert first == second == {"noise_std": pytest.approx(1 / 3)}
    assert (two.ledger.exchanges, two.ledger.clients.tolist(), two.ledger.spent.tolist()) == (
        2,
        [0, 1, 2, 3],
        [1, 2, 1, 1],
    )
    assert two.ledger.most() == 2


def test_the_sum_may_be_divided_by_the_clients_heard(monkeypatch):
    script(monkeypatch, [[0, 1]])
    ((at, metrics),) = played(mechanism(divide_by=None), 1)
    assert model(at) == pytest.approx(1.0 + (clipped(1.0, [0, 1]) + drawn(at, 0)) / 2)
    assert metrics["noise_std"] == 0.5


@pytest.mark.slow
def test_clients_may_bring_the_noise_and_what_those_not_heard_do_not_bring_is_reckoned(monkeypatch):
    script(monkeypatch, [[0, 1], [1, 2, 3]])
    given = mechanism(divide_by=None, shares=4)
    (_, first), (two, second) = played(given, 2)
    assert first["noise_std"] == pytest.approx(2.0 * 0.5 * math.sqrt(2 / 4) / 2)
    assert second["noise_std"] == pytest.approx(2.0 * 0.5 * math.sqrt(3 / 4) / 3)
    assert two.ledger.spent.tolist() == pytest.approx([4 / 2, 4 / 2 + 4 / 3, 4 / 3, 4 / 3])
    still = build("fedavg", BOWL.task, CohortOptions(size=4), lr=1e-12, steps=1, batch_size=1, weight="uniform")
    script(monkeypatch, [[0, 1, 2, 3]] * 300)
    z = torch.tensor([1.0, *(model(at) for at, _ in played(mechanism(shares=9), 300, algorithm=still))])
    assert float(z.diff().std()) == pytest.approx(2.0 * 0.5 * math.sqrt(4 / 9) / 3, rel=0.12)


def test_noise_that_is_correlated_holds_draws_of_earlier_rounds(monkeypatch):
    script(monkeypatch, [[0], [1], [0, 2]])
    mixed = mixing(2)
    assert mixed == (1.0, -0.5)
    states = [at for at, _ in played(mechanism(mixing=mixed), 3)]
    z = [1.0, *map(model, states)]
    noise = [drawn(states[0], t) for t in range(3)]
    for t, who in enumerate([[0], [1], [0, 2]]):
        mine = noise[t] - (0.5 * noise[t - 1] if t else 0.0)
        assert z[t + 1] == pytest.approx(z[t] + (clipped(z[t], who) + mine) / 3)
    # c = 1, 1/2, 1/4: client 0 in exchanges 0 and 2, client 1 in exchange 1, client 2 in exchange 2
    assert states[-1].ledger.spent.tolist() == pytest.approx([1 + 1 / 4 + (1 + 1 / 4) ** 2, 1 + 1 / 4, 1])


@given(
    bands=st.integers(1, 6),
    heard=st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=9),
    factors=st.lists(st.floats(0.5, 2), min_size=9, max_size=9),
)
def test_what_clients_have_spent_is_the_norm_of_what_they_may_have_added(bands, heard, factors):
    rounds, ledger = len(heard), Ledger.nothing()
    d = torch.zeros(rounds, rounds, dtype=torch.float64)
    for j, v in enumerate(mixing(bands)[:rounds]):
        d += v * torch.diag(torch.ones(rounds - j, dtype=torch.float64), -j)
    c = torch.linalg.inv(d)
    for t, who in enumerate(heard):
        numbers = torch.tensor(sorted(who, reverse=True), dtype=torch.int64)
        ledger = ledger.after(numbers, inverted(mixing(bands), rounds), factors[t])
    for client in range(4):
        took = torch.tensor([client in who for who in heard], dtype=torch.float64)
        want = float(((c @ took).square() * torch.tensor(factors[:rounds], dtype=torch.float64)).sum())
        found = ledger.spent[ledger.clients == client]
        assert (float(found) if len(found) else 0.0) == pytest.approx(want)
    assert ledger.exchanges == rounds


def test_over_all_bands_the_matrix_is_the_root_of_partial_sums():
    c = inverted(mixing(12), 12)
    sums = [float(c[: t + 1] @ c[: t + 1].flip(0)) for t in range(12)]
    assert sums == pytest.approx([1.0] * 12)
    assert inverted((1.0,), 12).tolist() == [1.0]


def test_a_norm_may_follow_a_quantile(monkeypatch):
    script(monkeypatch, [[0, 1, 2], [3, 2]])
    follows = Adaptive(quantile=0.25, lr=0.5, count_noise=1.5, sent=NORM, told=WITHIN)
    (one, first), (two, second) = played(mechanism(follows=follows), 2)
    z = (2.0**-2 - 3.0**-2) ** -0.5
    assert follows.of_messages(2.0) == pytest.approx(z)
    assert first["noise_std"] == pytest.approx(z * 0.5 / 3)
    z1 = 1.0 + (clipped(1.0, [0, 1, 2]) + z * 0.5 * drawn(one, 0)) / 3
    assert model(one) == pytest.approx(z1)
    count = [float(rng.normal(rng.fold(one.key, "within", t), (), torch.float64)) for t in range(2)]
    share = 0.5 + (1 - 3 * 0.5 + 1.5 * count[0]) / 3  # of three clients one is within 0.5 of 1
    assert one.norm == pytest.approx(0.5 * math.exp(-0.5 * (share - 0.25)))
    assert second["clip_norm"] == one.norm
    assert second["noise_std"] == pytest.approx(z * one.norm / 3)
    assert model(two) == pytest.approx(z1 + (clipped(z1, [2, 3], one.norm) + z * one.norm * drawn(one, 1)) / 3)
    within = sum(abs(MEANS[i] - z1) <= one.norm for i in (2, 3))
    share = 0.5 + (within - 2 * 0.5 + 1.5 * count[1]) / 3
    assert two.norm == pytest.approx(one.norm * math.exp(-0.5 * (share - 0.25)))


def test_a_round_that_nobody_answers_releases_noise_alone_where_it_must_not_tell_that(monkeypatch):
    offline = {"federation": Federation(availability=Bernoulli(1e-9))}
    follows = Adaptive(quantile=0.5, lr=0.5, count_noise=1.5, sent=NORM, told=WITHIN)
    for m in (mechanism(empty=True), mechanism(empty=True, follows=follows)):
        script(monkeypatch, [[0], [1]])
        ((at, metrics),) = played(m, 1, **offline)
        assert model(at) == pytest.approx(1.0 + metrics["noise_std"] * drawn(at, 0))
        assert (at.ledger.exchanges, len(at.ledger.clients)) == (1, 0)
    script(monkeypatch, [[0]] * 10)
    with pytest.raises(FedfleetError, match="0 of 1 invited answered"):
        played(mechanism(), 1, **offline)


def test_minibatches_of_some_clients_are_the_same_one_at_a_time_and_many_at_once():
    world = digits("classification", "quantity_skew", alpha=1.0, min_size=2)
    algorithm = averaging(world, steps=3, batch_size=4, lr=0.3, weight="uniform")
    follows = Adaptive(quantile=0.5, lr=0.2, count_noise=3.0, sent=NORM, told=WITHIN)
    for m in (mechanism(follows=follows), mechanism(shares=5), mechanism(mixing=mixing(3))):
        given = {"federation": Federation(availability=Bernoulli(0.7)), "selection": Poisson()}
        one, *others = (
            played(m, 3, world, algorithm, inner=inner, **given)[-1][0] for inner in ("serial", "batched", "factored")
        )
        for other in others:
            torch.testing.assert_close(flat(one.state.z), flat(other.state.z), rtol=1e-5, atol=1e-5)
            assert one.ledger.spent.tolist() == other.ledger.spent.tolist()


def test_what_noise_does_not_hide_is_refused():
    algorithm = averaging()
    (phase,) = algorithm.phases

    twice = algorithm._replace(round=lambda state, rnd: algorithm.round(algorithm.round(state, rnd)[0], rnd))
    with pytest.raises(FedfleetError, match="asked twice in a round"):
        played(mechanism(), 1, BOWL, twice)
    telling = replace(phase, work=replace(phase.work, client_final=_telling(phase.work.client_final)))
    told = algorithm._replace(round=lambda state, rnd: algorithm.round(state, _With(rnd, telling)), phases=(telling,))
    with pytest.raises(FedfleetError, match="clients send loss besides their models"):
        played(mechanism(), 1, BOWL, told)
    buffered = algorithm._replace(round=lambda state, rnd: rnd.buffered(None))
    with pytest.raises(FedfleetError, match="one by one"):
        played(mechanism(), 1, BOWL, buffered)


def test_who_is_asked_otherwise_than_is_reckoned_with_is_refused(subtests):
    algorithm = averaging()
    for how in ("more", "again", "kept", "role", "draw", "itself"):
        wrong = algorithm._replace(round=lambda state, rnd, how=how: algorithm.round(state, _Asking(rnd, how)))
        says = r"invite 4 of all clients, once|whom the selection has not drawn"
        with subtests.test(how), pytest.raises(FedfleetError, match=says):
            played(mechanism(invites=4), 2, BOWL, wrong)
        assert how != "more" or len(played(mechanism(), 2, BOWL, wrong)) == 2
    assert len(played(mechanism(invites=4), 2)) == 2


def test_who_was_heard_is_not_told_where_nobody_is_to_know():
    algorithm, told = averaging(), []

    def round(state: Any, rnd: Any) -> Any:
        return algorithm.round(state, _Heard(rnd, told))

    follows = Adaptive(quantile=0.5, lr=0.5, count_noise=1.5, sent=NORM, told=WITHIN)
    for empty in (True, False):
        played(mechanism(empty=empty, follows=follows), 1, BOWL, algorithm._replace(round=round))
    secret, known = told
    assert (len(secret.received), dict(secret.config)) == (0, {})
    assert len(known.received) == 4


class _Around:
    """A round, of which something is otherwise."""

    def __init__(self, rnd: Any, how: Any):
        self.rnd, self.how = rnd, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rnd, name)


class _Heard(_Around):
    def map_reduce(self, phase: Any, **given: Any) -> Any:
        self.how.append(self.rnd.map_reduce(phase, **given))
        return self.how[-1]


class _Asking(_Around):
    kept: Any = None

    def invite(self, size: int) -> Any:
        if self.how == "more":
            return self.rnd.invite(3)
        if self.how == "role":
            return self.rnd.invite(size, role="source")
        if self.how == "draw":
            return self.rnd.draw(size, lambda size, key: torch.arange(size))
        found = self.rnd.invite(size)
        if self.how == "again":
            return self.rnd.invite(size)
        if self.how == "itself":
            return Cohort(found.clients, found.copies)
        type(self).kept = self.kept or found
        return self.kept


def _telling(client_final: Any) -> Any:
    def told(*given: Any) -> Any:
        message, client_state = client_final(*given)
        return replace(message, config={"loss": torch.tensor(1.0)}), client_state

    return told


class _With(_Around):
    def map_reduce(self, phase: Any, **given: Any) -> Any:
        return self.rnd.map_reduce(self.how, **given)
