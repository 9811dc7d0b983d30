"""The runs whose digests are kept: every algorithm, every feature, every executor, each a small configuration."""

from __future__ import annotations

from typing import Any

import fedfleet
from tests.algorithms.cases import ASYNCHRONOUS, CASES, INVITE, LEARN_UNLABELLED, MODEL, NEEDS, VARIANTS
from tests.front.experiments import resuming

Overrides = dict[str, Any]

BASE: Overrides = {
    "rounds": 3,
    "population": {"clients": 30, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 8}},
    "task": {"name": "classification", "model": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedavg", "steps": 2},
    "availability": {"kind": "bernoulli", "rate": 0.7},
    "devices": "lognormal",
    "cohort": {"size": 8, "wait_for": "siwer"},
    "executor": {"kind": "local", "block_size": 3},
    "evaluation": {"every": 1},
}
AUC: Overrides = {"task": {"name": "auc", "model": "mlp", "hidden": [8]}}
WHOLE: Overrides = {"availability": "always", "devices": "homogeneous"}
BY_DOMAIN: Overrides = {
    "population.dataset": {"name": "digits", "label_domains": True},
    "population.partition": {"kind": "by_domain"},
}


def _algorithm(name: str) -> Overrides:
    task, options = CASES[name]
    given: Overrides = {"algorithm": {"name": name, **options}}
    if name not in ASYNCHRONOUS:
        given["cohort"] = {"size": INVITE.get(name, 8), "wait_for": "siwer" if name not in LEARN_UNLABELLED else "all"}
    else:
        given["cohort"] = {}
    net: Overrides = {"model": MODEL[name]} if name in MODEL else {"model": "mlp", "hidden": [8]}
    whole: Overrides = WHOLE if name in LEARN_UNLABELLED else {}
    return {**whole, "task": {"name": task, **net}, **given, **NEEDS.get(name, {})}


def _each(prefix: str, rows: dict[str, Overrides]) -> dict[str, Overrides]:
    return {f"{prefix}/{name}": row for name, row in rows.items()}


ALGORITHMS = _each("algorithm", {name: _algorithm(name) for name in CASES} | {
    "afl, best response": {
        **BY_DOMAIN,
        "task": {"name": "classification", "model": "logistic"},
        "algorithm": {"name": "afl", "batch_size": None, "method": "best_response", "dual": {"lr": 0.1}},
        "cohort": {"size": 30, "wait_for": "all"},
        "availability": "always",
    },
    "afl, chi2": {
        **BY_DOMAIN,
        "algorithm": {"name": "afl", "batch_size": 7, "method": "optimistic", "dual": {"lr": 0.1, "chi2": 0.1}},
    },
    "cdma_ada, falling": {**AUC, "algorithm": {"name": "cdma_ada", "epochs": 1, "batch_size": 7, "decay": 0.5}},
    "fedopt, yogi, cosine": {
        "algorithm": {"name": "fedopt", "steps": 2, "server_optimizer": {"name": "yogi"}, "lr_schedule": {"kind": "cosine"}}
    },
    "fact, fine-tuned": {
        **_algorithm("fact"),
        "algorithm": {"name": "fact", "batch_size": 7, "lr": 0.05, "targets": 3, "select": "last", "fine_tune": True},
    },
})  # fmt: skip
CORRECTIONS = _each("correction", {
    name: {
        "task": {"name": task, "model": "mlp", "hidden": [8]},
        "algorithm": {"name": name.partition(",")[0], **options},
        "cohort": {"size": 8, "wait_for": "all"},
    }
    for name, (task, options) in VARIANTS.items()
})  # fmt: skip
RULES = _each("rule", {
    rule: {
        "algorithm": {"name": "robust", "of": {"name": "fedavg", "steps": 2}, "rule": rule, **more},
        "attack": {"kind": "sign_flip", "share": 0.2},
        "cohort": {"size": 10, "wait_for": "all", "min_responses": 4, "attempts": 50},
        **({"population.root": {"examples": 40}} if rule == "fltrust" else {}),
    }
    for rule, more in {
        "median": {}, "trimmed_mean": {"byzantine": 0.2}, "krum": {"byzantine": 0.1}, "multi_krum": {"byzantine": 0.1, "keep": 2},
        "geometric_median": {}, "norm_bound": {"bound": 0.5}, "foolsgold": {}, "fltrust": {},
    }.items()
})  # fmt: skip
TASKS = _each("task", {
    "logistic": {"task": {"name": "classification", "model": "logistic"}},
    "cnn": {"task": {"name": "classification", "model": "cnn"}},
    "batch norm": {"task": {"name": "classification", "model": "cnn_bn"}},
    "robust": {"task": {"name": "robust", "model": "mlp", "hidden": [8]}, "algorithm": {"name": "cdma_one", "steps": 2}},
    "gan": {"task": {"name": "gan"}, "algorithm": {"name": "cdma_ada", "steps": 2}},
    "adapters": {
        "task": {"name": "classification", "model": "mlp", "hidden": [8], "adapters": {"rank": 2, "full": []}},
        "algorithm": {"name": "scaffold", "steps": 2},
    },
    "own net": {"task": {"name": "module", "model": "tests.tasks.own_nets:mlp", "loss": "cross_entropy"}},
})  # fmt: skip
POPULATIONS = _each("population", {
    "quantity skew": {"population.partition": {"kind": "quantity_skew", "alpha": 1.0}},
    "label sorted": {"population.partition": "label_sorted"},
    "shards": {"population.partition": "shards", "population.clients": 7, "cohort": {"size": 4, "wait_for": "all"}},
    "pathological": {"population.partition": {"kind": "pathological", "classes_per_client": 2}},
    "inner dirichlet": {"population.partition": "inner_dirichlet"},
    "synthetic": {"population.dataset": "synthetic", "population.partition": "iid", "population.clients": 1000},
    "held out": {"population.held_out": 0.25, "evaluation": {"per_client": True}},
    "validation": {"evaluation": {"validation": 0.2, "train_examples": 50}},
    "domains by label": {**BY_DOMAIN, "domains": {"kind": "label"}, "evaluation": {"per_client": True, "cosines": True}},
    "a domain left out": {**BY_DOMAIN, "domains": {"target": [8, 9]}},
})  # fmt: skip
FLEETS = _each("fleet", {
    "random rate": {"availability": "random_rate"},
    "markov": {"availability": {"kind": "markov", "mean_on_s": 5.0, "mean_off_s": 5.0}},
    "diurnal": {"availability": {"kind": "diurnal", "day_s": 10.0}},
    "by label": {"availability": {"kind": "label_correlated", "rate": 0.5, "classes": [1, 2]}},
    "by size": {"availability": "size_correlated"},
    "poisson": {"selection": "poisson", "cohort": {"size": 8, "wait_for": "all"}},
    "by examples": {"selection": "examples"},
    "round robin": {"selection": "round_robin"},
    "power of choice": {"selection": "power_of_choice"},
    "oort": {"selection": "oort"},
    "deadline, partial work": {
        "algorithm": {"name": "fedprox", "steps": 9, "batch_size": 7},
        "cohort": {"size": 8, "wait_for": "all", "deadline_s": 0.6, "partial_work": True},
    },
    "over-selected": {"cohort": {"size": 4, "wait_for": "all", "over_select": 1.5}},
    "failures": {"devices": {"kind": "lognormal", "failures_per_hour": 3600.0}, "cohort": {"size": 8, "wait_for": "all"}},
})  # fmt: skip
SENT = _each("sent", {
    name: {"transforms": {"up": rows}, "algorithm": {"name": "scaffold", "steps": 2}}
    for name, rows in {
        "clip": [{"name": "clip", "norm": 0.5}],
        "top_k": [{"name": "top_k", "share": 0.1, "error_feedback": True}],
        "random_k": [{"name": "random_k", "share": 0.2}],
        "qsgd": [{"name": "qsgd", "levels": 15}],
        "ternary": ["ternary"],
        "sign": [{"name": "sign", "error_feedback": True}],
        "rotated": ["rotation", {"name": "uniform", "levels": 15}],
        "low_rank": [{"name": "low_rank", "rank": 2, "error_feedback": True}],
        "fp16": ["fp16"],
        "bf16": ["bf16"],
    }.items()
})  # fmt: skip
ATTACKS = _each("attack", {
    name: {"attack": {"kind": name, "share": 0.3}, "cohort": {"size": 8, "wait_for": "all"}}
    for name in ("label_flip", "backdoor", "sign_flip", "scaled", "noise", "alie", "inner_product")
})  # fmt: skip
HIDDEN = _each("hidden", {
    "secagg_plus": {
        "secure_aggregation": {"protocol": "secagg_plus", "neighbours": 4, "threshold": 0.5, "execute": True},
        "cohort": {"size": 8, "wait_for": "all", "attempts": 50},
    },
    "examples, shuffled": {
        "example_privacy": {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0, "batches": "shuffled"}
    },
    "epsilon": {
        "algorithm": {"name": "fedavg", "steps": 2, "weight": "uniform"},
        "privacy": {"clip_norm": 0.5, "delta": 1e-3, "epsilon": 8.0, "accounting": "participation"},
        "selection": "round_robin",
    },
})  # fmt: skip
TOGETHER = _each(
    "together", {name: {**resuming.BASE, "rounds": 5, "cohort": {}, **row} for name, row in resuming.CASES.items()}
)
INNERS: dict[str, Overrides] = {
    "serial": {"inner": "serial"},
    "batched": {"inner": "batched"},
    "factored": {"inner": "factored"},
    "not captured": {"inner": "factored", "capture": False},
}
ACTORS: dict[str, Overrides] = {
    "1 actor": {"kind": "ray", "inner": "factored", "actors": 1},
    "2 actors": {"kind": "ray", "inner": "factored", "actors": 2},
    "3 actors": {"kind": "ray", "inner": "factored", "actors": 3},
}
EXECUTORS = _each("executor", {
    f"{algorithm}, {name}": {**_algorithm(algorithm), "executor": {"kind": "local", "block_size": 3, **how}}
    for algorithm in ("scaffold", "cdma_ada", "fedmm")
    for name, how in {**INNERS, **(ACTORS if algorithm != "fedmm" else {})}.items()
})  # fmt: skip

GOLDEN: dict[str, Overrides] = {
    **ALGORITHMS, **CORRECTIONS, **RULES, **TASKS, **POPULATIONS, **FLEETS, **SENT, **ATTACKS, **HIDDEN, **TOGETHER, **EXECUTORS,
}  # fmt: skip
"""Name -> sections that take the place of those of ``BASE``, and dotted keys; before the slash is the kind of thing held."""


def config(name: str) -> fedfleet.Config:
    """Return the configuration of a case."""
    row = GOLDEN[name]
    sections = {key: value for key, value in row.items() if "." not in key}
    return fedfleet.load({**BASE, **sections}, {key: value for key, value in row.items() if "." in key})
