"""One row an algorithm: the task it is tried on and its options. Every registered algorithm needs one."""

CASES: dict[str, tuple[str, dict]] = {
    "fedavg": ("classification", {"epochs": 1, "batch_size": 7, "client_optimizer": {"momentum": 0.9}}),
    "fedopt": (
        "classification",
        {"epochs": 2, "batch_size": 10, "client_optimizer": {"name": "adam", "eps": 1e-3}, "lr": 0.01},
    ),
    "fedbuff": ("classification", {"steps": 3, "batch_size": 7, "buffer": 4, "concurrency": 6}),
    "fedprox": ("classification", {"steps": 4, "batch_size": 7, "mu": 0.1}),
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
    "cdma_ada": ("auc", {"steps": 3, "batch_size": 7, "decay": 0.3, "alpha": 0.9}),
}
