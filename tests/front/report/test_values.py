"""What values that vary are called in names of runs and in tables."""

from __future__ import annotations

import pytest

from fedfleet.config.schema import load
from fedfleet.experiments.trials import planned
from fedfleet.report.values import names


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1, "iid", True, None], ["0.1", "iid", "true", "null"]),
        ([{"kind": "none"}, {"kind": "noise", "share": 0.2}], ["none", "noise"]),
        ([{"kind": "noise", "share": s, "std": 1} for s in (0.2, 0.1)], ["noise share=0.2", "noise share=0.1"]),
        ([{"share": 0.2}, {"share": 0.1}], ["share=0.2", "share=0.1"]),
        ([{"kind": "noise"}, {"kind": "noise", "share": 0.2}], ["noise", "noise share=0.2"]),
        ([None, {"share": 0.2}], ["null", "share=0.2"]),
        # What would be called alike is written out.
        (["noise", {"kind": "noise"}], ["noise", '{"kind": "noise"}']),
    ],
)
def test_a_mapping_is_called_by_what_tells_it_from_the_others(values, expected):
    assert names(values) == expected


def test_runs_are_called_by_it():
    attacks = [{"kind": "none"}, {"kind": "noise", "share": 0.2}, {"kind": "sign_flip", "share": 0.2}]
    plan = planned(load({"vary": {"attack": attacks, "rounds": [1, 2]}, "compare": {"mean": {}}}))
    assert [t.name for t in plan][:3] == [
        "mean attack=none rounds=1",
        "mean attack=none rounds=2",
        "mean attack=noise rounds=1",
    ]
    assert [t.point["attack"] for t in plan][2] == attacks[1]
