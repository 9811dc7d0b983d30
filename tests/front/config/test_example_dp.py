"""Promises to single examples: reckoned as another accountant does, noise found, runs that end in time, what is refused before."""

from __future__ import annotations

import json
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from prv_accountant.dpsgd import DPSGDAccountant

import fedfleet
from fedfleet.commands.plan import describe
from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from fedfleet.middleware.privacy import accounting
from fedfleet.middleware.privacy import example_dp as example_guarantee
from fedfleet.middleware.privacy.gradients import Answered, Counted
from fedfleet.simulator.block.batches import capacity
from fedfleet.simulator.errors import ConfigError
from tests.refusals import all_refused

BASE: dict[str, Any] = {
    "rounds": 6, "population": {"clients": 20, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "epochs": 2, "batch_size": 10}, "cohort": {"size": 20},
    "example_privacy": {"clip_norm": 1.0, "delta": 1e-4, "noise_multiplier": 1.2},
    "executor": {"kind": "local", "inner": "serial"}, "evaluation": {"every": 2},
}  # fmt: skip


def made(**given: Any) -> Experiment:
    return Experiment(load(BASE, {k.replace("__", "."): v for k, v in given.items()}))


def heard(exchanges: dict[str, dict[int, int]]) -> Counted:
    """A state in which clients were heard so often in phases."""
    answered = {
        phase: Answered(torch.tensor(sorted(of)), torch.tensor([of[c] for c in sorted(of)]))
        for phase, of in exchanges.items()
    }
    return Counted(None, answered)


def sizes(x: Experiment) -> list[int]:
    return x.population.num_examples(torch.arange(20)).tolist()


def drawn(z: float, rate: float, steps: int, delta: float = 1e-4) -> tuple[float, float]:
    """Bounds on epsilon by another accountant."""
    low, _, high = DPSGDAccountant(z, rate, steps, eps_error=0.02, delta_error=delta / 1000).compute_epsilon(
        delta, steps
    )
    return low, high


def test_a_client_spends_by_its_examples_and_how_often_it_was_heard_and_the_worst_counts():
    x = made()
    (promise,), n = x.promises, sizes(x)
    small, large = n.index(min(n)), n.index(max(n))
    assert promise.epsilon(heard({})) == 0
    each = {}
    for c, times in ((small, 1), (small, 5), (large, 5)):
        found = promise.epsilon(heard({"train": {c: times}}))
        steps = times * 2 * -(-n[c] // 10)
        low, high = drawn(1.2, min(1.0, 10 / n[c]), steps)
        assert low - 0.001 <= found <= high + 0.002
        each[c, times] = found
    assert each[small, 5] > each[large, 5]
    both = promise.epsilon(heard({"train": {small: 1, large: 5}}))
    assert both == max(each[small, 1], each[large, 5])


@pytest.mark.slow
def test_the_worst_of_many_is_the_most_that_one_alone_has_spent():
    """Clients of few examples use them often, those heard often use them rarely: neither rule alone finds the worst."""
    (promise,) = made().promises
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        n = torch.randint(5, 200, (12,), generator=generator)
        counts = torch.randint(0, 30, (12, 1), generator=generator)
        alone = [promise.worst(n[i : i + 1], counts[i : i + 1]) for i in range(12)]
        assert promise.worst(n, counts) == max(alone)
    rates, times = (torch.tensor(v, dtype=torch.float64)[:, None] for v in ([0.5, 0.1, 0.4], [4, 30, 3]))
    assert example_guarantee._front(rates, times) == [[[0.1], [30.0]], [[0.5], [4.0]]]


def test_of_shuffled_batches_it_counts_how_often_an_example_comes():
    x = made(example_privacy__batches="shuffled")
    (promise,) = x.promises
    assert promise.epsilon(heard({"train": {3: 5}})) == accounting.of_participation(1.2, 10, 1e-4)
    steps = made(example_privacy__batches="shuffled", algorithm__epochs=None, algorithm__steps=9)
    n = sizes(steps)
    (promise,) = steps.promises
    for c in (n.index(min(n)), n.index(max(n))):
        passes = -(-9 // -(-n[c] // 10))
        assert promise.epsilon(heard({"train": {c: 2}})) == accounting.of_participation(1.2, 2 * passes, 1e-4)


def test_gradients_of_one_batch_are_one_release_of_a_larger_norm():
    x = made(task__name="auc", algorithm={"name": "cdma_ada", "batch_size": 10, "steps": 4, "epochs": None})
    (promise,), n = x.promises, sizes(x)
    assert promise.gradients.calls[("update", 0)] == 2
    parts = {p.name: p.work.loops[0].batches for p in x.algorithm.phases}
    renyi = RdpAccountant(accounting.ORDERS)
    for name, times in (("gradient", 2), ("update", 3)):
        plan = parts[name]
        calls = promise.gradients.calls.get((name, 0), 1)
        event: Any = dp_accounting.GaussianDpEvent(1.2 / calls**0.5)
        if plan.drawn:
            renyi.compose(dp_accounting.PoissonSampledDpEvent(plan.size / n[0], event), 4 * times)
        else:
            renyi.compose(event, times * plan.epochs)
    found = promise.epsilon(heard({"gradient": {0: 2}, "update": {0: 3}}))
    bound = renyi.get_epsilon(1e-4)
    assert 0.8 * bound < found <= bound


@pytest.mark.slow
def test_noise_is_found_for_the_client_that_spends_most():
    wanted = {"example_privacy__noise_multiplier": None, "example_privacy__epsilon": 4.0}
    x = made(**wanted, rounds=5)
    (promise,) = x.promises
    spent = promise.epsilon(heard({"train": dict.fromkeys(range(20), 5)}))
    assert 3.98 <= spent <= 4.0
    assert "epsilon 4 at most in the end" in dict(describe(x))["example privacy"]
    turns = made(**wanted, rounds=10, cohort__size=10, selection="round_robin")
    assert (turns.promises[0].exchanges, promise.exchanges) == (5, 5)
    some = {"cohort.size": 8, "selection": "round_robin", "rounds": 6}
    assert Experiment(load(BASE, some)).promises[0].exchanges == 3  # 48 of 20 in turn
    assert turns.promises[0].gradients.multiplier == promise.gradients.multiplier  # five times each


@pytest.mark.slow
def test_a_run_ends_before_the_round_that_could_spend_too_much(tmp_path):
    given = {"example_privacy.epsilon": 9.0, "rounds": 50, "cohort.size": 8}
    x = Experiment(load(BASE, given))
    found = fedfleet.run(BASE, given, out=tmp_path / "run")
    assert found.summary["status"] == "stopped"
    assert 1 < found.summary["rounds"] < 50
    told = json.loads((tmp_path / "run/summary.json").read_text())["example_privacy"]
    assert told["epsilon"] <= 9.0
    most = told["exchanges_most"]
    n = min(sizes(x))
    assert accounting.of_sampling(1.2, 10 / n, (most + 1) * 2 * -(-n // 10), 1e-4) > 9.0
    spent = found.rounds["eval/example_epsilon_spent"].dropna()
    assert spent.is_monotonic_increasing
    assert spent.iloc[-1] == told["epsilon"]
    report = fedfleet.write_report([found.folder], tmp_path / "report").read_text()
    assert "epsilon of examples" in report
    assert "drawn batches" in report


@pytest.mark.slow
def test_a_run_that_goes_on_counts_on_and_both_promises_hold(tmp_path):
    given: dict[str, Any] = {"algorithm.weight": "uniform", "selection": "poisson", "cohort.size": 10}
    given["privacy"] = {"clip_norm": 0.5, "delta": 1e-3, "noise_multiplier": 1.1}
    whole = fedfleet.run(BASE, given, out=tmp_path / "whole")
    fedfleet.run(BASE, {**given, "rounds": 3}, out=tmp_path / "part")
    part = fedfleet.resume(tmp_path / "part", {"rounds": 6})
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "part/model.safetensors").read_bytes()
    for key in ("privacy", "example_privacy"):
        assert part.summary[key] == whole.summary[key]
    assert part.summary["privacy"]["epsilon"] == accounting.of_sampling(1.1, 0.5, 6, 1e-3)
    assert {"eval/epsilon_spent", "eval/example_epsilon_spent"} <= set(whole.rounds)
    outcomes = whole.table("outcomes")
    heard = outcomes[outcomes.outcome == "completed"].client.value_counts()
    assert whole.summary["example_privacy"]["exchanges_most"] == heard.max()
    assert whole.summary["example_privacy"]["epsilon"] > 1


def test_where_no_room_is_enough_nothing_is_gained_by_drawing():
    """A batch has room for all but what comes once in 10^18: for epsilon so large that this counts, unless all have room."""
    (promise,) = made(example_privacy__noise_multiplier=0.3).promises
    roomy, crowded = capacity(10), 10 * capacity(10)
    spent = lambda n, times: promise.worst(torch.tensor([n]), torch.tensor([[times]]))  # noqa: E731
    steps = 40 * 2 * -(-crowded // 10)
    assert spent(crowded, 40) == accounting.of_participation(1.0, 4 * steps / 0.3**2, 1e-4)
    steps = 40 * 2 * -(-roomy // 10)
    assert spent(roomy, 40) == accounting.of_sampling(0.3, 10 / roomy, steps, 1e-4)
    both = promise.worst(torch.tensor([crowded, roomy]), torch.tensor([[40], [40]]))
    assert both == max(spent(crowded, 40), spent(roomy, 40)) > spent(roomy, 40)


FOUND = {"example_privacy.noise_multiplier": None, "example_privacy.epsilon": 3, "cohort.size": 5}
TWO = {"task": "auc", "algorithm": {"name": "cdma_ada", "batch_size": 10, "epochs": None, "steps": 4}}
OWN = {"population.held_out": 0.2, "evaluation.per_client": True}
FEDBUFF = {"algorithm": {"name": "fedbuff", "buffer": 3, "concurrency": 5}, "cohort": "none"}
BOUND = {"example_privacy.epsilon": 9}
REFUSED = [
    ({"example_privacy.noise_multiplier": None}, "example_privacy={"),
    ({"example_privacy.delta": 0.1}, "example_privacy.delta=0.1"),
    ({"example_privacy.clip_norm": 0}, "example_privacy.clip_norm=0"),
    ({**FOUND, "example_privacy.epsilon": 1e-6, "cohort.size": 20}, "example_privacy.epsilon=1e-06"),
    (FOUND, "example_privacy.epsilon=3: how often selection.kind='uniform'"),
    ({**TWO, **FOUND, "selection": "round_robin"}, "example_privacy.epsilon=3: how often selection.kind='round_robin'"),
    ({"example_privacy.epsilon": 0.1}, "example_privacy.epsilon=0.1"),
    ({"algorithm": "qffl"}, "example_privacy: qffl"),
    ({"algorithm": "fedpac", "task.model": "mlp", **OWN}, "example_privacy: fedpac"),
    ({"algorithm": "drfa", "domains.kind": "label"}, "example_privacy: drfa"),
    ({"task.model": "cnn_bn"}, "task.name='classification': its net has layers of statistics (BatchNorm)"),
    ({"task": "gan"}, "example_privacy: fedavg: "),
    ({"selection": "oort"}, "selection.kind='oort'"),
    ({"availability": "label_correlated"}, "availability.kind='label_correlated'"),
    ({"availability": {"kind": "sine", "rates": "fedawe"}}, "availability.kind='sine'"),
    ({"availability": "outages", "domains": "label"}, "availability.kind='outages'"),
    ({"faults.non_finite": "keep"}, "faults.non_finite='keep'"),
    ({"stop_if_diverged": 3}, "stop_if_diverged=3"),
    ({**BOUND, **FEDBUFF}, "example_privacy.epsilon=9: fedbuff is asynchronous"),
    ({**BOUND, "cohort.min_responses": 2}, "example_privacy.epsilon=9: cohort.min_responses=2"),
    ({**BOUND, "cohort.deadline_s": 2, "devices": "lognormal"}, "example_privacy.epsilon=9: all answers may come after"),
    ({**BOUND, "secure_aggregation": {}}, "example_privacy.epsilon=9: secure_aggregation"),
    ({**TWO, "availability": {"kind": "bernoulli", "rate": 0.5}, "example_privacy.epsilon": 90}, "example_privacy.epsilon=90"),
]  # fmt: skip


def test_what_cannot_be_hidden_is_refused(subtests):
    def call(changes: dict[str, Any]) -> Experiment:
        base = {k: v for k, v in BASE.items() if k != "cohort" or changes.get(k) != "none"}
        return Experiment(load(base, {k: v for k, v in changes.items() if v != "none"}))

    all_refused(subtests, call, REFUSED)


def test_a_promise_is_written_out():
    config = load(BASE)
    promised = {"clip_norm": 1.0, "delta": 1e-4, "noise_multiplier": 1.2, "epsilon": None, "batches": "drawn"}
    assert config.model_dump(mode="json")["example_privacy"] == promised
    assert (
        load({k: v for k, v in BASE.items() if k != "example_privacy"}).model_dump(mode="json")["example_privacy"]
        is None
    )
    assert "drawn one by one" in dict(describe(Experiment(config)))["example privacy"]


@pytest.mark.slow
def test_noise_that_was_found_for_some_rounds_is_not_for_more(tmp_path):
    given = {"rounds": 2, "population.clients": 4, "cohort.size": 4, "executor.kind": "local"}
    hidden = {"clip_norm": 1.0, "delta": 1e-5, "epsilon": 3}
    fedfleet.run(given, {"example_privacy": hidden}, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"rounds=4: the noise of example_privacy\.epsilon=3 was found for 2 rounds"):
        fedfleet.resume(tmp_path / "run", {"rounds": 4})
    fedfleet.run(given, {"example_privacy": hidden | {"noise_multiplier": 2.0}}, out=tmp_path / "given")
    assert len(fedfleet.resume(tmp_path / "given", {"rounds": 3}).rounds) == 3
