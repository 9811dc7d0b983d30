"""No bit of what a run leaves moves without a word: ``python -m tests.golden --against REV`` says which did."""

import math

import pytest

from tests.golden.__main__ import Digests, found, kept
from tests.golden.cases import GOLDEN
from tests.golden.digests import Found, moved, processor


def test_the_digests_kept_are_those_of_the_cases():
    assert set(kept()) == set(GOLDEN)


def test_executors_that_must_agree_do():
    """One, two and three actors give the bytes of this process, captured or not."""
    rows = kept()
    for name in (name for name in GOLDEN if name.startswith("executor/") and name.endswith(", factored")):
        others = [
            n
            for n in GOLDEN
            if n.startswith(name.removesuffix("factored")) and n.endswith(("captured", "actors", "actor"))
        ]
        assert len(others) >= 1
        assert all(rows[other] == rows[name] for other in others), name


def test_a_digest_tells_what_moved_and_not_what_was_renamed():
    run = Found({"rounds: heard": "a", "rounds: late": "b"}, {"model: w": "c", "rounds: loss": "d"}, [1.0, math.nan])
    row = Digests.of(run, {})
    assert row.differences(run) == []
    renamed = run._replace(counts={"rounds: completed": "a", "rounds: late": "b"})
    assert row.differences(renamed) == []
    assert moved(run.counts, renamed.counts) == []
    assert row.differences(run._replace(counts={"rounds: heard": "a", "rounds: late": "x"})) == [
        "rounds (whole numbers, names)"
    ]
    assert row.differences(run._replace(numbers={**run.numbers, "model: w": "x"})) == ["model (floats)"]
    elsewhere = Digests(row.counts, {"another processor": row.numbers[processor()]}, row.close)
    assert elsewhere.differences(run._replace(numbers={}, close=[1.0001, math.nan])) == []
    assert len(elsewhere.differences(run._replace(close=[1.1, math.nan]))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({name.partition("/")[0] for name in GOLDEN}))
def test_no_bit_has_moved(kind):
    rows = kept()
    names = [name for name in GOLDEN if name.startswith(f"{kind}/")]
    differences = {name: rows[name].differences(run) for name, run in found(names)}
    assert {name: changed for name, changed in differences.items() if changed} == {}
