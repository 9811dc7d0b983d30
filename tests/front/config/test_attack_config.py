"""The section ``attack``: how it is written, what is refused, and runs with and without."""

from __future__ import annotations

from typing import Any

import pytest

import fedfleet
from fedfleet.commands.plan import describe
from fedfleet.config.schema import complete, load
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.poisoned import Poisoned
from tests.front.experiments.resuming import check_equal

BASE: dict[str, Any] = {
    "rounds": 3,
    "population": {"clients": 20},
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 2},
    "cohort": {"invite": 8, "respond": "siwer"},
    "executor": {"kind": "local", "block_size": 3},
    "evaluation": {"every": 1},
}


def test_nobody_attacks_if_nothing_is_said():
    assert complete(load({}))["attack"] == {"kind": "none"}
    found = load({}, {"attack": {"kind": "sign_flip", "share": 0.2}})
    assert complete(found)["attack"] == {"kind": "sign_flip", "share": 0.2, "clients": None, "scale": 1.0}
    assert load(complete(found)) == load(complete(load(complete(found))))
    assert load(found.model_dump(), ["attack=none"]).attack == {"kind": "none"}


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        ("sign_flipp", "attack.kind='sign_flipp': unknown; did you mean 'sign_flip'?"),
        ({"kind": "sign_flip"}, "who attacks? give share"),
        ({"kind": "sign_flip", "share": 0.1, "clients": [1]}, "and not both"),
        ({"kind": "sign_flip", "share": 1.5}, "attack.share=1.5: input should be less than or equal to 1"),
        ({"kind": "sign_flip", "clients": []}, "attack.clients=[]"),
        ({"kind": "sign_flip", "clients": [1, 1]}, "clients are numbers from 0, each once"),
        ({"kind": "sign_flip", "clients": [-1]}, "clients are numbers from 0, each once"),
        ({"kind": "sign_flip", "share": 0.1, "z": 1}, "attack.z=1: unknown key"),
        ({"kind": "none", "share": 0.1}, "attack.share=0.1: unknown key"),
        ({"kind": "noise", "share": 0.1, "std": 0}, "attack.std=0: input should be greater than 0"),
        ({"kind": "label_flip", "share": 0.1, "source": 1}, "give source and target, or neither"),
        ({"kind": "label_flip", "share": 0.1, "source": 1, "target": 1}, "source and target are both 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(attack, says):
    with pytest.raises(ConfigError) as caught:
        load(BASE, {"attack": attack})
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


HIDDEN = {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0}
COLLUDE = {"kind": "alie", "share": 0.2}
FLIP = {"kind": "label_flip", "share": 0.2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attack": {"kind": "scaled", "share": 0.01}}, "attack.share=0.01: of 20 clients that is nobody"),
        (
            {
                "attack": {"kind": "scaled", "share": 0.1},
                "population": {"dataset": "synthetic", "clients": 20_000_000, "partition": "iid"},
            },
            "attack.share=0.1: drawn of 20,000,000 clients, and up to 10,000,000 may be: give attack.clients",
        ),
        ({"attack": {"kind": "scaled", "clients": [3, 20]}}, "attack.clients=[3, 20]: clients are 0 to 19"),
        ({"attack": COLLUDE, "algorithm": "afl", "domains.kind": "label"}, "clients of afl send none"),
        (
            {"attack": COLLUDE, "algorithm": {"name": "fedbuff"}, "cohort.invite": 10, "cohort.respond": "all"},
            "of fedbuff send none",
        ),
        ({"attack": COLLUDE, "privacy": HIDDEN}, "is not clipped here: leave it or privacy out"),
        ({"attack": COLLUDE, "cohort.late": "keep"}, "attackers know what is sent in this round"),
        ({"attack": COLLUDE, "evaluation.cosines": True}, "evaluation.cosines=true: with attack.kind='alie'"),
        ({"attack": FLIP, "task.name": "auc"}, "measures no accuracy"),
        ({"attack": {**FLIP, "source": 3, "target": 10}}, "attack.target=10: labels are 0 to 9"),
        ({"attack": {"kind": "backdoor", "share": 0.2, "target": 10}}, "attack.target=10: labels are 0 to 9"),
        ({"attack": {"kind": "backdoor", "share": 0.2, "size": 9}}, "attack.size=9: images are 8 x 8 pixels"),
        (
            {"attack": {"kind": "backdoor", "share": 0.2}, "population.dataset": "synthetic"},
            "the pattern is for images",
        ),
        (
            {
                "attack": FLIP,
                "population.dataset": {"name": "digits", "label_domains": True},
                "population.partition": "by_domain",
                "domains": {"target": [8, 9]},
            },
            "clients of domains.target have no labels to poison",
        ),
    ],
)
def test_an_attack_for_which_there_is_no_room_is_refused(changes, says):
    with pytest.raises(ConfigError) as caught:
        fedfleet.Experiment(load(BASE, changes))
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


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


def test_the_last_models_success_is_measured_on_all_test_examples(tmp_path):
    flip = {"attack": {"kind": "label_flip", "share": 0.2}}
    every = fedfleet.run(BASE, flip, out=tmp_path / "every").summary["final"]
    few = fedfleet.run(BASE, {**flip, "evaluation.test_examples": 50}, out=tmp_path / "few").summary["final"]
    assert few["eval/all_attack_success"] == every["eval/attack_success"] != few["eval/attack_success"]
    assert not {"eval/all_attack_loss", "eval/all_attack_accuracy"} & set(few)


def test_chosen_clients_attack_by_whatever_they_hold():
    x = fedfleet.Experiment(load(BASE, {"attack": {"kind": "label_flip", "clients": [7, 2]}}))
    population = x.setup().population
    assert isinstance(population, Poisoned)
    assert population.attackers.clients.tolist() == [2, 7]
    assert not isinstance(x.population, Poisoned)


def test_a_plan_says_who_attacks():
    lines = dict(describe(fedfleet.Experiment(load(BASE, {"attack": {"kind": "scaled", "share": 0.3}}))))
    assert lines["attack"] == "scaled by 6 of 20 clients"
    assert "attack" not in dict(describe(fedfleet.Experiment(load(BASE))))


def test_the_seed_decides_who_attacks():
    def who(seed: int) -> list[int]:
        x = fedfleet.Experiment(load(BASE, {"seed": seed, "attack": {"kind": "scaled", "share": 0.3}}))
        assert x.attack is not None
        return x.attack.attackers.clients.tolist()

    assert who(0) == who(0) != who(1)
    assert len(who(0)) == 6
