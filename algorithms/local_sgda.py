"""Local SGDA: every client takes K simultaneous descent-ascent steps, the server averages x and y.

Deng & Mahdavi, "Local stochastic gradient descent ascent: convergence analysis and communication efficiency", AISTATS 2021,
Algorithm 1, with a sampled cohort. Averages are unweighted.

    paper          here
    x, y           z["x"], z["y"]
    eta_x, eta_y   lr, dual_lr
    tau (or K)     steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedfleet.algorithms.local import local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.algorithms.participation import Correction, correcting
from fedfleet.simulator.author import Algorithm, Key, LocalWork, Mean, Message, Phase, Problem, Round, Task, Tree, View


class SgdaOptions(LocalOptions):
    """Options of local SGDA."""

    correction: Correction = Correction()
    """Correction for clients that are heard less often than others."""


def local_sgda(options: SgdaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build local SGDA; its state is z."""
    made = averaged(options, task, cohort, local_training(options.plan()))
    return correcting(options.correction, made, "train", "z", model=True, rates=True)


def averaged(
    options: LocalOptions,
    task: Task,
    cohort: CohortOptions,
    work: LocalWork,
    config: Mapping[str, Any] | None = None,
    client_state: Callable[[Mapping[str, Any]], Tree] | None = None,
) -> Algorithm:
    """Return the algorithm whose clients start at z and whose server takes the mean of their final points; its state is z.

    ``config`` goes to the clients with the learning rates; ``client_state`` builds their state, if they keep one.
    """
    train = Phase(name="train", work=work, reduce={"z": Mean()}, client_state=client_state, model="z")

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        shared = Message(send={"z": z}, config={"lr": options.rates(rnd.index, task.parts), **(config or {})})
        return rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))["z"], {}

    return Algorithm(init, round, (train,), {"global": View(lambda z: z)}, requires=("x", "y"), buffers=True)
