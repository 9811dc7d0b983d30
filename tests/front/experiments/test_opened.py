"""Runs opened from their folders, and what is shown of runs and of data in a line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import fedfleet
from tests.front.experiments.resuming import Interrupting
from tests.refusals import tells

CONFIG = {
    "rounds": 2, "population": {"clients": 4}, "cohort": {"size": 2}, "task": {"model": "logistic"},
    "executor": {"kind": "local", "inner": "serial"},
}  # fmt: skip


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("opened") / "several"
    for seed in (0, 1):
        fedfleet.run(CONFIG, {"seed": seed}, out=out / "FedAvg" / f"seed-{seed}")
    return out


def test_a_run_that_has_ended_is_opened_as_it_was_returned(several: Path, tmp_path: Path) -> None:
    returned = fedfleet.run(CONFIG, {"seed": 1}, out=tmp_path / "run")
    opened = fedfleet.open_run(str(several / "FedAvg" / "seed-1"))
    assert opened.rounds["train_loss"].tolist() == returned.rounds["train_loss"].tolist()
    for ours, theirs in zip(opened.model().parameters(), returned.model().parameters(), strict=True):
        assert torch.equal(ours, theirs)
    final = returned.summary["final"]["eval/accuracy"]
    assert repr(opened).startswith(f"Run('{opened.folder}': finished, 2 rounds, accuracy {final:.4f}, loss ")


def test_a_folder_that_is_no_run_is_refused_saying_what_is_below_it(several: Path, tmp_path: Path) -> None:
    tells(lambda: fedfleet.open_run(several), "several: no summary.json there: there are FedAvg/seed-0, FedAvg/seed-1")
    tells(lambda: fedfleet.open_run(tmp_path / "none"), "none: no such folder")
    tells(lambda: fedfleet.open_runs(tmp_path / "none"), "none: no such folder")
    assert fedfleet.open_run(several / "FedAvg" / "seed-0").tables == [
        "classes",
        "outcomes",
        "phases",
        "recall",
        "rounds",
    ]
    tells(lambda: fedfleet.load(several / "FedAvg" / "seed-0"), "seed-0: the folder of a run")


def test_the_net_of_a_task_made_in_python_comes_back_with_the_task(tmp_path: Path) -> None:
    own = {k: v for k, v in CONFIG.items() if k != "task"}
    task = fedfleet.tasks.from_module(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), loss="cross_entropy")
    run = fedfleet.run(own, task=task, out=tmp_path / "run")
    tells(lambda: fedfleet.open_run(run.folder).model(), "made in Python, … or fedfleet.open_run(' … run', task=…)")
    opened = fedfleet.open_run(run.folder, task=task).model()
    assert torch.equal(opened.state_dict()["1.weight"], run.model().state_dict()["1.weight"])


def test_an_interruption_says_how_to_go_on(tmp_path: Path) -> None:
    data = fedfleet.data.from_arrays(torch.zeros(80, 2), [0, 1] * 40)
    with pytest.raises(KeyboardInterrupt) as raised:
        fedfleet.run(CONFIG, data=data, out=tmp_path / "run", callbacks=Interrupting(0))
    fix = f"go on with fedfleet.resume('{tmp_path / 'run'}', data=…)"
    assert raised.value.__notes__ == ["after 1 of 2 rounds", fix]
    assert fedfleet.resume(tmp_path / "run", data=data).summary["status"] == "finished"


def test_progress_is_shown_in_python_and_says_of_which_round_a_metric_is(tmp_path, capsys):
    fedfleet.run(CONFIG, {"evaluation.every": 2}, out=tmp_path / "run")
    out, shown = capsys.readouterr()
    assert not out
    assert "initial model: accuracy " in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("round 2/2 | accuracy ")]
    assert "| completed 2 of 2 |" in line
    fedfleet.resume(tmp_path / "run", {"rounds": 3})
    assert capsys.readouterr().err.count("round 3/3 | ") == 1
    shutil.rmtree(tmp_path / "run")
    fedfleet.run(CONFIG, out=tmp_path / "run", progress=False)
    shutil.rmtree(tmp_path / "run")
    fedfleet.run(CONFIG, out=tmp_path / "run", callbacks=fedfleet.Progress(silent=True))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_line_of_progress_fits(width):
    progress = fedfleet.Progress()
    progress._metrics = {"accuracy": 0.5, "loss": 1.25, "accuracy_worst_domain": 0.125}
    progress._rounds, progress._started = 1000, progress._started - 1e4
    phases = [{"invited": 100, "completed": 77}] * 2
    line = progress._line(phases, 500, width)
    assert len(line) <= width
    assert line.startswith("round 500/1000 | accuracy 0.5000")
    assert " after 0 | completed 77+77 of 100+100 | " in line
    assert ("worst domain 0.1250" in line) == (width >= 140)
    progress._measured = 500
    assert "| accuracy 0.5000, worst domain 0.1250 | " in progress._line(phases, 500, 140)
    assert len(progress._line([{"invited": 10**9, "completed": 10**9}] * 9, 1, width)) == width


def test_data_say_in_a_line_what_they_have() -> None:
    x, y = torch.zeros(20, 3, 4, 4, dtype=torch.uint8), torch.arange(20) % 2
    dealt = fedfleet.data.from_arrays(x, y, test=0.1)
    assert repr(dealt) == (
        "Dataset('arrays', train=Examples(18 of uint8 (3, 4, 4), 2 classes), test=Examples(2 of uint8 (3, 4, 4), 2 classes))"
    )
    held = fedfleet.data.from_arrays(
        x, target=y.float(), client=torch.arange(20) // 5, domain=torch.arange(20) // 10, test=0.5
    )
    assert repr(held) == (
        "FederatedDataset('arrays', 2 clients with 10 training examples, test=Examples(10 of uint8 (3, 4, 4), targets ()), "
        "2 domains, tested on clients 1, 3)"
    )


def test_every_column_of_the_tables_is_in_the_documentation(several: Path) -> None:
    run = fedfleet.open_run(several / "FedAvg" / "seed-0")
    page = (Path(__file__).parents[3] / "docs" / "reference" / "run_folder.md").read_text(encoding="utf-8")
    table = page[page.index("| column of `rounds.parquet`") : page.index("`phases.parquet` has the same")]
    named = {
        name
        for line in table.splitlines()[2:]
        for name in re.findall(r"`([\w/<>]+)`", line.split("|")[1] if "|" in line else "")
    }
    assert named == {
        "eval/<metric>" if name.startswith("eval/") else name for name in {*run.rounds, "skipped"}
    }  # which runs of cohort.on_abort=skip have
    assert run.table("phases").columns.difference(run.rounds.columns).tolist() == ["attempt", "phase"]
    assert {"client", "outcome", "virtual_s"} <= set(run.table("outcomes"))


@pytest.mark.extras("transformers")
def test_a_transformer_comes_back_where_the_file_that_configured_it_is_gone(tmp_path):
    told = {
        "model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8,
    }  # fmt: skip
    (tmp_path / "bert.json").write_text(json.dumps(told))
    texts = ["a fine film" if i % 2 else "a poor film" for i in range(40)]
    data = fedfleet.data.from_texts(texts, [i % 2 for i in range(40)], client=[i // 8 for i in range(40)])
    config = {"rounds": 1, "cohort": {"size": 2}, "algorithm": {"batch_size": 4}, "executor": {"kind": "local"}}
    model = {"task": {"model": f"transformers:{tmp_path / 'bert.json'}"}}
    run = fedfleet.run(config | model, data=data, out=tmp_path / "run")
    assert json.loads((run.folder / "net.json").read_text()) == told
    tokens, mask = run.encode(["a fine film"])
    before = run.model()(input_ids=tokens, attention_mask=mask.long()).logits
    (tmp_path / "bert.json").unlink()
    run.folder.rename(tmp_path / "moved")
    after = fedfleet.open_run(tmp_path / "moved").model()(input_ids=tokens, attention_mask=mask.long()).logits
    assert torch.equal(before, after)
