"""One row an algorithm: the task it is tried on and its options. Every registered algorithm needs one."""

CASES: dict[str, tuple[str, dict]] = {
    "fedavg": ("classification", {"epochs": 1, "batch_size": 7, "client_optimizer": {"momentum": 0.9}}),
    "fedopt": (
        "classification",
        {"epochs": 2, "batch_size": 10, "client_optimizer": {"name": "adam", "eps": 1e-3}, "lr": 0.01},
    ),
    "fedbuff": ("classification", {"steps": 3, "batch_size": 7, "buffer": 4, "concurrency": 6}),
    "fedprox": ("classification", {"steps": 4, "batch_size": 7, "mu": 0.1}),
    "fedper": ("classification", {"epochs": 1, "batch_size": 7}),
    "lg_fedavg": ("classification", {"steps": 3, "batch_size": 7}),
    "fedbn": ("classification", {"steps": 3, "batch_size": 7}),
    "fedrep": ("classification", {"steps": 3, "head_steps": 2, "batch_size": 7}),
    "fedbabu": ("classification", {"steps": 3, "batch_size": 7}),
    "fedrod": ("classification", {"epochs": 1, "batch_size": 7}),
    "ditto": ("classification", {"steps": 3, "own_epochs": 1, "batch_size": 7, "pull": 0.5}),
    "peravg": ("classification", {"epochs": 1, "batch_size": 7, "alpha": 0.05}),
    "fedsam": ("classification", {"epochs": 1, "batch_size": 7, "rho": 0.5}),
    "mofedsam": ("classification", {"steps": 3, "batch_size": 7, "rho": 0.5, "share": 0.6}),
    "fediir": ("classification", {"steps": 3, "batch_size": 7, "penalty": 0.3}),
    "fedpac": ("classification", {"steps": 3, "head_steps": 2, "batch_size": 7, "pull": 0.7}),
    "fedas": ("classification", {"steps": 3, "batch_size": 7, "align_lr": 0.1}),
    "fedga": ("classification", {"steps": 3, "batch_size": 7, "rounds": 4}),
    "fedsr": ("stochastic", {"steps": 3, "batch_size": 7, "l2r": 0.1, "cmi": 0.02}),
    "stablefdg": ("attentive", {"steps": 2, "batch_size": 7, "share": 0.7, "explore": 0.7, "copies": 4}),
    "irm": ("classification", {"steps": 3, "batch_size": 7, "penalty": 2.0}),
    "vrex": ("classification", {"steps": 3, "batch_size": 7, "penalty": 2.0}),
    "coral": ("classification", {"steps": 3, "batch_size": 7, "penalty": 2.0}),
    "mmd": ("classification", {"steps": 3, "batch_size": 7, "penalty": 0.001, "waves": 5}),
    "fishr": ("classification", {"steps": 3, "batch_size": 7, "penalty": 2.0}),
    "fish": ("classification", {"steps": 2, "batch_size": 7, "epsilon": 0.7}),
    "omg": ("classification", {"of": {"name": "fedrod", "epochs": 1, "batch_size": 7}, "kappa": 0.4}),
    "robust": ("classification", {"of": {"name": "fedrod", "epochs": 1, "batch_size": 7}, "rule": "geometric_median"}),
    "scaffold": ("classification", {"epochs": 1, "batch_size": 7}),
    "afl": ("classification", {"batch_size": 7, "optimizer": {"name": "adagrad"}, "dual": {"lr": 0.1}}),
    "drfa": ("classification", {"steps": 3, "batch_size": 7, "dual": {"lr": 0.1}}),
    "qffl": ("classification", {"steps": 3, "batch_size": 7, "q": 2.0}),
    "parallel_sgda": ("auc", {"gradient_chunk": 20}),
    "local_sgda": ("auc", {"epochs": 1, "batch_size": 7, "dual_lr": 0.2}),
    "local_sgda_plus": ("auc", {"steps": 3, "batch_size": 7, "snapshot_refresh": 2}),
    "extra_step": ("auc", {"steps": 3, "batch_size": 7}),
    "catalyst_scaffold_s": ("auc", {"steps": 3, "batch_size": 7, "theta": 0.2, "stage_iterations": 6}),
    "coda_plus": (
        "auc",
        {"steps": 3, "batch_size": 7, "theta": 0.2, "stage_iterations": 6, "anchor": "stage_average"},
    ),
    "codasca": ("auc", {"epochs": 1, "batch_size": 7, "theta": 0.2, "stage_iterations": 6, "global_lr": 0.9}),
    "cdma_nc": ("auc", {"steps": 3, "batch_size": 7}),
    "cdma_one": ("auc", {"epochs": 1, "batch_size": 7}),
    "fedmm": (
        "domain_adaptation",
        {"steps": 3, "batch_size": 7, "mu1": 0.5, "mu2": 1.0, "eta3": {"decay": 2.0, "per": 2}},
    ),
    "fedsgda": ("domain_adaptation", {"batch_size": 7}),
    "fedavg_sgda": ("domain_adaptation", {"steps": 3, "batch_size": 7, "dual_lr": 0.2}),
    "fedprox_sgda": ("domain_adaptation", {"steps": 3, "batch_size": 7, "mu1": 0.5}),
    "fedrobust": ("classification", {"steps": 3, "batch_size": 7, "shift_lr": 0.5, "penalty": 0.1}),
    "gt_gda": ("domain_adaptation", {"steps": 3, "batch_size": 7}),
    "gt_hsgd": ("domain_adaptation", {"batch_size": 7, "b": 0.3}),
    "fact": ("two_heads", {"batch_size": 7, "lr": 0.05, "targets": 3, "select": "last"}),
    "kd3a": (
        "two_heads",
        {"batch_size": 7, "gate": 0.12, "gate_end": 0.15, "rounds": 3, "targets": 3},
    ),
    "mcd": (
        "two_heads",
        {"steps": 2, "generator_steps": 1, "batch_size": 7, "lr": 0.05, "optimizer": {"momentum": 0.9}},
    ),
    "fedka": (
        "domain_adaptation",
        {
            "steps": 2,
            "pairs": 4,
            "every": 2,
            "votes": 2,
            "targets": 2,
            "batch_size": 8,
            "lr": 0.05,
            "rounds": 3,
            "optimizer": {"momentum": 0.9},
        },
    ),
    "fada": (
        "domain_adaptation",
        {"steps": 2, "batch_size": 7, "lr": 0.05, "clusters": 3, "targets": 2, "optimizer": {"momentum": 0.9}},
    ),
    "m3sda": (
        "two_heads",
        {"steps": 2, "generator_steps": 1, "batch_size": 7, "lr": 0.05, "penalty": 0.3, "optimizer": {"momentum": 0.9}},
    ),
    "cdma_ada": ("auc", {"steps": 3, "batch_size": 7, "decay": 0.3, "alpha": 0.9}),
    "fednova": ("classification", {"epochs": 1, "batch_size": 7, "momentum": 0.8, "mu": 0.1}),
    "feddyn": ("classification", {"epochs": 1, "batch_size": 7, "alpha": 0.5, "clip_norm": 5.0}),
    "fedawe": ("classification", {"steps": 3, "batch_size": 7, "max_echo": 2, "clip": 0.5}),
    "cluster_fedvarp": ("classification", {"steps": 3, "batch_size": 7, "correction": "known_p"}),
    "amplified_fedavg": ("classification", {"steps": 3, "batch_size": 7, "period": 2}),
    "amplified_scaffold": ("classification", {"epochs": 1, "batch_size": 7, "period": 2}),
    "clustered_sampling": ("classification", {"steps": 3, "batch_size": 7, "correction": "known_p"}),
    "f3ast": ("classification", {"steps": 3, "batch_size": 7, "select": 8, "beta": 0.2}),
    "fedlaavg": ("classification", {"steps": 3, "batch_size": 7, "select": 8}),
    "refl": ("classification", {"steps": 3, "batch_size": 7, "select": 8}),
    "mime": ("classification", {"epochs": 1, "batch_size": 7, "beta": 0.5}),
    "mimelite": ("classification", {"steps": 3, "batch_size": 7, "beta": 0.5}),
    "fedasync": ("classification", {"steps": 3, "batch_size": 7, "concurrency": 6, "mu": 0.1}),
    "fedfix": ("classification", {"steps": 3, "batch_size": 7, "concurrency": 9, "period_s": 0.7}),
}

VARIANTS: dict[str, tuple[str, dict]] = {
    "fedavg, known p": ("classification", {"epochs": 1, "batch_size": 7, "correction": "known_p"}),
    "fedprox, mifa": (
        "classification",
        {"steps": 3, "batch_size": 7, "correction": {"kind": "mifa", "start": "completed"}},
    ),
    "local_sgda, fedvarp": (
        "auc",
        {"steps": 3, "batch_size": 7, "correction": {"kind": "fedvarp", "chances": True}},
    ),
    "peravg, the rate of the round": ("classification", {"epochs": 1, "batch_size": 7}),
    "cdma_one, fedvarp": ("auc", {"epochs": 1, "batch_size": 7, "correction": "fedvarp"}),
    "clustered_sampling, similarity": ("classification", {"steps": 3, "batch_size": 7, "law": "similarity"}),
    "cdma_ada, fedau": (
        "auc",
        {
            "steps": 3,
            "batch_size": 7,
            "correction": {"kind": "fedau", "count": "invitations", "cutoff": 2},
            "weigh_models": True,
        },
    ),
}
"""More rows of some algorithms, whose names stand before the comma: options that change what clients do, or how they count."""
ROWS = {**CASES, **VARIANTS}

MODEL = {"fedbn": "cnn_bn", "stablefdg": "cnn"}
"""The nets of algorithms that need layers which others have not."""
CUT = {
    "fedper",
    "lg_fedavg",
    "fedbn",
    "fedrep",
    "fedbabu",
    "fedrod",
    "omg",
    "robust",
    "fediir",
    "fedpac",
    "fedas",
    "irm",
    "coral",
    "mmd",
    "fishr",
}
"""Algorithms that need a net with a last layer and others before it."""
ASYNCHRONOUS = ("fedbuff", "fedasync", "fedfix")
"""Algorithms without cohorts, whose answers come in later rounds."""
ALIKE = {
    "fediir", "fedsr", "stablefdg", "irm", "vrex", "coral", "mmd", "fishr", "fish", "scaffold", "parallel_sgda",
    "local_sgda", "local_sgda_plus", "extra_step", "catalyst_scaffold_s", "coda_plus", "codasca", "cdma_nc",
    "cdma_one", "cdma_ada", "fedmm", "fedsgda", "fedavg_sgda", "fedprox_sgda", "fedrobust", "gt_gda", "gt_hsgd",
    "fact", "kd3a", "fedka", "fada", "feddyn", "fedawe", "amplified_fedavg", "amplified_scaffold", "clustered_sampling", "fedasync",
}  # fmt: skip
"""Algorithms in whose means clients count alike."""
NO_MEAN = {
    *("fedbuff", "omg", "robust", "afl", "drfa", "cluster_fedvarp", "f3ast", "refl", "fedfix"),
    "clustered_sampling, similarity",
}
"""Rows that take no mean of what clients send."""
OWN_WEIGHTS: dict[str, set[str]] = {
    "fedas": {"own"},
    "fedga": {"own", "alike"},
    "fedavg, known p": {"own"},
    "cdma_ada, fedau": {"own", "alike"},
}
"""Rows in which clients count by numbers of their own, and how in other means of the round. In the rest they count by examples."""
INVITE = {"fact": 2, "kd3a": 4, "fedka": 3, "fada": 4}
"""Clients asked a round, of algorithms that leave no choice."""
LEARN_UNLABELLED = {
    "fact",
    "kd3a",
    "mcd",
    "m3sda",
    *(name for name, (task, _) in CASES.items() if task == "domain_adaptation"),
}
"""Algorithms that need clients without labels."""
TARGET: dict[str, object] = {
    "population.dataset": {"name": "digits", "label_domains": True},
    "population.partition": {"kind": "by_domain"},
    "domains": {"target": [8, 9]},
}
BY_LABEL: dict[str, object] = {"domains": {"kind": "label"}}
NEEDS: dict[str, dict[str, object]] = {
    **dict.fromkeys(LEARN_UNLABELLED, TARGET),
    "fedka": {**TARGET, "domains": {"target": [8, 9], "share_target": True}},
    "cluster_fedvarp": {**BY_LABEL, "cohort": {"size": 8, "wait_for": "all"}},
    "clustered_sampling": {"cohort": {"size": 8, "wait_for": "all"}},
    "vrex": BY_LABEL,
    "coral": BY_LABEL,
    "mmd": BY_LABEL,
    "fishr": BY_LABEL,
    "fedga": {"population.held_out": 0.25},
    "fish": {"availability": "always", "cohort": {"size": 3, "wait_for": "all"}},
}
"""What a configuration has to say besides of the clients of some algorithms."""
