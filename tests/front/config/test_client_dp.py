"""Promises of privacy: reckoned as other accountants do, noise found, runs that end in time, and what is refused before."""

from __future__ import annotations

import json
import math
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from prv_accountant.dpsgd import DPSGDAccountant
from safetensors.torch import load_file

import fedfleet
from fedfleet.commands.plan import describe
from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from fedfleet.middleware.privacy import accounting
from fedfleet.middleware.privacy.noise import Ledger
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.fleet.selection import RoundRobin
from tests.parts import slow_but
from tests.refusals import all_refused

BASE: dict[str, Any] = {
    "rounds": 6, "population": {"clients": 40}, "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 5, "weight": "uniform"}, "cohort": {"size": 10},
    "selection": "poisson", "privacy": {"clip_norm": 0.5, "delta": 1e-3, "noise_multiplier": 1.1},
    "executor": {"kind": "local", "inner": "serial"}, "evaluation": {"every": 2},
}  # fmt: skip
SAMPLED = [(0.01, 1.0, 1500, 1e-6), (0.1, 2.0, 200, 1e-6), (0.2, 0.8, 20, 1e-3), (0.05, 0.6, 100, 1e-5)]
SAMPLED += [(0.5, 4.0, 50, 1e-4)]
FINER = [
    (0.001, 0.7, 400, 1e-6), (0.02, 0.9, 300, 1e-5), (0.1, 1.2, 60, 1e-4), (0.3, 3.0, 40, 1e-3), (0.75, 2.5, 8, 1e-5),
]  # fmt: skip
KNOWN = [(1.0, 1.0, 1e-5), (2.0, 7.0, 1e-3), (0.7, 3.3, 1e-6), (9.0, 40.0, 1e-4), (4.0, 1.0, 1e-2)]
WHOLE = [(0.5, 1, 1e-3), (1.3, 4, 1e-4), (3.0, 25, 1e-5), (6.0, 9, 1e-6), (12.0, 100, 1e-2)]  # z, times heard, delta


def asked(event: Any, times: int, delta: float) -> float:
    """Epsilon by dp-accounting asked directly, of steps five times as fine and composed one by one."""
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=2e-4)
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, times)).get_epsilon(delta)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "z", "exchanges", "delta"), FINER)
def test_poisson_sampling_is_reckoned_as_by_finer_distributions_and_never_as_less(rate, z, exchanges, delta):
    exact = asked(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)), exchanges, delta)
    assert exact <= accounting.of_sampling(z, rate, exchanges, delta) <= exact * 1.0005


@pytest.mark.parametrize(("z", "times", "delta"), WHOLE)
def test_known_participation_is_reckoned_as_so_many_gaussian_mechanisms(z, times, delta):
    exact = asked(dp_accounting.GaussianDpEvent(z), times, delta)
    assert accounting.of_participation(z, float(times), delta) == pytest.approx(exact, rel=1e-7)
    assert accounting.of_parts(((z, 1.0, times),), delta) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize(("rate", "z", "exchanges", "delta"), SAMPLED)
def test_sampled_exchanges_are_reckoned_as_by_two_other_accountants(rate, z, exchanges, delta):
    found = accounting.of_sampling(z, rate, exchanges, delta)
    other = DPSGDAccountant(z, rate, exchanges, eps_error=0.02, delta_error=delta / 1000)
    low, _, high = other.compute_epsilon(delta, exchanges)
    assert low <= found <= high + 0.001
    renyi = RdpAccountant()
    renyi.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)), exchanges)
    assert found <= renyi.get_epsilon(delta) <= 1.3 * found
    assert accounting.of_sampling(z, rate, 0, delta) == 0


@pytest.mark.parametrize(("z", "spent", "delta"), KNOWN)
def test_known_participation_is_reckoned_as_by_the_closed_form_and_by_composition(z, spent, delta):
    found = accounting.of_participation(z, spent, delta)
    mu = math.sqrt(spent) / z
    normal = lambda x: math.erfc(-x / math.sqrt(2)) / 2  # noqa: E731
    gaussian = lambda e: normal(-e / mu + mu / 2) - math.exp(e) * normal(-e / mu - mu / 2)  # noqa: E731
    assert gaussian(0.0) <= delta if found == 0 else gaussian(found) == pytest.approx(delta, rel=1e-6)
    pld = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    pld.compose(dp_accounting.GaussianDpEvent(z / math.sqrt(spent)))
    assert found == pytest.approx(pld.get_epsilon(delta), abs=2e-3)
    assert accounting.of_participation(z, 0.0, delta) == 0


@pytest.mark.slow
def test_the_noise_of_a_published_setting_is_found():
    """CIFAR10 in pfl-research: noise for cohorts of 1,000 of a million clients, 1,500 rounds, (2, 10^-6)."""
    z = accounting.least_multiplier(2.0, lambda z: accounting.of_sampling(z, 1e-3, 1500, 1e-6))
    drawn = lambda z: dp_accounting.PoissonSampledDpEvent(1e-3, dp_accounting.GaussianDpEvent(z))  # noqa: E731
    finer = lambda: dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)  # noqa: E731
    event = lambda z: dp_accounting.SelfComposedDpEvent(drawn(z), 1500)  # noqa: E731
    exact = dp_accounting.calibrate_dp_mechanism(finer, event, 2.0, 1e-6)
    assert exact <= z * (1 + 1e-6) <= exact * 1.0011
    found = accounting.of_sampling(0.05, 0.5, 10, 1e-3)  # hardly any noise is reckoned, too
    assert 100 < found <= accounting.of_participation(0.05, 10, 1e-3) * 1.1
    assert accounting.of_sampling(1e-6, 0.5, 10, 1e-3) > 1e9
    assert 0.61615 <= z <= 0.61615 * 1.001  # what pfl-research's own accountant says of privacy loss distributions


def run(tmp_path, **given: Any) -> Any:
    return fedfleet.run(BASE, {k.replace("__", "."): v for k, v in given.items()}, out=tmp_path / "run")


def test_what_is_spent_is_a_column_and_told_in_the_end(tmp_path):
    found = run(tmp_path, availability={"kind": "bernoulli", "rate": 0.6})
    spent = found.rounds["eval/epsilon_spent"].dropna().tolist()
    assert spent == [accounting.of_sampling(1.1, 0.25, t, 1e-3) for t in (2, 4, 6)]
    assert (found.rounds["algorithm/noise_std"] == 1.1 * 0.5 / 10).all()
    told = json.loads((found.folder / "summary.json").read_text())["privacy"]
    assert told["epsilon"] == spent[-1]
    assert (told["accounting"], told["sampling_rate"], told["exchanges"], told["budget"]) == ("poisson", 0.25, 6, None)
    assert found.summary["initial"]["eval/epsilon_spent"] == 0
    report = fedfleet.write_report([found.folder], tmp_path / "report").read_text()
    assert "epsilon spent" in report
    assert "delta 0.001, poisson" in report
    assert "final epsilon_spent" not in report


def test_a_round_in_which_nobody_was_asked_counts_as_any(tmp_path):
    found = run(tmp_path, cohort__size=1, rounds=8, evaluation__cosines=True)
    assert found.rounds.completed.min() == 0
    assert (found.rounds["algorithm/noise_std"] == 1.1 * 0.5).all()
    assert found.summary["privacy"]["exchanges"] == 8
    assert found.table("phases").attempt.max() == 0


TURNS = {"selection": "round_robin"}
OWN_NOISE = {"privacy.noise": "clients", "cohort.min_responses": 4}


@pytest.mark.parametrize("given", [
    {}, TURNS, {**TURNS, "privacy.bands": 3}, {**TURNS, "cohort.size": 16},
    {**TURNS, "cohort.size": 30, "privacy.bands": 2}, {**TURNS, **OWN_NOISE},
    {**TURNS, **OWN_NOISE, "availability": {"kind": "bernoulli", "rate": 0.5}},
    {"cohort.size": 40, "selection": "uniform"},
])  # fmt: skip
@pytest.mark.slow
def test_noise_is_found_so_that_all_rounds_stay_within_epsilon_and_no_more(tmp_path, given):
    wanted = {"privacy.noise_multiplier": None, "privacy.epsilon": 5.0}
    x = Experiment(load(BASE, {**wanted, **given}))
    told = x.run(tmp_path / "run").summary
    assert (told["status"], told["rounds"]) == ("finished", 6)
    assert told["privacy"]["epsilon"] <= 5
    if given.get("privacy.noise") != "clients":  # which is more where more are heard than the fewest
        assert told["privacy"]["epsilon"] > 4.98


@pytest.mark.parametrize(("clients", "invite"), [(40, 10), (40, 16), (40, 30), (7, 3), (5, 5), (7, 4)])
@pytest.mark.parametrize("bands", [1, 4])
def test_what_the_client_asked_most_may_have_spent_is_that_of_everybody_asked_in_turn(clients, invite, bands):
    given = {"cohort.size": invite, "population.clients": clients, "selection": "round_robin", "privacy.bands": bands}
    x = Experiment(load(BASE, {"rounds": 23, "privacy.delta": 1e-3, **given}))
    ledger, most, selection = Ledger.nothing(), [0.0], RoundRobin(3)
    state = selection.init()
    for _ in range(23):
        asked, state = selection.invite(state, rng.key(0), invite, x.problem, replace=False)
        ledger = ledger.after(asked, x.promises[0].inverse)
        most.append(ledger.most())
    assert x.promises[0].worst == pytest.approx(most)


class Told(fedfleet.Callback):
    def __init__(self, said: list[str]):
        self.said = said

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("selection", slow_but(["poisson", "uniform", "round_robin"], "poisson"))
def test_a_run_ends_before_the_round_that_could_spend_too_much(tmp_path, selection):
    found = run(tmp_path, selection=selection, privacy__epsilon=4.0, rounds=60)
    told = found.summary
    assert told["status"] == "stopped"
    assert 0 < told["rounds"] < 60
    assert told["privacy"]["epsilon"] <= 4
    assert found.rounds["eval/epsilon_spent"].iloc[-1] == told["privacy"]["epsilon"]
    said: list[str] = []
    fedfleet.resume(found.folder, callbacks=Told(said))
    assert "another could spend more than privacy.epsilon" in said[0]
    again = fedfleet.resume(found.folder, {"rounds": 70}).summary
    assert (again["status"], again["rounds"]) == ("stopped", told["rounds"])
    more = told["privacy"]["spent_most"]
    if selection == "poisson":
        assert accounting.of_sampling(1.1, 0.25, told["rounds"] + 1, 1e-3) > 4
    else:
        assert accounting.of_participation(1.1, more + 1, 1e-3) > 4


def test_compression_and_privacy_go_together(tmp_path):
    up = [{"name": "top_k", "share": 0.1, "error_feedback": True}]
    found = run(tmp_path, transforms__up=up, privacy__adaptive={"quantile": 0.6, "count_noise": 2.0})
    assert (found.rounds.floats_up == 65 * found.rounds.completed).all()
    norms = found.rounds["algorithm/clip_norm"].tolist()
    assert norms[0] == 0.5
    assert len(set(norms)) == 6
    assert found.summary["privacy"]["clip_norm"] not in norms
    z = found.summary["privacy"]["noise_multiplier_of_messages"]
    assert z == pytest.approx((1.1**-2 - 4.0**-2) ** -0.5)


OWN = {"population.held_out": 0.2, "evaluation.per_client": True}
AMPLIFIED = {"privacy.accounting": "poisson"}
FOUND = {"privacy.noise_multiplier": None, "privacy.epsilon": 3}
REFUSED = [
    ({"privacy.delta": 0.025}, "privacy.delta=0.025"),
    ({"privacy.noise_multiplier": None}, "privacy={"),
    ({"privacy.clip_norm": 0}, "privacy.clip_norm=0"),
    ({"algorithm.weight": "num_examples"}, "algorithm.weight='num_examples'"),
    ({"algorithm": {"name": "scaffold"}}, "privacy: clients of scaffold send dz, dc"),
    ({"algorithm": {"name": "fedbuff"}, "cohort.size": 10, "selection": "uniform"}, "privacy: fedbuff is asynchronous"),
    ({"algorithm": {"name": "omg", "of": {"name": "fedavg", "weight": "uniform"}}}, "privacy: omg does not say that the mean"),
    ({"algorithm": {"name": "fedas"}, "task.model": "mlp", **OWN}, "privacy: fedas weighs"),
    ({"task.model": "cnn_bn"}, "task.name='classification': its net has layers of statistics (BatchNorm)"),
    ({"selection": "oort"}, "selection.kind='oort'"),
    ({"selection": "examples"}, "selection.kind='examples'"),
    ({"cohort.late": "keep", "selection": "uniform"}, "cohort.late='keep'"),
    ({"stop_if_diverged": "not_finite"}, "stop_if_diverged=not_finite"),
    ({"privacy.noise": "clients", "transforms.up": ["sign"]}, "transforms.up=['sign']: it changes"),
    ({"faults.non_finite": "keep"}, "faults.non_finite='keep'"),
    ({"patience": {"metric": "eval/train_loss"}, "evaluation.train_examples": 9}, "patience.metric='eval/train_loss'"),
    ({"until": "eval/train_loss=0.1", "evaluation.train_examples": 9}, "until='eval/train_loss'"),
    ({"checkpoint.best": "eval/clients_loss", "evaluation.per_client": True}, "checkpoint.best='eval/clients_loss'"),
    ({"privacy.noise": "clients", "privacy.bands": 2}, "privacy"),
    ({"privacy.noise": "clients", "privacy.adaptive": {}}, "privacy"),
    ({"privacy.bands": 2, "privacy.adaptive": {}}, "privacy"),
    ({"privacy.adaptive": {"count_noise": 0.5}}, "privacy.adaptive.count_noise=0.5"),
    ({"privacy.epsilon": 0.1}, "privacy.epsilon=0.1"),
    ({"privacy.epsilon": 0.1, "selection": "uniform"}, "privacy.epsilon=0.1"),
    ({"privacy.epsilon": 9, "selection": "uniform", "privacy.noise": "clients"}, "privacy.epsilon=9"),
    ({**FOUND, "privacy.epsilon": 1e-9, "privacy.delta": 1e-12}, "privacy.epsilon=1e-09"),
    ({**FOUND, "selection": "uniform"}, "privacy.epsilon=3: how often selection.kind='uniform'"),
    ({**FOUND, "cohort.wait_for": 4}, "privacy.epsilon=3: cohort.wait_for=4"),
    ({**FOUND, "privacy.accounting": "participation"}, "privacy.epsilon=3: how often selection.kind='poisson'"),
    ({**AMPLIFIED, "faults.non_finite": "drop_client"}, "faults.non_finite='drop_client'"),
    ({**AMPLIFIED, "faults.on_client_error": "drop_client"}, "faults.on_client_error='drop_client'"),
]  # fmt: skip


UNSAMPLED = [
    ({"availability": {"kind": "markov", "mean_on_s": 9, "mean_off_s": 9}}, "availability.kind='markov' goes by the clock"),
    ({"selection": "uniform"}, "selection.kind='uniform' draws clients together"),
    ({"cohort.deadline_s": 5.0}, "cohort.deadline_s=5.0 makes who is heard"),
    ({"cohort.wait_for": 4}, "cohort.wait_for=4 makes who is heard"),
    ({"cohort.over_select": 1.5}, "cohort.over_select=1.5 makes who is heard"),
    ({"cohort.min_responses": 2}, "cohort.min_responses=2 makes who is heard"),
    ({"availability": "size_correlated"}, "availability.kind='size_correlated' makes who is online"),
    ({"availability": {"kind": "cyclic", "rates": "sizes"}}, "availability.kind='cyclic' makes who is online"),
    ({"availability": "blocks"}, "availability.kind='blocks' makes who is online"),
    ({"devices": {"kind": "lognormal", "failures_per_hour": 1}}, "devices.failures_per_hour makes"),
    ({"privacy.bands": 3}, "bands=3"),
    ({"privacy.noise": "clients"}, "noise='clients'"),
    ({"privacy.divide_by": "completed"}, "divide_by='completed'"),
]  # fmt: skip


def test_what_cannot_be_promised_is_refused(subtests):
    all_refused(subtests, lambda given: Experiment(load(BASE, given)), REFUSED)
    rows = [({**AMPLIFIED, **given}, f"privacy.accounting='poisson': {key}") for given, key in UNSAMPLED]
    all_refused(subtests, lambda given: Experiment(load(BASE, given)), rows)


def test_players_of_a_minimax_task_are_hidden_together(tmp_path):
    given: dict[str, Any] = {"task__name": "auc", "algorithm": {"name": "local_sgda", "steps": 2}, "rounds": 1}
    given["selection"] = "round_robin"
    each = (run(tmp_path / str(z), **given, privacy__noise_multiplier=z) for z in (1e-9, 1.0))
    still, noisy = (load_file(r.folder / "model.safetensors") for r in each)
    noise = {name: (noisy[name] - still[name]).flatten() for name in still}
    assert {name.split(".")[0] for name in noise} == {"x", "y"}
    assert float(torch.cat(list(noise.values())).std()) == pytest.approx(0.5 / 10, rel=0.2)
    assert all(float(leaf.abs().min()) > 0 for leaf in noise.values())


@pytest.mark.parametrize("name", ["ditto", "fedper"])
def test_clients_may_have_models_of_their_own(tmp_path, name):
    given = {"name": name, "steps": 2, "batch_size": 5, "weight": "uniform"}
    found = run(
        tmp_path, algorithm=given, task__model="mlp", rounds=2, **{k.replace(".", "__"): v for k, v in OWN.items()}
    )
    assert math.isfinite(found.summary["final"]["eval/own_loss"])
    assert found.summary["privacy"]["exchanges"] == 2


def test_where_sampling_does_not_count_participation_does(subtests):
    for key, value in {
        "cohort.deadline_s": 5.0, "availability": "size_correlated", "privacy.bands": 3, "privacy.divide_by": "completed",
        "privacy.noise": "clients", "selection": "uniform", "privacy.accounting": "participation",
    }.items():  # fmt: skip
        with subtests.test(key):
            x = Experiment(load(BASE, {key: value}))
            assert x.promises[0].accounting == "participation"
            assert "as if all knew who was heard" in dict(describe(x))["privacy"]


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["batched", "factored"])
def test_a_norm_that_follows_is_the_same_in_blocks_that_are_captured(tmp_path, inner):
    given = {
        "rounds": 14, "population.clients": 64, "selection": "uniform", "cohort.size": 16, "evaluation.every": 14,
    }  # fmt: skip
    given |= {"executor.inner": inner, "executor.block_size": 8, "privacy.adaptive": {"count_noise": 2.0}}
    one, other = (fedfleet.run(BASE, {**given, "executor.capture": c}, out=tmp_path / str(c)) for c in (True, False))
    assert len(set(one.rounds["algorithm/clip_norm"])) == 14
    assert (one.folder / "model.safetensors").read_bytes() == (other.folder / "model.safetensors").read_bytes()


def test_a_promise_is_written_out_and_planned(tmp_path):
    x = Experiment(load(BASE))
    assert load(BASE).model_dump(mode="json")["privacy"]["accounting"] == "auto"
    assert load(load(BASE).model_dump(mode="json")).privacy == load(BASE).privacy
    assert load(BASE, {"privacy": None}).privacy is None
    adaptive = {"privacy.adaptive": {"count_noise": 20.0}, "privacy.epsilon": 3.0, "privacy.noise_multiplier": None}
    told = Experiment(load(BASE, {"rounds": 0, **adaptive})).run(tmp_path / "run").summary["privacy"]
    assert (told["epsilon"], told["exchanges"]) == (0, 0)  # no rounds spend nothing
    assert x.promises[0].accounting == "poisson"
    assert x.promises[0].mechanism.divide_by == 10
    assert "1.1 times a norm of 0.5" in dict(describe(x))["privacy"]
    follows = Experiment(load(BASE, {"cohort.size": 30, "privacy.adaptive": {}})).promises[0].mechanism.follows
    assert follows is not None
    assert (follows.quantile, follows.lr, follows.count_noise) == (0.5, 0.2, 1.5)


def test_the_norm_bounds_what_one_client_changes(tmp_path):
    """Two federations that differ in one client, the same noise: the models after a round differ by no more than the norm / 10."""
    found = []
    for clients in (BASE["population"], {**BASE["population"], "partition": {"kind": "quantity_skew", "alpha": 0.3}}):
        x = Experiment(load(BASE, {"rounds": 1, "population": clients, "privacy.noise_multiplier": 1e-9}))
        found.append(x.run(tmp_path / str(len(found))))
    start = dict(T.named_leaves(Experiment(load(BASE)).z))
    for each in found:
        heard = int(each.rounds.completed.iloc[0])
        after = load_file(each.folder / "model.safetensors")
        moved = torch.cat([(after[name] - leaf).flatten() for name, leaf in start.items()])
        assert len(after) == len(start)
        assert float(moved.norm()) <= 0.5 * heard / 10 * (1 + 1e-5)
