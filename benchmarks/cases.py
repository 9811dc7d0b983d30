"""The cases, as data."""

from __future__ import annotations

from benchmarks.peers.workload import Case

FLAT, DIGIT, COLOUR = (784,), (1, 28, 28), (3, 32, 32)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("logistic", "logistic", FLAT, clients=1000, cohort=100, samples=20),
        Case("logistic_1000", "logistic", FLAT, clients=1000, cohort=1000, samples=20),
        Case("mlp", "mlp", FLAT, clients=1000, cohort=100, samples=20),
        Case("mlp_12", "mlp", FLAT, clients=1000, cohort=100, samples=120),
        Case("lenet", "lenet", DIGIT, clients=500, cohort=16, samples=120),
        Case("cnn", "cnn", COLOUR, clients=500, cohort=20, samples=50),
        Case("cdma", "lenet_relu", DIGIT, clients=500, cohort=16, samples=120, algorithm="cdma_ada"),
    )
}
