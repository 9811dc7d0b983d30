"""The section ``attack``: how it is written, what is refused, and runs with and without."""

from __future__ import annotations

from typing import Any

import pytest

import fedfleet
from fedfleet.commands.plan import describe
from fedfleet.config.schema import load
from fedfleet.middleware.attacks.poisoned import Poisoned
from tests.front.experiments.resuming import check_equal
from tests.refusals import all_refused

BASE: dict[str, Any] = {
    "rounds": 3, "population": {"clients": 20}, "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 2}, "cohort": {"size": 8, "wait_for": "siwer"},
    "executor": {"kind": "local", "block_size": 3}, "evaluation": {"every": 1},
}  # fmt: skip


def test_nobody_attacks_if_nothing_is_said():
    assert load({}).model_dump(mode="json")["attack"] == {"kind": "none"}
    found = load({}, {"attack": {"kind": "sign_flip", "share": 0.2}})
    assert found.model_dump(mode="json")["attack"] == {"kind": "sign_flip", "share": 0.2, "clients": None, "scale": 1.0}
    assert load(found.model_dump(mode="json")) == found
    assert load(found.model_dump(), ["attack=none"]).attack.kind == "none"
    assert load({}, {"attack": {"kind": "sign_flip", "clients": [0, 3]}}).attack.clients == (0, 3)


HIDDEN = {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0}
COLLUDE = {"kind": "alie", "share": 0.2}
FLIP = {"kind": "label_flip", "share": 0.2}
BACKDOOR = {"kind": "backdoor", "share": 0.2}
MANY = {"dataset": "synthetic", "clients": 20_000_000, "partition": "iid"}
ASYNC = {"cohort.size": 10, "cohort.wait_for": "all"}
DIGITS = {"name": "digits", "label_domains": True}
TARGET = {"population.dataset": DIGITS, "population.partition": "by_domain", "domains.target": [8, 9]}
WRITTEN = [
    ("sign_flipp", "attack.kind='sign_flipp': unknown; did you mean 'sign_flip'?"),
    ({"kind": "sign_flip"}, "attack: who attacks?"),
    ({"kind": "sign_flip", "share": 0.1, "clients": [1]}, "attack: who attacks?"),
    ({"kind": "sign_flip", "share": 1.5}, "attack.share=1.5"),
    ({"kind": "sign_flip", "clients": []}, "attack.clients=[]"),
    ({"kind": "sign_flip", "clients": [1, 1]}, "attack: clients"),
    ({"kind": "sign_flip", "clients": [-1]}, "attack: clients"),
    ({"kind": "sign_flip", "share": 0.1, "z": 1}, "attack.z=1"),
    ({"kind": "none", "share": 0.1}, "attack.share=0.1"),
    ({"kind": "noise", "share": 0.1, "std": 0}, "attack.std=0"),
    ({"kind": "label_flip", "share": 0.1, "source": 1}, "attack: give source and target"),
    ({"kind": "label_flip", "share": 0.1, "source": 1, "target": 1}, "attack: source and target are both 1"),
]
NO_ROOM = [
    ({"attack": {"kind": "scaled", "share": 0.01}}, "attack.share=0.01"),
    ({"attack": {"kind": "scaled", "share": 0.1}, "population": MANY}, "attack.share=0.1"),
    ({"attack": {"kind": "scaled", "clients": [3, 20]}}, "attack.clients=[3, 20]"),
    ({"attack": COLLUDE, "algorithm": "afl", "domains.kind": "label"}, "attack.kind='alie': afl averages no models"),
    ({"attack": COLLUDE, "algorithm": "fedbuff", **ASYNC}, "attack.kind='alie': fedbuff averages no models"),
    ({"attack": COLLUDE, "privacy": HIDDEN, "algorithm.weight": "uniform"}, "attack.kind='alie': attackers send what they"),
    ({"attack": COLLUDE, "cohort.late": "keep"}, "cohort.late='keep': a late answer counts in a later round"),
    ({"attack": COLLUDE, "evaluation.cosines": True}, "attack.kind='alie': attackers send what they"),
    ({"attack": FLIP, "task.name": "auc"}, "attack.kind='label_flip': the task measures no accuracy"),
    ({"attack": {**FLIP, "source": 3, "target": 10}}, "attack.target=10"),
    ({"attack": {**BACKDOOR, "target": 10}}, "attack.target=10"),
    ({"attack": {**BACKDOOR, "size": 9}}, "attack.size=9"),
    ({"attack": BACKDOOR, "population.dataset": "synthetic"}, "attack.kind='backdoor': "),
    ({"attack": FLIP, **TARGET}, "domains.target=(8, 9): clients of these domains have no labels"),
]  # fmt: skip


def test_what_is_wrong_or_has_no_room_is_refused(subtests):
    all_refused(subtests, lambda attack: load(BASE, {"attack": attack}), WRITTEN)
    all_refused(subtests, lambda changes: fedfleet.Experiment(load(BASE, changes)), NO_ROOM)


@pytest.mark.parametrize("kind", ["sign_flip", "alie", "backdoor"])
def test_with_a_share_of_nobody_a_run_is_the_one_without(kind, tmp_path):
    plain = fedfleet.run(BASE, out=tmp_path / "plain")
    nobody = fedfleet.run(BASE, {"attack": {"kind": kind, "share": 0}}, out=tmp_path / "nobody")
    check_equal(plain.folder, nobody.folder)


def test_attackers_and_their_success_are_in_the_tables(tmp_path):
    run = fedfleet.run(BASE, {"attack": {"kind": "backdoor", "share": 0.5, "target": 3}}, out=tmp_path / "run")
    assert {"eval/accuracy", "eval/attack_success", "algorithm/attackers"} <= set(run.rounds)
    assert "eval/attack_loss" not in run.rounds
    assert (run.rounds["algorithm/attackers"] > 0).any()
    assert run.summary["best"]["eval/attack_success"] == min(
        run.summary["initial"]["eval/attack_success"], *run.rounds["eval/attack_success"]
    )
    flips = fedfleet.run(BASE, {"attack": {"kind": "sign_flip", "share": 0.5}}, out=tmp_path / "flips")
    assert "eval/attack_success" not in flips.rounds
    # The last model's is measured on all test examples.
    flip = {"attack": {"kind": "label_flip", "share": 0.2}}
    every = fedfleet.run(BASE, flip, out=tmp_path / "every").summary["final"]
    few = fedfleet.run(BASE, {**flip, "evaluation.test_examples": 50}, out=tmp_path / "few").summary["final"]
    assert few["eval/all_attack_success"] == every["eval/attack_success"] != few["eval/attack_success"]
    assert not {"eval/all_attack_loss", "eval/all_attack_accuracy"} & set(few)


def test_chosen_clients_attack_by_whatever_they_hold_and_a_plan_says_who_attacks():
    x = fedfleet.Experiment(load(BASE, {"attack": {"kind": "label_flip", "clients": [7, 2]}}))
    population = x.setup().population
    assert isinstance(population, Poisoned)
    assert population.attackers.clients.tolist() == [2, 7]
    assert not isinstance(x.population, Poisoned)
    lines = dict(describe(fedfleet.Experiment(load(BASE, {"attack": {"kind": "scaled", "share": 0.3}}))))
    assert lines["attack"] == "scaled by 6 of 20 clients"
    assert "attack" not in dict(describe(fedfleet.Experiment(load(BASE))))


def test_the_seed_decides_who_attacks():
    config = [load(BASE, {"seed": seed, "attack": {"kind": "scaled", "share": 0.3}}) for seed in (0, 0, 1)]
    one, again, other = (fedfleet.Experiment(c).attack.attackers.clients.tolist() for c in config)
    assert one == again != other
    assert len(one) == 6
