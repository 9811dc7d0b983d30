"""Searchers, which draw the next trial: by chance, from a grid, or by Optuna's tree-structured Parzen estimator.

A draw is a function of the seed, the trial's number and, for ``tpe``, of what is known then. That estimator is made
anew each time (Bergstra et al., "Algorithms for hyper-parameter optimization", NeurIPS 2011), so nothing of it has to
be kept or resumed.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedfleet.config.search import Choice, Distribution
from fedfleet.config.tuning import Tuning
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError
from fedfleet.tuning.schedules import Trial

if TYPE_CHECKING:
    import optuna

Space = Mapping[str, Distribution]
STARTUP = 10
"""Trials that `tpe`, too, draws at random, as Optuna does."""
LEAST = 8
"""Trials below which nothing is said of what matters."""


def grid(space: Space) -> list[dict[str, Any]]:
    """Return every combination of choices, the last key's values changing first."""
    values = [d.values if isinstance(d, Choice) else [] for d in space.values()]
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*values)]


def wanted(options: Tuning, space: Space) -> int:
    """Return how many trials are drawn in all."""
    return len(grid(space)) if options.trials is None else options.trials


def drawn(options: Tuning, space: Space, trials: Sequence[Trial], rungs: Sequence[int]) -> dict[str, Any]:
    """Return the values of the next trial. ``rungs`` are in rounds."""
    number = len(trials)
    if options.searcher == "grid":
        return grid(space)[number]
    if options.searcher == "tpe" and sum(bool(t.scores) for t in trials) >= STARTUP:
        return _suggested(options, space, trials, rungs)
    return {key: distribution.at(_uniform(options.seed, number, key)) for key, distribution in space.items()}


def _uniform(seed: int, number: int, *what: str) -> float:
    """Return a draw from [0, 1) that belongs to a trial and a key alone."""
    return (int(rng.bits(rng.fold(rng.key(seed), "tune", number, *what))) >> 11 & (1 << 53) - 1) / (1 << 53)


def imported() -> Any:
    """Import Optuna. Raises ConfigError where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "tune.searcher='tpe': Optuna is not installed: pip install 'fedfleet[tune]', or choose random"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _suggested(options: Tuning, space: Space, trials: Sequence[Trial], rungs: Sequence[int]) -> dict[str, Any]:
    optuna = imported()
    seed = int(_uniform(options.seed, len(trials)) * 2**32)
    with warnings.catch_warnings(action="ignore"):  # options of Optuna's that are called experimental
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0, multivariate=True, constant_liar=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([_told(optuna, space, t, rungs) for t in trials])
        result = study.ask(_distributions(optuna, space)).params
    return {key: d.values[result[key]] if isinstance(d, Choice) else result[key] for key, d in space.items()}


def _told(optuna: Any, space: Space, trial: Trial, rungs: Sequence[int]) -> optuna.trial.FrozenTrial:
    """Return what Optuna is told of a trial: scores by rounds; of one that stands at a rung, that it was pruned there."""
    state = optuna.trial.TrialState
    scores = {rungs[i]: score for i, score in enumerate(trial.scores) if score is not None}
    complete = trial.reached == len(rungs) - 1
    return optuna.trial.create_trial(
        state=state.COMPLETE if complete else state.PRUNED if trial.scores else state.RUNNING,
        params=_numbers(space, trial),
        distributions=_distributions(optuna, space),
        value=scores[rungs[-1]] if complete else None,
        intermediate_values={} if trial.failed else scores,  # one that failed, wherever, counts as the worst
    )


def _numbers(space: Space, trial: Trial) -> dict[str, Any]:
    """Return the values of a trial, of choices their places, since Optuna knows but few kinds of values."""
    return {k: d.values.index(trial.values[k]) if isinstance(d, Choice) else trial.values[k] for k, d in space.items()}


def _distributions(optuna: Any, space: Space) -> dict[str, Any]:
    result = {}
    for key, d in space.items():
        if isinstance(d, Choice):
            result[key] = optuna.distributions.CategoricalDistribution(tuple(range(len(d.values))))
        elif d.whole or isinstance(d.low, int):
            result[key] = optuna.distributions.IntDistribution(
                int(d.low), int(d.high if d.step is None else d.at(1 - 1e-12)), log=d.log, step=int(d.step or 1)
            )
        else:
            high = d.high if d.step is None else d.at(1 - 1e-12)
            result[key] = optuna.distributions.FloatDistribution(d.low, high, log=d.log, step=d.step)
    return result


def importances(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Return how much of the scores' variance at the first rung each key explains, where all trials can be compared.

    By functional ANOVA on a random forest (Hutter, Hoos & Leyton-Brown, ICML 2014), as Optuna does it. Empty without Optuna, and
    where there is too little to tell.
    """
    there = [t for t in trials if t.scores and t.scores[0] is not None]
    if len(space) < 2 or len(there) < LEAST or len({t.scores[0] for t in there}) < 2:
        return {}
    try:
        optuna = imported()
    except ConfigError:
        return {}
    distributions = _distributions(optuna, space)
    study = optuna.create_study(direction="maximize")
    for t in there:
        study.add_trial(
            optuna.trial.create_trial(params=_numbers(space, t), distributions=distributions, value=t.scores[0])
        )
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return {k: float(v) for k, v in optuna.importance.get_param_importances(study, evaluator=evaluator).items()}
