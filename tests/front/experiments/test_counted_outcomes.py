"""Outcomes that are counted are those that are listed, however a run comes to its end, and reports say the same of both."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

import fedfleet
from fedfleet.report import least_completed, overview
from fedfleet.report.study_tables import participation
from fedfleet.report.tables import heard_clients, read
from fedfleet.simulator.errors import FedfleetError

CASES: dict[str, dict[str, Any]] = {
    "two phases, some late": {
        **{"algorithm": {"name": "cdma_ada", "steps": 2}, "task": {"name": "auc", "model": "logistic"}},
        **{"cohort": {"size": 4, "over_select": 1.5, "stale_discount": 0.5}, "devices": "lognormal"},
    },
    "attempts": {
        **{"algorithm": {"name": "fedavg", "steps": 1}, "task": {"model": "logistic"}},
        **{"cohort": {"size": 4, "min_responses": 3}, "availability": {"kind": "bernoulli", "rate": 0.6}},
    },
    "skipped": {
        **{"algorithm": {"name": "fedavg", "steps": 1}, "task": {"model": "logistic"}},
        **{
            "cohort": {"size": 4, "min_responses": 3, "on_abort": "skip"},
            "availability": {"kind": "bernoulli", "rate": 0.6},
        },
    },
}


def config(case: str, outcomes: str) -> dict[str, Any]:
    return {
        **{"rounds": 6, "population": {"clients": 12}, "executor": {"kind": "local"}, "checkpoint": {"every_s": 0}},
        **{**CASES[case], "evaluation": {"every": 6, "outcomes": outcomes}},
    }


@pytest.mark.parametrize("case", CASES)
def test_counts_are_those_of_the_rows(tmp_path, case):
    listed = fedfleet.run(config(case, "listed"), out=tmp_path / "listed", progress=False)
    rows = pd.read_parquet(listed.folder / "outcomes.parquet")
    assert len(rows["attempt"].unique()) > (case == "attempts")
    assert len(rows["outcome"].unique()) > 1, "a test that cannot fail"
    one = fedfleet.run(config(case, "counted"), out=tmp_path / "one", progress=False)
    two = fedfleet.run({**config(case, "counted"), "rounds": 2}, out=tmp_path / "two", progress=False)
    two = fedfleet.resume(two.folder, {"rounds": 6}, progress=False)
    found = pd.read_parquet(one.folder / "outcomes.parquet")
    pd.testing.assert_frame_equal(found, pd.read_parquet(two.folder / "outcomes.parquet"))
    assert found["client"].is_monotonic_increasing
    by_client = rows.groupby("client")
    for outcome in ("completed", "late", "failed", "unavailable", "stale"):
        wanted = by_client["outcome"].apply(lambda of, outcome=outcome: (of == outcome).sum())
        assert found.set_index("client")[outcome].tolist() == wanted.tolist(), outcome
    a, b = read(listed.folder), read(one.folder)
    assert [x.tolist() for x in heard_clients(a)[:2]] == [x.tolist() for x in heard_clients(b)[:2]]
    assert least_completed.table(a) == least_completed.table(b)
    pd.testing.assert_frame_equal(participation(a), participation(b))
    lost = listed.rounds["round"][listed.rounds["skipped"]] if case == "skipped" else []
    last = rows.groupby("round")["attempt"].transform("max") == rows["attempt"]
    used = rows[rows["outcome"].isin(["completed", "stale"]) & last & ~rows["round"].isin(lost)]
    wanted = used.groupby("client")["round"].nunique()
    assert dict(zip(*heard_clients(a)[:2], strict=True)) == wanted.to_dict()
    told = f"Of 6 rounds {len(lost)} were skipped" in " ".join(overview.of_run(a))
    assert (listed.summary.get("skipped_rounds", 0), told) == (len(lost), case == "skipped")


def test_attempts_at_a_round_that_came_to_nothing_are_counted_once(tmp_path):
    never = {**config("attempts", "counted"), "rounds": 3, "availability": {"kind": "bernoulli", "rate": 0.3}}
    never["cohort"] = {"size": 4, "min_responses": 4}
    out = tmp_path / "run"
    seen = []
    for go_on in (lambda: fedfleet.run(never, out=out, progress=False), lambda: fedfleet.resume(out, progress=False)):
        with pytest.raises(FedfleetError):
            go_on()
        seen.append(pd.read_parquet(out / "outcomes.parquet"))
    pd.testing.assert_frame_equal(*seen)
    assert not seen[0]["rounds_heard"].any()
    phases = pd.read_parquet(out / "phases.parquet")
    assert seen[0]["unavailable"].sum() == phases["unavailable"].sum() > 0
