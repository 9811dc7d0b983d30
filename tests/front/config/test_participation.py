"""Corrections for unequal participation: what is refused before a run, and what is said."""

from typing import Any

import pytest

import fedfleet
from fedfleet.simulator.fleet.availability import Bernoulli
from tests.refusals import all_refused, refused

BASE: dict[str, Any] = {
    "rounds": 3,
    "population": {"clients": 20, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 8}},
    "task": {"name": "classification", "model": "logistic"},
    "availability": {"kind": "bernoulli", "rate": 0.7},
    "cohort": {"size": 8},
    "executor": {"kind": "local"},
}
HIDDEN: dict[str, Any] = {"privacy": {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0}}
MASKED: dict[str, Any] = {"secure_aggregation": {"clip": 4.0}}


class Silent:
    """A model of availability that does not tell chances."""

    def online(self, key: Any, clients: Any, seconds: Any) -> Any:
        return clients >= 0


def experiment(correction: Any, **given: Any) -> fedfleet.Experiment:
    algorithm = {"name": "fedavg", "steps": 2, "weight": "uniform", "correction": correction}
    return fedfleet.Experiment(fedfleet.load({**BASE, "algorithm": algorithm, **given}))


REFUSED: list[tuple[tuple[Any, dict[str, Any]], str]] = [
    (("known_p", {"cohort": {"size": 8, "wait_for": "siwer"}}), "cohort.wait_for=siwer"),
    (("known_p", {"cohort": {"size": 8, "over_select": 1.5}}), "cohort.over_select=1.5"),
    (("known_p", {"cohort": {"size": 8, "deadline_s": 9.0}}), "cohort.deadline_s=9.0"),
    (({"kind": "fedvarp", "chances": True}, {"cohort": {"size": 8, "wait_for": 4}}), "cohort.wait_for=4"),
    (("known_p", {"cohort": {"size": 8, "late": "keep"}}), "algorithm.correction='known_p': "),
    (("fedau", {"cohort": {"size": 8, "late": "keep"}}), "algorithm.correction='fedau': "),
    (("mifa", {"cohort": {"size": 8, "late": "keep"}}), "algorithm.correction='mifa': "),
    (("known_p", {"selection": "examples"}), "selection.kind='examples'"),
    (({"kind": "fedau", "count": "invitations"}, {"selection": "oort"}), "selection.kind='oort'"),
    (("known_p", {"availability": "tests.front.config.test_participation:Silent"}), "availability: Silent"),
    (("known_p", HIDDEN), "algorithm.correction='known_p': fedavg multiplies"),
    (("fedau", HIDDEN), "algorithm.correction='fedau': fedavg multiplies"),
    (("fedvarp", HIDDEN), "algorithm.correction='fedvarp'"),
    (("known_p", MASKED), "algorithm.correction='known_p': fedavg multiplies"),
    (("mifa", MASKED), "secure_aggregation: what clients send is cut"),
    (("mifa", {"transforms": {"up": ["fp16"]}}), "transforms.up=['fp16']: the server adds up what is left"),
    (({"kind": "mifa", "start": "wait"}, {"rounds": 2}), "algorithm.correction.start='wait'"),
    (({"kind": "mifa", "normalise": True}, {}), "algorithm.correction="),
    (({"kind": "fedau", "cap": 9.0}, {}), "algorithm.correction="),
    (({"kind": "fedvarp", "cap": 9.0}, {}), "algorithm.correction="),
    ((None, {"algorithm": {"name": "scaffold", "correction": "fedau"}}), "algorithm.correction"),
    (
        (None, {"algorithm": {"name": "robust", "of": {"name": "fedavg", "correction": "fedau"}}}),
        "algorithm.of.correction='fedau'",
    ),
    ((None, {"algorithm": {"name": "f3ast", "select": 9}}), "algorithm.select=9"),
    ((None, {"algorithm": {"name": "refl", "select": 9}}), "algorithm.select=9"),
    (
        (
            None,
            {
                "algorithm": {"name": "refl", "select": 4},
                "cohort": {"size": 8, "late": "keep", "stale_discount": 0.9},
            },
        ),
        "cohort.stale_discount=0.9",
    ),
    ((None, {"algorithm": {"name": "refl", "select": 4}, "selection": "oort"}), "selection.kind='oort'"),
    (("none", {"selection": {"kind": "tifl", "tiers": 3}}), "selection.tiers=3"),
    ((None, {"algorithm": {"name": "mimelite", "correction": "fedau"}}), "algorithm: correction is of one mean"),
    ((None, {"algorithm": {"name": "drfa", "correction": "memory"}}), "algorithm: correction='memory'"),
    (({"kind": "fedau", "pool": "domain"}, {}), "algorithm.correction="),
    (({"kind": "fedau", "count": "invitations", "pool": "domain"}, {}), "algorithm.correction.pool='domain'"),
    (
        (None, {"algorithm": {"name": "fednova", "steps": 2, "correction": "known_p"}}),
        "algorithm: correction='known_p'",
    ),
    ((None, {"algorithm": {"name": "fednova", "steps": 2, "correction": "mifa"}}), "algorithm: correction='mifa'"),
    ((None, {"algorithm": {"name": "fedlaavg", "select": 9}}), "algorithm.select=9"),
    *(
        ((None, {"algorithm": {"name": "fedlaavg", "select": 4, "correction": how}}), f"algorithm: correction.{what}")
        for how, what in (
            ("known_p", "kind='known_p'"),
            ({"kind": "fedvarp", "chances": True}, "chances=True"),
            ({"kind": "fedau", "count": "invitations"}, "count='invitations'"),
        )
    ),
    (
        (None, {"algorithm": {"name": "cdma_one", "steps": 2, "weigh_models": True}, "task": "auc"}),
        "algorithm: weigh_models=True",
    ),
]


def test_what_a_correction_does_not_go_with_is_refused(subtests):
    all_refused(subtests, lambda row: experiment(row[0], **row[1]), REFUSED)


def test_who_hears_fewer_than_are_online_is_told_what_else_to_set(subtests):
    given = {"cohort": {"size": 8, "wait_for": 4}}
    afl = {"algorithm": {"name": "afl", "correction": "known_p"}, "domains": "label"}
    rows: list[tuple[Any, dict[str, Any], str]] = [
        ("known_p", {}, "set algorithm.correction.normalise=true"),
        ({"kind": "fedvarp", "chances": True}, {}, "set algorithm.correction.chances=false"),
        (None, afl, "set algorithm.estimator=ratio"),
        (
            None,
            {**afl, "algorithm": {"name": "drfa", "correction": "known_p"}},
            "leave cohort.wait_for or algorithm.correction",
        ),
    ]
    for how, more, fix in rows:
        with subtests.test(fix):
            assert fix in refused(lambda how=how, more=more: experiment(how, **given, **more), "cohort.wait_for=4")


def test_a_client_that_is_never_online_cannot_be_divided_by(monkeypatch):
    def chance(self, clients, seconds, lasting):
        return (clients != 3).double()

    monkeypatch.setattr(Bernoulli, "chance", chance)
    assert "client 3 is heard is 0" in refused(lambda: experiment("known_p"), "availability: the chance")
    experiment("fedvarp")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("known_p", {}), []),
        (
            ("known_p", {"availability": {"kind": "bernoulli", "rate": 0.009}}),
            ["algorithm.correction.cap=100: 20 of", "algorithm.correction='known_p': 20 of the 20"],
        ),
        (
            ({"kind": "known_p", "cap": 1e3}, {"rounds": 1000, "availability": {"kind": "bernoulli", "rate": 0.009}}),
            [],
        ),
        (
            ("mifa", {"rounds": 40, "availability": {"kind": "label_correlated", "rate": 0.5, "strength": 9.0}}),
            ["algorithm.correction='mifa': "],
        ),
        (({"kind": "known_p", "normalise": True}, {"cohort": {"size": 8, "wait_for": "siwer"}}), []),
        (("fedau", {}), ["algorithm.correction.count='intervals': with 8 of 20"]),
        (("fedau", {"cohort": {"size": 12}}), []),
        (({"kind": "fedau", "count": "invitations"}, {}), []),
        (("mifa", {"rounds": 4}), ["algorithm.correction='mifa': clients remember"]),
        *(
            (
                ("known_p", {"availability": kind}),
                ["algorithm.correction='known_p': 20 of the 20 clients"] if rest else [],
            )
            for kind, rest in (
                ({"kind": "sine", "rates": {"kind": "constant", "rate": 0.5}, "below": 0.3}, True),
                ({"kind": "sine", "rates": {"kind": "constant", "rate": 0.5}, "below": 0.1}, False),
                ({"kind": "diurnal", "mean": 0.3, "amplitude": 0.4, "day_s": 20.0}, True),
                ({"kind": "diurnal", "mean": 0.5, "amplitude": 0.4}, False),
            )
        ),
        (("mifa", {"rounds": 8}), []),
        (
            ("mifa", {"rounds": 13, "availability": {"kind": "bernoulli", "rate": 0.1}}),
            ["algorithm.correction='mifa': clients"],
        ),
    ],
)
def test_what_a_correction_will_rarely_do_is_said(given, said):
    lines = experiment(given[0], **{"rounds": 40, **given[1]}).advice()
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))


def test_own_models_are_measured_under_a_correction(tmp_path):
    given = {"algorithm": {"name": "peravg", "steps": 2, "correction": "fedvarp"}, "population.held_out": 0.2}
    config = fedfleet.load(BASE, {**given, "evaluation": {"every": 1, "per_client": True}, "rounds": 2})
    assert "eval/own_accuracy" in fedfleet.run(config, out=tmp_path / "run").summary["final"]
