"""Words of a report: what happened, with which settings, and what losses of minimax tasks mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfleet.algorithms.options import ClientOptimizer, Schedule, ServerOptimizer
from fedfleet.algorithms.participation import Correction
from fedfleet.report import overview, variance
from fedfleet.report.groups import grouped
from fedfleet.report.meanings import OF_TASK, meaning
from fedfleet.report.settings import USED, settings
from fedfleet.report.tables import Run, read
from fedfleet.tasks.registry import TASKS
from tests.front.report.report_runs import comparison, make_run, rounds_table

CONFIG = {
    "seed": 0, "rounds": 9, "population": {"dataset": "digits", "clients": 5, "partition": {"kind": "iid"}},
    "task": {"name": "auc", "model": "logistic", "positive_class": 8},
    "algorithm": {"name": "fedavg", "lr": 0.1, "batch_size": 7, "steps": None, "client_optimizer": {"name": "sgd", "eps": 1e-8}},
    "cohort": {"size": 10, "wait_for": "all", "attempts": 10}, "attack": {"kind": "sign_flip", "share": 0.2},
    "secure_aggregation": {"protocol": "secagg"}, "privacy": None,
}  # fmt: skip
SUMMARY = {
    "status": "stopped", "stopped": {"by": "until", "why": "eval/accuracy is 0.5, and until=eval/accuracy>=0.5"},
    "model_floats": 650, "local_steps": {"train": {"least": 2, "middle": 6, "most": 14}}, "rounds": 4,
    "initial": {"eval/accuracy": 0.1}, "final": {"eval/accuracy": 0.5},
    "privacy": {"epsilon": 3.25, "delta": 1e-5, "accounting": "sampling"},
}  # fmt: skip


def run(path: Path, config: dict[str, Any] | None = None, summary: dict[str, Any] | None = None, **parts: Any) -> Run:
    changes = {"config": {**CONFIG, **(config or {})}, "summary": {**SUMMARY, **(summary or {})}, **parts}
    return read(make_run(path, **changes))


def rows(groups: dict[str, list[Run]], **given: Any) -> dict[str, list[str]]:
    """The table of settings: of each its values."""
    table = settings(groups, **given)
    assert table is not None
    return {str(row[0]): [str(cell) for cell in row[1:]] for row in table.rows}


def test_a_run_in_words(tmp_path: Path) -> None:
    table = rounds_table(4, accuracy=[0.2, 0.6, None, 0.5])
    assert overview.of_run(run(tmp_path / "run", rounds=table)) == [
        "fedavg learnt to rank class 8 above the others (AUC) on digits, held by 5 clients (iid), with logistic, 650 numbers. "
        "Clients learnt with lr 0.1 and batch_size 7 (local steps of a client a round: 2 to 14, 6 in the middle). "
        "Of 40 invitations in 4 rounds, 10 a round, 60 % were answered in time (24); 2 of 5 clients completed at least one round. "
        "accuracy went from 0.1 before the first round to 0.5; the best was 0.6, after round 2.",
        "It stopped after 4 of 9 rounds: eval/accuracy is 0.5, and until=eval/accuracy>=0.5. "
        "On the simulated fleet that took 20 s of virtual time, 1.6 kB sent by clients and 3.2 kB sent to them. "
        "It spent ε = 3.25 at δ = 1e-05 of the privacy of a client (sampling). "
        "The server saw sums of clients' updates alone (secure aggregation). "
        "It was attacked: sign_flip by 20 % of the clients.",
    ]


def test_thousands_of_invitations_a_round_are_whole_numbers(tmp_path: Path) -> None:
    table = rounds_table(4)
    table["invited"] = 1234
    assert (
        "Of 4,936 invitations in 4 rounds, 1,234 a round, " in overview.of_run(run(tmp_path / "run", rounds=table))[0]
    )


def test_it_is_said_which_variance_intervals_hold(tmp_path: Path) -> None:
    def held(of: Any, dealt: bool = True, drawn: bool = True, **changes: Any) -> str:
        population = {**CONFIG["population"], "partition_seed": of}
        place = tmp_path / f"{of}{dealt}{drawn}{len(changes)}"
        given: list[dict[str, Any]] = [{"population": population, "seed": seed, **changes} for seed in (0, 1)]
        found = variance.held(
            [run(place / str(i), one, {"dealt": dealt, "drawn": drawn}) for i, one in enumerate(given)]
        )
        assert found is not None
        return found

    few = {"size": 3}
    assert "initial models, cohorts, who is online, batches and partitions. Every seed deals" in held(
        "seed", cohort=few
    )
    assert "batches. The partition is the same for all seeds (population.partition_seed = 3)" in held(3)
    assert "The clients are those of the data" in held(0, dealt=False)
    assert "To deal anew" in held(4)
    assert "This partition draws nothing" in held(0, drawn=False)
    assert "initial models" not in held(0, warm_start="model.safetensors")
    assert "of initial models, who is online and batches." in held(1)
    assert "of initial models, cohorts and batches." in held(2, availability={"kind": "always"}, cohort=few)
    both = [
        run(tmp_path / f"{of}{s}", {"population": {"partition_seed": of}, "seed": s})
        for of in ("seed", 0)
        for s in (0, 1)
    ]
    assert "partitions where population.partition_seed is seed. Elsewhere" in str(variance.held(both))
    assert variance.held([run(tmp_path / "alone")]) is None
    groups = grouped([run(tmp_path / "seed" / s, {"seed": int(s)}) for s in "01"])
    assert sum("The partition is the same" in line for line in overview.of_comparison(groups)) == 1


COSINE = {"kind": "cosine", "every": None, "rounds": 9}
PROVEN = {"name": "x", "lr": 0.5, "batch_size": 9, "steps": 3, "theory": {"G": 1}}
OF_TWO = {"gradient": (1, 1, 1), "update": (3, 4, 1000)}
TOLD = "local steps of a client a round: 1 in gradient and 3 to 1,000, 4 in the middle in update"
LEARNT = [
    ({"name": "robust", "of": {"name": "fedavg", "lr": 0.5, "epochs": 1}}, {}, "with lr 0.5 and epochs 1. Of 40"),
    (PROVEN, {}, "with batch_size 9 and steps 3. Of 40"),
    ({"name": "cdma_ada", "lr": 0.5}, OF_TWO, f"with lr 0.5 ({TOLD}). Of 40"),
    ({"lr": 0.5, "epochs": 1, "lr_schedule": COSINE}, {}, "with lr 0.5 (schedule: cosine, rounds 9) and epochs 1. Of 40"),
    ({"lr": 0.5, "lr_schedule": {"kind": "constant", "every": None}}, {}, "with lr 0.5. Of 40"),
    ({"own": {}}, {"A": (2, 2, 2), "B": (1, 1, 1)}, "Local steps of a client a round: 2 in A and 1 in B. Of 40"),
    ({"own": {}}, {"mine": (2, 2, "<b>")}, "650 numbers. Of 40"),
]  # fmt: skip
ENDED = [
    ({"status": "finished"}, "It ran to its last round. On the"),
    ({"status": "interrupted"}, "It was interrupted after 4 of 9 rounds. On the"),
    ({"status": "failed", "error": "client 7: no such file\nat line 3"}, "It failed after 4 of 9 rounds: client 7: no such file"),
    ({"status": None}, "How it ended is not on record; 4 of 9 rounds are. On the"),
]  # fmt: skip


def test_how_clients_learnt_and_how_it_ended(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, (algorithm, phases, said) in enumerate(LEARNT):
        with subtests.test(said):
            steps = {name: dict(zip(("least", "middle", "most"), n, strict=True)) for name, n in phases.items()}
            given = {"own": {"name": "mine", "module": "lab"}} if "own" in algorithm else algorithm
            found = run(tmp_path / str(number), {"algorithm": given}, {"local_steps": steps})
            assert said in overview.of_run(found)[0]
    for summary, said in ENDED:
        with subtests.test(said):
            assert overview.of_run(run(tmp_path / f"{summary['status']}", summary=summary))[1].startswith(said)
    tested = "36 examples of 2 clients that are held out: ann, bob; none of class 3"
    said = overview.of_run(run(tmp_path / "tested", summary={"examples": {"tested_on": tested}}))[0]
    assert f"Models were tested on {tested}. accuracy went" in said


def test_a_loss_is_best_where_it_is_least_and_what_is_not_on_record_is_not_said(tmp_path: Path) -> None:
    table = rounds_table(4).rename(columns={"eval/accuracy": "eval/loss"}).assign(**{"eval/loss": [3.0, 1.0, 2.0, 2.5]})
    bare = {"config": {"seed": 0}, "summary": {"status": "finished"}, "outcomes": None, "environment": None}
    only = make_run(tmp_path / "run", **bare, rounds=table[["round", "eval/loss"]])
    learnt = "loss went from 3 after round 1 to 2.5; the best was 1, after round 2."
    assert overview.of_run(read(only)) == [learnt, "It ran to its last round."]
    nothing = make_run(tmp_path / "nothing", config=None, summary=None, outcomes=None, rounds=rounds_table(0))
    assert overview.of_run(read(nothing)) == ["", "How it ended is not on record; 0 rounds are."]


def test_the_metric_that_models_are_selected_by_comes_first_and_epsilon_is_none(tmp_path: Path) -> None:
    table = rounds_table(4).assign(**{"eval/epsilon_spent": 1.0, "eval/source_accuracy": 0.3})
    for best, first in (("eval/source_accuracy", "source_accuracy"), ("auto", "accuracy")):
        one = run(tmp_path / first, {"checkpoint": {"best": best}}, rounds=table)
        assert overview.headline([one])[0] == first
        assert "epsilon_spent" not in overview.headline([one])


def test_a_comparison_in_words_ranks_labels_and_pools_no_code(tmp_path: Path) -> None:
    root = comparison(tmp_path)
    for seed, source in ((0, "a"), (1, "b")):
        own = {"name": "mine", "module": "lab", "source": source * 64, "options": {}}
        config = {"seed": seed, "algorithm": {"own": own}, "attack": {"kind": "zero", "clients": [1]}}
        summary = {"status": "finished", "label": "mine", "final": {"eval/accuracy": 0.9 + seed / 100}}
        make_run(root / "own" / str(seed), config=config, summary=summary)
    groups = grouped([read(path.parent) for path in sorted(root.glob("*/*/rounds.parquet"))])
    assert overview.of_comparison(groups) == [
        "Compared here: 4 labels, 5 runs, 2 seeds.",
        "Final accuracy, the highest first: “mine (source bbbbbbbb)” 0.91, “mine (source aaaaaaaa)” 0.9, "
        "“label A” 0.60 ± 0.28, “label B” 0.4 (mean ± sample standard deviation over seeds).",
        "Under attack: “mine (source aaaaaaaa)” (zero by 1 client); “mine (source bbbbbbbb)” (zero by 1 client).",
    ]
    alone = {label: groups[label] for label in ("mine (source aaaaaaaa)", "label B")}
    assert "There is one seed a label" in overview.of_comparison(alone)[-1]
    for seed in (0, 1, 2):
        for label in ("A", "B"):
            final = {"eval/accuracy": 0.5 + (label == "B") * 0.1 + seed / 10 + seed * (label == "B") / 1000}
            summary = {"status": "finished", "label": label, "final": final}
            make_run(tmp_path / "paired" / label / str(seed), config={"seed": seed}, summary=summary)
    paired = grouped([read(path.parent) for path in sorted((tmp_path / "paired").glob("*/*/rounds.parquet"))])
    assert overview.of_comparison(paired)[2].startswith(
        "By final accuracy, the best is B (0.701), then A (0.6): they differ"
    )
    table = settings(groups)
    assert table is not None
    assert list(table.head) == ["setting", "label A", "label B", "mine (source aaaaaaaa)", "mine (source bbbbbbbb)"]
    assert rows(groups)["algorithm.own.source"][2:] == ["a" * 30 + "…" + "a" * 29, "b" * 30 + "…" + "b" * 29]


def test_settings_of_a_run_are_those_that_matter_and_are_on(tmp_path: Path) -> None:
    assert [(key, *values) for key, values in rows({"fedavg": [run(tmp_path / "run")]}).items()] == [
        ("algorithm", "fedavg"), ("algorithm.lr", "0.1"), ("algorithm.batch_size", "7"), ("rounds", "9"), ("cohort.size", "10"),
        ("cohort.wait_for", "all"), ("population.dataset", "digits"), ("population.clients", "5"),
        ("algorithm.client_optimizer", "sgd"), ("task", "auc"),
        ("task.model", "logistic"), ("task.positive_class", "8"), ("population.partition", "iid"), ("attack", "sign_flip"),
        ("attack.share", "0.2"), ("secure_aggregation.protocol", "secagg"),
    ]  # fmt: skip
    assert settings({"bare": [read(make_run(tmp_path / "bare", config=None))]}) is None


def test_settings_that_change_nothing_are_none(tmp_path: Path) -> None:
    for kind, there in (("constant", []), ("cosine", ["algorithm.lr_schedule", "algorithm.lr_schedule.rounds"])):
        algorithm = {"name": "fedavg", "lr_schedule": {"kind": kind, "every": None, "rounds": 9 if there else None}}
        found = rows({"one": [run(tmp_path / kind, {"algorithm": algorithm})]})
        assert [key for key in found if "schedule" in key] == there
    options = {"client_optimizer": ClientOptimizer, "server_optimizer": ServerOptimizer, "lr_schedule": Schedule}
    for name, of in (options | {"correction": Correction}).items():
        assert {kind: set(used) for kind, used in USED[f"{name}.{of.naming}"].items()} == {
            k: set(v) for k, v in of.used.items()
        }
    for correction, there in (
        ({"kind": "fedvarp"}, set()),
        ({"kind": "known_p"}, {"cap"}),
        ({"kind": "fedau"}, {"cutoff"}),
        ({"kind": "fedau", "pool": "domain"}, set()),
    ):
        algorithm = {"name": "fedavg", "correction": {**correction, "cap": 100.0, "cutoff": 50}}
        found = rows({"one": [run(tmp_path / "-".join(correction.values()), {"algorithm": algorithm})]})
        assert found.keys() & {f"algorithm.correction.{o}" for o in ("cap", "cutoff")} == {
            f"algorithm.correction.{o}" for o in there
        }
    for dealt, said in ((True, "held by 5 clients (iid)"), (False, "held by 5 clients, as the data say")):
        one = run(tmp_path / str(dealt), summary={"dealt": dealt})
        assert said in overview.of_run(one)[0]
        assert ("population.partition" in rows({"A": [one]})) == dealt
    for model in ("mlp", "nets:Own", "torchvision:resnet18", "logistic"):
        task = {"name": "classification", "model": model, "hidden": [200, 200]}
        assert ("task.hidden" in rows({"A": [run(tmp_path / model, {"task": task})]})) == (model == "mlp")


def test_rates_that_a_theorem_sets_are_no_settings(tmp_path: Path) -> None:
    rates = {"lr": 0.1, "dual_lr": 0.2, "alpha": 0.3, "dual": {"lr": 0.4, "kind": "ascent"}}
    proven = {"name": "x", **rates, "theory": {"G": 1, "kappa": 2}}
    for algorithm, at in ((proven, "algorithm."), ({"name": "omg", "of": proven, "lr": 9}, "algorithm.of.")):
        found = rows({"A": [run(tmp_path / at, {"algorithm": algorithm})]})
        assert not found.keys() & {f"{at}{name}" for name in ("lr", "dual_lr", "alpha", "dual.lr")}
        assert (found[f"{at}theory.kappa"], found[f"{at}dual"]) == (["2"], ["ascent"])
        assert ("algorithm.lr" in found) == ("of" in algorithm)
    groups = {"A": [run(tmp_path / "A")], "B": [run(tmp_path / "B", {"algorithm": proven})]}
    assert rows(groups)["algorithm.lr"] == ["0.1", "–"]


def test_settings_that_differ_come_first_whatever_they_are_and_what_is_varied_has_all_its_values(
    tmp_path: Path,
) -> None:
    changed = {"algorithm": {"name": "scaffold", "lr": 0.2, "global_lr": 1.0}, "cohort": {"attempts": 5}}
    other = {**changed, "availability": {"kind": "label_correlated", "strength": 3.0}}
    groups = {"A": [run(tmp_path / "A")], "B": [run(tmp_path / "B", changed), run(tmp_path / "C", other)]}
    varied = {"algorithm.lr": [0.2, 0.1], "availability.kind": ["always", "label_correlated"]}
    found = [[key, *values] for key, values in rows(groups, varied=varied).items()]
    assert found[:3] == [
        ["algorithm", "fedavg", "scaffold"], ["algorithm.batch_size", "7", "–"], ["cohort.size", "10", "–"],
    ]  # fmt: skip
    assert ["cohort.attempts", "10", "5"] in found[:8]
    assert ["algorithm.global_lr", "–", "1.0"] in found[:8]
    assert ["algorithm.lr", "0.2 and 0.1", "0.2 and 0.1"] in found
    assert ["availability", *["always and label_correlated"] * 2] in found
    whole = settings(groups, varied={"availability": ["always", "label_correlated"]})
    assert whole is not None
    assert [values for key, *values in whole.rows if key == "availability"] == [["always and label_correlated"] * 2]
    assert ["availability.strength", "–", "3.0"] in found  # which only a run has that is not the first
    table = settings(groups, varied=varied)
    assert table is not None
    assert "The first 8 differ. Tried, each with each: algorithm.lr and availability." in table.caption


def test_what_losses_of_minimax_tasks_mean_is_said_for_their_tasks_alone(tmp_path: Path) -> None:
    auc = {"auc": [run(tmp_path / "auc")]}
    assert meaning(auc, "train_loss").startswith("The relaxed AUC objective")
    assert meaning(auc, "train_auc").startswith("How likely an example of the positive class")
    assert meaning(auc, "clients_loss").endswith("below 0. ")
    assert meaning(auc, "clients_loss_std") == ""
    other = run(tmp_path / "other", {"task": {"name": "classification"}})
    assert meaning({"other": [other]}, "train_loss") == meaning(auc | {"other": [other]}, "train_loss") == ""
    gan = run(tmp_path / "gan", {"task": {"name": "gan"}})
    assert meaning({"gan": [gan]}, "train_loss").startswith("The generator's loss")
    assert meaning(auc | {"gan": [gan]}, "train_loss") == ""
    assert set(OF_TASK) <= set(TASKS)
    assert set(overview.LEARNS) <= set(TASKS)
    assert set(TASKS["gan"].build.measured) <= set(OF_TASK["gan"])  # type: ignore[attr-defined]
