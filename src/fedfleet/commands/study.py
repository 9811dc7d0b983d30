"""A study: every label at every point of a grid on every seed, each a run of its own; four tables and a report.

A trial runs its clients in its own process, and trials run side by side, so none waits for another's actors. What has been
finished is kept: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedfleet.config import resolve
from fedfleet.config import schema as C
from fedfleet.config.checking import unknown
from fedfleet.config.executor import IN_PROCESS
from fedfleet.config.population import Data
from fedfleet.config.reading import override, read
from fedfleet.config.schema import Config, flattened
from fedfleet.experiments import campaign, sweep
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.progress import Progress, time_left
from fedfleet.experiments.resume import asked_for, cut_off
from fedfleet.experiments.runfolder import check_free, claim, locked
from fedfleet.experiments.same_run import WHERE, differences, leaves, without
from fedfleet.experiments.side_by_side import Job, at_a_time, run_jobs
from fedfleet.experiments.sweep import Trial
from fedfleet.files import parquet
from fedfleet.files.summary import ended, summary_of
from fedfleet.files.writing import write_text
from fedfleet.report import study_comparisons
from fedfleet.report.study_page import write_study_report
from fedfleet.report.study_tables import DONE, MARK, Entry, Tables, Target, collect
from fedfleet.report.words import count
from fedfleet.simulator.errors import ConfigError, FedfleetError, show


@dataclass(frozen=True)
class Study:
    """A plan: the trials in their order, the values that vary, the metric to reach, the label that others are compared with."""

    config: Config
    """With the grid and the seeds in it."""
    trials: tuple[Trial, ...]
    varied: Mapping[str, list[Any]]
    target: Target | None
    reference: str | None = None
    """A label; the first one if None."""
    sought: float | None = None
    """A difference, for which the seeds are told that it would need."""


@dataclass(frozen=True)
class Prepared:
    """A study that has been checked: the resolved configuration of each trial, in their order, and the data they share."""

    study: Study
    resolved: tuple[dict[str, Any], ...]
    data: Mapping[str, Data]


def plan(
    config: Config,
    vary: Sequence[str] = (),
    seeds: int | None = None,
    target: str | None = None,
    *,
    reference: str | None = None,
    sought: float | None = None,
    in_process: bool = True,
    grid: bool = True,
) -> Study:
    """Return the grid: ``compare`` x ``vary`` x seeds. Raises ConfigError.

    Args:
        config: what all trials share; its ``vary`` comes after the one given here.
        vary: texts ``dotted.key=value,value``; the first key is the axis of the figures.
        seeds: how many, from the configuration's ``seed`` on; instead of the configuration's.
        target: a metric and a value, such as "eval/auc=0.9"; the configuration's ``until`` if not given.
        reference: the label that the others are compared with; the first one if not given.
        sought: a difference of the first metric, for which the report says how many seeds it would need.
        in_process: trials train their clients in their own process, whatever ``executor.kind`` says.
        grid: something must vary.

    """
    given: dict[str, list[Any]] = {}
    for key, values in map(varied, vary):
        if key in given:
            raise ConfigError(f"--vary {key}: given twice: give its values in one, {key}=value,value")
        given[key] = values
    axes = given | {k: v for k, v in (config.vary or {}).items() if k not in given}
    if grid and not axes:
        raise ConfigError(
            "--vary: nothing varies: give --vary dotted.key=value,value; for labels and seeds alone, fedfleet run CONFIG --seeds 3"
        )
    for key, values in axes.items():
        if key == "algorithm":  # a column of that name tells which it is
            raise ConfigError(f"vary.algorithm={show(values)}: write algorithm.name, or use compare")
        if any(a == b for i, a in enumerate(values) for b in values[:i]):
            raise ConfigError(f"vary.{key}={show(values)}: give each value once")
    numbers = [*range(config.seed, config.seed + seeds)] if seeds is not None else config.seeds or [config.seed]
    config = C.with_overrides(config, {"vary": axes or None, "seeds": numbers})
    axes = sweep.axes(config)
    result = []
    for trial in sweep.planned(config):
        own = C.with_overrides(trial.config, IN_PROCESS) if in_process else trial.config
        result.append(replace(trial, config=own, label=trial.label or trial.config.algorithm.name))
    wanted, key = (target, "--target") if target is not None else (config.until, "until")
    goal = None if wanted is None else Target(*resolve.parse_until(wanted, key))
    labels = list(dict.fromkeys(trial.label for trial in result))
    if reference is not None and reference not in labels:
        raise ConfigError(unknown("--reference", reference, labels))
    return Study(config, tuple(result), axes, goal, reference, sought)


def check_varied(vary: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse an override of what ``--vary`` sets. Raises ConfigError."""
    given = {key for text in overrides for key in flattened(override(text))}
    for key, values in map(varied, vary):
        if shared := given & {each for value in values for each in flattened({key: value})}:
            raise ConfigError(f"{min(shared)}: --vary {key} sets it, too: leave it out of one")


def varied(text: str) -> tuple[str, list[Any]]:
    """Read ``dotted.key=value,value``. Raises ConfigError."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--vary {show(text)}: write dotted.key=value,value")
    if not values.strip():
        raise ConfigError(f"--vary {show(text)}: no value: write {key.strip()}=value,value")
    try:
        ((key, result),) = override(f"{key}=[{values}]").items()
    except ConfigError:
        raise ConfigError(
            f"--vary {show(text)}: not a dotted key and values in YAML: write dotted.key=value,value"
        ) from None
    return key, result


def prepare(study: Study, progress: Progress, check: Callable[[Experiment], None] | None = None) -> Prepared:
    """Check every trial as a run would be, and by ``check``, and resolve it. Raises ConfigError or DataError naming the trial."""
    for line in [f"checking {len(study.trials)} trials", *sweep.left_out(study.trials)]:
        progress.say(line)
    data: dict[str, Data] = {}
    resolved: dict[str, dict[str, Any]] = {}
    advice: list[tuple[str, list[str]]] = []
    for trial in sweep.to_check(study.trials):
        experiment = campaign.prepare(trial, data)
        advice.append((trial.name, experiment.advice()))
        names = experiment.metric_names()
        if study.target is not None and study.target.metric not in names:
            raise ConfigError(unknown("--target", study.target.metric, names))
        if check is not None:
            check(experiment)
        resolved[trial.place] = experiment.config.model_dump(mode="json")
    first = {trial.name: resolved[trial.place] for trial in sweep.distinct(study.trials)}
    for line in campaign.advised(advice):
        progress.say(line)
    return Prepared(
        study, tuple({**resolved.get(t.place, first[t.name]), "seed": t.config.seed} for t in study.trials), data
    )


def describe(prepared: Prepared, out: Path | None) -> Iterator[str]:
    """Yield lines that say what would be run: a line a point, and how much of it is done. Raises ConfigError."""
    study = prepared.study
    done = finished(prepared, out) if out is not None else [False] * len(study.trials)
    there = f", {sum(done)} of them finished" if any(done) else ""
    yield f"{len(study.trials)} trials{there}; target: {study.target or 'none'}"
    for first in sweep.distinct(study.trials):
        same = [i for i, t in enumerate(study.trials) if t.name == first.name]
        c = prepared.resolved[same[0]]
        seeds = ", ".join(f"{study.trials[i].config.seed}{' (finished)' if done[i] else ''}" for i in same)
        yield f"{first.name}: {c['algorithm']['name']}, {c['rounds']} rounds, {c['executor']['kind']}, seeds {seeds}"


def folder(out: Path, trial: Trial) -> Path:
    """Return the run folder of a trial."""
    return out / "trials" / trial.place


def finished(prepared: Prepared, out: Path) -> list[bool]:
    """Say of each trial whether it is there already. Raises ConfigError where a finished one is of another configuration."""
    if not (out / MARK).exists():
        check_free(out)
    return [_finished(folder(out, t), c) for t, c in zip(prepared.study.trials, prepared.resolved, strict=True)]


def _finished(run: Path, wanted: Mapping[str, Any]) -> bool:
    summary = ended(run)
    if summary.get("status") not in DONE:
        return False
    try:
        result = read(run / "config.yaml")
    except ConfigError:
        return False
    if _cut(summary, result) and result.get("max_seconds") != wanted.get("max_seconds"):
        return False  # it had another time to run than it has now
    several = result.get("callbacks") or []
    by_one = (summary.get("stopped") or {}).get("by") in [callback["name"] for callback in several]
    if by_one and asked_for(several) != asked_for(wanted["callbacks"]):
        return False
    aside = (*WHERE, "callbacks")  # whatever they were, what was computed is the same
    old, new = (without(c, aside) for c in (result, wanted))
    if dict(leaves(new)).keys() - dict(leaves(old)):  # it may be of an earlier version, which had not all of the keys
        with suppress(ConfigError):
            old = without(C.recorded(run / "config.yaml"), aside)
    for key, was, now in differences(old, new):
        raise ConfigError(
            f"{key}={show(now)}: the finished trial {run} has {show(was)}: choose another folder, or remove that folder"
        )
    return True


def _cut(summary: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Say whether a run that was stopped ran out of ``max_seconds``, rather than diverge or reach what ``until`` says."""
    if summary.get("stopped"):
        return summary["stopped"]["by"] == "max_seconds"
    if summary.get("diverged"):
        return False
    if summary["status"] != "stopped" or not config.get("until"):
        return summary["status"] == "stopped"
    metric, at_least, value = resolve.parse_until(config["until"])
    result = {**summary.get("initial", {}), **summary.get("final", {})}.get(metric)
    return result is None or not (result >= value if at_least else result <= value)


def run(prepared: Prepared, out: Path, progress: Progress, jobs: int | None = None) -> Tables:
    """Run the trials that are not finished, ``jobs`` at a time, and write the tables and the report.

    A trial that fails does not end the study: its row says so, and ``failures`` has its error.
    """
    study = prepared.study
    errors = run_trials(prepared, out, progress, jobs)
    entries = [Entry(campaign.tells(t), folder(out, t), errors.get(t.place)) for t in study.trials]
    tables = replace(collect(entries, study.varied, study.target, study.reference), sought=study.sought)
    tables.write(out)
    parquet.write(study_comparisons.frame(tables), out / "comparisons.parquet")
    config = f"# target: {study.target or 'none'}\n"
    config += campaign.as_given(study.config)
    progress.say(f"report: {write_study_report(tables, out, config)}")
    return tables


def run_trials(prepared: Prepared, out: Path, progress: Progress, jobs: int | None = None) -> dict[str, str]:
    """Run the trials that are not finished and return the errors of those that failed, by place."""
    study = prepared.study
    there = finished(prepared, out)
    jobs = at_a_time([t.config for t in study.trials], jobs)
    if not (out / MARK).exists():
        claim(out)
    labels = list(dict.fromkeys(t.label for t in study.trials))
    about = {"labels": labels, "vary": study.varied, "target": study.target and study.target._asdict()}
    with closing(locked(out)):
        write_text(out / MARK, json.dumps({**about, "trials": len(study.trials)}, indent=2) + "\n")
        return _run_waiting(prepared, out, progress, jobs, there)


def _run_waiting(prepared: Prepared, out: Path, progress: Progress, jobs: int, there: Sequence[bool]) -> dict[str, str]:
    study = prepared.study
    waiting = [t for t, done in zip(study.trials, there, strict=True) if not done]
    if len(waiting) < len(study.trials):
        cut = cut_off(summary_of(folder(out, t)) for t, done in zip(study.trials, there, strict=True) if done)
        progress.say(f"{len(study.trials) - len(waiting)} of {len(study.trials)} trials are finished already{cut}")
    errors: dict[str, str] = {}
    pace = _Pace(len(study.trials), len(waiting), progress)
    try:
        for trial, error in _run_all(prepared, waiting, out, jobs):
            if error is not None:
                errors[trial.place] = error
            pace.tell(trial, error)
    except (KeyboardInterrupt, SystemExit) as e:
        e.add_note(f"after {pace.over} of {count(pace.total, 'trial')}")
        raise
    return errors


def failures(tables: Tables, study: Study) -> dict[str, str]:
    """Return the errors of the trials that failed, by place."""
    rows = zip(study.trials, tables.study["status"], tables.study["error"], strict=True)
    return {trial.place: str(error) for trial, status, error in rows if status == "failed"}


def check(errors: Mapping[str, str], study: Study) -> None:
    """Raise FedfleetError where trials failed, by their errors by place."""
    if errors:
        place, error = next(iter(errors.items()))
        raise FedfleetError(f"{len(errors)} of {len(study.trials)} trials: {place}: {error}")


def _run_all(prepared: Prepared, waiting: Sequence[Trial], out: Path, jobs: int) -> Iterator[tuple[Trial, str | None]]:
    """Run trials and yield each as it ends, with its error if it failed."""
    line = iter([Job(trial, trial.config, folder(out, trial)) for trial in waiting])
    address = prepared.study.config.executor.address
    for job, error in run_jobs(lambda: next(line, None), dict(prepared.data), min(jobs, len(waiting)), address):
        yield job.of, error


class _Pace:
    """Says how many trials are done, and how long the rest will take."""

    def __init__(self, total: int, waiting: int, progress: Progress):
        self.total, self.waiting, self.progress = total, waiting, progress
        self.done = self.failed = 0
        self.started = time.monotonic()

    @property
    def over(self) -> int:
        """Trials that are done, those of an earlier time included."""
        return self.total - self.waiting + self.done

    def tell(self, trial: Trial, error: str | None) -> None:
        """Count a trial that has ended."""
        self.done += 1
        self.failed += error is not None
        left = (time.monotonic() - self.started) / self.done * (self.waiting - self.done)
        failed = f" | {self.failed} failed" if self.failed else ""
        what = f"{trial.place}: {error or 'done'}"
        self.progress.say(f"trial {self.over}/{self.total}{failed} | left {time_left(left)} | {what}")
