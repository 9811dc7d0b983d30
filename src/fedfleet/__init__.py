"""fedfleet simulates federated learning on many unreliable devices.

import fedfleet

run = fedfleet.run("configs/cdma/digits.yaml", {"rounds": 20}, out="runs/first")
print(run.rounds[["round", "eval/auc", "floats_up"]].dropna())
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

LINKED = ("algorithms", "datasets", "middleware", "simulator", "tasks")
"""Subpackages that lie in the repository's root, and here as links."""
if any(
    (Path(__file__).parent / room).is_file() for room in LINKED
):  # a clone in which Git wrote links as text, as on Windows
    __path__.append(str(Path(__file__).parents[2]))

from fedfleet.simulator.errors import ClientError, ConfigError, FedfleetError  # noqa: E402

if TYPE_CHECKING:
    from fedfleet import data as data
    from fedfleet import tasks as tasks
    from fedfleet.config.schema import Config, load
    from fedfleet.datasets.examples import Dataset, Examples, FederatedDataset
    from fedfleet.experiments.campaign import open_runs
    from fedfleet.experiments.experiment import Experiment
    from fedfleet.experiments.progress import Progress
    from fedfleet.experiments.resume import resume
    from fedfleet.experiments.run import Run, open_run
    from fedfleet.experiments.runs import Runs
    from fedfleet.report import write_report
    from fedfleet.simulator.algorithm import Algorithm, Task
    from fedfleet.simulator.population import Population
    from fedfleet.tracking.callback import Callback

__all__ = [
    "Callback",
    "ClientError",
    "Config",
    "ConfigError",
    "Dataset",
    "Examples",
    "Experiment",
    "FederatedDataset",
    "FedfleetError",
    "Progress",
    "Run",
    "Runs",
    "load",
    "open_run",
    "open_runs",
    "resume",
    "run",
    "run_all",
    "write_report",
]
HOMES = {
    "Callback": "tracking.callback",
    "Config": "config.schema",
    "Dataset": "datasets.examples",
    "Examples": "datasets.examples",
    "FederatedDataset": "datasets.examples",
    "Experiment": "experiments.experiment",
    "Progress": "experiments.progress",
    "Run": "experiments.run",
    "Runs": "experiments.runs",
    "load": "config.schema",
    "open_run": "experiments.run",
    "open_runs": "experiments.campaign",
    "resume": "experiments.resume",
    "write_report": "report",
}
"""Where the names are that are imported when first asked for: PyTorch and pandas take seconds, which `fedfleet --help` need not."""


def __getattr__(name: str) -> Any:
    """Import what is asked for (PEP 562)."""
    if name in ("data", "tasks"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = result = getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
    return result


def __dir__() -> list[str]:
    """List what there is for others, imported yet or not."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, "data", "tasks"})


def run(
    config: str | Path | Mapping[str, Any] | Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    task: Task | None = None,
    algorithm: Algorithm | None = None,
    population: Population | None = None,
    data: Dataset | FederatedDataset | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    progress: bool = True,
) -> Run:
    """Run one experiment and write its run folder ``out``, which must be new.

    Args:
        config: a YAML file, a nested mapping of the same keys, or what ``fedfleet.load`` returned.
        overrides: dotted keys -> values.
        out: the run folder.
        task, algorithm, data: your own, instead of the configured ones. A ``Dataset`` is dealt to clients by the configured
            partition, a ``FederatedDataset`` comes in clients.
        population: clients of your own; their attribute ``test`` (``Examples``), or ``data``, is what models are tested on.
        callbacks: who is told how it goes, round by round, and may stop it.
        progress: show on standard error, or in the notebook, how it goes.

    Features that are far from 1 in size, and secure sums that have little of what clients sent, are told; they are warnings where
    there is nobody to tell. Raises ConfigError or DataError for input that cannot run, FedfleetError for a run that failed.

    """
    from fedfleet.config.schema import load
    from fedfleet.experiments.experiment import Experiment
    from fedfleet.experiments.progress import shown

    own = {"task": task, "algorithm": algorithm, "population": population, "data": data}
    told = shown(callbacks, progress=progress)
    experiment = Experiment(load(config, overrides), **own)
    for line in () if told else experiment.advice():  # else callbacks are told
        warnings.warn(line, stacklevel=2)
    try:
        result = experiment.run(Path(out), told)
    except KeyboardInterrupt as e:
        given = "".join(f", {name}=…" for name, part in own.items() if part is not None)
        e.add_note(f"go on with fedfleet.resume({str(out)!r}{given})")
        raise
    lost = (result.summary.get("secure_aggregation") or {}).get("lost")
    if lost and not told:
        warnings.warn(lost, stacklevel=2)
    return result


def run_all(
    config: Path | str | Mapping[str, Any] | Config,
    overrides: list[str] | Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    task: Task | None = None,
    algorithm: Algorithm | None = None,
    population: Population | None = None,
    data: Dataset | FederatedDataset | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    progress: bool = True,
) -> Runs:
    """Run every label of ``compare``, every point of ``vary`` and every of ``seeds``, one after another, and write a report.

    Args: as of ``run``; parts that are given are of all runs. Where ``out`` has runs of the same configuration and parts, those at
    their end are left as they are, and the others go on; there may be more labels, values and seeds than before.

    All are checked before the first begins. One that fails does not stop the others: FedfleetError is raised at the end. Raises
    ConfigError or DataError for input that cannot run.

    """
    from fedfleet.config.schema import load
    from fedfleet.experiments import campaign
    from fedfleet.experiments.progress import shown

    own = {"task": task, "algorithm": algorithm, "population": population, "data": data}
    try:
        return campaign.run_all(load(config, overrides), Path(out), shown(callbacks, progress=progress), own)
    except KeyboardInterrupt as e:
        e.add_note("the same call goes on")
        raise
