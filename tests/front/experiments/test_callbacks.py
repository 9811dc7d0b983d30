"""Callbacks: what they are told, how they stop a run, what becomes of one that raises; and a run that loses its patience."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedfleet
from fedfleet.config.schema import load
from fedfleet.experiments.stopping import Stopping
from tests.front.experiments.resuming import BASE, CASES, Interrupting, check_equal
from tests.parts import slow_but
from tests.refusals import all_say, tells

SMALL = {**BASE, **CASES["stateless"], "rounds": 6, "evaluation": {"every": 2}}


class Notes(fedfleet.Callback):
    """Writes down what it is told, and stops or raises where it is to."""

    def __init__(self, stop: str = "", fail: str = ""):
        self.events: list[Any] = []
        self.stop, self.fail = stop, fail

    def note(self, event: str) -> str | None:
        self.events.append(event)
        if event == self.fail:
            raise ValueError("this\nwill not do")
        return "enough seen" if event == self.stop else None

    def start(self, run: Any) -> None:
        self.begun = run
        self.note(f"start {run.done}")

    def round(self, row: Any, phases: Any) -> str | None:
        assert row["completed"] == sum(p["completed"] for p in phases)
        return self.note(f"round {row['round']}")

    def evaluation(self, done: int, metrics: Any) -> str | None:
        assert "eval/accuracy" in metrics
        return self.note(f"evaluation {done}")

    def checkpoint(self, done: int, path: Path) -> None:
        assert path.exists()
        self.note(f"checkpoint {done}")

    def end(self, summary: Any) -> None:
        self.note(f"end {summary['status']}")


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_they_are_told_of_everything_in_order(tmp_path):
    notes = Notes()
    fedfleet.run(SMALL, {"rounds": 3, "checkpoint.every_s": None}, out=tmp_path / "run", callbacks=[notes])
    assert notes.events == [
        *("checkpoint 0", "start 0", "round 0", "round 1", "evaluation 2", "round 2", "evaluation 3"),
        *("checkpoint 3", "end finished"),
    ]
    assert (notes.begun.name, notes.begun.config["algorithm"]["steps"]) == ("fedavg seed 0", 2)
    assert (notes.begun.rounds, notes.begun.folder) == (3, tmp_path / "run")
    again = Notes()
    fedfleet.resume(tmp_path / "run", {"rounds": 4}, again)
    assert again.events == ["checkpoint 3", "start 3", "round 3", "evaluation 4", "checkpoint 4", "end finished"][1:]
    assert [row["round"] for row in again.begun.rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("stop", "rounds"),
    slow_but(
        [("round 0", 1), ("evaluation 2", 2), ("round 1", 2), ("round 4", 5)], ("round 1", 2), ("evaluation 2", 2)
    ),
)
def test_one_may_stop_the_run_which_then_may_go_on(tmp_path, stop, rounds):
    whole = fedfleet.run(SMALL, out=tmp_path / "whole").folder
    run = fedfleet.run(SMALL, out=tmp_path / "run", callbacks=[Notes(), Notes(stop)])
    said = run.summary
    assert (said["status"], said["rounds"]) == ("stopped", rounds)
    assert said["stopped"] == {"by": "Notes", "why": "enough seen"}
    assert run.rounds["eval/accuracy"].notna().tolist()[-1]  # the last model is measured
    fedfleet.resume(run.folder)
    check_equal(run.folder, whole)


def test_after_the_last_round_there_is_nothing_to_stop(tmp_path):
    run = fedfleet.run(SMALL, out=tmp_path / "run", callbacks=[Notes("evaluation 6")])
    assert (run.summary["status"], run.summary["stopped"]) == ("finished", None)


@pytest.mark.parametrize(
    "fail", slow_but(["start 0", "round 2", "evaluation 4", "checkpoint 3"], "round 2", "checkpoint 3")
)
def test_one_that_raises_ends_the_run_in_one_line_and_it_can_go_on(tmp_path, fail):
    whole = fedfleet.run(SMALL, out=tmp_path / "whole").folder
    other = Notes()
    with pytest.raises(fedfleet.FedfleetError, match=r"^callback Notes, .*: ValueError: this will not do$"):
        fedfleet.run(SMALL, out=tmp_path / "run", callbacks=[other, Notes(fail=fail)])
    assert (summary(tmp_path / "run")["status"], other.events[-1]) == ("failed", "end failed")
    fedfleet.resume(tmp_path / "run")
    check_equal(tmp_path / "run", whole)


def test_one_that_raises_at_the_end_leaves_a_finished_run(tmp_path):
    other = Notes()
    with pytest.raises(fedfleet.FedfleetError, match="callback Notes, end: ValueError"):
        fedfleet.run(SMALL, out=tmp_path / "run", callbacks=[Notes(fail="end finished"), other])
    assert (other.events[-1], summary(tmp_path / "run")["status"]) == ("end finished", "finished")


@pytest.mark.parametrize(("given", "what"), [([Notes], "the class Notes itself"), (3, "a int"), (["x"], "a str")])
def test_what_is_no_callback_is_refused_before_the_work(tmp_path, given, what):
    tells(lambda: fedfleet.run(SMALL, out=tmp_path / "run", callbacks=given), f"^callbacks[0]: {what}: give an object")
    assert not (tmp_path / "run").exists()


# Patience
def after(values: list[float | None], **given: Any) -> list[bool]:
    config = load({"patience": {"metric": "eval/accuracy", "evaluations": 2, **given}})
    stopping, found = Stopping(config, None), []
    for value in values:
        stopping.note({given.get("metric", "eval/accuracy"): value})  # pyright: ignore
        found.append(stopping.patience() is not None)
    return found


def test_patience_ends_after_so_many_evaluations_without_an_improvement():
    assert after([0.1, 0.2, 0.2, 0.1]) == [False, False, False, True]
    assert after([0.1, 0.2, 0.2, 0.3, 0.3, 0.2]) == [False] * 5 + [True]
    assert after([0.5, 0.4, 0.41], metric="eval/loss") == [False, False, False]
    assert after([0.4, 0.5, 0.41], metric="eval/loss") == [False, False, True]
    assert after([0.1, 0.2, 0.3], min_delta=0.5) == [False, False, True]
    assert after([0.0, 0.5, 0.5], min_delta=0.5) == [False, False, True]  # not more than that
    assert after([float("nan"), None, 0.1, float("inf"), None]) == [False, True, False, False, True]


PATIENT = {"patience": {"metric": "eval/accuracy", "evaluations": 2, "min_delta": 0.9}}


def test_patience_stops_a_run_the_same_way_when_it_was_interrupted(tmp_path):
    whole = fedfleet.run(SMALL, PATIENT, out=tmp_path / "whole")
    assert (whole.summary["status"], whole.summary["rounds"]) == ("stopped", 4)
    assert whole.summary["stopped"]["by"] == "patience"
    assert "was never better than" in whole.summary["stopped"]["why"]
    with pytest.raises(KeyboardInterrupt):
        fedfleet.run(SMALL, PATIENT, out=tmp_path / "run", callbacks=Interrupting(2))
    fedfleet.resume(tmp_path / "run")
    check_equal(tmp_path / "run", whole.folder)


def test_a_run_that_lost_its_patience_is_at_its_end_until_it_has_more(tmp_path):
    out, notes = tmp_path / "run", Notes()
    fedfleet.run(SMALL, PATIENT, out=out)
    fedfleet.resume(out, callbacks=notes)
    assert (notes.events, fedfleet.resume(out, {"patience": None}).summary["rounds"]) == ([], 6)
    whole = fedfleet.run(SMALL, out=tmp_path / "whole").folder
    check_equal(out, whole)


def test_patience_that_cannot_be_is_refused(subtests):
    rows = [
        ({"patience.evaluations": 3}, "patience.metric: missing"),
        ({"patience.metric": "eval/acuracy"}, "did you mean 'eval/accuracy'"),
        ({"patience": {"metric": "eval/accuracy", "evaluations": 0}}, "patience.evaluations=0"),
        ({"patience": {"metric": "eval/accuracy", "min_delta": -1}}, "patience.min_delta=-1"),
    ]  # fmt: skip
    all_say(subtests, lambda given: fedfleet.Experiment(load(SMALL, given)), rows)


def test_one_that_asks_for_a_metric_that_is_not_there_is_told_which_are(tmp_path):
    class Asking(fedfleet.Callback):
        def evaluation(self, done, metrics):
            assert metrics.get("eval/auc") is None
            return None if metrics["eval/auc"] < 1 else "done"

    tells(lambda: fedfleet.run(SMALL, out=tmp_path / "run", callbacks=[Asking()]), "KeyError", fedfleet.FedfleetError)
