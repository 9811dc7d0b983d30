"""An algorithm within an algorithm's options: as strict, and as short to write, as one by itself."""

from __future__ import annotations

from typing import Any

from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from tests.refusals import all_refused

OMG = {"algorithm": {"name": "omg", "of": {"name": "fedrep", "lr": 0.3, "head_epochs": 2}}}


def of(*overrides: str, source: Any = OMG) -> dict[str, Any]:
    return load(source, [*overrides]).algorithm.of.model_dump(mode="json")


def test_it_is_fedavg_if_nothing_is_said_and_its_options_are_filled_in_and_read_again():
    plain = load({"algorithm": "fedavg"}).model_dump(mode="json")["algorithm"]
    for source in ({"algorithm": "omg"}, {"algorithm": {"name": "omg", "of": None}}):
        found = load(source).model_dump(mode="json")["algorithm"]["of"]
        assert found == plain
        assert found["epochs"] == 1
    found = load(OMG).model_dump(mode="json")
    assert (found["algorithm"]["of"]["head_epochs"], found["algorithm"]["of"]["batch_size"]) == (2, 10)
    assert load(found).model_dump(mode="json") == found


def test_another_name_leaves_out_what_only_the_old_one_has():
    found = of("algorithm.of.lr=0.2", source={"algorithm": {"name": "omg", "of": "fedprox"}})
    assert (found["name"], found["lr"], found["mu"]) == ("fedprox", 0.2, 0.01)
    for written in ("algorithm.of=fedprox", "algorithm.of.name=fedprox"):
        found = of(written)
        assert (found["name"], found["lr"]) == ("fedprox", 0.3)
        assert "head_epochs" not in found
    assert load(OMG, ["algorithm.name=fedavg"]).algorithm.lr == 0.1


REFUSED = [
    ("algorithm.of=fedrp", "algorithm.of.name='fedrp': unknown; did you mean 'fedrep'"),
    ("algorithm.of=omg", "algorithm.of.name='omg'"),
    ("algorithm.of=3", "algorithm.of=3"),
    ("algorithm.of.name=[fedavg]", "algorithm.of.name=['fedavg']"),
    ("algorithm.of.q=1", "algorithm.of.q=1"),
    ("algorithm.of.lr='0.3'", "algorithm.of.lr='0.3'"),
    ("algorithm.of.head_epochs=true", "algorithm.of.head_epochs=True"),
    ("algorithm.of.lr=-1", "algorithm.of.lr=-1"),
    ("algorithm.of.dual_lr=0.5", "algorithm.dual_lr=0.5"),  # of a part that is not there
]


def test_what_is_wrong_is_refused(subtests):
    all_refused(subtests, lambda given: Experiment(load({**OMG, "executor": {"kind": "local"}}, [given])), REFUSED)
