"""Whole runs with transforms: what is counted, on the clock, evaluated; where a transform is the algorithm's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import fedfleet
from fedfleet.algorithms.fedavg import FedAvgOptions, fedavg
from fedfleet.algorithms.options import CohortOptions
from fedfleet.middleware.compression.codecs.sparse import TopK
from fedfleet.simulator.errors import ConfigError
from fedfleet.tasks.classification import Classification, ClassificationOptions
from fedfleet.tasks.options import DataShape

BASE = {
    "rounds": 6, "population": {"clients": 20, "held_out": 0.25}, "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "scaffold", "steps": 2, "batch_size": 5}, "cohort": {"size": 6, "wait_for": "siwer"},
    "devices": {"kind": "lognormal", "up_mbps": 0.001, "jitter": 0.0}, "executor": {"kind": "local", "block_size": 3},
    "evaluation": {"every": 3, "per_client": True, "cosines": True},
}  # fmt: skip
UP = [{"name": "top_k", "share": 0.01, "error_feedback": True}, {"name": "qsgd", "levels": 7}]
EACH = 2 * (7 + 1), 2 * (7 * 10 + 7 * 4 + 32)
"""Numbers and bits of two slots: seven of 650 floats each, in places of 10 bits, as a sign and one of eight levels, and a norm."""


def test_what_is_counted_is_what_travels_and_slow_uplinks_gain(tmp_path):
    plain = fedfleet.run(BASE, out=tmp_path / "plain")
    small = fedfleet.run(BASE, {"transforms.up": UP}, out=tmp_path / "small")
    heard = small.rounds.completed
    assert (small.rounds.floats_up == heard * EACH[0]).all()
    assert (small.rounds.bytes_up == heard * -(-EACH[1] // 8)).all()
    assert (small.rounds.bytes_down / small.rounds.invited == plain.rounds.bytes_down / plain.rounds.invited).all()
    assert small.summary["virtual_s"] < plain.summary["virtual_s"] / 20
    assert "algorithm/cosine_mean" in small.rounds


DOWN = ["delta", {"name": "top_k", "share": 0.02}]


def test_the_way_down_is_counted_for_each_client(tmp_path):
    off = {"evaluation.per_client": False, "population.held_out": 0.0}
    given = {**off, "transforms.down": DOWN}
    plain = fedfleet.run(BASE, off, out=tmp_path / "plain")
    run = fedfleet.run(BASE, given, out=tmp_path / "run")
    first, *rest = (run.rounds.bytes_down / plain.rounds.bytes_down).tolist()
    assert first == 1.0  # nobody has anything yet
    assert min(rest) < 1.0
    assert max(rest) <= 1.0
    assert run.rounds["algorithm/cosine_mean"].notna().all()


def test_noise_hides_clients_behind_the_servers_own_model(tmp_path):
    """Whether what is sent down is coded or not: with all of it coded, a private run is the private run without."""
    given = {
        "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 5, "weight": "uniform"}, "cohort.wait_for": "all",
        "selection": "poisson", "privacy": {"clip_norm": 0.05, "delta": 1e-3, "noise_multiplier": 0.5},
        "devices": "homogeneous", **dict.fromkeys(("evaluation.per_client", "evaluation.cosines"), False),
        "population.held_out": 0.0,
    }  # fmt: skip
    found = {}
    for name, down in (("plain", []), ("all", ["delta", {"name": "top_k", "share": 1.0}]), ("some", DOWN)):
        fedfleet.run(BASE, {**given, "transforms.down": down}, out=tmp_path / name)
        found[name] = load_file(tmp_path / name / "model.safetensors")
    for name, same in (("all", True), ("some", False)):
        close = [torch.allclose(v, found[name][k], rtol=1e-4, atol=1e-6) for k, v in found["plain"].items()]
        assert all(close) is same


@pytest.mark.parametrize("algorithm", ["fedrod", "peravg"])
def test_looking_at_clients_own_models_makes_none_forget_what_it_owes(tmp_path, algorithm):
    given = {"algorithm.name": algorithm, "task.model": "mlp", "evaluation.cosines": False, "transforms.up": UP[:1]}
    run = fedfleet.run(BASE, given, out=tmp_path / "seen")
    assert run.rounds["eval/own_accuracy"].notna().any()
    forgetting = [{"name": "top_k", "share": 0.01}]
    fedfleet.run(BASE, {**given, "transforms.up": forgetting}, out=tmp_path / "forgetting")
    seen, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("seen", "forgetting"))
    assert seen != other


def test_an_algorithm_of_ones_own_may_have_a_transform_that_remembers(tmp_path):
    task = Classification(ClassificationOptions(model="logistic"), DataShape((1, 8, 8), 10))
    built = fedavg(FedAvgOptions(steps=2, batch_size=5), task, CohortOptions(size=6))
    (phase,) = built.phases
    owing = replace(phase, uplink=(TopK(share=0.01, error_feedback=True),))
    own = built._replace(phases=(owing,), name="owing")
    given = {k: v for k, v in BASE.items() if k != "algorithm"}
    plain = {"evaluation.cosines": False}
    same = {**plain, "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 5}, "transforms.up": UP[:1]}
    a = fedfleet.run(given, plain, algorithm=own, out=tmp_path / "own")
    b = fedfleet.run(BASE, same, out=tmp_path / "configured")
    assert (tmp_path / "own/model.safetensors").read_bytes() == (tmp_path / "configured/model.safetensors").read_bytes()
    assert a.rounds.bytes_up.tolist() == b.rounds.bytes_up.tolist()
    with pytest.raises(ConfigError, match=r"cohort.late='keep'"):
        fedfleet.run(given, {"cohort.late": "keep"}, algorithm=own, out=tmp_path / "late")
