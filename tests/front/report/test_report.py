"""The report, on synthetic run folders: what it shows is right, what is missing left out, what is hostile text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedfleet import report
from fedfleet.report import canvas, write_report
from fedfleet.report.canvas import PALETTE, look, plain, plain_names
from fedfleet.report.groups import grouped
from fedfleet.report.study_tables import Target
from fedfleet.report.tables import at_equal_traffic, read
from tests.front.report.report_runs import PNG, Page, comparison, figures, make_run, rounds_table


def test_one_run(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "new" / "out"
    path = write_report([run], out)
    assert path == out / "report.html"
    assert figures(out) == {"metric-accuracy", "train-loss", "participation", "outcomes", "communication"}
    assert all((out / "figures" / f"{name}.png").read_bytes().startswith(PNG) for name in figures(out))
    page = Page(path)
    for text in (
        "fedavg · classification · digits", "final accuracy 0.5 best 0.625", "rounds 4 240 client steps", "floats up 400 received",
        "bytes 4.8 kB 1.6 kB up, 3.2 kB down", "virtual time 20 s", "a round takes 250 ms", "clients that completed 40 % 2 of 5",
        "completed of invited 60 % 24 of 40 invitations", "60 % of the clients never completed one",
        "Gini coefficient (here 0.70)",  # of 3, 1 and three zeros
    ):  # fmt: skip
        assert text in page.text
    assert {"class": "badge finished"} in page.all("span")


@pytest.mark.slow
def test_wide_metric_figure_shrinks_with_what_is_missing(tmp_path: Path) -> None:
    def width(name: str, table: pd.DataFrame) -> int:
        write_report([make_run(tmp_path / name, rounds=table)], tmp_path / f"{name}-out")
        return int.from_bytes((tmp_path / f"{name}-out" / "figures" / "metric-accuracy.png").read_bytes()[16:20], "big")

    full = width("full", rounds_table(4))
    still = width("still", rounds_table(4).assign(virtual_s=0.0))
    bare = width("bare", rounds_table(4).drop(columns=["virtual_s", "floats_up"]))
    assert (round(3 * still / full), round(3 * bare / full)) == (2, 1)


def test_comparison_groups_seeds_by_label(tmp_path: Path) -> None:
    root = comparison(tmp_path)
    page = Page(write_report([root], tmp_path / "out"))
    assert "3 runs under 2 labels" in page.text
    # B sent 200 floats in all. There A is after round 2 of 4: 0.2 and 0.4; B at its end: 0.4.
    assert "accuracy at 200 floats up" in page.text
    assert "label A 2 0, 1 0.60 ± 0.28 0.30 ± 0.14 400 20 s" in page.text
    assert "label B 1 0 0.4 0.4 200 20 s" in page.text
    assert "bands reach from the least to the greatest seed" in page.text
    apart = Page(write_report([root / "B", *(root / "A" / f"seed-{seed}" for seed in (0, 1))], tmp_path / "apart"))
    assert "label A 2 0, 1 0.60 ± 0.28 0.30 ± 0.14 400 20 s" in apart.text
    assert figures(tmp_path / "apart") == figures(tmp_path / "out")


@pytest.mark.slow
def test_traffic_is_told_in_bytes_where_numbers_are_sent_at_other_widths(tmp_path: Path) -> None:
    halved = {"algorithm": {"name": "fedavg"}, "transforms": {"up": ["bf16"], "down": []}}
    table = rounds_table(4)
    table["bytes_up"] /= 2
    make_run(tmp_path / "runs" / "plain", config={"algorithm": {"name": "fedavg"}})
    make_run(tmp_path / "runs" / "bf16", config=halved, rounds=table)
    page = Page(write_report([tmp_path / "runs"], tmp_path / "out"))
    assert "accuracy at 800 B up" in page.text
    assert "against rounds, bytes received by the server and virtual time" in page.text
    alone = Page(write_report([tmp_path / "runs" / "plain"], tmp_path / "alone"))
    assert "against rounds, floats received by the server and virtual time" in alone.text


@pytest.mark.slow
def test_what_it_took_to_reach_a_value(tmp_path: Path) -> None:
    """Of two seeds of A after rounds 3 and 2, of B never."""
    for seed, accuracy in ((0, [0.1, 0.2, 0.5, 0.5]), (1, [0.1, 0.5, 0.4, 0.4])):
        summary = {"label": "A", "seed": seed, "status": "finished", "rounds": 4, "initial": {"eval/accuracy": 0.1}}
        make_run(tmp_path / "A" / f"seed-{seed}", rounds=rounds_table(4, accuracy=[*accuracy]), summary=summary)
    make_run(tmp_path / "B", summary={"label": "B", "status": "finished", "rounds": 4}, rounds=rounds_table(2))
    page = Page(write_report([tmp_path], tmp_path / "out", Target("eval/accuracy", True, 0.45)))
    assert "A 2 of 2 2.5 750 12.5 s B 0 of 1 – – –" in page.text
    assert "first evaluation that found accuracy ≥ 0.45" in page.text
    with pytest.raises(ValueError, match=r"--target: no run has measured 'auc', only accuracy"):
        write_report([tmp_path], tmp_path / "out", Target("eval/auc", True, 0.45))


def test_equal_floats_leaves_out_runs_that_sent_nothing(tmp_path: Path) -> None:
    table = rounds_table(4, accuracy=[None, None, 0.2, 0.4])
    late = read(make_run(tmp_path / "late", rounds=table, summary=None))
    short = read(make_run(tmp_path / "short", rounds=rounds_table(1, 250, [0.3])))
    silent = read(make_run(tmp_path / "silent", rounds=rounds_table(1, 0)))
    least, found = at_equal_traffic([[late, silent], [short]], "accuracy", "floats") or (0, [])
    assert least == 250
    assert np.isnan(found[0][0])  # first evaluated at 300 floats: nothing to interpolate from
    assert found[1].tolist() == [0.3]
    assert at_equal_traffic([[silent]], "accuracy", "floats") is None


def test_what_was_made_in_python_is_told_apart_by_name_source_and_options(tmp_path: Path) -> None:
    own = {"name": "mine", "module": "lab", "source": "a" * 64, "options": {"lr": 0.1}}
    rate, code = own | {"options": {"lr": 1.0}}, own | {"source": "b" * 64}
    for seed, kind in enumerate((own, own, rate, code)):
        config = {"seed": seed, "algorithm": {"own": kind}}
        make_run(tmp_path / "runs" / str(seed), config=config, summary={"status": "finished"})
    found = grouped([read(path) for path in sorted((tmp_path / "runs").iterdir())])
    of = {("0.1", "a"): 2, ("0.1", "b"): 1, ("1.0", "a"): 1}
    named = {f"mine (algorithm.lr={lr}, source {code * 8})": runs for (lr, code), runs in of.items()}
    assert {name: len(runs) for name, runs in found.items()} == named
    text = Page(write_report([tmp_path / "runs"], tmp_path / "out")).text
    assert "4 runs under 3 labels" in text


@pytest.mark.slow
def test_a_label_is_the_algorithm_and_what_differs_but_where_and_how_long_a_run_was_computed(tmp_path: Path) -> None:
    for seed, step in ((0, 0.1), (1, 1.0)):
        config: dict[str, Any] = {"seed": 3, "algorithm": {"name": "fedavg", "eta": step}}
        make_run(tmp_path / "steps" / str(step), config=config, summary={"status": "finished"})
        config = {"seed": seed, "algorithm": {"name": "fedavg"}}
        config |= {"executor": {"actors": seed + 1}, "checkpoint": {"keep": seed + 1}}
        environment = {"packages": {"fedfleet": f"0.{seed}", "torch": "2"}}
        make_run(tmp_path / "runs" / str(seed), config=config, environment=environment)
    steps, runs = (Page(write_report([tmp_path / name], tmp_path / f"{name}-out")).text for name in ("steps", "runs"))
    for said in ("2 runs under 2 labels", "fedavg (algorithm.eta=0.1)", "fedavg (algorithm.eta=1.0)"):
        assert said in steps
    assert "2 runs under 1 label" in runs
    assert "“fedavg” had several versions of packages, which may change numbers: fedfleet 0.0, 0.1." in runs


def test_numbers_in_names_are_compared_as_numbers_and_folders_no_deeper_than_three_are_read(tmp_path: Path) -> None:
    for seed, folder in ((10, "seed-10"), (2, "seed-2"), (4, "c/seed-4")):
        make_run(tmp_path / "runs" / "a" / "b" / folder, config={"seed": seed, "algorithm": {"name": "afl"}})
    assert "afl 2 2, 10 " in Page(write_report([tmp_path / "runs"], tmp_path / "out")).text
    for names in ("seed-2 seed-10", "lr-0.05 lr-0.2 lr-1.0", "lr-1e-05 lr-0.001", "a a-1 b", "lr-0.1/s-1 lr-0.1/s-12"):
        paths = [*map(Path, names.split())]
        assert sorted(reversed(paths), key=report._natural) == paths


@pytest.mark.slow
def test_status_is_the_worst_the_same_seed_twice_is_noted_and_the_same_folder_twice_is_one(tmp_path: Path) -> None:
    first = make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", summary={"status": "failed", "error": "client 7: no such file"})
    page = Page(write_report([tmp_path / "runs"], tmp_path / "out"))
    assert {"class": "badge failed"} in page.all("span")
    for text in ("1 finished, 1 failed", "client 7: no such file", "fedavg 1 of 2 0, 0", "have the same seed"):
        assert text in page.text
    assert "runs under" not in Page(write_report([first, tmp_path / "runs" / "b" / ".." / "a"], tmp_path / "once")).text


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> $\\frac{ {{ 7 * 7 }} </pre>"


def test_everything_from_files_is_escaped(tmp_path: Path) -> None:
    config = {
        "seed": HOSTILE, "algorithm": {"name": HOSTILE}, "task": {"name": HOSTILE},
        "population": {"dataset": HOSTILE, "clients": 5, "partition": {"kind": HOSTILE}},
        "attack": {"kind": HOSTILE, "share": 0.5, HOSTILE: HOSTILE},
    }  # fmt: skip
    table = rounds_table(4).rename(columns={"eval/accuracy": f"eval/{HOSTILE}"})
    clients = pd.DataFrame({"round": [1, 1], "client": [0, 1], HOSTILE: [0.1, 0.2]})
    summary = {
        "status": HOSTILE,
        "label": HOSTILE,
        "error": HOSTILE,
        "final": {HOSTILE: HOSTILE},
        "best": {HOSTILE: HOSTILE},
    }
    phases = pd.DataFrame({"round": [0, 0], "phase": [HOSTILE, "b"], "completed": [1, 2]})
    summary |= {"stopped": {"why": HOSTILE}, "privacy": {"epsilon": 1.0, "delta": 0.1, "accounting": HOSTILE}}
    changes = {"config": config, "rounds": table, "clients": clients, "summary": summary, "phases": phases}
    environment = {HOSTILE: HOSTILE}
    make_run(tmp_path / "runs" / "bad", environment=environment, **changes)
    alone = Page(write_report([tmp_path / "runs" / "bad"], tmp_path / "alone"))
    make_run(tmp_path / "runs" / "good")
    among = Page(write_report([tmp_path / "runs"], tmp_path / "among"))
    for page in (alone, among):
        assert [attributes.get("type") for attributes in page.all("script")] == [None, "application/json"]
        assert page.html.count("</script>") == 2  # whatever a parser makes of what stands between
        assert not page.all("img")
        assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
        assert HOSTILE in {chart["name"] for chart in page.charts.values()}
        assert page.text.count("<script>alert(1)</script>") >= 5
        assert "{{ 7 * 7 }}" in page.text
    assert {"class": "badge unknown"} in alone.all("span")
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in figures(tmp_path / "among"))


def test_zero_rounds_still_give_a_page(tmp_path: Path) -> None:
    for name, table in {"no-rows": rounds_table(2).iloc[:0], "no-columns": pd.DataFrame()}.items():
        empty = pd.DataFrame({"round": [], "phase": [], "client": [], "outcome": []})
        run = make_run(tmp_path / name, rounds=table, outcomes=empty, summary=None, environment=None)
        page = Page(write_report([run], tmp_path / f"{name}-out"))
        assert "No round has been completed yet" in page.text
        assert figures(tmp_path / f"{name}-out") == set()
        assert {"class": "badge unknown"} in page.all("span")


def test_what_is_missing_or_null_is_left_out(tmp_path: Path) -> None:
    bare = {"config": None, "summary": None, "environment": None, "outcomes": None}
    page = Page(write_report([make_run(tmp_path / "bare", **bare)], tmp_path / "out"))
    assert figures(tmp_path / "out") == {"metric-accuracy", "train-loss", "outcomes", "communication"}
    assert "final accuracy 0.5 " in page.text  # from the table
    assert "rounds 4 " in page.text
    table = rounds_table(4).drop(columns=["floats_up", "floats_down", "late", "virtual_s"]).assign(train_loss=None)
    page = Page(write_report([make_run(tmp_path / "run", rounds=table, outcomes=None)], tmp_path / "less"))
    assert figures(tmp_path / "less") == {"metric-accuracy", "outcomes"}
    assert "floats up" not in page.text
    assert "never" not in page.text


def test_diverged_values_do_not_stop_the_report(tmp_path: Path) -> None:
    table = rounds_table(4)
    table["train_loss"] = [1.0, np.inf, np.nan, 1e38]
    table["eval/accuracy"] = [np.nan, np.inf, 0.2, 0.3]
    summary = {"status": "failed", "error": "NaN", "initial": {"eval/accuracy": 0.1}}
    summary |= {"final": {"eval/accuracy": float("nan")}, "best": {"eval/accuracy": None}}
    page = Page(write_report([make_run(tmp_path / "run", rounds=table, summary=summary)], tmp_path / "out"))
    assert {"metric-accuracy", "train-loss"} <= figures(tmp_path / "out")
    assert "final accuracy 0.3" in page.text


@pytest.mark.slow
def test_metric_names_that_look_alike_get_files_of_their_own(tmp_path: Path) -> None:
    table = rounds_table(4).assign(**{name: 0.5 for name in ("eval/../accuracy", "eval/accuracy/")})
    write_report([make_run(tmp_path / "run", rounds=table)], tmp_path / "out")
    found = {name for name in figures(tmp_path / "out") if name.startswith("metric")}
    assert (len(found), {"metric-accuracy", "metric-accuracy-2"} <= found) == (3, True)


@pytest.mark.slow
def test_tables_of_clients_and_phases_and_a_configuration_once_for_seeds_that_share_it(tmp_path: Path) -> None:
    clients = pd.DataFrame({"round": [0] * 10 + [3] * 10, "client": [*range(10)] * 2, "num_examples": 7, "note": "x"})
    clients["loss"] = [9.0] * 10 + [float(i) for i in range(10)]
    clients["accuracy"] = [0.0] * 10 + [0.1 * i for i in range(10)]
    phases = pd.DataFrame({"round": [0, 0, 1, 1], "phase": ["mean", "drift"] * 2, "completed": [700, 2, 800, 4]})
    run = make_run(tmp_path / "run", clients=clients, phases=phases.assign(floats_up=10**6))
    text = Page(write_report([run], tmp_path / "out")).text
    assert {"clients-loss", "clients-accuracy"} <= figures(tmp_path / "out")
    assert not {"clients-num-examples", "clients-note"} & figures(tmp_path / "out")
    assert "(the highest values). mean 4.5, worst 10 % 9" in text
    assert "(the lowest values). mean 0.45, worst 10 % 0" in text
    assert "mean 1,500 2 M drift 6 2 M" in text
    text = Page(write_report([comparison(tmp_path)], tmp_path / "seeds")).text
    assert (text.count("name: cdma_nc"), text.count('"python": "3.12"')) == (1, 1)
    assert "Configuration: label A, seed 0; label A, seed 1" in text


def test_a_legend_of_many_rows_leaves_the_panels_their_height() -> None:
    for labels, grows in ((6, False), (24, True)):
        figure, (axes,) = canvas.panels(1, width=7.2, height=3.4)
        canvas.legend(figure, {f"a label of some thirty letters {i}": [] for i in range(labels)})
        assert (figure.get_figheight() > 3.4) == grows
        canvas.png(figure)
        assert axes.get_position().height * figure.get_figheight() > 1.5


def test_a_label_keeps_its_colour_and_text_is_no_mathematics() -> None:
    labels: dict[str, list[Any]] = {f"label {i}": [] for i in range(20)}
    looks = [look(labels, label) for label in labels]
    assert looks[0] == (PALETTE[0], "-")
    assert len(set(looks)) == 20
    assert plain("a $x$") == r"a \$x\$"
    assert not plain("_hidden").startswith("_")
    assert len(plain("x" * 500)) == 48
    long = {f"{'x' * 40} {i} {'y' * 40}": () for i in range(3)}
    assert len({*plain_names(long).values()}) == 3  # cut, all would be alike


def test_wrong_folders_and_unreadable_files_are_named(subtests: pytest.Subtests, tmp_path: Path) -> None:
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    runs = {name: make_run(tmp_path / name) for name in ("good", "rounds.parquet", "config.yaml", "summary.json")}
    named = {f"{name} missing": folder / name for name, folder in runs.items() if name != "good"}
    for words, path in {"": None, "missing": None, "empty": None, "good empty": None, **named}.items():
        with subtests.test(words):
            if path is not None:
                path.write_text("{ half a file: [", encoding="utf-8")
            folders = [path.parent] if path is not None else [tmp_path / word for word in words.split()]
            says = re.escape(str(path or folders[-1])) if folders else "no run"
            with pytest.raises(ValueError, match=says) as caught:
                write_report(folders, tmp_path / "out")
            assert "\n" not in str(caught.value)
            assert not (tmp_path / "out").exists()
