"""fedfleet simulates federated learning over very many unreliable devices.

import fedfleet

run = fedfleet.run("configs/quickstart.yaml", {"rounds": 20}, out="runs/first")
print(run.rounds[["round", "eval/auc", "floats_up"]].dropna())
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfleet.config.schema import Config, load
from fedfleet.datasets.examples import Dataset, Examples, FederatedDataset
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.resume import resume
from fedfleet.experiments.runner import Run
from fedfleet.report import write_report
from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.errors import ClientError, ConfigError, FedfleetError
from fedfleet.simulator.population import Population

__all__ = [
    "ClientError",
    "Config",
    "ConfigError",
    "Dataset",
    "Examples",
    "Experiment",
    "FederatedDataset",
    "FedfleetError",
    "Run",
    "load",
    "resume",
    "run",
    "write_report",
]


def run(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    task: Task | None = None,
    algorithm: Algorithm | None = None,
    population: Population | None = None,
    data: Dataset | FederatedDataset | None = None,
) -> Run:
    """Run one experiment and write its run folder ``out``, which must be new.

    Args:
        config: a YAML file, or a nested mapping of the same keys.
        overrides: dotted keys -> values.
        out: the run folder.
        task, algorithm, data: your own, instead of the configured ones. A ``Dataset`` is dealt to clients by the configured
            partition, a ``FederatedDataset`` comes in clients.
        population: clients of your own; their attribute ``test`` (``Examples``), or ``data``, is what models are tested on.

    Raises ConfigError or DataError for input that cannot run, FedfleetError for a run that failed.

    """
    experiment = Experiment(load(config, overrides), task=task, algorithm=algorithm, population=population, data=data)
    return experiment.run(Path(out))
