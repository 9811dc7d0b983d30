"""Privacy accounting: epsilon of (epsilon, delta)-differential privacy, by the accountants of ``dp-accounting``.

known participation   mu-GDP (Dong, Roth & Su 2022): Gaussian noise of z over what one client may have added, as it took
                      part
Poisson sampling      privacy loss distributions of the subsampled Gaussian mechanism (Koskela et al. 2020), composed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from fedfleet.simulator.errors import ConfigError

INTERVAL = 1e-3
"""Width of the steps of privacy loss distributions: their rounding is pessimistic."""
COARSE = 100.0
"""Epsilon from which on a bound by Rényi differential privacy does: distributions would take more memory than they are worth."""
ORDERS = (*range(2, 64), *range(64, 257, 16), 512, 1024)
"""Of Rényi divergences, for a bound at little cost."""
LARGEST, PRECISION = 1e4, 1e-3
"""The largest noise multiplier that is looked for, and how far it may be from what it has to be, at most, as a share."""


def library() -> Any:
    """Return ``dp_accounting``. Raises ConfigError where it is not installed."""
    try:
        import dp_accounting  # heavy, and not everybody has it
    except ImportError:
        raise ConfigError("privacy: accounting needs dp-accounting: pip install 'fedfleet[privacy]'") from None
    return dp_accounting


@lru_cache(maxsize=4096)
def of_participation(multiplier: float, spent: float, delta: float) -> float:
    """Return epsilon of Gaussian noise of ``multiplier`` where a client has spent so much (``Ledger.spent``), exactly."""
    if spent == 0:
        return 0.0
    library()
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    loss: Any = GaussianPrivacyLoss(multiplier / spent**0.5)
    if loss.get_delta_for_epsilon(0.0) <= delta:
        return 0.0
    return _least(lambda epsilon: loss.get_delta_for_epsilon(epsilon) <= delta, math.inf, 1e-9)


@lru_cache(maxsize=4096)
def of_sampling(multiplier: float, rate: float, exchanges: int, delta: float) -> float:
    """Return epsilon of so many exchanges, in each of which every client is asked with probability ``rate``, for itself."""
    return of_parts(((multiplier, rate, exchanges),) if exchanges else (), delta)


Parts = tuple[tuple[float, float, int], ...]
"""Of a composition: noise multiplier, probability of taking part, how often."""


@lru_cache(maxsize=4096)
def of_parts(parts: Parts, delta: float) -> float:
    """Return epsilon of Gaussian mechanisms one after another, in each of which one takes part with some probability."""
    if not parts:
        return 0.0
    whole = sum(times / z**2 for z, _, times in parts)
    if all(rate == 1 for _, rate, _ in parts):
        return of_participation(1.0, whole, delta)
    dp = library()
    from dp_accounting.pld import PLDAccountant

    if of_participation(1.0, whole, delta) > COARSE:  # without sampling, which it is not above
        from dp_accounting.rdp import RdpAccountant

        above = _composed(dp, RdpAccountant(), parts, delta)
        if not above < COARSE:
            return above
    return _composed(dp, PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, INTERVAL), parts, delta)


@lru_cache(maxsize=65536)
def bound_of(parts: Parts, delta: float) -> float:
    """Return a bound on the same by Rényi differential privacy of whole orders, which takes a hundredth of the time."""
    dp = library()
    from dp_accounting.rdp import RdpAccountant

    return _composed(dp, RdpAccountant(ORDERS), parts, delta)


def _composed(dp: Any, accountant: Any, parts: Parts, delta: float) -> float:
    for z, rate, times in parts:
        gaussian = dp.GaussianDpEvent(z)
        with _quiet():
            accountant.compose(gaussian if rate == 1 else dp.PoissonSampledDpEvent(rate, gaussian), times)
    return float(accountant.get_epsilon(delta))


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave unsaid that a Rényi divergence of some order was left out: others bound the same."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def least_multiplier(epsilon: float, spends: Callable[[float], float], key: str = "privacy.epsilon") -> float:
    """Return the least noise multiplier whose epsilon, as ``spends`` says, is not above ``epsilon``. Raises ConfigError."""
    result = _least(lambda z: spends(z) <= epsilon, LARGEST, PRECISION)
    if result > LARGEST:
        raise ConfigError(
            f"{key}={epsilon:g}: no noise up to {LARGEST:g} times the norm reaches it: raise it, or lower rounds"
        )
    return result


def _least(holds: Callable[[float], bool], largest: float, precision: float) -> float:
    """Return the least positive number from which on something holds, or a little more; one above ``largest`` if there is none."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, high * 2
        if low > largest:
            return high
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
