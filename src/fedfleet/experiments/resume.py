"""Go on with a run that was interrupted, or that is to be longer."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fedfleet.assembly.user_parts import check_same, parts
from fedfleet.config.reading import check_there, override, read
from fedfleet.config.schema import Config, load, recorded, without_own
from fedfleet.config.trust import check as check_trusted
from fedfleet.experiments.checkpoint import newest
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.progress import shown
from fedfleet.experiments.run import Run
from fedfleet.experiments.runfolder import CHECKPOINTS, locked
from fedfleet.experiments.same_run import MAY_CHANGE, STOPS, without
from fedfleet.experiments.stopping import KEYS
from fedfleet.experiments.workers import Workers
from fedfleet.files import parquet
from fedfleet.files.summary import ended, summary_of
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.tracking.callback import Callback, Callbacks, checked


def resume(
    folder: str | Path,
    overrides: list[str] | Mapping[str, Any] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    *,
    trust: bool = False,
    progress: bool = True,
    **own: Any,
) -> Run:
    """Go on with the run in ``folder`` from its last checkpoint, and return it finished.

    A run that is at its end is returned as it is, one that was stopped before its first checkpoint begins again.

    Args:
        folder: the run folder.
        overrides: ``dotted.key=value`` strings or a mapping, of keys in ``MAY_CHANGE`` only.
        callbacks: who is told how it goes.
        trust: call code, and reach machines, that the folder names also where no run of this user's on this machine wrote that.
        progress: show on standard error, or in the notebook, how it goes.
        own: the task, algorithm, population or data in Python that the run began with, if any.

    Raises ConfigError where there is nothing to go on from, FedfleetError for a run that failed.

    """
    callbacks = shown(callbacks, progress=progress)
    told, folder = Callbacks(callbacks), Path(folder)
    config = changed(folder / "config.yaml", overrides, own, trust=trust)
    result, faults = newest(folder / CHECKPOINTS)
    if result is not None:  # before the data are read, and also where nothing is left to do
        check_same(folder, result.account["own"], parts(**own).describe())
    none_yet = result is None and not faults and not _has_rounds(folder)
    if none_yet and (folder / CHECKPOINTS).is_dir():  # it is a run folder indeed
        told.say(f"{folder}: it was stopped before its first checkpoint, and begins again")
        return run_or_go_on(Experiment(config, **own), folder, callbacks)
    if result is not None:
        check_rounds(config, result.rounds)
        _check_noise(recorded(folder / "config.yaml"), config)
    if (done := at_its_end(folder, config)) is not None:
        told.say(f"{folder}: {_ended(done, config)}")
        return Run(folder, done, own.get("task"))
    warm_start, config = config.warm_start, config.model_copy(update={"warm_start": None})
    experiment = Experiment(config, **own)
    started = experiment.config.model_copy(update={"warm_start": warm_start})
    return experiment.recorded_as(started).resume(folder, callbacks)


def _has_rounds(folder: Path) -> bool:
    """Say whether a run has done a round, as far as its tables tell: those of one that was interrupted before are empty."""
    try:
        with parquet.readable(folder / "rounds.parquet") as file:
            return file.metadata.num_rows > 0
    except FileNotFoundError:
        return False
    except ConfigError:  # it cannot be read
        return True


def _check_noise(before: Mapping[str, Any], config: Config) -> None:
    """Refuse other rounds than those that noise was found for. Raises ConfigError."""
    hidden, rounds = config.example_privacy, before.get("rounds")
    if hidden is not None and hidden.noise_multiplier is None and rounds not in (None, config.rounds):
        raise ConfigError(
            f"rounds={config.rounds}: the noise of example_privacy.epsilon={hidden.epsilon:g} was found for {rounds} rounds, "
            f"and some are done with it: leave rounds as it was, or begin a new run"
        )


def run_or_go_on(
    x: Experiment,
    out: Path,
    callbacks: Callback | Sequence[Callback] = (),
    workers: Workers | None = None,
    pause: int | None = None,
    *,
    replace: bool = False,
) -> Run:
    """Go on from the last checkpoint of the same run in ``out``; where there is none, run it, until ``pause``.

    Raises ConfigError where ``out`` has a checkpoint of another run, unless that is to be replaced, and where a process is at
    work in it.
    """
    result = newest(out / CHECKPOINTS)[0]
    if result is not None:
        path = out / "config.yaml"
        before = recorded(path) if path.exists() else {}
        same = without(before, MAY_CHANGE) == without(x.config.model_dump(mode="json"), MAY_CHANGE)
        if same and result.rounds <= x.config.rounds:
            _check_noise(before, x.config)
            return x.resume(out, callbacks, workers, pause)
        if not replace:
            raise ConfigError(f"{out}: a run of another configuration is there: choose another folder, or remove it")
    if out.exists():
        if result is None and _has_rounds(out):
            Callbacks(checked(callbacks)).say(f"{out}: there is no checkpoint to go on from, and the run begins again")
        with closing(locked(out)):
            shutil.rmtree(out)
    return x.run(out, callbacks, workers, pause)


def check_rounds(config: Config, done: int, run: str = "the run") -> None:
    """Refuse a configuration of fewer rounds than a run has done. Raises ConfigError."""
    if config.rounds < done:
        raise ConfigError(f"rounds={config.rounds}: {run} has done {done} already: give more")


def at_its_end(folder: Path, config: Config) -> dict[str, Any] | None:
    """Return the summary of a run that has nothing left to do under this configuration.

    Raises ConfigError where it has, and tables or models are missing or damaged.
    """
    summary = summary_of(folder)
    try:
        before = recorded(folder / "config.yaml")
    except ConfigError:
        return None
    finished = summary.get("status") == "finished" and (summary.get("rounds") or 0) >= config.rounds
    now = config.model_dump(mode="json")
    same = all(asked_for(before.get(key)) == asked_for(now[key]) for key in ("rounds", *STOPS))
    configured = [callback["name"] for callback in now["callbacks"]]
    by_key = (summary.get("stopped") or {}).get("by", KEYS[0]) in (
        *KEYS,
        *configured,
    )  # another callback's stop is none
    return ended(folder) if finished or (summary.get("status") == "stopped" and same and by_key) else None


def asked_for(value: Any) -> Any:
    """Return which callbacks were asked for, without what a run says of their code; anything else as it is."""
    return [(each["name"], each["arguments"]) for each in value] if isinstance(value, list) else value


def _ended(summary: Mapping[str, Any], config: Config) -> str:
    if summary["status"] == "finished":
        return f"finished, {summary['rounds']} rounds: give rounds=N to go on"
    by = summary["stopped"]["by"] if summary.get("stopped") else None
    given = {key: value for key in STOPS if (value := getattr(config, key)) is not None and by in (None, key)}
    if by in (several := [callback.name for callback in config.callbacks]):
        return (
            f"stopped after {summary['rounds']} rounds by callbacks={several}: leave it out, as callbacks=[], to go on"
        )
    if not given:
        spent = [f"{k}.epsilon" for k in ("privacy", "example_privacy") if getattr(getattr(config, k), "epsilon", None)]
        return f"stopped after {summary['rounds']} rounds: another could spend more than {' or '.join(spent)}"
    why = " or ".join(f"{key}={value}" if isinstance(value, str | float) else key for key, value in given.items())
    return f"stopped after {summary['rounds']} rounds by {why}: give another to go on"


def cut_off(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Return, to be said of runs at their end, how many of them ran out of ``max_seconds``; nothing where none did."""
    cut = sum((summary.get("stopped") or {}).get("by") == "max_seconds" for summary in summaries)
    return f", {cut} of them by max_seconds: give another, or null, to go on" if cut else ""


def changed(
    path: Path,
    overrides: list[str] | Mapping[str, Any] | None,
    own: Mapping[str, Any] | None = None,
    *,
    trust: bool = False,
) -> Config:
    """Return the configuration of a run, or of several, with what is to be changed; ``own`` are parts given in Python.

    Raises ConfigError, also where it names code that no run of this user's wrote and that is not to be trusted.
    """
    check_there(path.parent, path.name)
    if isinstance(overrides, Mapping):
        given = dict(overrides)
    else:
        given = {key: value for text in overrides or [] for key, value in override(text).items()}
    for key, value in given.items():
        if not any(key == may or key.startswith(f"{may}.") for may in MAY_CHANGE):
            raise ConfigError(
                f"{key}={show(value)}: a run goes on as it began: start a new one (with --warm-start, if from this model); what "
                f"may change: {', '.join(MAY_CHANGE)}"
            )
    check_trusted(path, given, trust=trust)
    return load(without_own(read(path), [name for name, part in (own or {}).items() if part is not None]), given)
