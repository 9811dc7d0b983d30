"""Secure aggregation as it is configured: what is refused before a run, what a plan and a summary say, what goes together."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pandas as pd
import pytest
import torch

import fedfleet
from fedfleet.commands.plan import describe
from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from fedfleet.middleware.secure_aggregation.wrap import _check_sent, costs, most_clients
from fedfleet.simulator.errors import ConfigError, FedfleetError
from tests.refusals import all_refused, refused

BASE: dict[str, Any] = {
    "rounds": 4, "population": {"clients": 40}, "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 5}, "cohort": {"size": 10, "attempts": 40},
    "secure_aggregation": {"bits": 16}, "executor": {"kind": "local", "inner": "serial"}, "evaluation": {"every": 2},
}  # fmt: skip
MODEL = 650  # numbers of the net


def run(tmp_path, name: str = "run", **given: Any) -> Any:
    return fedfleet.run(BASE, {k.replace("__", "."): v for k, v in given.items()}, out=tmp_path / name)


def bits_of(found: Any) -> bytes:
    return (found.folder / "model.safetensors").read_bytes()


def test_the_account_of_a_run_by_hand(tmp_path):
    found = run(tmp_path)
    how = json.loads((found.folder / "summary.json").read_text())["secure_aggregation"]["phases"]["train"]
    # 10 clients, integers up to 2^15 - 1 of either sign: R above 20 * 32767, which is 2^20; weights up to 36: above 720
    assert (how["modulus_bits"], how["weight_bits"], how["weight_bound"]) == (20, 10, 36)
    assert (how["numbers"], how["message_bytes"]) == (MODEL + 1, (20 * MODEL + 10 + 7) // 8)
    up = how["message_bytes"] + 2 * 32 + 9 * 2 * 32 + 10 * 32
    down = 4 * MODEL + 9 * 2 * 32 + 9 * 2 * 32
    assert (found.rounds.bytes_up == 10 * up).all()
    assert (found.rounds.floats_up == 10 * (MODEL + 1)).all()
    assert ((found.rounds.bytes_down - 10 * down) == 10 * 8 * (found.rounds.bytes_down.iloc[0] // 10 - down) / 8).all()
    assert (found.rounds["algorithm/secure_rebuilt"] == 0).all()
    assert (found.rounds["algorithm/secure_clipped"] == 0).all()
    assert found.summary["secure_aggregation"]["protocol"] == "secagg"
    plain = run(tmp_path, "plain", secure_aggregation=None)
    assert (found.rounds.bytes_down - plain.rounds.bytes_down == 10 * 9 * 4 * 32).all()
    assert plain.summary["secure_aggregation"] is None
    assert found.summary["final"]["eval/loss"] == pytest.approx(plain.summary["final"]["eval/loss"], abs=1e-4)


LOST = {
    "clipped": {"secure_aggregation.clip": 1e-6},
    "rounded_to_zero": {"secure_aggregation.clip": 1e6, "secure_aggregation.rounding": "nearest"},
}


@pytest.mark.parametrize("what", [None, *LOST])
def test_a_sum_that_has_little_of_what_clients_send_is_told_once_and_recorded(tmp_path, what):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = fedfleet.run(BASE, LOST.get(what, {}), out=tmp_path / "run", progress=False)
    lines = [str(w.message) for w in told if str(w.message).startswith("secure_aggregation: ")]
    log = found.folder / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    events = [e for e in events if e["event"] == "secure_sum_lost"]
    assert len(lines) == len(events) == (what is not None)
    assert found.summary["secure_aggregation"]["lost"] == (lines[0] if lines else None)
    assert found.summary["bit_exact"]
    if what is None:
        return
    assert 0.5 < events[0][what] <= 1
    assert (events[0]["round"], events[0]["phase"]) == (0, "train")
    longer = fedfleet.resume(found.folder, {"rounds": 5})
    assert longer.summary["secure_aggregation"]["lost"] == lines[0]
    assert log.read_text().count("secure_sum_lost") == 1


def test_a_plan_says_what_it_costs_and_that_it_protects_nobody():
    ring = {"protocol": "secagg_plus", "neighbours": 6}
    x = Experiment(load(BASE, {"cohort.size": 30, "secure_aggregation": ring}))
    told = dict(describe(x))["secure aggregation"]
    for word in ("secagg_plus", "5 of 7 parts", "16 bits a number, 21 masked", "1,708 bytes masked", "672 besides"):
        assert word in told
    assert "gets 768 more" in told
    assert "protects nobody" in told
    assert costs(next(iter(x.algorithm.phases)).secure, 4)["besides_up"] == 2 * 32 + 3 * 64 + 4 * 32
    devices = {"kind": "lognormal", "gflops": 1.0, "gflops_sigma": 0, "latency_s": 0.1}
    given = {"devices": devices, "secure_aggregation.mask_flop": 1e5}
    told = dict(describe(Experiment(load(BASE, given))))["round, median device"]
    x = Experiment(load(BASE, given))
    c = costs(next(iter(x.algorithm.phases)).secure, 10)
    device = x.federation.devices.fleet.of(torch.arange(1))
    links = 8e-6 * (c["besides_down"] / float(device.down_mbps) + c["besides_up"] / float(device.up_mbps))
    wanted = 0.6 + links + 10 * (MODEL + 1) * 1e5 / 1e9
    assert told.endswith(f"exchanges of secure aggregation and masks {wanted:.3g} s")
    plain = dict(describe(Experiment(load(BASE, {**given, "secure_aggregation": None}))))["round, median device"]
    assert "secure" not in plain
    assert load(BASE).model_dump(mode="json")["secure_aggregation"]["threshold"] == 0.67
    assert load(load(BASE).model_dump(mode="json")).secure_aggregation == load(BASE).secure_aggregation


DROPS = {"secure_aggregation.dropout": {"shares": 0.05, "masked": 0.2, "unmasking": 0.05}}


@pytest.mark.parametrize("protocol", [{}, {"protocol": "secagg_plus", "neighbours": 4, "threshold": 0.4}])
def test_masked_in_earnest_a_run_is_the_same_to_the_bit(tmp_path, protocol):
    pytest.importorskip("Crypto", reason="pycryptodome is not installed")
    given = {"secure_aggregation": {"bits": 12, "threshold": 0.5, **protocol}, **DROPS}
    one, other = (
        fedfleet.run(BASE, {**given, "secure_aggregation.execute": e}, out=tmp_path / str(e)) for e in (False, True)
    )
    assert bits_of(one) == bits_of(other)
    assert one.table("phases").drop(columns="train_loss").equals(other.table("phases").drop(columns="train_loss"))
    assert one.rounds["algorithm/secure_rebuilt"].sum() > 0
    assert one.table("phases").failed.sum() > 0


def test_a_run_goes_on_to_the_same_bits_through_void_rounds(tmp_path):
    given = {"secure_aggregation.threshold": 0.8, "rounds": 6, **DROPS}
    whole = fedfleet.run(BASE, given, out=tmp_path / "whole")
    assert whole.table("phases").attempt.max() > 0
    part = fedfleet.run(BASE, {**given, "rounds": 3}, out=tmp_path / "part")
    assert bits_of(fedfleet.resume(part.folder, {"rounds": 6})) == bits_of(whole)


def test_where_too_many_drop_out_every_time_the_run_says_why(tmp_path):
    given = {"secure_aggregation.threshold": 1.0, "secure_aggregation.dropout": {"masked": 0.9}, "cohort.attempts": 2}
    with pytest.raises(FedfleetError, match=r"aborted after masked .*secure_aggregation.threshold.*2 cohorts"):
        fedfleet.run(BASE, given, out=tmp_path / "run")
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (told["status"], "aborted after masked messages" in told["error"]) == ("failed", True)
    phases = pd.read_parquet(tmp_path / "run" / "phases.parquet")
    assert phases.attempt.tolist() == [0, 1]
    assert (phases.bytes_up > 0).all()
    assert (phases.client_steps == 0).all()


TWO = {"steps": 2, "batch_size": 5}
AUC = {"name": "auc", "model": "logistic"}


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": {"name": "scaffold", **TWO}, "secure_aggregation.clip": {"dz": 1.0, "dc": 8.0}},
        {"transforms.up": [{"name": "clip", "norm": 0.5}]},
        {"attack": {"kind": "sign_flip", "share": 0.2, "scale": 4}},
        {"availability": {"kind": "bernoulli", "rate": 0.7}, "cohort.over_select": 1.5},
        {"selection": "poisson"},
        {"devices": "lognormal", "cohort.deadline_s": 60.0},
        {"executor.inner": "factored", "rounds": 14, "executor.block_size": 5},
        {"executor.inner": "batched", "rounds": 14, "executor.block_size": 5, "executor.capture": False},
        {"population": {"dataset": "synthetic", "clients": 1_000_000}, "task.model": "logistic"},
        {"algorithm": {"name": "cdma_ada"}, "task": AUC, "secure_aggregation.clip": {"r": 1.0, "z": 1.0}},
        {"algorithm": {"name": "fedprox", **TWO}, "secure_aggregation.rounding": "nearest"},
    ],
    ids=lambda g: next(iter(g)),
)
@pytest.mark.slow
def test_it_goes_with(tmp_path, given):
    plain = fedfleet.run(BASE, {**given, "secure_aggregation": None}, out=tmp_path / "plain")
    found = fedfleet.run(BASE, {**given, "secure_aggregation.bits": 24}, out=tmp_path / "run")
    assert found.summary["status"] == "finished"
    assert found.rounds.completed.tolist() == plain.rounds.completed.tolist()
    assert found.summary["final"] == pytest.approx(plain.summary["final"], abs=2e-3)
    assert (found.rounds.virtual_s > plain.rounds.virtual_s).all()


PRIVATE = {
    "algorithm.weight": "uniform",
    "privacy": {"clip_norm": 0.5, "delta": 1e-3, "noise_multiplier": 1.1},
    "secure_aggregation.rounding": "toward_zero",
}


def test_noise_of_the_servers_goes_with_numbers_that_rounding_makes_no_longer(tmp_path):
    found = fedfleet.run(BASE, PRIVATE, out=tmp_path / "run")
    assert found.summary["privacy"]["accounting"] == "participation"
    plain = fedfleet.run(BASE, {**PRIVATE, "secure_aggregation": None}, out=tmp_path / "plain")
    assert found.summary["privacy"]["epsilon"] == plain.summary["privacy"]["epsilon"]
    assert found.summary["final"]["eval/loss"] == pytest.approx(plain.summary["final"]["eval/loss"], abs=1e-2)


COLLUDE = {"kind": "alie", "share": 0.2, "z": 1.0}
OWED = {"name": "top_k", "share": 0.1, "error_feedback": True}
RING = {"protocol": "secagg_plus", "neighbours": 3}
REFUSED = [
    ({"algorithm": {"name": "robust", "rule": "median"}}, "secure_aggregation: robust keeps what each client sends"),
    ({"algorithm": {"name": "omg"}}, "secure_aggregation: omg keeps what each client sends"),
    ({"algorithm": "fedbuff"}, "secure_aggregation: fedbuff is asynchronous"),
    ({"algorithm": {"name": "drfa"}, "domains": {"kind": "label"}}, "secure_aggregation: drfa adds up slot 'loss'"),
    ({"cohort.late": "keep"}, "cohort.late='keep'"),
    ({"faults.non_finite": "drop_client"}, "faults.non_finite='drop_client'"),
    ({"faults.non_finite": "keep"}, "faults.non_finite='keep'"),
    ({"faults.on_client_error": "drop_client"}, "faults.on_client_error='drop_client'"),
    ({"selection": "oort"}, "selection.kind='oort'"),
    ({"selection": "power_of_choice"}, "selection.kind='power_of_choice'"),
    ({"evaluation.cosines": True}, "secure_aggregation: the server sees a sum alone, and evaluation.cosines"),
    ({"attack": COLLUDE}, "secure_aggregation: the server sees a sum alone, and attack.kind='alie'"),
    ({"transforms.down": ["bf16"]}, "transforms.down=['bf16']"),
    ({"transforms.up": ["sign"]}, "transforms.up[0].name='sign'"),
    ({"transforms.up": [{"name": "clip", "norm": 1.0}, "fp16"]}, "transforms.up[1].name='fp16'"),
    ({"transforms.up": [OWED]}, "transforms.up[0].name='top_k'"),
    ({"secure_aggregation.clip": {"q": 1.0}}, "secure_aggregation.clip"),
    ({"algorithm": {"name": "scaffold", "steps": 2, "batch_size": 5}}, "secure_aggregation.clip=1"),
    ({"secure_aggregation.most_clients": 2}, "secure_aggregation.most_clients=2"),
    ({"secure_aggregation.clip": {}}, "secure_aggregation.clip"),
    ({"secure_aggregation.clip": 0}, "secure_aggregation.clip"),
    ({"secure_aggregation.bits": 1}, "secure_aggregation.bits=1"),
    ({"secure_aggregation.threshold": 1.1}, "secure_aggregation.threshold=1.1"),
    ({"secure_aggregation.protocol": "secagg_plus"}, "secure_aggregation={'bits': 16, 'protocol': 'secagg_plus'}"),
    ({"secure_aggregation.neighbours": 4}, "secure_aggregation={'bits': 16, 'neighbours': 4}: neighbours"),
    ({"secure_aggregation": RING}, "secure_aggregation.neighbours=3"),
    ({"secure_aggregation.dropout.masked": 1.0}, "secure_aggregation.dropout.masked=1.0"),
    ({"secure_aggregation.execute": True, "cohort.size": 65, "population.clients": 80}, "secure_aggregation.execute=true"),
    ({**PRIVATE, "privacy.adaptive": {"count_noise": 3.0}}, "secure_aggregation: the server sees a sum alone, and privacy.adap"),
    ({**PRIVATE, "privacy.noise": "clients", "cohort.min_responses": 4}, "secure_aggregation: what clients send is cut"),
    ({**PRIVATE, "secure_aggregation.rounding": "nearest"}, "secure_aggregation.rounding='nearest'"),
    ({**PRIVATE, "selection": "poisson", "privacy.accounting": "poisson"}, "privacy.accounting='poisson'"),
]  # fmt: skip


def test_what_is_no_sum_is_refused(subtests):
    all_refused(subtests, lambda given: Experiment(load(BASE, given)), REFUSED)
    many = {"secure_aggregation.max_weight": 2**40, "secure_aggregation.most_clients": 2**20}
    said = refused(lambda: Experiment(load(BASE, many)), "secure_aggregation.bits=16")
    assert "take 62 bits" in said
    assert "52" in said


def test_whole_numbers_have_no_range_and_a_poisson_cohort_may_be_larger_than_what_is_invited():
    sent = {"z": {"x": torch.zeros(2), "b": {"seen": torch.zeros(1, dtype=torch.int64)}}}
    with pytest.raises(ConfigError, match=r"send whole numbers \(z.b.seen\)"):
        _check_sent(load(BASE).secure_aggregation, "mine", {"train": sent}, {"z"})
    assert most_clients(15, "uniform") == 15
    assert most_clients(10, "poisson") == 52
    assert most_clients(1, "uniform") == 2
