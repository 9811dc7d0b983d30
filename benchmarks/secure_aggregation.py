"""What secure aggregation sends besides models, and how often it is void: exactly, and among simulated exchanges. A minute.

python -m benchmarks.secure_aggregation
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedfleet.config.secured import costs
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.fleet.secagg import exchange
from fedfleet.simulator.secure import Secure

FLOATS, BITS, EXCHANGES = 50_890, 16, 500
GONE, THRESHOLDS = (0.1, 0.2, 0.3, 0.4), (0.5, 0.67, 0.8)
KINDS = (("secagg", None), ("secagg_plus, k 20", 20), ("secagg_plus, k 50", 50))


def secure(most: int, neighbours: int | None, threshold: float = 0.67, gone: float = 0.0) -> Secure:
    """Return how a net's mean is added up, by clients a share of whom goes after it has shared its keys."""
    return Secure(
        threshold=threshold,
        neighbours=neighbours,
        bits=BITS,
        rounding="stochastic",
        clip={"z": 1.0},
        weighted=("z",),
        weight_bound=1000,
        most=most,
        numbers=FLOATS + 1,
        dropout={"masked": gone},
        mask_flop=0.0,
    )


def sent() -> Iterator[str]:
    """Yield rows of what one client sends and gets, kB, where nobody goes."""
    yield "| clients | bits masked | masked, kB up | protocol | besides, kB up | besides, kB down | all up, of 32-bit floats |"
    yield "|---|---|---|---|---|---|---|"
    for n in (50, 100, 200):
        for name, k in KINDS:
            if k is None or k < n - 1:
                how = secure(n, k)
                c = costs(how, n)
                share = (c["masked"] + c["besides_up"]) / (4 * FLOATS)
                numbers = (
                    f"{c['masked'] / 1e3:.1f} | {name} | {c['besides_up'] / 1e3:.2f} | {c['besides_down'] / 1e3:.2f}"
                )
                yield f"| {n} | {how.modulus_bits} | {numbers} | {share:.1%} |"


def void(n: int, how: Secure) -> float:
    """Return the share of exchanges that are void."""
    clients, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    found = 0
    for i in range(EXCHANGES):
        key = rng.fold(rng.key(0), i)
        _, went = exchange(how, Federation(), clients, zero, Load(zero + 1, zero + 1), 0.0, key, key)
        assert went is not None
        found += went.void is not None
    return found / EXCHANGES


def voids(n: int = 100) -> Iterator[str]:
    """Yield rows of how often an exchange is void."""
    yield "| protocol | threshold | " + " | ".join(f"{g:.0%} go" for g in GONE) + " |"
    yield "|---|---|" + "---|" * len(GONE)
    for name, k in KINDS:
        for t in THRESHOLDS:
            shares = " | ".join(f"{void(n, secure(n, k, t, g)):.1%}" for g in GONE)
            yield f"| {name} | {t:g} | {shares} |"


if __name__ == "__main__":
    for line in (*sent(), "", *voids()):
        print(line)
