"""The soak in short: one run, every kind of fault once. The long form is ``python -m tests.chaos --minutes 5``."""

import random

import pytest

from tests.chaos.soak import FAULTS, events, soak


@pytest.mark.ray
@pytest.mark.slow
def test_nothing_is_lost(tmp_path):
    found = soak("scaffold", tmp_path, random.Random(0), rounds=100, faults=len(FAULTS), every_s=(0.2, 0.8))
    assert found.lost == []
    assert sum(found.faults.values()) >= 3
    assert events(tmp_path / "run")["resumed"] >= 2
