"""Learning rates that fall with a client's epochs, and floors below which none falls."""

import math

import pytest
import torch

from fedfleet.algorithms.epochs import name_of
from fedfleet.algorithms.options import CohortOptions, Schedule
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.simulator.author import rng
from tests.algorithms.cases import ASYNCHRONOUS, INVITE, ROWS
from tests.algorithms.harness import Bowl, World, build, digits, flat, play, rows
from tests.algorithms.histories import How, world
from tests.algorithms.test_contract import options_of
from tests.parts import slow_but
from tests.refusals import refused

LR, EPOCHS, ROUNDS = 0.3, 3, 3
BOWL = World(Bowl(), rows([(0.7, 4.0)]))
STEP = {"kind": "step", "every": 2, "factor": 0.5, "by": "epoch"}
BY_HAND = {
    "step": ({**STEP, "floor": 0.2}, [1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2]),
    "power": (
        {"kind": "power", "exponent": 1.0, "over": 2.0, "by": "epoch", "floor": 0.3},
        [max(0.3, 2 / (n + 2)) for n in range(9)],
    ),
    "cosine": (
        {"kind": "cosine", "rounds": 3, "floor": 0.1, "by": "epoch"},
        [0.1 + 0.9 * (1 + math.cos(math.pi * n / 9)) / 2 for n in range(9)],
    ),
}
KEY = "algorithm.lr_schedule.by='epoch'"


@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize("inner", ["serial", "batched", "factored"])
def test_the_rate_is_that_of_the_epoch(kind, inner):
    """A client of one example, whose epoch is a step."""
    given, factors = BY_HAND[kind]
    options = {"epochs": EPOCHS, "batch_size": 1, "lr": LR, "lr_schedule": given}
    found = play(build("fedavg", BOWL.task, CohortOptions(size=1), **options), BOWL, ROUNDS, inner=inner)
    w, hand = 1.0, []
    for n, factor in enumerate(factors):
        w -= LR * factor * 0.7 * (w - 4.0)
        hand += [w] * ((n + 1) % EPOCHS == 0)
    assert [float(z["x"]["w"]) for z in found] == pytest.approx(hand, rel=1e-12)


def test_a_floor_is_what_no_kind_falls_below_and_nothing_if_it_is_none():
    for given in ({"kind": "step", "every": 3}, {"kind": "power"}, {"kind": "cosine", "rounds": 8}):
        plain, floored = Schedule(**given), Schedule(**given, floor=0.5)
        assert Schedule(**given, floor=0.0) == plain.model_copy(update={"floor": 0.0})
        ends = [floored.at(t) for t in range(40)]
        assert min(ends) == pytest.approx(0.5)
        if given["kind"] != "cosine":
            assert ends == [max(0.5, plain.at(t)) for t in range(40)]


@pytest.mark.parametrize("name", slow_but(["fedavg", "fedrep", "scaffold", "fedbuff", "fedga"], "fedrep", "fedbuff"))
def test_epochs_keep_the_contract(name):
    """In all ways to run; with one epoch a round, a round's rate is that of its epoch."""
    where = digits("classification", "quantity_skew", clients=8, dtype=torch.float64, alpha=1.0, min_size=2)
    size = CohortOptions(size=4)
    given = {k: v for k, v in ROWS[name][1].items() if not k.endswith("steps")} | {"batch_size": 40}
    more = {"head_epochs": 1} if name == "fedrep" else {}

    def ends(inner, epochs, **schedule):
        algorithm = build(name, where.task, size, **{**given, **more, "epochs": epochs, "lr_schedule": schedule})
        z = {"x": {k: v.double() for k, v in where.task.init(0)["x"].items()}}
        return flat(play(algorithm, where, 3, z=z, inner=inner)[-1])

    one = ends("serial", 2, **STEP)
    for inner in ("batched", "factored"):
        torch.testing.assert_close(one, ends(inner, 2, **STEP), rtol=1e-9, atol=1e-10)
    rounds = [ends("serial", e, kind="step", every=2, factor=0.5) for e in (1, 2)]
    torch.testing.assert_close(ends("serial", 1, **STEP), rounds[0], rtol=1e-12, atol=1e-12)
    assert float((one - rounds[1]).abs().max()) > 1e-5


def test_who_takes_it_and_who_is_refused(subtests):
    takes = set()
    for name in ROWS:
        kind, fields = name.partition(",")[0], options_of(name)
        if "lr_schedule" not in fields or kind in ("fedsgda", "gt_hsgd"):  # of one step a round
            continue
        options = {k: v for k, v in ROWS[name][1].items() if not k.endswith("steps")} | {"lr_schedule": STEP}

        def make(name=name, kind=kind, options=options):
            return build(kind, world(name, How()).task, CohortOptions(size=INVITE.get(name, 8)), **options)

        with subtests.test(name):
            usual = (
                "client_optimizer" in fields and kind not in ("peravg", "mofedsam", "fedlaavg") and "mifa" not in name
            )
            if not usual:
                refused(make, KEY)
            else:
                assert make().phases
                takes.add(kind)
    assert {"fedavg", "fedpac", "scaffold", "fedga", *ASYNCHRONOUS} <= takes


def test_what_does_not_apply_is_refused():
    for given, line in (
        ({"kind": "constant", "floor": 0.1}, "floor=0.1 is not for constant"),
        ({"kind": "constant", "by": "epoch"}, "by=epoch is not for constant"),
    ):
        with pytest.raises(ValueError, match=line):
            Schedule(**given)
    with pytest.raises(ValueError, match="clients work for steps=3"):
        ALGORITHMS["fedavg"].options(steps=3, lr_schedule=STEP)
    where = digits("classification")
    refused(lambda: build("fedrep", where.task, head_steps=2, epochs=1, lr_schedule=STEP), KEY)
    refused(lambda: build("fedavg", where.task, correction="mifa", lr_schedule=STEP), KEY)


def test_own_models_are_told_what_clients_of_the_round_are():
    algorithm = build("fedavg", BOWL.task, epochs=2, lr=LR, lr_schedule=STEP)
    state = algorithm.init(BOWL.task.init(0), rng.key(0), None)
    told = algorithm.personal.message(state, 1).config
    assert told["lr"] == {"x": pytest.approx(LR / 2)}
    assert [told[name_of(0, e)] for e in (0, 1)] == [1.0, 1.0]
    assert algorithm.personal.work.loops == algorithm.phases[0].work.loops
