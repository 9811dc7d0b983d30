"""Studies on digits: the grid, what is finished already, what fails, tables, report, bad input."""

import json
import math
import shutil
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import fedfleet
from fedfleet.commands import study
from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.progress import Progress
from fedfleet.experiments.runfolder import locked
from fedfleet.report import study_page
from fedfleet.report.study_tables import Target, interval, paired, reached
from fedfleet.report.words import number
from tests.front.report.report_runs import Page
from tests.refusals import tells

TINY = {
    "rounds": 4, "population": {"clients": 20, "partition": "label_sorted"},
    "task": {"name": "auc", "model": "logistic", "positive_class": 8},
    "algorithm": {"name": "cdma_one", "steps": 2, "batch_size": 5},
    "cohort": {"size": 6, "wait_for": "siwer", "attempts": 50}, "availability": {"kind": "bernoulli"},
    "evaluation": {"every": 2}, "compare": {"ONE": {}, "par": {"algorithm.name": "parallel_sgda"}},
}  # fmt: skip
VARY = ["availability.rate=1.0,0.2"]
SILENT = Progress.silent()
TABLES = ("study", "curves", "participation", "comparisons")


def run(out, config=TINY, vary=VARY, seeds=2, target="eval/auc=0.635", jobs=1, overrides=None):
    prepared = study.prepare(study.plan(load(config, overrides), vary, seeds, target), SILENT)
    tables = study.run(prepared, out, SILENT, jobs)
    study.check(study.failures(tables, prepared.study), prepared.study)
    return tables


def table(out, name):
    return pd.read_parquet(out / f"{name}.parquet").drop(columns="seconds", errors="ignore")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "one"
    run(out)
    return out


def test_the_grid_is_labels_by_values_by_seeds():
    varied = {"algorithm.lr": [0.1, 0.2], "availability.rate": [0.9]}
    config = load({**TINY, "seeds": [7], "seed": 3}, {"vary": varied})
    planned = study.plan(config, VARY, 2)
    found = [(t.label, *t.point.items(), t.config.seed) for t in planned.trials]
    assert found[:2] == [("ONE", ("availability.rate", 1.0), ("algorithm.lr", 0.1), seed) for seed in (3, 4)]
    assert len(set(found)) == len(found) == 2 * 2 * 2 * 2
    assert list(planned.varied) == ["availability.rate", "algorithm.lr"]
    assert {t.config.executor.kind for t in planned.trials} == {"local"}
    assert [t.config.seed for t in study.plan(config, VARY).trials[:1]] == [7]
    assert {t.config.executor.kind for t in study.plan(config, VARY, in_process=False).trials} == {"auto"}


def test_what_a_run_would_be_told_a_study_is_told_once():
    few = {**TINY, "population": {"clients": 9, "partition": "iid"}, "cohort": {}}
    for compared, whose in (
        ({"ONE": {}, "par": {}}, ""),
        ({"ONE": {}, "par": {"cohort.size": 3}}, "ONE rate=1.0, ONE rate=0.2: "),
    ):
        said, progress = [], Progress.silent()
        progress.say = said.append
        study.prepare(study.plan(load({**few, "compare": compared}), VARY, 1, None), progress)
        assert [line.partition("cohort.size")[0] for line in said if "by default" in line] == [whose]


def test_a_kind_may_vary_beside_its_options():
    kinds = {"vary": {"availability.rate": [0.5, 0.1], "availability.kind": ["bernoulli"]}}
    assert list(load(TINY, kinds).vary) == ["availability.rate", "availability.kind"]  # the first is the figures' axis
    trials = study.plan(load(TINY, {"availability": "always", **kinds})).trials
    assert [(t.config.availability.kind, t.config.availability.rate) for t in trials[:2]] == [
        ("bernoulli", r) for r in (0.5, 0.1)
    ]
    with pytest.raises(fedfleet.ConfigError, match=r"availability\.rate=0\.5: unknown key"):
        study.plan(load(TINY, {"vary": {"availability.rate": [0.5], "availability.kind": ["always"]}}))


def test_tables_say_what_the_runs_say(done):
    rows = pd.read_parquet(done / "study.parquet")
    names = (("ONE", "cdma_one"), ("par", "parallel_sgda"))
    grid = [[*name, rate, seed] for name in names for rate in (1.0, 0.2) for seed in (0, 1)]
    assert rows[["label", "algorithm", "availability.rate", "seed"]].values.tolist() == grid
    assert (rows["status"] == "finished").all()
    assert rows["error"].isna().all()
    first = done / "trials" / "ONE-rate-1.0" / "seed-0"
    summary, rounds = json.loads((first / "summary.json").read_text()), pd.read_parquet(first / "rounds.parquet")
    row = rows.iloc[0]
    assert row["final/auc"] == summary["final"]["eval/auc"]
    assert row["best/auc"] == summary["best"]["eval/auc"]
    assert row["floats"] == (rounds.floats_up + rounds.floats_down).sum()
    assert (row["bytes_up"], row["bytes_down"]) == (rounds.bytes_up.sum(), rounds.bytes_down.sum())
    assert row["virtual_s"] == pytest.approx(rounds.virtual_s.sum())
    assert (row["clients"], row["rounds_done"], row["aborted_attempts"]) == (20, 4, 0)
    assert rows[rows["availability.rate"] == 0.2]["aborted_attempts"].sum() > 0
    curves = pd.read_parquet(done / "curves.parquet")
    one = curves[(curves.label == "ONE") & (curves["availability.rate"] == 1.0) & (curves.seed == 0)]
    assert one["round"].tolist() == [0, 2, 4]
    assert list(curves)[5:9] == ["virtual_s", "floats", "bytes_up", "bytes_down"]
    assert one["floats"].tolist()[1:] == (rounds.floats_up + rounds.floats_down).cumsum().tolist()[1::2]
    assert one["eval/auc"].tolist()[0] == summary["initial"]["eval/auc"]
    there = one[one["eval/auc"] >= 0.635]
    assert len(there), "choose a target that this trial reaches"
    at = there.iloc[0]
    for key, name in (("rounds", "round"), ("floats", "floats"), ("virtual_s", "virtual_s")):
        assert row[f"target/{key}"] == at[name]
    for name in ("bytes_up", "bytes_down"):
        assert row[f"target/{name}"] == at[name] == rounds[name][: int(at["round"])].sum()


def test_participation_counts_rounds_and_no_void_attempt(done):
    counts = pd.read_parquet(done / "participation.parquet")
    rows = pd.read_parquet(done / "study.parquet")
    aborts = 0
    for place, key in (("ONE-rate-0.2/seed-0", ("ONE", 0.2, 0)), ("par-rate-0.2/seed-1", ("par", 0.2, 1))):
        outcomes = pd.read_parquet(done / "trials" / place / "outcomes.parquet")
        invited: dict[int, set[int]] = {}
        heard: dict[int, set[int]] = {}
        for row in outcomes.itertuples():
            invited.setdefault(row.client, set()).add(row.round)
            if row.outcome == "completed" and row.attempt == outcomes[outcomes["round"] == row.round].attempt.max():
                heard.setdefault(row.client, set()).add(row.round)
        aborts += outcomes.attempt.max()
        here = (counts.label == key[0]) & (counts["availability.rate"] == key[1]) & (counts.seed == key[2])
        expected = [[c, len(invited[c]), len(heard.get(c, ()))] for c in sorted(invited)]
        assert counts[here][["client", "invited", "completed"]].values.tolist() == expected
        trial = rows[(rows.label == key[0]) & (rows["availability.rate"] == key[1]) & (rows.seed == key[2])].iloc[0]
        assert trial["never_completed"] == pytest.approx(1 - len(heard) / 20)
        every = [len(heard.get(c, ())) for c in range(20)]
        gini = sum(abs(a - b) for a in every for b in every) / (2 * 20 * sum(every))
        assert trial["gini"] == pytest.approx(gini)
    assert aborts > 0


def check_same(out, other):
    for name in TABLES:
        pd.testing.assert_frame_equal(table(out, name), table(other, name), check_exact=True)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=[pytest.mark.ray, pytest.mark.slow])])
def test_the_same_command_gives_the_same_tables_by_any_jobs(done, tmp_path, jobs):
    run(tmp_path / "again", jobs=jobs)
    check_same(tmp_path / "again", done)


def test_a_folder_is_worked_in_by_one_at_a_time(done):
    with closing(locked(done)):
        tells(lambda: run(done), "another process is at work in it")


@pytest.mark.slow
def test_every_seed_may_deal_anew_and_a_difference_may_be_sought(config, tmp_path, command):
    drawn = ["population.partition_seed=seed", "population.partition.similarity=0.2"]
    of = ["study", config, "compare=null", *drawn, "--vary", VARY[0], "--jobs", "1"]
    of += ["--seeds", "2", "--power", "0.05", "--out", str(tmp_path / "study")]
    status, said, error = command(*of)
    assert status == 0, error
    assert "Every seed deals the clients anew (population.partition_seed: seed)." in said
    assert "value less the first" in said
    status, _, error = command(*of)  # again: each trial is what it was
    assert status == 0, error
    assert "4 of 4 trials are finished already" in error
    trials = tmp_path / "study" / "trials"
    given = {
        "compare": None,
        "availability.rate": 1.0,
        "executor.kind": "local",
        "seed": 1,
        "population.partition_seed": 1,
        "population.partition.similarity": 0.2,
    }
    alone = fedfleet.run(load(TINY, given), out=tmp_path / "alone")
    there = fedfleet.open_run(trials / "rate-1.0" / "seed-1")
    assert there.summary["final"] == alone.summary["final"]


@pytest.mark.slow
def test_finished_trials_are_kept_and_the_rest_is_run(done, tmp_path, monkeypatch):
    out = tmp_path / "study"
    shutil.copytree(done, out)
    kept = out / "trials" / "par-rate-0.2" / "seed-0"
    written = yaml.safe_load((kept / "config.yaml").read_text())
    del written["transforms"], written["executor"]["capture"]  # a version that had no such keys ran it
    (kept / "config.yaml").write_text(yaml.safe_dump(written))
    shutil.rmtree(out / "trials" / "ONE-rate-1.0" / "seed-1")
    cut = out / "trials" / "par-rate-1.0" / "seed-0"
    (cut / "summary.json").unlink()
    stopped = out / "trials" / "ONE-rate-0.2" / "seed-0" / "summary.json"
    stopped.write_text(json.dumps({**json.loads(stopped.read_text()), "status": "interrupted"}))
    ran = []
    for verb in ("run", "resume"):
        original = getattr(Experiment, verb)
        monkeypatch.setattr(
            Experiment, verb, lambda self, out, *more, how=original: ran.append(out) or how(self, out, *more)
        )
    times = kept.stat().st_mtime_ns
    run(out)
    again = {"ONE-rate-1.0/seed-1", "par-rate-1.0/seed-0", "ONE-rate-0.2/seed-0"}
    assert {"/".join(p.parts[-2:]) for p in ran} == again
    assert kept.stat().st_mtime_ns == times
    check_same(out, done)
    ran.clear()
    run(out, vary=["availability.rate=1.0,0.2,0.5"])  # a larger grid goes on from a smaller one
    assert len(ran) == 4
    assert len(pd.read_parquet(out / "study.parquet")) == 12


@pytest.mark.slow
def test_an_interruption_leaves_what_is_finished(tmp_path, monkeypatch):
    original, ran = Experiment.run, []

    def interrupted(self, out, *more):
        ran.append(out)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return original(self, out, *more)

    monkeypatch.setattr(Experiment, "run", interrupted)
    with pytest.raises(KeyboardInterrupt) as e:
        run(tmp_path / "study")
    assert e.value.__notes__ == ["after 2 of 8 trials"]
    run(tmp_path / "study")
    assert len(ran) == 3 + 8 - 2


@pytest.mark.ray
@pytest.mark.slow
def test_an_interruption_on_a_cluster_of_others_ends_the_trials(tmp_path, monkeypatch, cluster):
    from fedfleet.simulator.executors.cluster import ray

    before = ray.available_resources()["CPU"]
    wait = ray.wait

    def interrupted(references, **given):
        folders = tmp_path / "study" / "trials"
        until = time.monotonic() + 120
        while len({p.parent for p in folders.glob("*/*/checkpoints/round-*.safetensors")}) < 2:
            assert time.monotonic() < until, "no trial has begun"
            time.sleep(0.1)
        monkeypatch.setattr(ray, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "study", jobs=2, overrides={"rounds": 1_000_000, "executor.address": cluster.address})
    assert ray.is_initialized(), "it is not the study's to stop"
    summaries = [json.loads(p.read_text()) for p in (tmp_path / "study" / "trials").glob("*/*/summary.json")]
    assert [s["status"] for s in summaries] == ["interrupted"] * 2
    until = time.monotonic() + 20
    while (free := ray.available_resources().get("CPU", 0)) < before and time.monotonic() < until:
        time.sleep(0.1)
    assert free >= before  # an actor of an earlier test may have been leaving then


@pytest.mark.slow
def test_a_trial_cut_by_max_seconds_is_finished_for_that_time_alone(done, tmp_path):
    out = tmp_path / "study"
    run(out, vary=["availability.rate=1.0"], seeds=1, overrides={"rounds": 10_000, "max_seconds": 0.01})
    rows = pd.read_parquet(out / "study.parquet")
    assert rows["status"].tolist() == ["stopped"] * 2
    assert (rows["rounds_done"] < 10_000).all()

    def there(folder, **given):
        prepared = study.prepare(study.plan(load(TINY, given), ["availability.rate=1.0"], 1), SILENT)
        return study.finished(prepared, folder)

    assert there(out, rounds=10_000, max_seconds=0.01) == [True] * 2
    assert there(out, rounds=10_000, max_seconds=60) == [False] * 2
    assert there(out, rounds=10_000) == [False] * 2
    assert there(done, max_seconds=60) == [True] * 2, "a trial that came to its end needs no more time"
    given = {"until": "eval/auc=0.01", "max_seconds": 60}
    run(tmp_path / "until", vary=["availability.rate=1.0"], seeds=1, target=None, overrides=given)
    assert there(tmp_path / "until", **{**given, "max_seconds": 1}) == [True] * 2, "nor one that reached what it was to"


def test_a_finished_trial_of_another_configuration_is_not_thrown_away(done):
    with pytest.raises(fedfleet.ConfigError, match=r"rounds=5: the finished trial .* has 4: choose another folder"):
        run(done, overrides={"rounds": 5})
    prepared = study.prepare(study.plan(load(TINY, {"executor.actors": 1}), VARY, 2), SILENT)
    assert all(study.finished(prepared, done)), "actors decide no bit of the result"


@pytest.mark.slow
def test_a_failing_trial_is_a_row_and_the_rest_goes_on(tmp_path, monkeypatch):
    original = Experiment.run

    def broken(self, out, *more):
        if self.config.seed == 1 and self.label.startswith("par rate=0.2"):
            raise RuntimeError("no\nmore")
        return original(self, out, *more)

    monkeypatch.setattr(Experiment, "run", broken)
    with pytest.raises(fedfleet.FedfleetError, match=r"1 of 8 trials: par-rate-0\.2/seed-1: RuntimeError: no more"):
        run(tmp_path / "study")
    rows = pd.read_parquet(tmp_path / "study" / "study.parquet")
    assert rows["status"].tolist() == ["finished"] * 7 + ["failed"]
    assert rows["error"].iloc[-1] == "RuntimeError: no more"
    assert math.isnan(rows["final/auc"].iloc[-1])
    page = (tmp_path / "study" / "report.html").read_text()
    assert "par, rate = 0.2, seed 1:\nRuntimeError: no more" in page
    assert "1 failed" in page
    monkeypatch.undo()
    assert (run(tmp_path / "study").study["status"] == "finished").all()


def test_voids_beyond_all_attempts_are_errors_in_the_table_and_nothing_finished_is_still_a_report(tmp_path):
    with pytest.raises(fedfleet.FedfleetError, match=r"4 of 4 trials: .* in 1 cohorts in a row"):
        run(tmp_path / "study", vary=["availability.rate=0.001"], overrides={"cohort.attempts": 1})
    assert (pd.read_parquet(tmp_path / "study" / "study.parquet")["status"] == "failed").tolist() == [True] * 4
    page = (tmp_path / "study" / "report.html").read_text()
    assert all(f"{label}, rate = 0.001, seed {seed}" in page for label in ("ONE", "par") for seed in (0, 1))
    assert "in 1 cohorts in a row" in page
    assert "<figure" not in page


def test_the_report_shows_everything(done):
    page = (done / "report.html").read_text()
    for text in ("Final auc against availability.rate", "Cost of reaching auc ≥ 0.635", "Learning curves at the extremes",
                 "Participation", "never completed", "Gini", "Labels compared", "Results", "t-interval"):  # fmt: skip
        assert text in page
    assert page.count("<figure ") == page.count('role="img"') == 5
    drawn = {p.stem for p in (done / "figures").glob("*.png")}
    assert drawn == {"final-auc", "target", "curves-auc", "participation", "evenness"}
    assert page.count("<script") == 1  # the page's own
    study = pd.read_parquet(done / "study.parquet")
    ends = [study.query("label == 'ONE' and `availability.rate` == @rate")["final/auc"].mean() for rate in (1.0, 0.2)]
    assert f"ONE: mean final auc {ends[0]:.4g} at availability.rate = 1, {ends[1]:.4g} at 0.2." in page
    settings = page.split('id="at-settings"')[1].split("</table>")[0]
    assert '<th scope="col">ONE</th><th scope="col">par</th>' in settings
    assert "availability.rate</th><td>1 and 0.2<" in settings  # which the study varies


@pytest.mark.slow
def test_the_report_names_what_never_reached_the_target(tmp_path):
    made = run(tmp_path / "study", target="eval/auc=1.1")
    page = (tmp_path / "study" / "report.html").read_text()
    never = ("ONE, rate = 1.0", "ONE, rate = 0.2", "par, rate = 1.0", "par, rate = 0.2")
    assert f"Never reached auc ≥ 1.1, on any seed: {'; '.join(never)}." in page
    spent = study_page.to_target(made)
    assert spent is not None
    assert spent.caption.startswith("Trials that failed do not count. Rounds, floats")
    rows = pd.read_parquet(tmp_path / "study" / "study.parquet")
    assert rows[["target/rounds", "target/floats", "target/virtual_s"]].isna().all(axis=None)


@pytest.mark.slow
def test_values_may_be_words_and_keys_may_be_two(tmp_path):
    vary = ["cohort.wait_for=all,siwer,3", "devices.sigma=0.1,2"]
    found = run(tmp_path / "study", vary=vary, seeds=1, target=None, overrides={"compare": {"par": {}}, "rounds": 2})
    assert found.study["cohort.wait_for"].tolist() == ["all", "all", "siwer", "siwer", "3", "3"]
    assert "target/rounds" not in found.study
    page = (tmp_path / "study" / "report.html").read_text()
    assert "There is one seed" in page
    assert "3 values of cohort.wait_for × 2 values of devices.sigma" in page


@pytest.mark.slow
def test_rules_against_attacks_are_one_table_and_traffic_is_in_bytes_where_it_is_compressed(tmp_path):
    attacks = [{"kind": "none"}, {"kind": "sign_flip", "share": 0.3, "scale": 4}]
    rules = {rule: {"algorithm.rule": rule} for rule in ("mean", "median")}
    robust = {"name": "robust", "of": {"name": "fedavg", "steps": 2}}
    small = {"rounds": 2, "population": {"clients": 20}, "cohort": {"size": 8}, "transforms": {"up": ["bf16"]}}
    config = load({**small, "algorithm": robust, "vary": {"attack": attacks}, "compare": rules})
    prepared = study.prepare(study.plan(config, [], 1, "eval/accuracy=0.11"), SILENT)
    found = study.run(prepared, tmp_path / "study", SILENT, 1)
    assert found.study["attack"].tolist() == ["none", "sign_flip"] * 2
    trial = tmp_path / "study" / "trials" / "mean-attack-sign_flip"
    assert trial.is_dir()
    classes = pd.read_parquet(trial / "seed-0" / "classes.parquet")
    of = classes.groupby("label")["examples"].sum()
    right = classes.query("label == predicted").set_index("label")["examples"].reindex(of.index, fill_value=0)
    row = found.study.query("label == 'mean' and attack == 'sign_flip'").iloc[0]
    assert (row["worst_recall"], row["worst_class"]) == ((right / of).min(), (right / of).idxmin())
    assert "recall of the worst class" in (tmp_path / "study" / "report.html").read_text()
    page = Page(tmp_path / "study" / "report.html").text
    table = " ".join(["label none sign_flip", *(
        f"{rule} " + " ".join(number(v) for v in found.study[found.study.label == rule]["final/accuracy"]) for rule in rules
    )])  # fmt: skip
    assert table in page
    assert "bytes up to it bytes down to it" in page
    assert "floats to it" not in page


def test_targets_intervals_and_pairs():
    curve = pd.DataFrame({"round": [0, 5, 10], "floats": [0, 7, 9], "bytes_up": [0, 8, 9], "bytes_down": [0, 3, 4]})
    curve = curve.assign(**{"virtual_s": [0.0, 1.5, 2.5], "eval/auc": [0.5, 0.9, 0.8]})
    assert reached(curve, Target("eval/auc", True, 0.8)) == (5, 7, 8, 3, 1.5)
    assert reached(curve, Target("eval/auc", False, 0.5)) == (0,) * 5
    assert all(math.isnan(v) for v in reached(curve, Target("eval/auc", True, 0.95)))
    assert all(math.isnan(v) for v in reached(curve, Target("eval/loss", True, 0.1)))
    mean, half = interval(np.array([1.0, 2.0, 3.0, math.nan]))
    assert (mean, half) == (2.0, pytest.approx(4.302653 / math.sqrt(3)))
    assert math.isnan(interval(np.array([1.0]))[1])
    a = pd.DataFrame({"seed": [0, 1, 2], "v": [1.0, 2.0, 3.0]})
    b = pd.DataFrame({"seed": [2, 0, 3], "v": [1.0, 0.5, 9.0]})
    assert paired(a, b, "v").tolist() == [0.5, 2.0]


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return str(path)


GIVEN = ["--vary", VARY[0]]
REFUSED = [
    ([], "--vary: nothing varies"),
    (["--vary", "availability.rat=0.1"], "availability.rat=0.1: unknown key; did you mean availability.rate?"),
    (["--vary", "availability.rate"], "--vary 'availability.rate'"),
    (["--vary", "availability.rate="], "--vary 'availability.rate=': no value"),
    (["--vary", "availability.rate=[0.1"], "--vary 'availability.rate=[0.1'"),
    (["--vary", "availability.rate=0.1,0.1"], "vary.availability.rate=[0.1, 0.1]"),
    (["--vary", "availability.rate=2"], "availability.rate=2"), (["--vary", "seed=1,2"], "vary.seed=[1, 2]"),
    ([*GIVEN, *GIVEN], "--vary availability.rate: given twice"),
    ([*GIVEN, "availability.rate=0.9"], "availability.rate: --vary availability.rate sets it, too"),
    ([*GIVEN, "--seeds", "2", "seeds=[5]"], "--seeds=2: seeds=[5] is given, too"),
    (["--vary", "algorithm=fedavg"], "vary.algorithm=['fedavg']"),
    ([*GIVEN, "--seeds", "0"], "Invalid value for '--seeds': "),
    ([*GIVEN, "--target", "eval/acu=0.9"], "--target='eval/acu': unknown; did you mean 'eval/auc'?"),
    ([*GIVEN, "--reference", "OME"], "--reference='OME': unknown; did you mean 'ONE'?"),
    ([*GIVEN, "--target", "0.9"], "--target='0.9'"), ([*GIVEN, "--executor", "ray"], "--executor 'ray'"),
    ([*GIVEN, "--executor", "config", "--jobs", "2"], "--jobs 2"),
]  # fmt: skip


def test_bad_input_is_one_line(subtests, config, tmp_path, command):
    for arguments, says in REFUSED:
        with subtests.test(str(arguments)):
            status, _, error = command("study", config, "--out", str(tmp_path / "out"), *arguments)
            *before, last = error.strip().splitlines()
            assert status == 2
            assert last.startswith("error: ")
            assert says in last
            assert [line for line in before if not line.startswith("left out ")] in ([], ["checking 4 trials"])
            assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_study_and_the_report_of_one_are_left_alone(config, done, tmp_path, command):
    before = (done / "report.html").read_bytes()
    for words, says in (
        (("study", config, *GIVEN, "--out", tmp_path), "it exists and is not empty"),
        (("study", config, *GIVEN), "error: --out: not given"),
        (("report", done), "a study, which has a page of its own"),
    ):
        status, _, error = command(*words)
        assert (status, says in error) == (2, True)
    assert (done / "report.html").read_bytes() == before


def test_a_dry_run_says_what_would_be_run(config, tmp_path, done, command):
    same = [config, "--vary", "availability.rate=1.0,0.5", "--seeds", "2", "--target", "eval/auc=0.5", "--dry-run"]
    status, said, _ = command("study", *same)
    assert status == 0
    assert said.splitlines()[0] == "8 trials; target: auc ≥ 0.5"
    assert said.splitlines()[1:3] == [
        "ONE rate=1.0: cdma_one, 4 rounds, local, seeds 0, 1",
        "ONE rate=0.5: cdma_one, 4 rounds, local, seeds 0, 1",
    ]
    status, said, _ = command("study", *same, "--out", str(done))
    assert said.splitlines()[0] == "8 trials, 4 of them finished; target: auc ≥ 0.5"
    assert "seeds 0 (finished), 1 (finished)" in said


def test_the_command_runs_it_and_tells_how_far_it_is(config, tmp_path, command):
    arguments = [config, "compare=null", "--vary", VARY[0], "--jobs", "1", "--out", str(tmp_path / "study")]
    status, said, error = command("study", *arguments)
    assert status == 0
    assert said.endswith(f"\n{tmp_path / 'study'}: 2 trials\n")
    assert "trial 1/2 | left" in error
    assert "trial 2/2 | left 0 s | rate-0.2/seed-0: done" in error
    rows = pd.read_parquet(tmp_path / "study" / "study.parquet")
    assert rows["label"].tolist() == ["cdma_one"] * 2
    cells = [[c.strip() for c in line.split("│")[1:4]] for line in said.splitlines() if line.startswith("│")]
    assert cells == [["cdma_one", rate, "1"] for rate in ("1", "0.2")]
    assert all(f"{value:.4f}" in said for value in rows["final/auc"])
    aborted = ["cohort.attempts=1", "cohort.wait_for=all", "--vary", "cohort.min_responses=6"]
    status, said, error = command(
        "study", *arguments[:-1], str(tmp_path / "failing"), *aborted, "--paper", "--power", "0.1"
    )
    assert (status, "failed: " in error, "final auc" in said, "--power=0.1: no spread" in said) == (1, True, True, True)
    assert (tmp_path / "failing" / "paper" / "methods.tex").exists()


@pytest.mark.parametrize("name", ["dropout_study", "dropout_study_quick"])
def test_the_studies_that_come_with_it_are_sound(name):
    path = Path(__file__).parents[3] / "configs" / f"{name}.yaml"
    assert len(study.plan(load(path)).trials) == 150


@pytest.mark.slow
def test_a_study_of_which_every_trial_failed_has_methods(tmp_path, command):
    never = {
        **TINY,
        "rounds": 1,
        "compare": None,
        "cohort": {"size": 4, "min_responses": 4, "attempts": 1},
        "availability": "bernoulli",
    }
    config = tmp_path / "never.yaml"
    config.write_text(yaml.safe_dump(never))
    given = (
        "--vary",
        "availability.rate=0.01,0.02",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--paper",
        "--out",
        tmp_path / "study",
    )
    status, _, error = command("study", config, *given)
    assert (status, "Traceback" in error) == (1, False)
    assert "Of 2 runs, 2 failed" in (tmp_path / "study" / "paper" / "methods.tex").read_text()
