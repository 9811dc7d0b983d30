"""Trackers, with the libraries themselves: what they have of a run, also when it was interrupted, and when they fail."""

from __future__ import annotations

import json
import math
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import fedfleet
from fedfleet.config.schema import load
from fedfleet.experiments import tracker_setup
from fedfleet.tracking import registry
from fedfleet.tracking.base import Tracker, numbers
from fedfleet.tracking.csv import Csv
from tests.front.experiments.resuming import BASE, CASES, Interrupting, Told, check_equal
from tests.refusals import all_say

SMALL = {**BASE, **CASES["stateless"], "rounds": 7, "evaluation": {"every": 2}}
NEEDS = {"mlflow": "mlflow", "wandb": "wandb"}
LIBRARIES = [
    pytest.param(name, marks=[pytest.mark.extras(NEEDS[name])] if name in NEEDS else []) for name in registry.TRACKERS
]
BLOCK = 1 << 15
Values = dict[str, dict[int, list[float]]]
"""Name -> step -> what was entered there, each time."""


@pytest.fixture(autouse=True)
def _stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no library look for a server, or write beside the tests; MLflow's store of files wants to be allowed."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)


def options(name: str, tmp_path: Path) -> dict[str, Any]:
    return {"mlflow": {"uri": f"file:{tmp_path}/mlflow", "tags": {"a": "b"}}, "wandb": {"tags": ["a"]}}.get(name, {})


def given(name: str, tmp_path: Path) -> dict[str, Any]:
    return {"track": [{"name": name, **options(name, tmp_path)}]}


def entered(name: str, run: Path) -> Values:
    found: Values = {}
    for key, step, value in {"csv": _csv, "tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[name](run):
        found.setdefault(key.removeprefix("round/"), {}).setdefault(step, []).append(value)
    return found


def _csv(run: Path) -> Any:
    frame = pd.read_csv(run / "metrics.csv")
    for _, row in frame.iterrows():
        yield from ((k, int(row["rounds"]), v) for k, v in row.items() if k != "rounds" and v == v)


def _tensorboard(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    for tag in found.Tags()["scalars"]:
        yield from ((tag, e.step, e.value) for e in found.Scalars(tag))


def _mlflow(run: Path) -> Any:
    from mlflow.tracking import MlflowClient

    note = json.loads((run / "mlflow.json").read_text())
    client = MlflowClient(note["uri"])
    for key in client.get_run(note["run"]).data.metrics:
        yield from ((key, m.step, m.value) for m in client.get_metric_history(note["run"], key))


def wandb_records(run: Path) -> Any:
    """Yield what W&B's files hold, once its process has written all of it."""
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        until = time.monotonic() + 20
        found: list[Any] = []
        while not any(record.HasField("exit") for record in found):
            assert time.monotonic() < until
            time.sleep(0.05)
            found = list(_records(path.read_bytes()))
        yield from found


def _records(data: bytes) -> Any:
    """Yield what is in LevelDB's log format, blocks of 32 KiB behind a header."""
    from wandb.proto import wandb_internal_pb2

    at, whole = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def _wandb(run: Path) -> Any:
    for record in wandb_records(run):
        if record.HasField("history"):
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            yield from ((k, row["rounds"], v) for k, v in row.items() if k != "rounds" and not k.startswith("_"))


def wanted(run: Path) -> Values:
    """What the run folder says."""
    found: Values = {}
    initial = json.loads((run / "summary.json").read_text())["initial"]
    rows = pd.read_parquet(run / "rounds.parquet").to_dict("records")
    for step, row in [(0, initial), *((r["round"] + 1, {k: v for k, v in r.items() if k != "round"}) for r in rows)]:
        for key, value in row.items():
            if value is not None and math.isfinite(value):
                found.setdefault(key, {})[step] = [value]
    return found


def check(name: str, run: Path, *, but: tuple[str, ...] = (), more: int | None = None) -> None:
    """``but`` are names that are not compared, ``more`` a step at which an evaluation may stand that the run has not."""
    found, right = entered(name, run), wanted(run)
    for key in found:
        if key.startswith("eval/") and more not in right.get(key, {}):
            found[key].pop(more, None)  # pyright: ignore
    found = {k: v for k, v in found.items() if not k.startswith(("final/", "best/", "selected/"))}
    assert set(found) == set(right)
    for key in set(right) - set(but):
        assert {s: len(v) for s, v in found[key].items()} == {s: 1 for s in right[key]}, key
        assert {s: v[0] for s, v in found[key].items()} == pytest.approx(
            {s: v[0] for s, v in right[key].items()}, rel=1e-6
        )


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_tracker_has_every_number_of_every_round_and_changes_none(tmp_path, name):
    plain = fedfleet.run(SMALL, out=tmp_path / "plain").folder
    run = fedfleet.run(SMALL, given(name, tmp_path), out=tmp_path / "run").folder
    check(name, run)
    check_equal(run, plain)
    assert not (run / "events.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_rounds_that_come_again_are_entered_once(tmp_path, name):
    track = given(name, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fedfleet.run(SMALL, track, out=tmp_path / "run", callbacks=Interrupting(4))
    run = tmp_path / "run"
    newest = max(run.glob("checkpoints/round-*.safetensors"))
    newest.unlink()  # as if the process had been killed: rounds come again
    fedfleet.resume(run)
    check(name, run, but=("seconds",))  # whose first values may stand
    fedfleet.resume(run, {"rounds": 9})
    check(name, run, but=("seconds",), more=7)  # which was evaluated because it was the last
    plain = fedfleet.run(SMALL, {"rounds": 9}, out=tmp_path / "plain").folder
    check_equal(run, plain)


@pytest.mark.slow
def test_what_a_killed_process_has_entered_is_not_entered_again(tmp_path):
    config = {**SMALL, "rounds": 100_000, **given("csv", tmp_path)}
    (tmp_path / "c.yaml").write_text(json.dumps({**config, "checkpoint": {"every_s": 0.3}}))
    command = [sys.executable, "-m", "fedfleet", "run", "c.yaml", "--out", "run", "--no-report"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        until = time.monotonic() + 60
        while len(list((tmp_path / "run").glob("checkpoints/round-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    run = tmp_path / "run"
    done = int(max(run.glob("checkpoints/round-*.safetensors")).stem.removeprefix("round-"))
    fedfleet.resume(run, {"rounds": done + 3})
    check("csv", run)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.slow
def test_a_tracker_that_comes_later_has_the_rounds_before(tmp_path, name):
    run = fedfleet.run(SMALL, {"rounds": 4}, out=tmp_path / "run").folder
    fedfleet.resume(run, {"rounds": 7, **given(name, tmp_path)})
    check(name, run)
    fedfleet.resume(run, {"rounds": 8, "track": []})


def test_tensorboard_has_the_configuration_and_the_summary(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = fedfleet.run(SMALL, {"track": "tensorboard"}, out=tmp_path / "run").folder
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["tensors"]) == {"config/text_summary", "summary/text_summary"}
    assert "final/eval/accuracy" in found.Tags()["scalars"]
    hparams = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"algorithm.steps" in hparams


@pytest.mark.extras("mlflow")
def test_mlflow_has_parameters_tags_and_how_it_ended(tmp_path):
    from mlflow.tracking import MlflowClient

    run = fedfleet.run(SMALL, {"label": "mine", "seed": 3, **given("mlflow", tmp_path)}, out=tmp_path / "run").folder
    note = json.loads((run / "mlflow.json").read_text())
    found = MlflowClient(note["uri"]).get_run(note["run"])
    assert (found.info.run_name, found.info.status) == ("mine seed 3", "FINISHED")
    assert (found.data.params["algorithm.steps"], found.data.tags["a"]) == ("2", "b")
    assert found.data.tags["fedfleet.status"] == "finished"
    assert "final/eval/accuracy" in found.data.metrics
    fedfleet.resume(run, {"rounds": 8})
    found = MlflowClient(note["uri"]).get_run(note["run"])
    assert (found.data.params["rounds"], found.data.tags["resumed.rounds"]) == ("7", "8")


@pytest.mark.extras("wandb")
def test_wandb_has_the_configuration_the_tags_and_the_summary(tmp_path):
    run = fedfleet.run(SMALL, {"label": "mine", **given("wandb", tmp_path)}, out=tmp_path / "run").folder
    records = list(wandb_records(run))
    (begun,) = [r.run for r in records if r.HasField("run")]
    wanted = ("fedfleet", "mine seed 0", "mine", ["a"])
    assert (begun.project, begun.display_name, begun.run_group, list(begun.tags)) == wanted
    assert {u.key: u.value_json for u in begun.config.update}["algorithm.steps"] == "2"
    said = {i.key for r in records if r.HasField("summary") for i in r.summary.update}
    assert {"final/eval/accuracy", "status"} <= said
    fedfleet.resume(run, {"rounds": 8})
    assert {r.run.run_id for r in wandb_records(run) if r.HasField("run")} == {begun.run_id}


@pytest.mark.slow
def test_runs_of_a_study_have_a_run_each(tmp_path, command):
    (tmp_path / "c.yaml").write_text(json.dumps({**SMALL, "rounds": 2, "track": [{"name": "csv", "dir": "all"}]}))
    config = ["c.yaml", "compare={a: {}, b: {algorithm.lr: 0.2}}", "seeds=[0, 1]"]
    assert command("run", *config, "--out", "runs", "--no-report")[0] == 0
    names = {f"{n}-seed-{s}" for n in "ab" for s in (0, 1)}
    assert {p.parent.name for p in Path("all").rglob("metrics.csv")} == names
    assert command("run", *config, "--out", "again", "--no-report")[0] == 0  # it takes nothing from those before
    assert command("resume", "again", "rounds=3", "--no-report")[0] == 0  # and goes on in its own place
    lines = {p.parent.name: len(p.read_text().splitlines()) for p in Path("all").rglob("metrics.csv")}
    assert lines == {**dict.fromkeys(names, 4), **{f"{n}-2": 5 for n in names}}


@pytest.mark.slow
def test_where_a_run_is_tracked_does_not_tell_it_from_others(tmp_path, command):
    (tmp_path / "c.yaml").write_text(json.dumps({**SMALL, "rounds": 2}))
    study = ["study", "c.yaml", "--vary", "algorithm.lr=0.1,0.2", "--jobs", 1, "--out", "s"]
    assert command(*study)[0] == 0
    status, said, _ = command(*study, "track=csv", "--dry-run")
    assert (status, "2 of them finished" in said) == (0, True)
    a, b = (fedfleet.run(SMALL, {"rounds": 1, "track": t}, out=tmp_path / f"{i}") for i, t in enumerate(([], ["csv"])))
    fedfleet.write_report([a.folder, b.folder], tmp_path / "both")
    assert "csv" not in (tmp_path / "both" / "report.html").read_text().partition("</table>")[0]


# What goes wrong
class Broken(Csv):
    """Fails at a step, so many times."""

    times, at = 1, 3

    def log(self, step: int, found: Mapping[str, float]) -> None:
        if step == self.at and self.times:
            type(self).times -= 1
            raise OSError(28, "No space left\non device")
        super().log(step, found)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> type[Broken]:
    monkeypatch.setitem(registry.ROWS, "csv", registry.ROWS["csv"]._replace(build=Broken))
    monkeypatch.setattr(Broken, "times", 1)
    return Broken


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_tracker_that_fails_is_said_once_and_begun_again_at_the_end(tmp_path, broken, monkeypatch, at):
    monkeypatch.setattr(broken, "at", at)
    said = Told()
    run = fedfleet.run(SMALL, {"track": "csv"}, out=tmp_path / "run", callbacks=said)
    assert run.summary["status"] == "finished"
    why = "OSError: No space left on device"
    assert [line for line in said.lines if "failed" in line] == [
        f"track=csv failed, and the run goes on without: {why}"
    ]
    (event,) = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["of"], event["why"]) == ("tracker_failed", "csv", why)
    check("csv", run.folder)
    assert run.summary["bit_exact"]


def test_a_tracker_that_keeps_failing_is_said_once(tmp_path, broken, monkeypatch):
    monkeypatch.setattr(broken, "times", 99)
    monkeypatch.setattr(tracker_setup, "AGAIN_S", 0.0)
    run = fedfleet.run(SMALL, {"track": "csv"}, out=tmp_path / "run")
    assert (run.summary["status"], len((run.folder / "events.jsonl").read_text().splitlines())) == ("finished", 1)
    assert broken.times < 95  # it was tried again round by round


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_one_that_is_not_installed_is_said_before_the_work(tmp_path, monkeypatch, name):
    monkeypatch.setattr(registry, "find_spec", lambda package: None)
    install = {"tensorboard": "tensorboard"}.get(name, f"'fedfleet\\[{name}\\]'")
    with pytest.raises(fedfleet.ConfigError, match=rf"^track={name}: {name} is not installed: pip install {install}"):
        fedfleet.run(SMALL, {"track": [name]}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert fedfleet.load(SMALL, {"track": [name]}).track  # a configuration is read wherever


def test_a_folder_called_as_a_package_is_none(tmp_path, monkeypatch):
    (tmp_path / "mlflow9").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not registry._installed("mlflow9")


# What may be written
@pytest.mark.parametrize("written", ["csv", ["csv"], {"name": "csv"}, [{"name": "csv", "dir": None}]])
def test_one_or_several_names_or_mappings(written):
    config = load({"track": written})
    assert config.model_dump(mode="json")["track"] == [{"name": "csv", "dir": None}]
    assert load(config.model_dump(mode="json")).model_dump(mode="json") == config.model_dump(mode="json")
    assert load({"track": written}, ["track=null"]).track == []


def test_what_is_no_tracker_is_refused(subtests):
    rows = [
        ("tensorbord", "track.name='tensorbord': unknown; did you mean 'tensorboard'"),
        (["csv", "csv"], "track[1].name='csv': it is there already"),
        ([{"name": "mlflow", "url": "x"}], "track[0].url='x': unknown key; did you mean track[0].uri"),
        ([3], "track[0]=3: give a name"), ([{"project": "x"}], "track[0]= … : give a name"),
        ([{"name": "wandb", "mode": "off"}], "track[0].mode='off'"),
    ]  # fmt: skip
    all_say(subtests, lambda written: load({"track": written}), rows)


def test_numbers_are_finite_and_no_truth_values():
    found = {"a": 1, "b": 0.5, "c": None, "d": float("nan"), "e": True, "f": "x", "g": float("inf")}
    assert numbers(found) == {"a": 1, "b": 0.5}


def test_trackers_are_one_of_a_kind():
    assert all(issubclass(e.build, Tracker) and e.about for e in registry.TRACKERS.values())  # pyright: ignore
    assert Counter(e.options for e in registry.TRACKERS.values()).most_common(1)[0][1] == 1
