"""SCAFFOLD: control variates correct the drift of local training.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020, Algorithm 1.

    paper          here
    x, y_i         shared z, local.z
    c, c_i         shared c, client_state (a client's state)
    K, eta_l       steps (or epochs), lr
    eta_g          global_lr
    option II      how c_i is renewed (option I, which takes an extra pass over the data, is not offered)
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from fedfleet.algorithms.control import controlled, no_control, share
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.simulator.author import Algorithm, Key, Mean, Message, Phase, Problem, Round, T, Task, Tree, View


class ScaffoldOptions(LocalOptions):
    """Options of SCAFFOLD."""

    global_lr: float = Field(default=1.0, gt=0)
    """Server learning rate, eta_g."""
    weight: Literal["num_examples", "uniform"] = "uniform"
    """How much a client counts in the means and in c, which stays the mean of all c_i; the paper's is uniform."""
    client_optimizer: LocalOptimizer = LocalOptimizer()
    """The rule for gradients before the correction is added; plain steps in the paper."""


class State(NamedTuple):
    """The model x and the server control variate c."""

    z: Tree
    c: Tree


def scaffold(options: ScaffoldOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build SCAFFOLD with option II, whose control variates cost no extra gradient."""

    train = Phase(
        name="train",
        work=controlled(options.plan(), optimizer=options.client_optimizer.build()),
        reduce={"dz": Mean(), "dc": Mean()},
        weight=options.weight,
        client_state=no_control,
        difference="dz",
    )

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, T.zeros_like(z))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        shared = Message(send={"z": state.z, "c": state.c}, config={"lr": options.rates(rnd.index, task.parts)})
        heard = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))
        z = T.axpy(options.global_lr, heard["dz"], state.z)  # l. 16-17
        return State(z, T.axpy(share(heard.received, rnd.problem, options.weight), heard["dc"], state.c)), {}

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)})
