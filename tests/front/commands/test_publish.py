"""Files for a paper: what there is, what methods say of what ran, and that the same runs give the same bytes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import fedfleet
from fedfleet.commands import methods, options_told, publish, tuned
from fedfleet.commands.methods import paragraph
from fedfleet.config.schema import load
from fedfleet.report import publication
from fedfleet.report.settings import USED
from fedfleet.report.tables import read
from tests.front.report.report_runs import make_run, rounds_table

CONFIG: dict[str, Any] = {
    "rounds": 2, "population": {"clients": 20, "partition": {"kind": "dirichlet", "alpha": 0.3}},
    "task": {"model": "logistic"}, "algorithm": {"name": "fedavg", "lr": 0.2}, "cohort": {"size": 5},
    "availability": {"kind": "bernoulli", "rate": 0.6}, "executor": {"kind": "local"}, "seeds": [3, 4], "evaluation": {"every": 1},
    "compare": {"FedAvg": {}, "A_B": {"algorithm": {"name": "scaffold", "lr": 0.05}}, "p": {"algorithm.correction": "known_p"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> fedfleet.Runs:
    return fedfleet.run_all(CONFIG, out=tmp_path_factory.mktemp("publish") / "runs")


@pytest.mark.slow
def test_what_is_written(runs: fedfleet.Runs, tmp_path: Path, command) -> None:
    (tmp_path / "tune").mkdir()
    search = {
        "tune": {"search": {"algorithm.lr": "loguniform(0.01, 1)"}, "metric": "eval/validation_loss", "trials": 8},
        "seeds": [9],
    }
    (tmp_path / "tune" / "tune.yaml").write_text(yaml.safe_dump(search))
    (tmp_path / "tune" / "best.yaml").write_text("")
    chosen = {
        "label": "FedAvg",
        "algorithm": "fedavg",
        "algorithm.lr": 0.2,
        "edge": "algorithm.lr",
        "trials": 8,
        "folder": "FedAvg",
    }
    pd.DataFrame([chosen]).to_parquet(tmp_path / "tune" / "winners.parquet")
    trial = {**CONFIG, "rounds": 7, "evaluation": {"validation": 0.1}}
    (tmp_path / "tune" / "FedAvg" / "trials").mkdir(parents=True)
    (tmp_path / "tune" / "FedAvg" / "trials" / "config.yaml").write_text(yaml.safe_dump(trial))
    given = ("report", runs.folder, "--paper", "--width", "2.5")
    status, _, error = command(*given, "--out", tmp_path / "one", "--tuned", tmp_path / "tune")
    assert status == 0, error
    paper = tmp_path / "one" / "paper"
    assert {path.name for path in paper.iterdir()} == {
        *(f"{m}-by-round.{kind}" for m in ("accuracy", "loss") for kind in ("pdf", "svg")), "figures.tex",
        "results.tex", "results.csv", "methods.tex", "references.bib",
    }  # fmt: skip
    drawn = (paper / "accuracy-by-round.pdf").read_bytes()
    left, low, right, high = map(float, re.search(rb"/MediaBox \[ ([\d. ]+) \]", drawn)[1].split())  # type: ignore[index]
    assert (right - left, high - low) == pytest.approx((180, 0.72 * 180), abs=0.5)  # points: 2.5 inches
    assert b"/Type3" not in drawn
    publish.runs([runs.folder], tmp_path / "two", 2.5, tmp_path / "tune")
    assert all((tmp_path / "two" / "paper" / path.name).read_bytes() == path.read_bytes() for path in paper.iterdir())
    told, bib = (paper / "methods.tex").read_text(), (paper / "references.bib").read_text()
    for says in (
        r"dealt to 20 clients of 20 to 148 training examples by the partition \texttt{dirichlet} (alpha 0.3; shares of",
        "In each of 2 rounds the server invites 5 clients",
        r"who is online follows \texttt{bernoulli} (rate 0.6; each client is online with a fixed probability,",
        r"A\_B is \texttt{scaffold} (", "learning rate 0.05", r"\cite{karimireddy2020scaffold}", "Seeds are 3 and 4",
        "The partition is the same for all seeds", r"over \texttt{algorithm.lr} in loguniform(0.01, 1)", "8 trials", "seed 9",
        "Hyper-parameters of FedAvg were chosen", r"on 10 \% of the training examples, kept aside", 
        r"Those of A\_B and p were not searched for",
        "At an edge of what was searched are the values of FedAvg (algorithm.lr=0.2)",
        r"was made with \texttt{rounds} 7 (here 2)",
        r"\cite{holm1979simple}", f"fedfleet {version('fedfleet')}",
        r"Clients count alike in A\_B; by their examples in FedAvg and p.", "client optimizer sgd",
        "client optimizer sgd, server optimizer sgd (learning rate 1)",
        "Models are evaluated after every round, on", "A round in which nobody answers is tried again, in up to 10 attempts",
    ):  # fmt: skip
        assert says in told
    head = (paper / "results.csv").read_text().splitlines()[0].split(",")
    assert head[-2:] == ["worst_recall mean", "worst_recall sd"]
    assert "add --paper" in command("report", runs.folder, "--out", tmp_path / "one")[1]  # what is there is older now
    keys = {key for cited in re.findall(r"\\cite\{(.*?)\}", told) for key in cited.split(", ")}
    assert keys == set(re.findall(r"@\w+\{(.*?),", bib))


@pytest.mark.slow
def test_methods_tell_options_that_are_no_defaults_and_those_alone(runs: fedfleet.Runs, tmp_path: Path) -> None:
    plain = paragraph({"x": [read(runs[0].folder)]}, None, None)
    assert "momentum" not in plain
    assert "weight" not in plain
    assert "No search for learning rates is on record" in plain
    assert "Holm" not in plain
    assert "Clients count by their examples." in plain
    whole = {
        "task": {"name": "classification", "model": "mlp", "hidden": [32, 16]}, "population": {"clients": 4, "dataset": "digits"},
        "cohort": {"size": 4, "min_responses": 2, "on_abort": "skip"}, "availability": {"kind": "bernoulli", "rate": 0.5},
        "algorithm": {"name": "fedavg", "client_optimizer": {"name": "sgd", "momentum": 0.9, "beta1": 0.9, "state": "reset"}},
        "rounds": 3, "evaluation": {"every": 2}, "selection": {"kind": "uniform"}, "seed": 0,
    }  # fmt: skip
    told = paragraph({"x": [read(make_run(tmp_path / "whole", config=whole))]}, None, None)
    for says in (
        r"\texttt{mlp} (hidden 32 and 16)", "the server invites all 4 clients, and waits for all that are online;",
        "client optimizer sgd (momentum 0.9, state reset))",
        "A round in which fewer than 2 clients answer counts as done, and is not tried again: no answer of it is used.",
        "Models are evaluated after every 2 rounds and after the last",
    ):  # fmt: skip
        assert says in told


def test_every_setting_that_decides_a_result_is_told(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Another value of any setting makes another paragraph, but for those that change nothing, or nothing beside the others."""
    plain = replace(read(make_run(tmp_path / "plain")), config={})
    bases: list[dict[str, Any]] = [
        {}, {"cohort.wait_for": "siwer", "cohort.late": "keep", "availability": {"kind": "bernoulli", "rate": 0.5}},
    ]  # fmt: skip
    given: dict[str, Any] = {"patience": {"metric": "eval/auc", "evaluations": 3}, "callbacks": [{"name": "x:y"}]}
    given |= {"population.root": {"examples": 7}, "cohort.on_abort": "skip"}
    given |= {key: {"epsilon": 3.0} for key in ("privacy", "example_privacy", "secure_aggregation")}
    others = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x + 0.5, str: lambda _: "other"}
    aside = (
        *methods.UNTOLD,
        *(f"algorithm.{naming.partition('.')[0]}" for naming in USED),
    )  # the latter as in the test above
    for key, value in options_told.DEFAULTS.items():
        if any(f"{key}.".startswith(f"{each}.") for each in aside) or key.endswith(".source"):
            continue
        with subtests.test(key):
            changed = False
            for base in bases:
                config = load(base).model_dump(mode="json")
                was = paragraph({"x": [replace(plain, config=config)]}, None, None)
                other = given[key] if key in given else others.get(type(value), lambda _: 3)(value)
                *parents, last = key.split(".")
                section = reduce(lambda node, name: node[name], parents, config)
                section[last] = other
                changed |= paragraph({"x": [replace(plain, config=config)]}, None, None) != was
            assert changed


def test_a_task_of_ones_own_is_told_with_torchs_loss(tmp_path: Path) -> None:
    loss = {
        "function": "torch.nn.functional.cross_entropy",
        "options": {"weight": [1.0, 0.25], "pos_weight": "Tensor sha256:f00", "label_smoothing": 0.1},
    }
    for given, says in (
        (loss, "; loss cross\\_entropy (weight 1 and 0.25, with pos weight, label smoothing 0.1)."),
        ({"loss": {"name": "mse"}, "chosen": {}}, "; loss mse\\_loss."),
        ({"name": "mse"}, "; loss mse, of one's own."),
        ({}, "."),
    ):
        summary = {"status": "finished", "own": {"task": {"options": given}}}
        run = make_run(
            tmp_path / str(len(says)), config={"task": {"own": {"name": "net"}}, "rounds": 1}, summary=summary
        )
        assert f"The task is \\texttt{{net}}{says}\n" in paragraph({"x": [read(run)]}, None, None)


def test_captions_and_methods_say_of_which_examples_metrics_are(tmp_path: Path) -> None:
    table = rounds_table(4)
    for name in ("own_accuracy", "clients_accuracy", "validation_accuracy", "train_accuracy"):
        table[f"eval/{name}"] = table["eval/accuracy"]
    config = {
        **{"population": {"held_out": 0.2}, "evaluation": {"test_examples": 10}, "rounds": 4},
        "algorithm": {"name": "fedavg", "server_optimizer": {"name": "sgd", "momentum": 0.9}},
    }
    run = read(make_run(tmp_path / "run", rounds=table, config=config))
    publication.of_runs({"x": [run]}, tmp_path / "paper")
    told = (tmp_path / "paper" / "figures.tex").read_text()
    for name, examples in (("accuracy", "test examples"), ("own_accuracy", "examples held out of each client's")):
        assert f"\\caption{{{name.replace('_', chr(92) + '_')} by round, on {examples}, of one seed.}}" in told
    said = paragraph({"x": [run]}, None, None)
    assert "the last model on all test examples, too" in said
    assert "of clients' own models, on examples held out of each client's" in said
    assert "hsu2019measuring" in said


def test_runs_give_their_table_in_latex(runs: fedfleet.Runs) -> None:
    made = runs.latex(["accuracy"], caption="Ours.", label="tab:a")
    assert made.count(r"$\pm$") == 3
    assert r"A\_B & " in made
    assert r"\label{tab:a}" in made
    with pytest.raises(fedfleet.ConfigError, match="metrics: 'acc'"):
        runs.latex(["acc"])


def test_bad_input_is_one_line(runs: fedfleet.Runs, tmp_path: Path, command, subtests) -> None:
    (tmp_path / "tune.yaml").write_text("tune: {search: {algorithm.lr: 'choice(0.7, 0.9)'}, metric: eval/loss}")
    (tmp_path / "best.yaml").write_text("algorithm: {name: fedavg, lr: 0.9}")
    for given, says in (
        (["--width", "3"], "--width=3.0: it is for"),
        (["--paper", "--tuned", tmp_path / "no"], "no search there"),
        (["--paper", "--tuned", tmp_path], "has what it chose (fedavg: algorithm.lr=0.9)"),
    ):
        with subtests.test(says):
            status, _, error = command("report", runs.folder, "--out", tmp_path / "out", *given)
            assert (status, error.startswith("error: "), error.count("\n"), says in error) == (2, True, 1, True), error
            assert not (tmp_path / "out").exists()


def test_a_search_is_told_of_the_runs_that_have_what_it_chose_and_where_it_was_made() -> None:
    def run(rate: float, lr: float, **more: Any) -> dict[str, Any]:
        return {
            "rounds": 9,
            "availability": {"rate": rate},
            "algorithm": {"name": "fedavg", "lr": lr, **more},
            "seed": 3,
        }

    def won(label: str, rate: float | None, lr: float, **more: Any) -> tuned.Winner:
        point = {} if rate is None else {"availability.rate": rate}
        config = run(1.0 if rate is None else rate, 0.01, steps=1, **more)
        return tuned.Winner(label, "fedavg", point, {"algorithm.lr": lr}, ["algorithm.lr"] * (lr > 0.2), 4, config)

    asked = {
        "tune": {"search": {"algorithm.lr": "choice(0.1, 0.3)"}, "metric": "eval/loss", "min_rounds": 3, "reduction": 2}
    }
    search = tuned.Search(Path("s"), asked, [won("A", 1.0, 0.3), won("A", 0.3, 0.1), won("B", 1.0, 0.1)])
    runs = {
        "A": [run(1.0, 0.3, steps=5), run(0.3, 0.3, steps=5)],
        "B": [run(1.0, 0.1, steps=1), run(0.3, 0.1, steps=1)],
        "C": [run(1.0, 0.3)],
    }
    told = list(tuned.sentences(search, runs, str))
    assert told[0].startswith(
        "Hyper-parameters of A and B were chosen by a random search each (4 trials, successive halving after 3 and 6 "
        "of 9 rounds, where one trial in 2 goes on, seed 0) over "
    )
    assert told[1:] == [
        "At an edge of what was searched are the values of A at availability.rate 1 (algorithm.lr=0.3).",
        "For some of the runs of A it chose other values: algorithm.lr=0.1 (A at availability.rate 0.3).",
        "Those of C were not searched for.",
        "The search for A was made with algorithm.steps 1 (here 5).",
        "The search for B was made with availability.rate 1 (here 1 and 0.3).",
    ]
    asked["tune"]["search"]["algorithm.mu"] = [0.1]  # an option that neither has
    own = replace(search, config={**asked, "compare": {"B": {"tune.search": {"algorithm.lr": [0.1]}}}})
    assert [line.partition(" over ")[2].partition(",")[0] for line in tuned.sentences(own, runs, str)][:2] == [
        "algorithm.lr in choice(0.1", "algorithm.lr in [0.1]",
    ]  # fmt: skip
    search.check(runs)
    with pytest.raises(
        fedfleet.ConfigError, match=r"none of A has what it chose \(A at availability\.rate 1: algorithm\.lr=0\.3"
    ):
        search.check({"A": [run(1.0, 0.1)]})
    alone = replace(search, winners=[won("", None, 0.3, correction={"kind": "none"})])
    assert alone.chose("any", run(1.0, 0.3, correction={"kind": "none"}))
    assert not alone.chose("any", run(1.0, 0.3, correction={"kind": "mifa"}))
