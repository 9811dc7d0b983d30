"""Update attacks beside a version of their own: alone and together, whoever completes, in every executor."""

from __future__ import annotations

import sys
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.wrapping import Exchange, instead
from fedfleet.middleware.attacks.attacked import attacked
from fedfleet.middleware.attacks.attackers import Attackers
from fedfleet.middleware.attacks.kinds.collusion import Alie, InnerProduct, z_max
from fedfleet.middleware.attacks.kinds.poison import Backdoor
from fedfleet.middleware.attacks.kinds.updates import Noise, Scaled, SignFlip
from fedfleet.middleware.compression.codecs.half import Half
from fedfleet.middleware.compression.down import downward
from fedfleet.middleware.facts import Fact, of_algorithm
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.fleet.policies import Siwer
from tests.algorithms.harness import build, digits, flat, play, records

WHERE = digits("classification", "dirichlet", alpha=1.0, min_size=8)
BN = digits("classification", "dirichlet", net={"model": "cnn_bn"}, alpha=1.0, min_size=8)
BAD = Attackers(torch.tensor([1, 2, 5, 8, 11, 12, 17, 18, 21, 25, 28]))
WAYS = [("serial", 4), ("batched", 3), ("factored", 4)]


def fedavg(where: Any = WHERE, name: str = "fedavg") -> Algorithm:
    return build(name, where.task, CohortOptions(size=12), steps=3, batch_size=7)


class Seeing:
    """An algorithm that keeps what its server was sent, and takes the mean."""

    def __init__(self, inner: Algorithm):
        self.seen: list[Exchange] = []
        self.algorithm = instead(inner, "seeing", self.rule)

    def rule(self, given: Exchange) -> Any:
        self.seen.append(given)
        return given.uploads.mean()

    def uploads(self, i: int = 0) -> Any:
        return self.seen[i].uploads.stacked()


def under(attack: Any, algorithm: Algorithm, attackers: Attackers = BAD) -> Algorithm:
    return attacked(
        algorithm, attackers, attack.forged if attack.forges else None, attack.colluded if attack.colludes else None
    )


def sent(attack: Any, inner: str, block: int, where: Any = WHERE, name: str = "fedavg", **given: Any) -> Any:
    """The exchange of a first round with and without the attack, of the same clients."""
    found = []
    for attacks in (False, True):
        seeing = Seeing(fedavg(where, name))
        algorithm = under(attack, seeing.algorithm) if attacks else seeing.algorithm
        (record,) = records(algorithm, where, 1, inner=inner, block_size=block, policy=Siwer(), **given)
        found.append((seeing, record))
    (plain, _), (other, record) = found
    assert torch.equal(plain.seen[0].received, other.seen[0].received)
    theirs = BAD.among(plain.seen[0].received)
    assert 0 < int(theirs.sum()) < len(theirs)
    assert record.metrics["attackers"] == int(theirs.sum()) / len(theirs)
    return plain, other, theirs


BY_THEMSELVES = [
    (SignFlip(share=0, scale=3.0), lambda d: -3 * d),
    (SignFlip(share=0), lambda d: -d),
    (Scaled(share=0), lambda d: 10 * d),
    (Scaled(share=0, factor=0.5), lambda d: d / 2),
    (Backdoor(share=0, scale=6.0), lambda d: 6 * d),
]


@pytest.mark.parametrize(
    ("attack", "law", "inner", "block"), [(*row, *WAYS[i % 3]) for i, row in enumerate(BY_THEMSELVES)]
)
def test_attackers_send_what_they_are_to_and_the_others_to_the_bit_what_they_would(attack, law, inner, block):
    plain, other, theirs = sent(attack, inner, block)
    origin = plain.seen[0].origin
    leaves = zip(T.leaves(plain.uploads()), T.leaves(other.uploads()), T.leaves(origin), strict=True)
    for was, is_, start in leaves:
        # Factored, a weight is a sum of other terms.
        off = {"rtol": 1e-6, "atol": 1e-7} if inner == "factored" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(is_[~theirs], was[~theirs], **off)
        want = start.double() + law(was[theirs].double() - start.double())
        torch.testing.assert_close(is_[theirs].double(), want, rtol=1e-5, atol=1e-5)


def test_what_is_no_model_is_forged_as_it_is():
    plain, other, theirs = sent(SignFlip(share=0, scale=2.0), "serial", 4, name="scaffold")
    assert plain.seen[0].origin is None
    for was, is_ in zip(T.leaves(plain.uploads()), T.leaves(other.uploads()), strict=True):
        torch.testing.assert_close(is_[theirs], -2 * was[theirs])


@pytest.mark.parametrize("inner", ["serial", "batched"])
def test_what_a_sum_is_divided_by_is_told_truly(inner):
    """q-FedAvg's step is a quotient of what clients send: forged above and below it would be what it was."""
    algorithm = build("qffl", WHERE.task, CohortOptions(size=6), steps=3, batch_size=7)
    everybody = attacked(algorithm, Attackers(torch.arange(30)), SignFlip(share=0, scale=2.0).forged, None)
    start = flat(WHERE.task.init(0))
    plain, turned = (flat(play(a, WHERE, 1, inner=inner)[-1]) - start for a in (algorithm, everybody))
    assert float(plain.abs().max()) > 1e-3
    torch.testing.assert_close(turned, -2 * plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("attack", "factor"), [(SignFlip(share=0, scale=2.0), -2.0), (Scaled(share=0), 10.0)])
def test_the_counts_of_prototypes_are_told_truly(attack, factor):
    algorithm = build("fedpac", WHERE.task, CohortOptions(size=6), steps=1, head_steps=1, batch_size=7)
    everybody = attacked(algorithm, Attackers(torch.arange(30)), attack.forged, None)
    (plain,), (turned,) = (list(records(a, WHERE, 1)) for a in (algorithm, everybody))
    assert float(plain.state.prototypes.abs().max()) > 0.1
    torch.testing.assert_close(turned.state.prototypes, factor * plain.state.prototypes)
    assert torch.equal(turned.state.known, plain.state.known)


@pytest.mark.parametrize(("inner", "block"), WAYS)
@pytest.mark.parametrize("add", [False, True])
def test_noise_is_normal_of_each_client_its_own(add, inner, block):
    plain, other, theirs = sent(Noise(share=0, std=0.7, add=add), inner, block)
    base = plain.uploads() if add else T.map(lambda z: z[None], plain.seen[0].origin)
    drawn = T.map(lambda a, b: (a - b)[theirs], other.uploads(), base)
    rows = torch.stack([flat(T.index(drawn, i)) for i in range(int(theirs.sum()))])
    assert abs(float(rows.std()) - 0.7) < 0.05
    assert abs(float(rows.mean())) < 0.05
    assert float(torch.corrcoef(rows).fill_diagonal_(0).abs().max()) < 0.2
    again = sent(Noise(share=0, std=0.7, add=add), "serial", 2)[1].uploads()
    torch.testing.assert_close(flat(again), flat(other.uploads()), rtol=1e-4, atol=1e-5)


def test_no_slot_has_the_noise_of_another_round():
    seeing = Seeing(fedavg())
    list(records(under(Noise(share=0), seeing.algorithm), WHERE, 2))
    one, two = (
        flat(T.map(torch.sub, T.index(seeing.uploads(i), BAD.among(seeing.seen[i].received)), o.origin))
        for i, o in enumerate(seeing.seen)
    )
    assert torch.isin(one, two).double().mean() < 0.01  # by chance


def test_what_layers_count_is_left_as_it_is():
    plain, other, theirs = sent(SignFlip(share=0), "serial", 4, BN)
    assert torch.equal(flat(plain.uploads()["b"]), flat(other.uploads()["b"]))
    assert not torch.equal(flat(plain.uploads()["x"]), flat(other.uploads()["x"]))
    plain, other, theirs = sent(InnerProduct(share=0), "serial", 4, BN)
    for was, is_ in zip(T.leaves(plain.uploads()["b"]), T.leaves(other.uploads()["b"]), strict=True):
        assert torch.equal(is_[~theirs], was[~theirs])
        mean = was[~theirs].double().mean(0).to(was.dtype).expand_as(is_[theirs])
        torch.testing.assert_close(is_[theirs], mean)


def colluding(attack: Any, plain: Seeing, theirs: torch.Tensor) -> np.ndarray:
    """What the attackers send, in numpy and double precision."""
    seen, rows = plain.seen[0], len(theirs)
    each = np.stack([flat(T.index(plain.uploads(), i)).numpy() for i in range(rows)])
    start = 0 if seen.origin is None else flat(seen.origin).numpy()
    known = theirs.numpy() if attack.knows == "attackers" else ~theirs.numpy()
    mine = each[known] - start
    if isinstance(attack, InnerProduct):
        return start - attack.epsilon * mine.mean(0)
    n, m = rows, int(theirs.sum())
    s = n // 2 + 1 - m
    z = max(NormalDist().inv_cdf((n - m - s) / (n - m)), 0) if attack.z == "auto" else attack.z
    return start + mine.mean(0) - z * np.sqrt(((mine - mine.mean(0)) ** 2).mean(0))


TOGETHER = [
    Alie(share=0),
    Alie(share=0, z=1.5),
    Alie(share=0, z=-0.5, knows="honest"),
    InnerProduct(share=0),
    InnerProduct(share=0, epsilon=3.0, knows="attackers"),
]


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@pytest.mark.parametrize("spilled", [0, sys.maxsize])
@pytest.mark.parametrize("attack", TOGETHER, ids=repr)
def test_attackers_agree_on_what_the_papers_say(attack, spilled, name):
    plain, other, theirs = sent(attack, "batched", 3, name=name, spilled_bytes=spilled)
    want = torch.from_numpy(colluding(attack, plain, theirs))
    came = [flat(T.index(other.uploads(), i)) for i in range(len(theirs))]
    for i, attacks in enumerate(theirs.tolist()):
        if attacks:
            torch.testing.assert_close(came[i], want, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(came[i], flat(T.index(plain.uploads(), i)))


def test_a_mean_is_that_of_what_is_sent_and_rules_see_it_tile_by_tile(monkeypatch):
    _, other, _ = sent(Alie(share=0, z=1.5), "serial", 4)
    uploads = other.seen[0].uploads
    weight = uploads.weight / uploads.weight.sum()
    want = sum(w * flat(T.index(other.uploads(), i)) for i, w in enumerate(weight))
    mean = play(under(Alie(share=0, z=1.5), fedavg()), WHERE, 1, policy=Siwer())
    torch.testing.assert_close(flat(mean[0]), want, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr("fedfleet.simulator.arithmetic.upload_matrix._TILE", 50)
    stacked = torch.stack([flat(T.index(other.uploads(), i)) for i in range(len(weight))])
    middle = np.median(stacked.numpy(), axis=0)
    torch.testing.assert_close(flat(uploads.median()), torch.from_numpy(middle), rtol=1e-5, atol=1e-6)
    moved = stacked - flat(other.seen[0].origin)
    torch.testing.assert_close(uploads.gram(other.seen[0].origin), moved @ moved.T, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(uploads.norms(other.seen[0].origin), moved.norm(dim=1), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "attack", [SignFlip(share=0), Noise(share=0, add=True), Alie(share=0, z=1.0), InnerProduct(share=0)]
)
def test_a_run_is_the_same_one_client_at_a_time_and_many_at_once(attack):
    ends = [flat(play(under(attack, fedavg()), WHERE, 3, inner=i, block_size=b, policy=Siwer())[-1]) for i, b in WAYS]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-4, atol=1e-5)
    assert not torch.equal(ends[0], flat(play(fedavg(), WHERE, 3, policy=Siwer())[-1]))


def test_attackers_who_are_not_heard_change_nothing_that_is_sent():
    for attack in (SignFlip(share=0), Alie(share=0, z=2.0)):
        nobody = under(attack, fedavg(), Attackers(torch.tensor([10**6])))
        found, plain = play(nobody, WHERE, 2), play(fedavg(), WHERE, 2)
        torch.testing.assert_close(flat(found[-1]), flat(plain[-1]), rtol=1e-5, atol=1e-6)
        assert attack.colludes or torch.equal(flat(found[-1]), flat(plain[-1]))


def test_what_is_new_of_a_memory_is_no_model_to_attackers_or_to_what_the_server_sends():
    def made(correction: str) -> Algorithm:
        return build("fedavg", WHERE.task, CohortOptions(size=20), steps=2, batch_size=8, correction=correction)

    start, everybody = flat(WHERE.task.init(0)), Attackers(torch.arange(1000))
    for correction in ("none", "fedvarp"):
        algorithm = made(correction)
        ways = (algorithm, under(SignFlip(share=1), algorithm, everybody))
        plain, turned = (flat(play(way, WHERE, 1)[0]) for way in ways)
        torch.testing.assert_close(turned - start, start - plain, rtol=1e-4, atol=1e-6)
        ways = (algorithm, downward(algorithm, (Half(),), memory=False))
        plain, halved = (flat(play(way, WHERE, 3)[-1]) for way in ways)
        torch.testing.assert_close(halved, plain, rtol=0, atol=2e-3)


def test_an_asynchronous_server_is_sent_what_attackers_send():
    algorithm = build("fedbuff", WHERE.task, CohortOptions(), buffer=4, concurrency=8, steps=2, batch_size=7)
    assert Fact.AVERAGED in {b.fact for b in of_algorithm(algorithm, "fedbuff")}
    plain, bad = (list(records(a, WHERE, 3)) for a in (algorithm, under(SignFlip(share=0), algorithm)))
    assert 0 < sum(r.metrics["attackers"] for r in bad) < 3
    assert not torch.equal(*(flat(algorithm.views["global"].params(r[-1].state)) for r in (plain, bad)))


def test_z_max_is_that_of_the_paper():
    law = NormalDist().inv_cdf
    for heard, attackers, z in (
        (50, 24, law(24 / 26)),
        (50, 12, law(24 / 38)),
        (10, 2, 0.0),
        (10, 1, 0.0),
        (10, 7, law(2 / 3)),
    ):
        assert z_max(heard, attackers) == pytest.approx(z, abs=1e-12)
    # Where attackers are most or all: of one of two honest clients, the median of a normal law.
    assert (z_max(10, 8), z_max(10, 9), z_max(10, 10)) == (0.0, 0.0, 0.0)
