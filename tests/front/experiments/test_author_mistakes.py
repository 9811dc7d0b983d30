"""Mistakes that authors make most often, each refused in a line that says what to write in its place."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedfleet
from fedfleet.assembly.user_parts import check_algorithm
from fedfleet.author import Algorithm, BatchPlan, LocalLoop, LocalWork, Mean, Message, Phase, T, View
from tests.refusals import tells


def algorithm(**changed: Any) -> Algorithm:
    """FedAvg, with some of its functions changed."""
    own = {
        "step": lambda ops, s, z, b, at, key: ops.step("train", z, 0.1, ops.grad("train", z, b, key)[0]),
        "final": lambda s, c, i, z: (Message(send={"z": z}), c),
        "round": lambda phase, z, rnd: (
            rnd.map_reduce(phase, shared=Message(send={"z": z}), cohort=rnd.invite(3))["z"],
            {},
        ),
        "state": None,
    } | changed
    work = LocalWork(
        client_init=lambda s, c, i, key: s["z"],
        loops=(LocalLoop(step=own["step"], batches=BatchPlan(size=5, steps=2)),),
        client_final=own["final"],
    )
    phase = Phase(name="train", work=work, reduce={"z": Mean()}, client_state=own["state"])
    views = {"global": View(lambda z: z)}
    return Algorithm(lambda z, key, problem: z, lambda z, rnd: own["round"](phase, z, rnd), (phase,), views, name="own")


MISTAKES = {
    "no slot 'change' was reduced, only z": {
        "round": lambda phase, z, rnd: (
            rnd.map_reduce(phase, shared=Message(send={"z": z}), cohort=rnd.invite(3))["change"],
            {},
        )
    },
    "a client's state is None where Phase.client_state makes none": {
        "step": lambda ops, s, z, b, at, key: T.add(z, None)
    },
    "slot z has an int: send tensors": {"final": lambda s, c, i, z: (Message(send={"z": 1}), c)},
    "direction, _ = ops.grad": {
        "step": lambda ops, s, z, b, at, key: ops.step("train", z, 0.1, ops.grad("train", z, b, key))
    },
    "trees are combined by T": {"step": lambda ops, s, z, b, at, key: 0.1 * z},
    "client_final returned a Message": {"final": lambda s, c, i, z: Message(send={"z": z})},
    "return Message(send=": {"final": lambda s, c, i, z: ({"z": z}, c)},
    "give Phase.client_state": {"final": lambda s, c, i, z: (Message(send={"z": z}), z)},
    "a client's state is a tree of tensors": {"state": lambda shared: 0.0},
    "the algorithm's round returned a dict": {
        "round": lambda phase, z, rnd: rnd.map_reduce(phase, shared=Message(send={"z": z}), cohort=rnd.invite(3))["z"]
    },
    "give Message(send=": {
        "round": lambda phase, z, rnd: (rnd.map_reduce(phase, shared={"z": z}, cohort=rnd.invite(3))["z"], {})
    },
    "give rnd.invite(size)": {
        "round": lambda phase, z, rnd: (rnd.map_reduce(phase, shared=Message(send={"z": z}), cohort=3)["z"], {})
    },
}


def test_each_mistake_is_told_how_to_mend_it(tmp_path: Path, subtests: pytest.Subtests):
    config = {"rounds": 1, "population.clients": 10, "executor.kind": "local"}
    for i, (text, changed) in enumerate(MISTAKES.items()):
        with subtests.test(text), pytest.raises((ValueError, fedfleet.ClientError)) as found:
            fedfleet.run(config, algorithm=algorithm(**changed), out=tmp_path / str(i))
        assert text in str(found.value)
        assert "vmap" not in str(found.value)  # nothing of the first attempt, as a block
    with pytest.raises(ValueError, match="steps=0"):
        BatchPlan(size=5, steps=0)


def test_a_state_that_is_asked_for_is_kept(tmp_path: Path):
    count = {
        "state": lambda shared: {"rounds": torch.zeros(())},
        "final": lambda s, c, i, z: (Message(send={"z": z}), T.map(lambda n: n + 1, c)),
    }
    run = fedfleet.run(
        {"rounds": 1, "population.clients": 10, "executor.kind": "local"},
        algorithm=algorithm(**count),
        out=tmp_path / "run",
    )
    assert run.summary["status"] == "finished"


def test_a_default_cohort_is_no_mistake_of_an_algorithm_that_asks_nobody():
    config = fedfleet.load({"population.clients": 4, "executor.kind": "local"})
    made = fedfleet.Experiment(config, algorithm=algorithm(round=lambda phase, z, rnd: (z, {})))
    assert made.config.cohort.size == 4
    assert not made.advice()


def test_what_an_algorithm_is_made_of_is_looked_at_before_it_runs(subtests: pytest.Subtests):
    whole = algorithm()
    wrong = {
        "phases=(train,)": whole._replace(phases=whole.phases[0]),
        "views={'global': View(": whole._replace(views={"global": lambda z: z}),
        "no view 'global'": whole._replace(views={"mean": View(lambda z: z)}),
    }
    for text, given in wrong.items():
        with subtests.test(text):
            tells(lambda given=given: check_algorithm(given), f"^algorithm=own … {text}")
