"""The cases, as data."""

from __future__ import annotations

from benchmarks.peers.workload import Case

FLAT, DIGIT, COLOUR = (784,), (1, 28, 28), (3, 32, 32)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("logistic", "logistic", FLAT, clients=1000, cohort=100, samples=20, rounds=200, warmup=60),
        Case("logistic_1000", "logistic", FLAT, clients=1000, cohort=1000, samples=20, rounds=40, warmup=15),
        Case("mlp", "mlp", FLAT, clients=1000, cohort=100, samples=20, rounds=80, warmup=30),
        Case("mlp_12", "mlp", FLAT, clients=1000, cohort=100, samples=120, rounds=16, warmup=6),
        Case("lenet", "lenet", DIGIT, clients=500, cohort=16, samples=120, rounds=24, warmup=8),
        Case("cnn", "cnn", COLOUR, clients=500, cohort=20, samples=50, rounds=6, warmup=2),
        Case(
            "cdma", "lenet_relu", DIGIT, clients=500, cohort=16, samples=120, rounds=10, warmup=4, algorithm="cdma_ada"
        ),
    )
}
