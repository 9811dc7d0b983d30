"""Whole runs with transforms: what is counted, on the clock, evaluated; where a transform is the algorithm's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fedfleet
from fedfleet.algorithms.fedavg import FedAvgOptions, fedavg
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.errors import ConfigError
from fedfleet.tasks.classification import Classification, ClassificationOptions
from fedfleet.tasks.options import DataShape
from fedfleet.transforms.sparse import TopK

BASE = {
    "rounds": 6,
    "population": {"clients": 20, "held_out": 0.25},
    "task": {"name": "classification", "model": "logistic"},  # 650 floats
    "algorithm": {"name": "scaffold", "steps": 2, "batch_size": 5},
    "cohort": {"invite": 6, "respond": "siwer"},
    "devices": {"kind": "lognormal", "up_mbps": 0.001, "jitter": 0.0},
    "executor": {"kind": "local", "block_size": 3},
    "evaluation": {"every": 3, "per_client": True, "cosines": True},
}
UP = [{"name": "top_k", "share": 0.01, "feedback": True}, {"name": "qsgd", "levels": 7}]
EACH = 2 * (7 + 1), 2 * (7 * 10 + 7 * 4 + 32)
"""Numbers and bits of two slots: seven of 650 floats each, in places of 10 bits, as a sign and one of eight levels, and a norm."""


def test_what_is_counted_is_what_travels_and_slow_uplinks_gain(tmp_path):
    plain = fedfleet.run(BASE, out=tmp_path / "plain")
    small = fedfleet.run(BASE, {"transforms.up": UP}, out=tmp_path / "small")
    heard = small.rounds.heard
    assert (small.rounds.floats_up == heard * EACH[0]).all()
    assert (small.rounds.bytes_up == heard * -(-EACH[1] // 8)).all()
    assert (small.rounds.bytes_down / small.rounds.invited == plain.rounds.bytes_down / plain.rounds.invited).all()
    assert small.summary["virtual_s"] < plain.summary["virtual_s"] / 20
    assert "algorithm/cosine_mean" in small.rounds


@pytest.mark.parametrize("algorithm", ["fedrod", "peravg"])
def test_looking_at_clients_own_models_makes_none_forget_what_it_owes(tmp_path, algorithm):
    given = {"algorithm.name": algorithm, "task.model": "mlp", "evaluation.cosines": False, "transforms.up": UP[:1]}
    run = fedfleet.run(BASE, given, out=tmp_path / "seen")
    assert run.rounds["eval/own_accuracy"].notna().any()
    forgetting = [{"name": "top_k", "share": 0.01}]
    fedfleet.run(BASE, {**given, "transforms.up": forgetting}, out=tmp_path / "forgetting")
    assert (tmp_path / "seen/model.safetensors").read_bytes() != (
        tmp_path / "forgetting/model.safetensors"
    ).read_bytes()


def test_an_algorithm_of_ones_own_may_have_a_transform_that_remembers(tmp_path):
    task = Classification(ClassificationOptions(model="logistic"), DataShape((1, 8, 8), 10))
    built = fedavg(FedAvgOptions(steps=2, batch_size=5), task, CohortOptions(invite=6))
    (phase,) = built.phases
    owing = replace(phase, uplink=(TopK(share=0.01, feedback=True),))
    own = built._replace(phases=(owing,), name="owing")
    given = {k: v for k, v in BASE.items() if k != "algorithm"}
    a = fedfleet.run(given, {"evaluation.cosines": False}, algorithm=own, out=tmp_path / "own")
    b = fedfleet.run(
        BASE,
        {
            "evaluation.cosines": False,
            "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 5},
            "transforms.up": UP[:1],
        },
        out=tmp_path / "configured",
    )
    assert (tmp_path / "own/model.safetensors").read_bytes() == (tmp_path / "configured/model.safetensors").read_bytes()
    assert a.rounds.bytes_up.tolist() == b.rounds.bytes_up.tolist()
    with pytest.raises(ConfigError, match=r"an uplink with feedback: with cohort.late='keep'"):
        fedfleet.run(given, {"cohort.late": "keep"}, algorithm=own, out=tmp_path / "late")
