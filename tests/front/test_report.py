"""The report, on synthetic run folders: what it shows is right, what is missing left out, what is hostile text."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from fedfleet.report import write_report
from fedfleet.report.canvas import PALETTE, look, plain, window
from fedfleet.report.page import duration, number, quantity, share
from fedfleet.report.tables import at, at_equal_floats, band, fate_shares, gini, heard_counts, read, smooth, worst_tenth

PNG = b"\x89PNG\r\n\x1a\n"
COUNTS = [
    "seconds",
    "invited",
    "heard",
    "late",
    "failed",
    "offline",
    "client_steps",
    "floats_up",
    "floats_down",
    "bytes_up",
    "bytes_down",
]


def rounds_table(rounds: int, floats: int = 100, accuracy: list[float | None] | None = None) -> pd.DataFrame:
    """Per round 10 invited, 6 heard, 2 late, 1 failed, 1 offline, and 5 virtual seconds; accuracy 0.2, 0.3, ..."""
    each = dict(zip(COUNTS, (0.5, 10, 6, 2, 1, 1, 60, floats, 200, 4 * floats, 800), strict=True))
    rows = [{"round": t, **each, "virtual_s": 5.0, "train_loss": 1 / (t + 1)} for t in range(rounds)]
    table = pd.DataFrame(rows, columns=["round", *COUNTS, "virtual_s", "train_loss"])
    table["eval/accuracy"] = accuracy if accuracy is not None else [0.2 + 0.1 * t for t in range(rounds)]
    table["eval/never"] = None
    return table


def make_run(path: Path, **changes: Any) -> Path:
    """A run folder of 4 rounds, 5 clients; `changes` replace a table or a document, None leaves the file out."""
    fates = [(0, 0, "heard"), (0, 1, "late"), (1, 0, "heard"), (1, 2, "offline"), (2, 0, "heard"), (3, 1, "heard")]
    config = {
        "seed": 0,
        "rounds": 4,
        "population": {"dataset": "digits", "clients": 5, "partition": {"kind": "iid"}},
        "task": {"name": "classification", "model": "logistic"},
        "algorithm": {"name": "fedavg"},
        "cohort": {"invite": 10},
    }
    summary = {
        "status": "finished",
        "rounds": 4,
        "initial": {"eval/accuracy": 0.1},
        "final": {"eval/accuracy": 0.5},
        "best": {"eval/accuracy": 0.625},
        "median_seconds_per_round": 0.25,
        "error": None,
    }
    parts: dict[str, Any] = {
        "rounds": rounds_table(4),
        "fates": pd.DataFrame(fates, columns=["round", "client", "fate"]).assign(phase="mean", virtual_s=1.0),
        "phases": None,
        "clients": None,
        "config": config,
        "summary": summary,
        "environment": {"python": "3.12"},
    } | changes
    path.mkdir(parents=True)
    for name in ("rounds", "fates", "phases", "clients"):
        if parts[name] is not None:
            parts[name].to_parquet(path / f"{name}.parquet")
    if parts["config"] is not None:
        (path / "config.yaml").write_text(yaml.safe_dump(parts["config"]), encoding="utf-8")
    for name in ("summary", "environment"):
        if parts[name] is not None:
            (path / f"{name}.json").write_text(json.dumps(parts[name]), encoding="utf-8")
    return path


class Page(HTMLParser):
    """What a reader of the page meets: tags with attributes, and text."""

    def __init__(self, path: Path):
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(self.html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def figures(out: Path) -> set[str]:
    return {path.stem for path in out.glob("*.png")}


def comparison(tmp_path: Path) -> Path:
    """Two labels, two and one seeds: A sends 100 floats a round, B 50."""
    root = tmp_path / "cmp"
    for label, seed, floats, gain in (("A", 0, 100, 0.1), ("A", 1, 100, 0.2), ("B", 0, 50, 0.1)):
        accuracy = [gain * t for t in range(1, 5)]
        summary = {"status": "finished", "label": f"label {label}", "final": {"eval/accuracy": accuracy[-1]}}
        summary["initial"] = {"eval/accuracy": 0.0}
        config = {"seed": seed, "algorithm": {"name": "cdma_nc" if label == "A" else "fedavg"}}
        table = rounds_table(4, floats, list(accuracy))
        make_run(root / label / f"seed-{seed}", rounds=table, summary=summary, config=config)
    return root


def test_one_run(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "new" / "out"
    path = write_report([run], out)
    assert path == out / "report.html"
    assert figures(out) == {"metric-accuracy", "train-loss", "participation", "fates", "communication"}
    assert all((out / f"{name}.png").read_bytes().startswith(PNG) for name in figures(out))
    page = Page(path)
    text = page.text
    assert "fedavg · classification · digits" in text
    assert "final accuracy 0.5 best 0.625" in text
    assert "rounds 4 240 client steps" in text
    assert "floats up 400 received" in text
    assert "bytes 4.8 kB 1.6 kB up, 3.2 kB down" in text
    assert "virtual time 20 s" in text
    assert "a round takes 250 ms" in text
    assert "heard of invited 60 % 24 of 40 invitations" in text
    assert "clients heard 40 % 2 of 5" in text
    assert "Gini coefficient (here 0.70)" in text  # 3, 1 and three zeros
    assert "60 % of the clients were never heard" in text
    assert {"class": "badge finished"} in page.all("span")


def test_page_stands_alone(tmp_path: Path) -> None:
    path = write_report([make_run(tmp_path / "run")], tmp_path / "out")
    page = Page(path)
    assert not page.all("script")
    assert not page.all("link")
    images = page.all("img")
    assert len(images) == len(figures(tmp_path / "out"))
    embedded = {base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,")) for image in images}
    assert embedded == {file.read_bytes() for file in (tmp_path / "out").glob("*.png")}
    assert all(image["alt"] for image in images)
    addresses = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert all((address or "").startswith("data:") for address in addresses)
    assert "url(" not in page.html
    assert "@import" not in page.html


def test_wide_metric_figure_shrinks_with_what_is_missing(tmp_path: Path) -> None:
    def width(name: str, table: pd.DataFrame) -> int:
        write_report([make_run(tmp_path / name, rounds=table)], tmp_path / f"{name}-out")
        return int.from_bytes((tmp_path / f"{name}-out" / "metric-accuracy.png").read_bytes()[16:20], "big")

    full = width("full", rounds_table(4))
    still = width("still", rounds_table(4).assign(virtual_s=0.0))
    bare = width("bare", rounds_table(4).drop(columns=["virtual_s", "floats_up"]))
    assert (round(3 * still / full), round(3 * bare / full)) == (2, 1)


def test_cumulative_sums_and_evaluated_rows(tmp_path: Path) -> None:
    table = rounds_table(4, accuracy=[None, 0.4, None, 0.5]).iloc[[3, 0, 1, 2]]
    run = read(make_run(tmp_path / "run", rounds=table))
    assert run.metrics == ["accuracy"]
    x, y = run.curve("eval/accuracy", "total/floats_up")
    assert x.tolist() == [0, 200, 400]
    assert y.tolist() == [0.1, 0.4, 0.5]
    assert run.curve("eval/accuracy", "completed")[0].tolist() == [0, 2, 4]
    assert run.curve("eval/accuracy", "total/virtual_s")[0].tolist() == [0, 10, 20]
    assert run.total("floats_up") == 400
    assert run.total("unheard_of") is None


def test_a_repeated_round_counts_once(tmp_path: Path) -> None:
    table = rounds_table(4)
    again = table[table["round"] == 3].assign(floats_up=7)
    run = read(make_run(tmp_path / "run", rounds=pd.concat([table, again])))
    assert run.total("floats_up") == 307


def test_gini_by_hand() -> None:
    assert gini(np.array([4]), 4) == pytest.approx(0.75)
    assert gini(np.array([2, 2, 2]), 3) == pytest.approx(0)
    assert gini(np.array([3, 1]), 2) == pytest.approx(0.25)
    assert gini(np.array([1, 3]), 5) == pytest.approx(0.7)
    assert gini(np.array([1, 3, 0, 0, 0]), 5) == pytest.approx(gini(np.array([3, 1]), 5))
    assert np.isnan(gini(np.array([]), 5))
    assert gini(np.array([1]), 10**10) == pytest.approx(1)  # no array of ten thousand million zeros


def test_heard_counts(tmp_path: Path) -> None:
    rows = [(0, "a", 1, "heard"), (0, "b", 1, "heard"), (1, "a", 1, "stale"), (1, "a", 2, "heard"), (1, "a", 3, "late")]
    fates = pd.DataFrame(rows, columns=["round", "phase", "client", "fate"])
    fates["fate"] = fates["fate"].astype("category")
    counts, size = heard_counts(read(make_run(tmp_path / "run", fates=fates))) or (np.empty(0), 0)
    assert (sorted(counts.tolist()), size) == ([1, 2], 5)  # two phases of a round once, stale replies too
    unknown = heard_counts(read(make_run(tmp_path / "other", fates=fates, config=None)))
    assert unknown is not None
    assert unknown[1] == 3
    nobody = heard_counts(read(make_run(tmp_path / "nobody", fates=fates.assign(fate="offline"))))
    assert nobody is not None
    assert (nobody[0].tolist(), nobody[1]) == ([], 5)


def test_fate_shares_from_fates_else_from_counts(tmp_path: Path) -> None:
    with_fates = fate_shares([read(make_run(tmp_path / "a"))])
    assert with_fates is not None
    assert with_fates[0].tolist() == [0, 1, 2, 3]
    assert with_fates[1].tolist() == [[0.5, 0, 0.5, 0, 0], [0.5, 0, 0, 0, 0.5], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    counted = fate_shares([read(make_run(tmp_path / "b", fates=None))])
    assert counted is not None
    assert counted[0].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(counted[1], [[0.6, 0, 0.2, 0.1, 0.1]] * 4)


def test_interpolation() -> None:
    x, y = np.array([1.0, 2.0, 2.0, 4.0]), np.array([0.0, 1.0, 3.0, 5.0])
    np.testing.assert_allclose(at(x, y, np.array([0.5, 1.5, 2.0, 3.0, 9.0])), [np.nan, 1.5, 3.0, 4.0, 5.0])
    assert np.isnan(at(np.empty(0), np.empty(0), np.array([1.0]))).all()


def test_band_over_seeds() -> None:
    x = np.array([0.0, 1.0, 2.0])
    same = band([(x, x), (x, 3 * x)])
    assert same is not None
    assert [part.tolist() for part in same] == [[0, 1, 2], [0, 2, 4], [0, 1, 2], [0, 3, 6]]
    shifted = band([(x, x), (x + 1, x + 1)], points=3)  # both are the line y = x, and share 1 to 2
    assert shifted is not None
    assert [part.tolist() for part in shifted] == [[1, 1.5, 2]] * 4
    assert band([(x, x), (x + 10, x)]) is None
    assert band([]) is None


def test_smooth_and_window() -> None:
    assert smooth(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist() == [1.5, 3, 3, 3]
    assert window(100) == 1
    assert all(window(rounds) % 2 == 1 for rounds in range(90, 500))
    values = np.arange(7.0)
    assert smooth(values, 1).tolist() == values.tolist()


def test_worst_tenth() -> None:
    values = np.arange(20.0)
    assert worst_tenth(values, high_is_bad=False) == 0.5
    assert worst_tenth(values, high_is_bad=True) == 18.5
    assert worst_tenth(np.array([3.0, 4.0]), high_is_bad=False) == 3


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


def test_equal_floats_leaves_out_runs_that_sent_nothing(tmp_path: Path) -> None:
    table = rounds_table(4, accuracy=[None, None, 0.2, 0.4])
    late = read(make_run(tmp_path / "late", rounds=table, summary=None))
    short = read(make_run(tmp_path / "short", rounds=rounds_table(1, 250, [0.3])))
    silent = read(make_run(tmp_path / "silent", rounds=rounds_table(1, 0)))
    least, found = at_equal_floats([[late, silent], [short]], "accuracy") or (0, [])
    assert least == 250
    assert np.isnan(found[0][0])  # first evaluated at 300 floats: nothing to interpolate from
    assert found[1].tolist() == [0.3]
    assert at_equal_floats([[silent]], "accuracy") is None


def test_label_falls_back_to_the_algorithm_and_warns_of_a_mixture(tmp_path: Path) -> None:
    for name, step in (("small", 0.1), ("large", 1.0)):
        config = {"seed": 3, "algorithm": {"name": "fedavg", "eta": step}}
        make_run(tmp_path / "runs" / name, config=config, summary={"status": "finished"})
    text = Page(write_report([tmp_path / "runs"], tmp_path / "out")).text
    assert "2 runs under 1 label" in text
    assert "The runs of “fedavg” differ in algorithm" in text


def test_same_seed_twice_is_noted_and_the_same_folder_twice_is_one(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert "have the same seed" in Page(write_report([first, second], tmp_path / "out")).text
    assert "runs under" not in Page(write_report([first, tmp_path / "b" / ".." / "a"], tmp_path / "once")).text


def test_folder_of_runs_in_natural_order_and_no_deeper_than_three(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for seed in (10, 2):
        make_run(root / "a" / "b" / f"seed-{seed}", config={"seed": seed, "algorithm": {"name": "afl"}})
    make_run(root / "a" / "b" / "c" / "seed-4", config={"seed": 4, "algorithm": {"name": "afl"}})
    assert "afl 2 2, 10 " in Page(write_report([root], tmp_path / "out")).text


def test_status_is_the_worst(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", summary={"status": "failed", "error": "client 7: no such file"})
    page = Page(write_report([tmp_path / "runs"], tmp_path / "out"))
    assert "1 finished, 1 failed" in page.text
    assert {"class": "badge failed"} in page.all("span")
    assert "client 7: no such file" in page.text
    assert "fedavg 1 of 2 0, 0" in page.text


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> $\\frac{ {{ 7 * 7 }} </pre>"


def test_everything_from_files_is_escaped(tmp_path: Path) -> None:
    config = {
        "seed": HOSTILE,
        "algorithm": {"name": HOSTILE},
        "task": {"name": HOSTILE},
        "population": {"dataset": HOSTILE},
    }
    table = rounds_table(4).rename(columns={"eval/accuracy": f"eval/{HOSTILE}"})
    clients = pd.DataFrame({"round": [1, 1], "client": [0, 1], HOSTILE: [0.1, 0.2]})
    summary = {"status": HOSTILE, "label": HOSTILE, "error": HOSTILE, "final": {HOSTILE: HOSTILE}, "best": HOSTILE}
    phases = pd.DataFrame({"round": [0, 0], "phase": [HOSTILE, "b"], "heard": [1, 2]})
    changes = {"config": config, "rounds": table, "clients": clients, "summary": summary, "phases": phases}
    environment = {HOSTILE: HOSTILE}
    make_run(tmp_path / "runs" / "bad", environment=environment, **changes)
    alone = Page(write_report([tmp_path / "runs" / "bad"], tmp_path / "alone"))
    make_run(tmp_path / "runs" / "good")
    among = Page(write_report([tmp_path / "runs"], tmp_path / "among"))
    for page in (alone, among):
        assert not page.all("script")
        assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.all("img"))
        assert not any("onerror" in attributes for _, attributes in page.tags)
        assert page.text.count("<script>alert(1)</script>") >= 5
        assert "{{ 7 * 7 }}" in page.text
    assert {"class": "badge unknown"} in alone.all("span")
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in figures(tmp_path / "among"))


def test_metric_names_that_look_alike_get_files_of_their_own(tmp_path: Path) -> None:
    table = rounds_table(4)
    table["eval/../accuracy"] = table["eval/accuracy/"] = table["eval/accuracy"]
    write_report([make_run(tmp_path / "run", rounds=table)], tmp_path / "out")
    assert {"metric-accuracy", "metric-accuracy-2"} <= figures(tmp_path / "out")
    assert len([name for name in figures(tmp_path / "out") if name.startswith("metric")]) == 3


def test_zero_rounds_still_give_a_page(tmp_path: Path) -> None:
    for name, table in {
        "no-rows": rounds_table(2).iloc[:0],
        "no-columns": pd.DataFrame(),
    }.items():
        empty = pd.DataFrame({"round": [], "phase": [], "client": [], "fate": []})
        run = make_run(tmp_path / name, rounds=table, fates=empty, summary=None, environment=None)
        page = Page(write_report([run], tmp_path / f"{name}-out"))
        assert "No round has been completed yet" in page.text
        assert figures(tmp_path / f"{name}-out") == set()
        assert {"class": "badge unknown"} in page.all("span")


def test_a_folder_with_only_rounds(tmp_path: Path) -> None:
    bare = {"config": None, "summary": None, "environment": None, "fates": None}
    page = Page(write_report([make_run(tmp_path / "run", **bare)], tmp_path / "out"))
    assert figures(tmp_path / "out") == {"metric-accuracy", "train-loss", "fates", "communication"}
    assert "final accuracy 0.5 " in page.text  # from the table
    assert "rounds 4 " in page.text


def test_missing_and_all_null_columns_are_left_out(tmp_path: Path) -> None:
    table = rounds_table(4).drop(columns=["floats_up", "floats_down", "late", "virtual_s"]).assign(train_loss=None)
    page = Page(write_report([make_run(tmp_path / "run", rounds=table, fates=None)], tmp_path / "out"))
    assert figures(tmp_path / "out") == {"metric-accuracy", "fates"}
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


def test_clients_table(tmp_path: Path) -> None:
    clients = pd.DataFrame(
        {
            "round": [0] * 10 + [3] * 10,
            "client": [*range(10)] * 2,
            "loss": [9.0] * 10 + [float(i) for i in range(10)],
            "accuracy": [0.0] * 10 + [0.1 * i for i in range(10)],
            "num_examples": 7,
            "note": "x",
        }
    )
    page = Page(write_report([make_run(tmp_path / "run", clients=clients)], tmp_path / "out"))
    assert {"clients-loss", "clients-accuracy"} <= figures(tmp_path / "out")
    assert not {"clients-num-examples", "clients-note"} & figures(tmp_path / "out")
    assert "(the highest values). mean 4.5, worst 10 % 9" in page.text
    assert "(the lowest values). mean 0.45, worst 10 % 0" in page.text


def test_phases_of_one_run(tmp_path: Path) -> None:
    phases = pd.DataFrame(
        {"round": [0, 0, 1, 1], "phase": ["mean", "drift"] * 2, "heard": [700, 2, 800, 4], "floats_up": [10**6] * 4}
    )
    page = Page(write_report([make_run(tmp_path / "run", phases=phases)], tmp_path / "out"))
    assert "mean 1,500 2 M drift 6 2 M" in page.text


def test_config_is_shown_once_for_seeds_that_share_it(tmp_path: Path) -> None:
    page = Page(write_report([comparison(tmp_path)], tmp_path / "out"))
    assert page.text.count("name: cdma_nc") == 1
    assert "Configuration: label A, seed 0; label A, seed 1" in page.text
    assert page.text.count('"python": "3.12"') == 1


def test_a_label_keeps_its_colour() -> None:
    labels: dict[str, list[Any]] = {f"label {i}": [] for i in range(20)}
    looks = [look(labels, label) for label in labels]
    assert looks[0] == (PALETTE[0], "-")
    assert len(set(looks)) == 20


def test_text_for_matplotlib() -> None:
    assert plain("a $x$") == r"a \$x\$"
    assert not plain("_hidden").startswith("_")
    assert len(plain("x" * 500)) < 60


@pytest.mark.parametrize("runs", [[], ["missing"], ["empty"], ["good", "empty"]])
def test_wrong_folders_are_named_with_the_mend(tmp_path: Path, runs: list[str]) -> None:
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    make_run(tmp_path / "good")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / runs[-1])) if runs else "no run") as caught:
        write_report([tmp_path / run for run in runs], tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert re.search("give (the|a|at least one) run folder", str(caught.value))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["rounds.parquet", "config.yaml", "summary.json"])
def test_unreadable_files_are_named(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run")
    (run / name).write_text("{ half a file: [", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(str(run / name))) as caught:
        write_report([run], tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (1_250_000, "floats", "1.25 M floats"),
        (3_400_000, "B", "3.4 MB"),
        (999_950, "", "1 M"),
        (999_400, "", "999 k"),
        (0, "floats", "0 floats"),
        (12, "B", "12 B"),
        (7.5e12, "", "7.5 T"),
        (None, "B", "–"),
        (float("nan"), "", "–"),
    ],
)
def test_quantity(value: float | None, unit: str, shown: str) -> None:
    assert quantity(value, unit) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.25, "250 ms"),
        (0.9999, "1 s"),
        (12.5, "12.5 s"),
        (99.96, "1 min 40 s"),
        (3599.6, "1 h 0 min"),
        (7320, "2 h 2 min"),
        (3 * 86400, "3 days"),
        (0, "0 s"),
        (None, "–"),
    ],
)
def test_duration(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_small_numbers() -> None:
    assert number(0.123456) == "0.1235"
    assert number(None) == number(float("nan")) == "–"
    assert (share(1), share(0.9999), share(0.571), share(0)) == ("100 %", "99.9 %", "57.1 %", "0 %")
