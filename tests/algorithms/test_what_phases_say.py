"""Facts that an algorithm states of itself, by which features and options are refused."""

from tests.algorithms.cases import ROWS
from tests.algorithms.histories import How, algorithm, world

DATED = {
    "fediir", "fedpac", "fedga", "stablefdg", "vrex", "coral", "mmd", "fishr", "fish", "omg", "robust", "drfa", "fact", "kd3a",
    "fedka", "fada", "cdma_ada", "cluster_fedvarp", "clustered_sampling", "f3ast", "fedavg, known p", "cdma_ada, fedau",
}  # fmt: skip
"""Algorithms with answers that are of use in their own round alone."""
REWEIGHTED = {
    "cluster_fedvarp", "clustered_sampling", "f3ast", "fedfix", "fedavg, known p", "local_sgda, fedvarp", "cdma_ada, fedau",
}  # fmt: skip
"""Algorithms whose server gives answers weights of its own."""
MINIMISES = {
    "fedper", "lg_fedavg", "fedbn", "fedrep", "fedbabu", "fedrod", "ditto", "fedsam", "mofedsam", "fediir", "fedpac", "fedas",
    "fedga", "fedsr", "stablefdg", "irm", "vrex", "coral", "mmd", "fishr", "fish", "omg", "robust", "qffl", "fact", "kd3a", "mcd",
    "m3sda", "fednova",
}  # fmt: skip
"""Algorithms for tasks without a dual part."""


def test_facts_are_stated_by_those_that_they_are_true_of():
    made = {name: algorithm(name, world(name, How()), How()) for name in ROWS}
    assert {name for name, a in made.items() if any(phase.dated for phase in a.phases)} == DATED
    assert {name for name, a in made.items() if any(phase.reweighted for phase in a.phases)} == REWEIGHTED
    assert {name for name, a in made.items() if a.minimises} == MINIMISES
