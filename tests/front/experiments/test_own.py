"""Parts made in Python: what is recorded of them, what they are refused for, and that no other may go on with their run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import pytest
import torch
import yaml

import fedfleet
from fedfleet.algorithms.local import local_training
from fedfleet.assembly.provenance import describe, differences
from fedfleet.config.population import load_data
from fedfleet.report.groups import grouped
from fedfleet.report.tables import read
from fedfleet.simulator.author import Algorithm, BatchPlan, Mean, Message, Phase, View
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.options import DataShape, ModelOptions
from tests.refusals import all_say, refused, tells

CONFIG = {
    "rounds": 1, "population": {"clients": 20}, "task": {"model": "logistic"},
    "executor": {"kind": "local", "inner": "batched"}, "evaluation": {"every": 1},
}  # fmt: skip
OWN = {k: v for k, v in CONFIG.items() if k != "task"}
TEMPERATURE = 1.0


def heated(lr):
    return lr * TEMPERATURE


def mine(lr=0.1, size=4, name=None):
    phase = Phase(name="train", work=local_training(BatchPlan(size=5, steps=2)), reduce={"z": Mean()})

    def round_(z, rnd):
        shared = Message(send={"z": z}, config={"lr": {"x": heated(lr)}})
        return rnd.map_reduce(phase, shared=shared, cohort=rnd.invite(size))["z"], {}

    return Algorithm(lambda z, key, problem: z, round_, (phase,), {"global": View(lambda z: z)}, name=name)


def other(lr=0.1, size=4):
    made = mine(lr, size)
    return made._replace(init=lambda z, key, problem: {"x": dict(z["x"])}, name="mine")


def test_a_description_holds_name_module_source_and_options():
    found = describe(mine(0.3))
    assert (found["name"], found["module"]) == ("mine", __name__)
    assert (found["options"]["lr"], found["options"]["size"], found["options"]["TEMPERATURE"]) == (0.3, 4, 1.0)
    assert (len(found["source"]), describe(mine(name="called"))["name"]) == (64, "called")
    assert json.loads(json.dumps(found)) == found


def test_other_code_and_other_options_are_told_apart(monkeypatch):
    base = describe(mine())
    assert (describe(mine()), differences(base, describe(mine(1.0)))) == (base, ("lr=0.1", "lr=1.0"))
    assert describe(other())["source"] != base["source"]
    assert describe(other())["options"] == base["options"]
    monkeypatch.setattr(sys.modules[__name__], "TEMPERATURE", 2.0)
    assert differences(base, describe(mine())) == ("TEMPERATURE=1.0", "TEMPERATURE=2.0")
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules[__name__], "heated", lambda lr: lr)  # a helper that is only named
    assert describe(mine())["source"] != base["source"]


@dataclass(frozen=True)
class Rate:
    lr: float
    schedule: object = None

    def __call__(self, z, rnd):
        return z, {}


def step(z, rnd, scale=1.0):
    return z, {"scale": scale}


def test_partials_callables_and_nested_functions_are_followed():
    def of(round_):
        return describe(Algorithm(lambda z, key, problem: z, round_, (), {}))

    assert (of(partial(step, scale=2.0))["options"]["scale"], of(partial(step, scale=2.0))["name"]) == (2.0, "step")
    assert of(Rate(0.1))["options"] != of(Rate(0.2))["options"]
    assert of(Rate(0.1))["name"] == "Rate"
    assert of(Rate(0.1, lambda t: t))["source"] != of(Rate(0.1, lambda t: t + 1))["source"]

    def with_mask(mask):
        return of(lambda z, rnd: (z, {"m": mask}))

    assert with_mask(torch.ones(2)) == with_mask(torch.ones(2))
    assert with_mask(torch.ones(2))["options"] != with_mask(torch.zeros(2))["options"]


def test_fedfleets_own_classes_have_no_source_but_options():
    found = describe(Classification(ModelOptions(hidden=(3,)), DataShape((1, 8, 8), 10)))
    assert (found["name"], found["source"]) == ("Classification", None)
    assert found["options"]["_options"] == {"model": "mlp", "hidden": [3], "init": "drawn"}


SCRIPT = """
from fedfleet.assembly.provenance import describe
from fedfleet.simulator.author import Algorithm
import json, torch
{comment}
KINDS = frozenset({{"a", "b", "c", "dd"}})

def made(lr):
    def helper(x):
        return x in {{"one", "two", "three"}} or (lambda: x)
    def round_(z, rnd):
        return helper(z), {{"lr": lr, "unknown": object, "k": KINDS}}
    return Algorithm(lambda z, key, problem: z, round_, (), {{}}, saddle=lambda s, p: (s, torch.ones(3)))

{call}
"""


@pytest.mark.slow
def test_a_description_is_the_same_in_every_process_with_or_without_a_file(tmp_path):
    call = "print(json.dumps(describe(made(0.5))))"
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(comment="# said later", call=f"print(end='')\n{call}"))
    text = SCRIPT.format(comment="", call=call)
    ways = [[str(file)], ["-c", text]]
    said = []
    for way, seed in zip(ways, "12", strict=True):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ended = subprocess.run([sys.executable, *way], env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        said.append(ended.stdout)
    assert said[0] == said[1]
    assert json.loads(said[0])["options"] == {"phases": [], "views": {}, "lr": 0.5, "KINDS": ["a", "b", "c", "dd"]}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of an algorithm, a task and data of one's own."""
    data = load_data(fedfleet.load(CONFIG))
    parts = {
        "algorithm": mine(),
        "task": Classification(ModelOptions(model="logistic"), DataShape((1, 8, 8), 10)),
        "data": replace(data, name="my digits"),
    }
    return fedfleet.run(OWN, out=tmp_path_factory.mktemp("own") / "run", **parts), parts


def test_config_and_summary_say_what_ran_and_nothing_that_did_not(done):
    run, parts = done
    written = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert written["algorithm"] == {"own": describe(parts["algorithm"])}
    assert written["task"] == {"own": describe(parts["task"])}
    assert written["population"]["dataset"] == {"own": {**describe(parts["data"]), "given": ["data"]}}
    assert (written["cohort"]["size"], run.summary["label"]) == (4, "mine")
    assert (run.summary["own"].keys(), run.summary["own"]["task"]) == (parts.keys(), describe(parts["task"]))
    report = fedfleet.write_report([run.folder], run.folder).read_text()
    assert describe(parts["algorithm"])["source"] in report
    assert "mine · Classification · my digits" in report


def test_a_report_pools_no_two_things(done, tmp_path):
    run, parts = done
    others = {"own rate": {"algorithm": mine(1.0)}, "fedavg": {"algorithm": None}}
    for seed, (name, given) in enumerate(others.items(), 1):
        fedfleet.run(OWN, {"label": "mine", "seed": seed}, out=tmp_path / name, **{**parts, **given})
    fedfleet.run(OWN, {"seed": 9}, out=tmp_path / "seed", **parts)
    found = grouped([read(p) for p in (run.folder, *sorted(tmp_path.iterdir()))])
    assert (sorted(map(len, found.values())), len({name.partition(" (")[0] for name in found})) == ([1, 1, 2], 1)


@pytest.mark.parametrize("verb", ["run", "plan", "resume"])
def test_the_command_line_says_that_it_cannot(done, command, tmp_path, verb):
    run, _ = done
    target = run.folder if verb == "resume" else run.folder / "config.yaml"
    status, _, error = command(verb, target, *(["rounds=2"] if verb == "resume" else []))
    assert (status, error.count("\n")) == (2, 1), error
    assert ".own='" in error
    assert "made in Python" in error
    assert "fedfleet.resume(RUN, " in error


def test_resuming_takes_the_same_and_refuses_what_differs(subtests, done, tmp_path):
    run, parts = done
    folder = shutil.copytree(run.folder, tmp_path / "run")
    wide = Classification(ModelOptions(model="logistic", hidden=(5,)), DataShape((1, 8, 8), 10))
    rows = [
        ({"algorithm": mine(1.0)}, "began with algorithm mine (lr=0.1), and this one is mine (lr=1.0)"),
        ({"algorithm": other()}, "began with algorithm mine (source … ), and this one is mine (source"),
        ({"task": wide}, "with task"),
    ]  # fmt: skip
    for more in ({"rounds": 2}, {}):  # also of a run that is at its end
        all_say(subtests, lambda given, more=more: fedfleet.resume(str(folder), more, **{**parts, **given}), rows)
    tells(lambda: fedfleet.resume(folder, **{**parts, "task": None}), "made in Python, which no file brings back")
    assert fedfleet.resume(folder, **parts).summary == run.summary
    assert fedfleet.resume(str(folder), {"rounds": 2}, **parts).summary["rounds"] == 2
    whole = fedfleet.run(OWN, {"rounds": 2}, out=tmp_path / "whole", **parts)
    assert (folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert fedfleet.resume(folder, {"rounds": 2}, **parts).summary["rounds"] == 2  # at its end


def test_a_cohort_that_is_not_asked_for_is_refused(tmp_path):
    tells(lambda: fedfleet.run(CONFIG, {"cohort.size": 7}, algorithm=mine(), out=tmp_path / "run"), "cohort.size=7")
    assert fedfleet.Experiment(fedfleet.load(CONFIG, {"cohort.size": 4}), algorithm=mine()).config.cohort.size == 4


def test_what_is_no_part_is_refused(subtests, tmp_path):
    def call(row):
        part, given = row
        fedfleet.run(CONFIG, out=tmp_path / "run", **{part: given})

    rows = [
        (("algorithm", "fedprox"), "algorithm='fedprox' … fedfleet.author.Algorithm … algorithm=fedprox"),
        (("algorithm", mine), "algorithm=a function: it cannot be one"), (("task", "auc"), "task='auc' … task=auc"),
        (("task", Classification), "task=a type"), (("population", 30), "population=30: … Population"),
        (("population", "digits"), "population='digits' … population.dataset=digits"),
        (("data", {"x": 1}), "data= … fedfleet.Dataset"),
        (("data", "mnist"), "data='mnist' … population.dataset=mnist"),
    ]  # fmt: skip
    all_say(subtests, call, rows)
    assert not (tmp_path / "run").exists()


def clients(domains=3, features=5):
    """Twelve clients of ten examples, of so many domains."""
    x = torch.randn(120, features, generator=torch.Generator().manual_seed(1))
    data = {"x": x, "y": (x[:, 0] > 0).long()}
    return InMemoryPopulation(data, torch.arange(120), torch.arange(13) * 10, torch.arange(12) % domains)


def examples(domains=3, features=5):
    x = torch.randn(30, features, generator=torch.Generator().manual_seed(2))
    return fedfleet.Examples(x, (x[:, 0] > 0).long(), 2, torch.arange(30) % domains)


def test_clients_of_ones_own_bring_their_test_examples(tmp_path):
    population = clients()
    bare = fedfleet.load(CONFIG, {"population.clients": None})
    tells(lambda: fedfleet.Experiment(bare, population=population), "^population=InMemoryPopulation: … data=")
    data = fedfleet.FederatedDataset("mine", population, examples(), examples().sample)
    overrides = {"population.clients": None, "algorithm.batch_size": 5, "evaluation.train_examples": 7}
    run = fedfleet.run(CONFIG, {**overrides, "algorithm.name": "afl"}, data=data, out=tmp_path / "run")
    domains = run.table("domains")
    assert len(domains) == 3
    assert domains.notna().all(axis=None)
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["population"]["dataset"]["own"]["name"] == "mine"
    beside = fedfleet.run(
        CONFIG, {**overrides, "algorithm.name": "afl"}, population=population, data=data, out=tmp_path / "b"
    )
    assert (beside.folder / "model.safetensors").read_bytes() == (run.folder / "model.safetensors").read_bytes()


def test_a_partition_of_clients_is_refused_and_training_examples_that_are_not_there(tmp_path):
    population = clients()
    object.__setattr__(population, "test", examples())
    given = {"population.clients": None, "algorithm.batch_size": 5}
    for key, value in (("population.partition", "shards"), ("evaluation.train_examples", 5)):
        more = fedfleet.load(CONFIG, {**given, key: value})
        refused(lambda more=more: fedfleet.Experiment(more, population=population), f"{key}=")
    assert fedfleet.run(CONFIG, given, population=population, out=tmp_path / "run").summary["status"] == "finished"


class Clients(InMemoryPopulation):
    """Clients of one's own that hold their examples in a table."""

    @classmethod
    def made(cls, sign=1.0, sizes=(10,) * 12):
        found = clients(domains=1)
        frame = pd.DataFrame(sign * found.data["x"].numpy())
        offsets = torch.tensor([0, *sizes]).cumsum(0)
        made = cls({}, found.indices, offsets, found.domain)
        object.__setattr__(made, "frame", frame)
        object.__setattr__(made, "test", replace(examples(), domain=None))
        return made

    def local_data(self, ids):
        x = torch.tensor(self.frame.to_numpy())  # type: ignore[attr-defined]
        data = {"x": x, "y": (x[:, 0] > 0).long()}
        return InMemoryPopulation(data, self.indices, self.offsets, self.domain).local_data(ids)

    def sample(self, size):
        return replace(examples(), domain=None).sample(size)

    def to(self, device):
        return self


FEW = {"rounds": 1, "executor": {"kind": "local"}, "algorithm": {"batch_size": 5, "steps": 2}}


def test_clients_of_ones_own_are_recorded_and_asked_for_as_what_they_are(tmp_path):
    run = fedfleet.run(FEW, {"evaluation.train_examples": 6}, population=Clients.made(), out=tmp_path / "run")
    assert "eval/train_accuracy" in run.rounds
    written = yaml.safe_load((run.folder / "config.yaml").read_text())["population"]
    about = written["dataset"]["own"]
    assert written["clients"] == 12
    more = fedfleet.load(FEW, {"cohort.size": 13})
    tells(lambda: fedfleet.Experiment(more, population=Clients.made()), "cohort.size=13 … population.clients=12")
    assert (about["name"], about["module"], about["given"]) == ("Clients", __name__, ["population"])
    assert about["options"]["local_data"].startswith("of a few clients sha256:")
    tells(lambda: fedfleet.resume(run.folder, {"rounds": 2}), "population=… … fedfleet.resume(RUN, population=…)")
    with pytest.raises(fedfleet.ConfigError, match=r"began with population Clients \(population=.*local_data="):
        fedfleet.resume(run.folder, {"rounds": 2}, population=Clients.made(-1.0))
    assert fedfleet.resume(run.folder, {"rounds": 2}, population=Clients.made()).summary["rounds"] == 2


def test_what_clients_learn_from_is_in_the_fingerprint_wherever_it_is_held(monkeypatch):
    def fingerprint(sign):
        return fedfleet.Experiment(fedfleet.load(FEW), population=Clients.made(sign)).fingerprint

    assert fingerprint(1.0) == fingerprint(1.0) != fingerprint(-1.0)


class Noisy(Clients):
    def local_data(self, ids):
        found = super().local_data(ids)
        return found._replace(data={**found.data, "x": found.data["x"] + torch.randn(1)})


class Broken(Clients):
    def local_data(self, ids):
        raise KeyError("x")


def test_clients_that_will_not_do_are_refused(subtests, tmp_path):
    rows = [
        (Noisy.made(), "population=Noisy"),
        (Broken.made(), "population=Broken: what clients hold cannot be read (KeyError: 'x')"),
        (Clients.made(sizes=(20, 0, *(10,) * 10)), "population.dataset='Clients': … no examples"),
    ]  # fmt: skip
    all_say(subtests, lambda population: fedfleet.run(FEW, population=population, out=tmp_path / "run"), rows)
    assert not (tmp_path / "run").exists()


def test_examples_of_another_dtype_labels_out_of_range_and_names_of_other_domains_are_refused(subtests, tmp_path):
    def call(row):
        population, test, names = row
        data = fedfleet.FederatedDataset("mine", population, test, test.sample, names)
        fedfleet.run(FEW, data=data, out=tmp_path / "run")

    wide = replace(clients(), data={**clients().data, "x": clients().data["x"].double()})
    rows = [
        ((wide, examples(), ()), "are of dtype torch.float64, those to test on of torch.float32"),
        ((clients(), replace(examples(), y=examples().y + 1), ()), "there are test labels up to 2, and classes=2"),
        ((clients(), examples(), ("a", "b")), "2 names of domains, a, b, and there are 3"),
        ((clients(), examples(2), ()), "clients are of 3 domains, test examples of 2"),
        ((clients(), examples(4), ()), "clients are of 3 domains, test examples of 4"),
        ((clients(), examples(features=6), ()), "of shape (5,), those to test on of (6,)"),
    ]  # fmt: skip
    all_say(subtests, call, rows)


def test_options_of_what_is_not_there_are_refused(subtests, tmp_path):
    own_task = Classification(ModelOptions(), DataShape((1, 8, 8), 10))
    features = {"population.dataset.features": 3, "population.dataset.name": "synthetic"}
    rows = [
        (({"algorithm.lr": 0.1}, {"algorithm": mine()}), "^algorithm.lr=0.1"),
        (({}, {"task": own_task}), "^task.model='logistic': … task=null"),
        ((features, {"population": Clients.made()}), "features=3"),
    ]  # fmt: skip
    one = {"population.clients": None}
    all_say(subtests, lambda row: fedfleet.run(CONFIG, {**one, **row[0]}, **row[1], out=tmp_path / "run"), rows)
    left_out = {"algorithm": None, "task": None, "population.dataset": None, "population.clients": 12}
    for (given, _), _ in rows:
        assert not fedfleet.load(CONFIG, {**given, **left_out}).task.model_fields_set


def test_what_changes_between_an_experiment_and_its_run_is_refused(tmp_path):
    box, made = {"lr": 0.1}, mine()

    def round_(z, rnd):
        return made.round(z, rnd) if box["lr"] else (z, {})

    x = fedfleet.Experiment(fedfleet.load(CONFIG), algorithm=made._replace(round=round_))
    box["lr"] = 9.0
    tells(lambda: x.run(tmp_path / "run"), 'changed (box={"lr": 0.1}, now box={"lr": 9.0}) after')
    box["lr"] = 0.1
    assert x.run(tmp_path / "run").summary["status"] == "finished"


def test_what_is_not_recorded_is_pooled_with_nothing(tmp_path):
    def locked(lock):
        made = mine(name="Mine")
        return made._replace(round=lambda z, rnd: made.round(z, rnd) if lock else (z, {}))

    for seed in (0, 1):
        fedfleet.run(CONFIG, {"seed": seed}, algorithm=locked(threading.Lock()), out=tmp_path / f"{seed}")
    runs = [read(tmp_path / f"{seed}") for seed in (0, 1)]
    assert list(grouped(runs)) == ["Mine (not recorded: lock)", "Mine (not recorded: lock) #2"]
    resumed = fedfleet.resume(tmp_path / "0", {"rounds": 2}, algorithm=locked(threading.Lock()))
    assert resumed.summary["bit_exact"] is False
    events = (tmp_path / "0" / "events.jsonl").read_text()
    assert '"event": "not_compared", "of": ["lock"]' in events


class Measuring:
    """A task around another, whose metrics are what is given."""

    def __init__(self, metrics=None, net=None):
        self._task = Classification(ModelOptions(model="logistic"), DataShape((1, 8, 8), 10))
        self.parts, self.init = self._task.parts, self._task.init
        self.objectives = self._task.objectives
        predict = self._task.functions["predict"]
        self.functions = {"predict": predict if net is None else lambda z, batch: net(batch.x)}
        self._metrics = metrics

    def metrics(self, outputs, data):
        return self._metrics or self._task.metrics(outputs, data)


def test_mistakes_in_own_parts_are_said(subtests, tmp_path_factory):
    def call(row):
        parts, more = row
        tmp_path = tmp_path_factory.mktemp("row")
        fedfleet.run({**OWN, "evaluation": {"every": 1}}, more, **parts, out=tmp_path / "run")

    rows = [
        (({"algorithm": mine()._replace(phases=())}, {}), "phase 'train': it is none of the algorithm's phases"),
        (({"algorithm": mine()._replace(views={})}, {}), "it has no view 'global'"),
        (({"algorithm": mine()._replace(round=lambda z, rnd: (z, {"m": "x"}))}, {}),
         "round 0: the algorithm's metrics: 'm' is 'x'"),
        (({"task": Measuring({"m": torch.ones(3)})}, {}), "the task's metrics: 'm' is a tensor of shape (3,)"),
        (({"task": Measuring()}, {"evaluation.per_client": True}), "Measuring has no function 'per_example'"),
        (({"task": Measuring(net=torch.nn.Linear(5, 2))}, {}),
         "'predict', on the split 'test' (x … ): RuntimeError: addmm"),
        (({"task": Measuring(net=torch.nn.Linear(5, 2))}, {"until": "eval/m=1"}),
         "its 'predict' fails on examples of shape"),
    ]  # fmt: skip
    all_say(subtests, call, rows, fedfleet.FedfleetError)
