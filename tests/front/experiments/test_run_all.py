"""Several runs in Python, with parts made there: what comes back, what is left alone, what is refused."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedfleet
from fedfleet.experiments import campaign
from fedfleet.experiments.frames import Whole
from fedfleet.experiments.progress import Progress
from fedfleet.experiments.runfolder import locked
from tests.front.experiments.resuming import Told
from tests.refusals import all_say, tells

CONFIG: dict[str, Any] = {
    "rounds": 2, "seeds": [3, 4], "vary": {"algorithm.lr": [0.1, 0.5]},
    "compare": {"plain": {"algorithm": "fedavg"}, "near": {"algorithm": {"name": "fedprox", "mu": 0.1}}},
    "algorithm": {"batch_size": 5}, "cohort": {"size": 2}, "executor": {"kind": "local"},
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, width: int = 3):
        super().__init__()
        self.out = nn.Linear(2, 2)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


def data() -> Any:
    x = np.random.default_rng(0).normal(size=(60, 2))
    return fedfleet.data.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.arange(60) // 10)


def task(width: int = 3) -> Any:
    return fedfleet.tasks.from_module(lambda: Net(width))


def test_every_label_point_and_seed_is_run_and_comes_back_in_order(tmp_path: Path):
    told = Told()
    runs = fedfleet.run_all(CONFIG, task=task(), data=data(), out=tmp_path / "all", callbacks=told)
    keys = [(label, lr, seed) for label in ("plain", "near") for lr in (0.1, 0.5) for seed in (3, 4)]
    table = runs.table
    assert [tuple(row) for row in table[["label", "algorithm.lr", "seed"]].to_numpy().tolist()] == keys
    assert (len(runs), told.rounds) == (8, 16)
    for run, (label, lr, seed) in zip(runs, keys, strict=True):
        one = {**CONFIG, "seeds": None, "vary": None, "compare": None, **CONFIG["compare"][label], "seed": seed}
        given, out = {"algorithm.lr": lr, "algorithm.batch_size": 5}, tmp_path / "alone" / f"{label}{lr}{seed}"
        alone = fedfleet.run(one, given, task=task(), data=data(), out=out)
        assert (run.folder / "model.safetensors").read_bytes() == (alone.folder / "model.safetensors").read_bytes()
    assert table["accuracy"].tolist() == [run.summary["final"]["eval/accuracy"] for run in runs]
    mean = runs.mean()
    assert {type(frame) for frame in (table, mean, runs.rounds, runs[0].rounds)} == {Whole}
    assert mean.loc[("plain", 0.5), ("loss", "mean")] == pytest.approx(table["loss"][2:4].mean())
    assert mean.loc[("plain", 0.5), ("loss", "std")] == pytest.approx(table["loss"][2:4].std())
    rounds = runs.rounds
    assert len(rounds) == 16
    pd.testing.assert_series_equal(rounds["train_loss"][14:].reset_index(drop=True), runs[7].rounds["train_loss"])
    assert rounds["seed"][14:].tolist() == [4, 4]
    assert isinstance(runs[0].model(), Net)
    assert "<table" in runs._repr_html_()
    page = (tmp_path / "all" / "report.html").read_text()
    assert all(
        words in page
        for words in ("Study: accuracy against algorithm.lr", "What algorithm.lr costs", "Over all points")
    )
    assert any(line.startswith("plain lr=0.1  final accuracy") for line in told.lines)
    table = tmp_path / "all" / "trials.json"
    table.write_text(table.read_text().replace('"place": "', '"place": "../'))
    with pytest.raises(fedfleet.ConfigError, match="not as fedfleet wrote it"):
        campaign.tables(tmp_path / "all")


def test_all_columns_are_printed_however_narrow_the_terminal(monkeypatch: pytest.MonkeyPatch):
    names = [f"a_metric_{k}" for k in range(12)]
    frame = Whole([range(12)], columns=names)
    monkeypatch.setenv("COLUMNS", "50")
    for each in (frame, frame.round(1), frame[frame["a_metric_0"] >= 0], frame.groupby("a_metric_0").mean()):
        told = repr(each)
        assert [name for name in names if name not in told] == []
        assert max(map(len, told.splitlines())) <= 50
        assert told != repr(pd.DataFrame(each)), "pandas leaves some out"
    monkeypatch.setenv("COLUMNS", "200")
    assert len(repr(frame).splitlines()) == 2


@pytest.mark.slow
def test_run_again_it_goes_on_with_what_has_not_ended(subtests, tmp_path: Path):
    config = {**CONFIG, "vary": None, "compare": None}

    class Stops(fedfleet.Callback):
        def round(self, row: Any, phases: Any) -> None:
            if seen.rounds == 3:
                raise KeyboardInterrupt

    seen = Told()
    with pytest.raises(KeyboardInterrupt) as e:
        fedfleet.run_all(config, task=task(), data=data(), out=tmp_path / "all", callbacks=[seen, Stops()])
    assert e.value.__notes__ == ["after 1 of 2 rounds", "after 1 of 2 runs", "the same call goes on"]
    more = Told()
    runs = fedfleet.run_all(config, task=task(), data=data(), out=tmp_path / "all", callbacks=more)
    assert "1 of 2 runs are at their end" in more.lines
    assert [run.summary["rounds"] for run in runs] == [2, 2]
    whole = fedfleet.run_all(config, task=task(), data=data(), out=tmp_path / "whole")
    pd.testing.assert_frame_equal(runs.table, whole.table)
    assert runs.mean().shape == (1, 6)  # accuracy, loss, worst recall
    again = Told()
    assert fedfleet.run_all(config, task=task(), data=data(), out=tmp_path / "all", callbacks=again)[0].task is not None
    assert again.rounds == 0
    shutil.rmtree(runs[1].folder / "checkpoints")
    (runs[1].folder / "summary.json").unlink()  # as if it had been killed
    fedfleet.run_all(config, task=task(), data=data(), out=tmp_path / "all", callbacks=again)
    assert again.rounds == 2
    assert f"{runs[1].folder}: there is no checkpoint to go on from, and the run begins again" in again.lines
    other = fedfleet.data.from_arrays(np.ones((40, 2)), [0, 1] * 20, client=np.arange(40) // 10)
    rows = [
        ({"config": {**config, "rounds": 3}}, "runs of another configuration are there (rounds)"),
        ({"task": task(4)}, "seed-3: the run began with task"), ({"data": other}, "began with data"),
    ]  # fmt: skip
    given = {"config": config, "task": task(), "data": data(), "out": tmp_path / "all"}
    all_say(subtests, lambda change: fedfleet.run_all(**{**given, **change}), rows)
    with closing(locked(tmp_path / "all")):
        for call in (
            lambda: fedfleet.run_all(**given),
            lambda: campaign.resume(tmp_path / "all", None, Progress.silent()),
        ):
            tells(call, "another process is at work in it")


@pytest.mark.slow
def test_more_are_run_beside_those_that_are_there_and_all_are_opened(subtests, tmp_path: Path):
    few, told = {**CONFIG, "vary": {"algorithm.lr": [0.1]}, "seeds": [3]}, Told()
    fedfleet.run_all(few, task=task(), data=data(), out=tmp_path / "all")
    more = {**CONFIG, "compare": {**CONFIG["compare"], "opt": {"algorithm": "fedopt"}}}
    runs = fedfleet.run_all(more, task=task(), data=data(), out=tmp_path / "all", callbacks=told)
    assert (len(runs), told.rounds) == (12, 20)
    assert "2 of 12 runs are at their end" in told.lines
    opened = fedfleet.open_runs(tmp_path / "all", task=task())
    pd.testing.assert_frame_equal(opened.table, runs.table)
    assert isinstance(opened[11].model(), Net)
    (runs[2].folder / "summary.json").unlink()
    assert len(fedfleet.open_runs(tmp_path / "all")) == 11
    rows = [
        ({k: v}, f"({k}): ask for all") for k, v in (("vary", None), ("seeds", [3]), ("algorithm", {"batch_size": 4}))
    ]
    given = {"task": task(), "data": data(), "out": tmp_path / "all"}
    all_say(subtests, lambda less: fedfleet.run_all({**more, **less}, **given), rows)
    rows = [(runs[0].folder, "it is one run: take fedfleet.open_run"), (tmp_path, "give the folder of several")]
    all_say(subtests, fedfleet.open_runs, rows)


@pytest.mark.slow
def test_what_is_given_to_all_and_means_nothing_to_some_is_told(tmp_path: Path):
    algorithm = {"name": "fedavg", "batch_size": 5, "client_optimizer": "adam", "epochs": 1}
    compare = {
        "avg": {}, "dyn": {"algorithm.name": "feddyn"}, "omg": {"algorithm": {"name": "omg", "of": algorithm}},
    }  # fmt: skip
    config, told = {**CONFIG, "algorithm": algorithm, "compare": compare, "vary": None, "rounds": 1}, Told()
    runs = fedfleet.run_all(config, task=task(), data=data(), out=tmp_path / "all", callbacks=told)
    assert [line for line in told.lines if line.startswith("left out")] == [
        "left out algorithm.client_optimizer: feddyn has no such option"
    ]
    assert len(runs) == 6


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path):
    config = {**CONFIG, "compare": None, "vary": {"algorithm.lr": [1e38, 0.1]}, "seeds": None}
    with pytest.raises(fedfleet.FedfleetError, match=r"1 of 2 runs: lr-1e.38: .*lower the learning rates"):
        fedfleet.run_all(config, task=task(), data=data(), out=tmp_path / "all")
    assert fedfleet.open_run(tmp_path / "all" / "lr-0.1").summary["status"] == "finished"


def test_what_cannot_be_is_said_before_anything_is_written(subtests, tmp_path: Path):
    rows = [
        ({"seeds": None, "vary": None, "compare": None}, "there is one run"),
        ({"vary": {"lr": [1]}}, "run 'plain lr=1': lr=1: unknown key; did you mean algorithm.lr?"),
        ({"vary": {"cohort.size": [2, 99]}}, "run 'plain size=99': cohort.size=99"),
    ]  # fmt: skip
    given = {"task": task(), "data": data(), "out": tmp_path / "all"}
    all_say(subtests, lambda change: fedfleet.run_all({**CONFIG, **change}, **given), rows)
    assert not (tmp_path / "all").exists()
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "mine").touch()
    tells(lambda: fedfleet.run_all(CONFIG, task=task(), data=data(), out=tmp_path / "all"), "exists and is not empty")
