"""Runs one after another, or side by side as Ray tasks of one CPU each, whichever is next when one has ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfleet.assembly.executors import on_ray
from fedfleet.assembly.user_parts import read_by_workers
from fedfleet.config import resolve
from fedfleet.config.population import Data, data_key, load_data
from fedfleet.config.schema import Config
from fedfleet.datasets.examples import FederatedDataset
from fedfleet.datasets.files import DataError
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.resume import run_or_go_on
from fedfleet.experiments.runfolder import CHECKPOINTS
from fedfleet.experiments.workers import Workers
from fedfleet.files.summary import SUMMARY
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line
from fedfleet.simulator.executors.fingerprint import Fingerprint, Place, of_modules, of_process, unread

RETRIES = 2  # of a run whose process died
LOOK_S = 1.0  # between two looks at whether Ray is still there
GRACE_S = 10.0  # for runs to write down that they were interrupted, before their processes are ended


@dataclass(frozen=True)
class Job:
    """A run to be made, or gone on with: what it is of, its folder, and after how many rounds it stops for now."""

    of: Any
    config: Config
    folder: Path
    pause: int | None = None


Ended = tuple[Job, str | None]
"""A job, and its error if it failed."""


def at_a_time(configs: Sequence[Config], jobs: int | None) -> int:
    """Return how many runs go on at a time: one where runs bring actors of their own. Raises ConfigError."""
    if all(config.executor.kind == "local" for config in configs):
        return jobs or resolve.cpus()
    if jobs is not None and jobs > 1:
        raise ConfigError(
            f"--jobs {jobs}: with --executor config each trial brings its own Ray actors: leave --jobs out, or leave --executor "
            f"config out"
        )
    return 1


def run_jobs(
    next_job: Callable[[], Job | None], data: dict[str, Data], jobs: int, address: str | None = None
) -> Iterator[Ended]:
    """Run jobs, at most so many at a time, and yield each as it ends, with its error if it failed. An interruption is raised.

    Args:
        next_job: asked whenever there is room; None is nothing for now, and the end where nothing is under way.
        data: the data sets, by ``data_key``; those that are lacking are read.
        jobs: 1: all in this process, and no Ray.
        address: of the Ray cluster; one of our own if None.

    """
    yield from _in_tasks(next_job, data, jobs, address) if jobs > 1 else _in_turn(next_job, data)


def _in_turn(next_job: Callable[[], Job | None], data: dict[str, Data]) -> Iterator[Ended]:
    with closing(Workers()) as workers:
        while (job := next_job()) is not None:
            error = _lacking(job, data)
            yield job, error or _run(job, data[data_key(job.config)], workers)


def _lacking(job: Job, data: dict[str, Data]) -> str | None:
    """Read the data set of a job, where it is not there; return what is wrong with it."""
    if (key := data_key(job.config)) not in data:
        try:
            data[key] = load_data(job.config)
        except (ConfigError, DataError) as e:
            return one_line(e)
    return None


def _run(job: Job, data: Data, workers: Workers | None = None) -> str | None:
    """Run a job, from its last checkpoint if there is one, and return its error, None if it ended well."""
    try:
        run_or_go_on(Experiment(job.config, loaded=data), job.folder, workers=workers, pause=job.pause, replace=True)
    except FedfleetError as e:
        return one_line(e)
    except Exception as e:
        return f"{type(e).__name__}: {one_line(e)}"
    return None


def _in_tasks(
    next_job: Callable[[], Job | None], data: dict[str, Data], jobs: int, address: str | None
) -> Iterator[Ended]:
    on_ray("vital")
    from fedfleet.simulator.executors.cluster import ray, send_whole, share_tensors, start_ray, stop_ray
    from fedfleet.simulator.executors.vital import Vitals

    started = start_ray(address, jobs)
    vitals = Vitals()
    mine = None if address is None else of_process()  # what processes of other nodes have to have, too
    under_way: dict[Any, Job] = {}
    try:
        share_tensors()
        send_whole()
        kept: dict[str, Any] = {}
        wanted: dict[str, Any] = {}  # of processes of other nodes, by the data that they read
        fingerprint = Fingerprint({}, [], allow=False)  # of modules that client code loads only as it is called
        task = ray.remote(_task_told)
        while True:
            while len(under_way) < jobs and (job := next_job()) is not None:
                if (error := _lacking(job, data)) is not None:
                    yield job, error
                    continue
                key = data_key(job.config)
                if key not in kept:
                    kept[key] = ray.put(data[key])
                    wanted[key] = None if mine is None else {**mine, **_read(data[key])}
                away = Job(None, job.config, job.folder.absolute(), job.pause)
                gpus = job.config.executor.gpus_per_actor
                one = task.options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
                under_way[one.remote(away, [kept[key]], wanted[key])] = job
            if not under_way:
                return
            ready, _ = ray.wait(list(under_way), num_returns=1, timeout=LOOK_S)
            vitals.check()
            if not ready:
                continue
            job = under_way.pop(ready[0])
            try:
                error, place = ray.get(ready[0])
                if error is None and (error := _unlike(fingerprint, place)) is not None:
                    _undo(job.folder)
            except ray.exceptions.RayError as e:  # pyright: ignore[reportAttributeAccessIssue]
                error = f"its process died ({one_line(e)}): if memory ran out, lower --jobs"
            yield job, error
    finally:
        try:
            _cancel(list(under_way))
        finally:
            dead = vitals.dead
            vitals.close()
            if started:
                stop_ray(dead=dead)


def _cancel(references: list[Any]) -> None:
    """Interrupt runs under way, which on a cluster of others would go on; end those that do not stop."""
    from fedfleet.simulator.executors.cluster import ray

    for force in (False, True):
        for reference in references:
            ray.cancel(reference, force=force)
        if references:
            _, references = ray.wait(references, num_returns=len(references), timeout=GRACE_S)


def _unlike(fingerprint: Fingerprint, place: Place) -> str | None:
    """Return why what a process has computed does not count, if so."""
    fault = fingerprint.fault(place)
    return None if fault is None else fault.partition(", or set ")[0]  # a run of one process has no key for it


def _undo(folder: Path) -> None:
    """Let a run begin again the next time."""
    (folder / SUMMARY).unlink(missing_ok=True)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _task(job: Job, data: list[Any], wanted: dict[str, str] | None) -> str | None:
    """Run a job in a worker process, if that has what is wanted; the data are mapped, not copied."""
    from fedfleet.simulator.executors.cluster import ray, share_tensors

    share_tensors()
    result: Any = ray.get(data[0])
    if wanted is not None:
        node = ray.util.get_node_ip_address()  # pyright: ignore[reportAttributeAccessIssue]
        if (fault := _unlike(Fingerprint(wanted, [], allow=False), _place(node, result))) is not None:
            return fault
    return _run(job, result)


def _task_told(job: Job, data: list[Any], wanted: dict[str, str] | None) -> tuple[str | None, Place]:
    """Run a job in a worker process; return its error, and the modules of authors that the process has loaded by then."""
    from fedfleet.simulator.executors.cluster import ray

    error = _task(job, data, wanted)
    node = ray.util.get_node_ip_address()  # pyright: ignore[reportAttributeAccessIssue]
    return error, Place(node, of_modules())


def _place(node: str, data: Data) -> Place:
    try:
        return Place(node, of_process() | _read(data))
    except Exception as e:
        return Place(node, of_process(), unread(e))


def _read(data: Data) -> dict[str, str]:
    """Return what tells clients that a process reads for itself from others."""
    return read_by_workers(data.population) if isinstance(data, FederatedDataset) else {}
