"""Every configuration that comes with fedfleet can be read, and every table's rows are runs of its configuration."""

from pathlib import Path

import pytest
import torch

from fedfleet.commands import paper
from fedfleet.config import schema as config
from fedfleet.config import tuning
from fedfleet.experiments import sweep

CONFIGS = Path(__file__).parents[3] / "configs"
TABLES = sorted(CONFIGS.rglob("*_table.yaml"))


def test_configurations(subtests):
    for path in sorted({*CONFIGS.rglob("*.yaml")} - {*TABLES}):
        with subtests.test(str(path.relative_to(CONFIGS))):
            found = config.load(path)
            assert config.load(found) == found
            assert config.load(found, {"seed": 7}) == config.load(path, {"seed": 7})
            if found.tune is not None:
                assert tuning.checked(found.tune, found.rounds)
            assert sweep.planned(config.with_overrides(found, {"tune": None}))


def test_tables(subtests):
    for path in TABLES:
        with subtests.test(str(path.relative_to(CONFIGS))):
            table = paper.read(path)
            places = table.places(config.load(path.parent / table.config).compare or {})
            labels = [row for row, _ in places.values()]
            compared = table.compared(labels)
            printed = [row for rows in table.told() for row in rows]
            assert {*compared, *compared.values(), *printed} <= {*labels}
            found = config.load(path.parent / table.config)
            assert all(config.at(found, key) is not None for block in table.blocks for key in block.where)


def test_fashion_mnist_can_be_dealt_to_fedomgs_clients():
    """A hundred of them under Dirichlet(0.1), for each seed of a partition that one may try first."""
    said = config.load(CONFIGS / "fedomg" / "fashion_mnist.yaml")
    labels = torch.arange(10).repeat_interleave(6000)
    for seed in range(3):
        dealt = said.population.partition.split(labels, None, said.population.clients, seed)
        assert int(dealt.offsets.diff().min()) >= 20


METHODS = ("ADA", "ONE", "NC", "Local SGDA+", "Catalyst-Scaffold-S", "Extra Step", "CODA+", "CODASCA", "Parallel SGDA")
T2, T4 = {"stage_iterations": 2000}, {"stage_iterations": 4000}
AUTHORS = {
    "auc_mnist": (
        (0.7, 0.3162, {"decay": 0.2, "alpha": 5}),
        *((0.3162, 1), (0.3162, 0.1), (0.3162, 0.1), (0.1, 0.1, T2), (0.3162, 0.3162)),
        *((0.3162, 0.3162, T4), (0.3162, 0.3162, T4), (1, 1)),
    ),
    "auc_cifar10": (
        (0.25, 0.3162, {"decay": 0, "alpha": 0.95}),
        *((0.2, 0.3162), (0.1, 0.1), (0.1, 0.1), (0.3162, 0.3162, T4), (0.3162, 0.3162)),
        *((0.1, 0.1, T2), (0.03162, 0.03162, T4 | {"global_lr": 0.99}), (1, 0.3162)),
    ),
    "robust_mnist": (
        (0.01, 1, {"decay": 0.333, "alpha": 5}),
        *((0.001, 0.3162), (0.0003162, 0.03162), (0.0003162, 0.03162), (0.001, 0.001, T4 | {"theta": 0.1})),
        *((0.0003162, 0.0003162), (0.001, 0.001, T2), (0.003162, 0.003162, T2), (0.01, 1)),
    ),
    "robust_fashion_mnist": (
        (0.01, 1, {"decay": 0.333, "alpha": 5}),
        *((0.001, 0.1), (0.001, 0.03162), (0.001, 0.03162), (0.001, 0.001, T4), (0.0003162, 0.0003162)),
        (0.001, 0.001, T4 | {"theta": 0.1}),
        *((0.003162, 0.003162, T4 | {"theta": 0.1, "global_lr": 1.1}), (0.01, 0.1)),
    ),
    "gan_mnist": (
        (0.01, 0.01, {"decay": 0, "alpha": 0.99}),
        *((0.01, 0.01), (0.01, 0.001), (0.01, 0.001), (0.01, 0.01, T2), (0.001, 0.001), (0.01, 0.01, T4)),
        *((0.01, 0.01, T4 | {"theta": 0.1}), (0.01, 0.01)),
    ),
    "gan_fashion_mnist": (
        (0.01, 0.001, {"decay": 0, "alpha": 0.99}),
        *((0.01, 0.001), (0.001, 0.001), (0.001, 0.001), (0.01, 0.01, T4), (0.001, 0.001), (0.01, 0.01, T4)),
        *((0.01, 0.01, T4 | {"global_lr": 1.1}), (0.001, 0.01)),
    ),
    "gan_celeba": (
        (0.01, 0.01, {"decay": 0, "alpha": 0.99, "steps": 25}),
        *((0.01, 0.01), (0.001, 0.01), (0.001, 0.01), (0.01, 0.01, T2), (0.01, 0.01, {"steps": 10})),
        *((0.01, 0.01, T4), (0.01, 0.01, T4 | {"global_lr": 1.1, "steps": 25}), (0.01, 0.01)),
    ),
}
DEFAULTS = {"decay": 0, "theta": 0, "global_lr": 1}


@pytest.mark.parametrize("name", AUTHORS)
def test_the_authors_steps(name):
    """CDMA's configurations have those of its authors' scripts: primal, dual, what differs from a method's defaults."""
    loaded = config.load(CONFIGS / "cdma" / f"{name}.yaml")
    algorithms = {t.label: t.config.algorithm for t in sweep.distinct(sweep.planned(loaded))}
    assert set(algorithms) == set(METHODS)
    for method, (lr, dual, *more) in zip(METHODS, AUTHORS[name], strict=True):
        options = algorithms[method]
        given = options.lr if options.dual_lr is None else options.dual_lr
        assert (options.lr, given) == (lr, dual), method
        for key, value in {**DEFAULTS, **(more[0] if more else {})}.items():
            assert getattr(options, key, value) == value, (method, key)
