"""Runs that are stopped and go on, for the tests of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

import fedfleet

BASE: dict[str, Any] = {
    "rounds": 9, "population": {"clients": 30, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 8}},
    "task": {"name": "classification", "model": "logistic"}, "availability": {"kind": "bernoulli", "rate": 0.7},
    "devices": "lognormal", "executor": {"kind": "local", "block_size": 3}, "evaluation": {"every": 2},
    "checkpoint": {"every_s": 0},
}  # fmt: skip
THREE: dict[str, Any] = {
    "dataset": {"name": "digits", "classes": [1, 4, 8], "label_domains": True}, "clients": 9,
    "partition": {"kind": "by_domain"},
}  # fmt: skip
"""Clients of three domains."""
CASES: dict[str, dict[str, Any]] = {
    "stateless": {"algorithm": {"name": "fedavg", "steps": 2}, "evaluation": {"every": 2, "per_client": True}},
    "server state": {"algorithm": {"name": "fedopt", "steps": 2}, "selection": "round_robin"},
    "two phases": {"task": {"name": "auc", "model": "logistic"}, "algorithm": {"name": "cdma_ada", "steps": 2}},
    "client state": {"algorithm": {"name": "scaffold", "steps": 2}, "cohort": {"min_responses": 4, "attempts": 50}},
    "owed": {"algorithm": {"name": "fedavg", "steps": 2},
     "transforms": {"up": [{"name": "top_k", "share": 0.1, "error_feedback": True}, {"name": "qsgd", "levels": 15}]}},
    "hidden": {"algorithm": {"name": "fedavg", "steps": 2, "weight": "uniform"},
     "privacy": {"clip_norm": 0.5, "delta": 1e-3, "noise_multiplier": 1.0, "bands": 3}},
    "secretly drawn, and a norm that follows": {"algorithm": {"name": "fedavg", "steps": 2, "weight": "uniform"},
     "privacy": {"clip_norm": 0.5, "delta": 1e-3, "noise_multiplier": 1.0, "accounting": "poisson"},
     "privacy.adaptive": {"count_noise": 2.0}, "selection": "poisson", "cohort": {"wait_for": "all"}},
    "hidden by clients": {"algorithm": {"name": "fedavg", "steps": 2, "weight": "uniform"},
     "privacy": {"clip_norm": 0.5, "delta": 1e-3, "noise_multiplier": 1.0, "noise": "clients"},
     "cohort": {"wait_for": 6, "min_responses": 6, "attempts": 50}},
    "hidden examples, and a secret sum": {"algorithm": {"name": "scaffold", "steps": 2},
     "example_privacy": {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0},
     "secure_aggregation": {"clip": {"dz": 1.0, "dc": 1.0}, "dropout": {"masked": 0.1, "unmasking": 0.1}},
     "cohort": {"attempts": 50}},
    "differences both ways": {"algorithm": {"name": "fedavg", "steps": 2},
     "transforms": {"up": [{"name": "top_k", "share": 0.1, "error_feedback": True}],
     "down": ["delta", {"name": "random_k", "share": 0.2, "unbiased": False}]}},
    "attacked": {"algorithm": {"name": "robust", "of": {"name": "fedavg", "steps": 2}, "rule": "foolsgold"},
     "attack": {"kind": "backdoor", "share": 0.3, "scale": 3.0}},
    "colluding": {"algorithm": {"name": "robust", "of": {"name": "scaffold", "steps": 2}, "rule": "geometric_median",
     "bucket": 2}, "attack": {"kind": "alie", "share": 0.4, "z": 1.0}},
    "trusting": {"algorithm": {"name": "robust", "of": {"name": "scaffold", "steps": 2}, "rule": "fltrust"},
     "population.root": {"examples": 40}},
    "late answers": {"algorithm": {"name": "fedavg", "steps": 2},
     "cohort": {"late": "keep", "stale_discount": 0.5, "wait_for": 4}, "selection": "oort"},
    "asynchronous": {"algorithm": {"name": "fedbuff", "steps": 2, "buffer": 5, "concurrency": 12}},
}  # fmt: skip
for name, case in CASES.items():
    if name != "asynchronous":
        case["cohort"] = {"size": 8, "wait_for": "siwer", **case.get("cohort", {})}
KINDS = ("two phases", "client state", "owed", "secretly drawn, and a norm that follows", "attacked", "late answers")
"""Cases that between them keep every kind of state."""
DIGESTS = ("files", "sha256")  # of a summary, of files with seconds in them
TABLES = ("rounds", "phases", "outcomes", "clients", "classes")


class Interrupting(fedfleet.Callback):
    """Interrupts a run after a round, some rounds after its last checkpoint."""

    def __init__(self, after: int):
        self.after = after

    def round(self, row: Any, phases: Any) -> None:
        if row["round"] == self.after:
            raise KeyboardInterrupt


class Told(fedfleet.Callback):
    """Keeps what it is told, and how many rounds there were."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rounds = 0

    def say(self, text: str) -> None:
        self.lines.append(text)

    def round(self, row: Any, phases: Any) -> None:
        self.rounds += 1


def config(case: str) -> fedfleet.Config:
    return fedfleet.load(BASE, CASES[case])


def outcome(run: Path) -> tuple[bytes, dict[str, pd.DataFrame], dict[str, Any]]:
    tables = {t: pd.read_parquet(run / f"{t}.parquet") for t in TABLES if (run / f"{t}.parquet").exists()}
    summary = json.loads((run / "summary.json").read_text())
    said = {k: v for k, v in summary.items() if "seconds" not in k and k not in DIGESTS}
    tables["rounds"] = tables["rounds"].drop(columns="seconds")
    return (run / "model.safetensors").read_bytes(), tables, said


def check_equal(run: Path, other: Path) -> None:
    (model, tables, summary), (model_2, tables_2, summary_2) = outcome(run), outcome(other)
    assert (model, list(tables)) == (model_2, list(tables_2))
    for name, frame in tables.items():
        pd.testing.assert_frame_equal(frame, tables_2[name], check_exact=True)
    assert summary == summary_2
    assert (run / "best.safetensors").read_bytes() == (other / "best.safetensors").read_bytes()
    assert not (run / "outcomes").exists()
