"""Epsilon as reckoned here beside dp-accounting asked directly, of steps five times as fine and composed one by one."""

from __future__ import annotations

from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from fedfleet.config import accounting

SAMPLED = [  # rate, z, exchanges, delta
    (0.001, 0.7, 400, 1e-6),
    (0.02, 0.9, 300, 1e-5),
    (0.1, 1.2, 60, 1e-4),
    (0.3, 3.0, 40, 1e-3),
    (0.75, 2.5, 8, 1e-5),
]
KNOWN = [(0.5, 1, 1e-3), (1.3, 4, 1e-4), (3.0, 25, 1e-5), (6.0, 9, 1e-6), (12.0, 100, 1e-2)]  # z, times heard, delta


def asked(event: Any, times: int, delta: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=2e-4)
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, times)).get_epsilon(delta)


@pytest.mark.parametrize(("rate", "z", "exchanges", "delta"), SAMPLED)
def test_poisson_sampling_is_reckoned_as_by_finer_distributions_and_never_as_less(rate, z, exchanges, delta):
    exact = asked(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)), exchanges, delta)
    assert exact <= accounting.of_sampling(z, rate, exchanges, delta) <= exact * 1.0005


@pytest.mark.parametrize(("z", "times", "delta"), KNOWN)
def test_known_participation_is_reckoned_as_so_many_gaussian_mechanisms(z, times, delta):
    exact = asked(dp_accounting.GaussianDpEvent(z), times, delta)
    assert accounting.of_participation(z, float(times), delta) == pytest.approx(exact, rel=1e-7)
    assert accounting.of_parts(((z, 1.0, times),), delta) == pytest.approx(exact, rel=1e-7)
