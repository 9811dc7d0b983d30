"""The soak in short, one run: a worker killed; the driver killed and its checkpoint damaged.

The long form is ``python -m tests.chaos``; what else befalls a driver, test_resume.py has without Ray.
"""

import random

import pytest

from tests.chaos.soak import events, soak


@pytest.mark.ray
@pytest.mark.own_ray
def test_nothing_is_lost(tmp_path):
    faults = ["worker killed", "driver killed, newest checkpoint cut short"]
    found = soak("scaffold", tmp_path, random.Random(0), rounds=60, faults=faults, every_s=(0.2, 0.8))
    assert found.lost == []
    assert sum(found.faults.values()) >= 1
    assert events(tmp_path / "run")["resumed"] + found.faults.get("worker killed", 0) >= 1
