"""Run folders made by hand, for the tests of the report."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

PNG = b"\x89PNG\r\n\x1a\n"
COUNTS = ["seconds", "invited", "completed", "late", "failed", "unavailable", "client_steps"]
COUNTS += ["floats_up", "floats_down", "bytes_up", "bytes_down"]


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
    outcomes = [
        (0, 0, "completed"),
        (0, 1, "late"),
        (1, 0, "completed"),
        (1, 2, "unavailable"),
        (2, 0, "completed"),
        (3, 1, "completed"),
    ]
    config = {
        "seed": 0, "rounds": 4, "population": {"dataset": "digits", "clients": 5, "partition": {"kind": "iid"}},
        "task": {"name": "classification", "model": "logistic"}, "algorithm": {"name": "fedavg"},
        "cohort": {"size": 10},
    }  # fmt: skip
    summary = {
        "status": "finished", "rounds": 4, "initial": {"eval/accuracy": 0.1}, "final": {"eval/accuracy": 0.5},
        "best": {"eval/accuracy": 0.625}, "median_seconds_per_round": 0.25, "error": None,
    }  # fmt: skip
    outcome = pd.DataFrame(outcomes, columns=["round", "client", "outcome"]).assign(phase="mean", virtual_s=1.0)
    parts: dict[str, Any] = {"rounds": rounds_table(4), "outcomes": outcome, "config": config, "summary": summary}
    parts |= {"environment": {"python": "3.12"}} | changes
    path.mkdir(parents=True)
    for name in ("rounds", "outcomes", "phases", "clients", "classes"):
        if parts.get(name) is not None:
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

    @property
    def charts(self) -> dict[str, Any]:
        """What the page's script is given, with its numbers in their places."""
        held = re.search(r'<script type="application/json" id="charts">(.*?)</script>', self.html, re.DOTALL)
        told = json.loads(held[1]) if held else {"charts": {}, "pool": []}
        for chart in told["charts"].values():
            for line in (line for axis in chart["axes"] for line in axis["lines"]):
                line |= {name: told["pool"][line[name]] for name in ("x", "y", "low", "high") if name in line}
        return told["charts"]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def figures(out: Path) -> set[str]:
    return {path.stem for path in (out / "figures").glob("*.png")}


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
