"""The cases, as data."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.peers.workload import Case

FLAT, DIGIT, COLOUR = (784,), (1, 28, 28), (3, 32, 32)

CDMA = Case("", "", (), clients=500, cohort=16, samples=120, algorithm="cdma_ada")
ADAPTATION = Case(
    "fedmm",
    "small_cnn",
    COLOUR,
    clients=100,
    cohort=8,
    samples=160,
    batch=32,
    lr=0.01,
    algorithm="fedmm",
    task="domain_adaptation",
    rounds=8,
    warmup=4,
)
"""FedMM with DANN, every second client without labels; ``fedmm_source`` is FedAvg with its extractor and head, all with labels."""

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("logistic", "logistic", FLAT, clients=1000, cohort=100, samples=20, rounds=200, warmup=60),
        Case("logistic_1000", "logistic", FLAT, clients=1000, cohort=1000, samples=20, rounds=40, warmup=15),
        Case("mlp", "mlp", FLAT, clients=1000, cohort=100, samples=20, rounds=80, warmup=30),
        Case("mlp_12", "mlp", FLAT, clients=1000, cohort=100, samples=120, rounds=16, warmup=6),
        Case("lenet", "lenet", DIGIT, clients=500, cohort=16, samples=120, rounds=24, warmup=8),
        Case("cnn", "cnn", COLOUR, clients=500, cohort=20, samples=50, rounds=6, warmup=8),
        replace(CDMA, name="cdma", model="lenet_relu", shape=DIGIT, task="auc", rounds=10, warmup=10),
        replace(CDMA, name="cdma_robust", model="mlp", shape=FLAT, task="robust", rounds=20, warmup=10),
        ADAPTATION,
        replace(ADAPTATION, name="fedmm_source", algorithm="fedavg", task="source_only"),
    )
}
USUAL = tuple(CASES)
"""Cases that commands take where none is named."""

ROUNDS = {10: (200, 120), 100: (200, 120), 1000: (80, 60), 10**4: (20, 20), 10**5: (6, 4), 10**6: (3, 1)}
BY_COHORT = tuple(f"tabular_{cohort}" for cohort in ROUNDS)
"""Cases of small clients, ten examples of 32 numbers each, of whom more and more take part."""
CASES |= {
    name: Case(name, "logistic", (32,), max(1000, size), size, samples=10, rounds=timed, warmup=before)
    for name, (size, (timed, before)) in zip(BY_COHORT, ROUNDS.items(), strict=True)
}
