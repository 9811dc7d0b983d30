"""FLTrust: rounds by hand in plain torch, and what holds of trust whatever attackers send."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import World, build, digits, flat, play, records
from test_personalised import LR, START, B, Params, X, fit, heard, rows_of
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.robust_rules import trust
from fedfleet.middleware.attacks.attacked import attacked
from fedfleet.middleware.attacks.attackers import Attackers
from fedfleet.middleware.attacks.kinds.updates import Scaled, SignFlip
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.errors import ClientError, ConfigError
from fedfleet.simulator.fleet.policies import Siwer
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import BatchPlan

STEPS = 5
OF = {"name": "fedavg", "steps": STEPS, "batch_size": B, "lr": LR}


def rooted(where: World, first: int, examples: int) -> World:
    """A world whose server has some of the rows."""
    p = where.population
    rows, one = p.indices[first : first + examples], torch.zeros(1, dtype=torch.int64)
    return World(where.task, p, InMemoryPopulation(p.data, rows, torch.tensor([0, examples]), one))


def world(partition: str = "dirichlet", net: dict[str, Any] | None = None, **options: Any) -> World:
    return rooted(digits("classification", partition, **({"net": net} if net else {}), **options), 100, 40)


WHERE = world(alpha=1.0, min_size=8)
EXACT = rooted(replace(WHERE, population=replace(WHERE.population, data={**WHERE.population.data, "x": X})), 100, 40)
BEFORE = T.map(Tensor.double, WHERE.task.init(0))
BN = world(alpha=1.0, min_size=8, net={"model": "cnn_bn"})
BAD = Attackers(torch.tensor([1, 2, 5, 8, 11, 12, 17, 18, 21, 25, 28]))


def fltrust(where: World = WHERE, invite: int = 12, **of: Any) -> Algorithm:
    return build("robust", where.task, CohortOptions(size=invite), of={**OF, **of}, rule="fltrust")


def under(attack: Any, algorithm: Algorithm, attackers: Attackers = BAD) -> Algorithm:
    return attacked(algorithm, attackers, attack.forged, None)


def moved_by(z: Params, batches: Any) -> Tensor:
    """What plain steps of SGD on such batches move a net by."""
    return flat(fit(z, batches)) - flat(z)


@pytest.mark.quick
@pytest.mark.parametrize(("inner", "block"), [("serial", 4), ("batched", 5)])
def test_rounds_are_those_by_hand(inner, block):
    """Of a cohort some are heard, some of whom send -3 times what they have learnt, of examples that are none of the server's."""
    alpha, plan = 0.7, BatchPlan(size=B, steps=STEPS)
    algorithm = under(SignFlip(share=0, scale=3.0), fltrust(server_optimizer={"lr": alpha}))
    z, seen = dict(START), []
    for t, record in enumerate(records(algorithm, EXACT, 3, z=BEFORE, inner=inner, block_size=block, policy=Siwer())):
        keys = [rng.fold(rng.key(0), of, t, 0) for of in ("client", "at server")]
        g0 = moved_by(z, rows_of(0, keys[1], 0, plan, World(EXACT.task, EXACT.root)))
        total, whole = torch.zeros_like(g0), 0.0
        for c in heard(record):
            g = moved_by(z, rows_of(c, keys[0], 0, plan, WHERE)) * (-3.0 if c in BAD.clients else 1.0)
            score = max(0.0, float(g @ g0 / (g.norm() * g0.norm())))
            total, whole = total + score * g0.norm() / g.norm() * g, whole + score
            seen.append((c in BAD.clients, score > 0))
        after = flat(z) + alpha * total / whole
        z = {
            n: v.view_as(z[n])
            for (n, _), v in zip(z.items(), after.split([v.numel() for v in z.values()]), strict=True)
        }
        torch.testing.assert_close(flat(record.state.state.z["x"]), after, rtol=1e-9, atol=1e-12)
        now = seen[-len(heard(record)) :]
        assert record.metrics["trusted"] == pytest.approx(sum(trusted for _, trusted in now) / len(now))
        assert {len(record.phases), int(record.phases[0].counts["client_steps"])} == {1, STEPS * len(now)}
    assert {(True, False), (False, True)} <= set(seen)
    assert len(seen) < 3 * 12


def test_trust_is_the_cosine_where_it_is_above_nought():
    products, norms = torch.tensor([6.0, -6.0, 0.0, 1.0, torch.nan]).double(), torch.tensor([2.0, 2, 3, 0, 1]).double()
    assert trust(products, norms, 4.0).tolist() == [0.75, 0.0, 0.0, 0.0, 0.0]
    assert trust(products, norms, 0.0).tolist() == [0.0] * 5


def test_how_long_an_update_is_changes_nothing_and_what_is_turned_counts_for_nothing():
    plain, long, short, turned, far = (
        play(a, WHERE, 2)[-1]
        for a in (
            fltrust(),
            *(under(Scaled(share=0, factor=f), fltrust()) for f in (50.0, 0.01)),
            *(under(SignFlip(share=0, scale=s), fltrust()) for s in (1.0, 30.0)),
        )
    )
    for other in (long, short):
        torch.testing.assert_close(flat(other), flat(plain), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(flat(far), flat(turned), rtol=1e-3, atol=1e-5)
    assert float((flat(turned) - flat(plain)).abs().max()) > 1e-3


def alike(root: World) -> World:
    """Clients that all hold what the server does."""
    p, clients = root.root, 6
    offsets = torch.arange(clients + 1) * len(p.indices)
    domain = torch.zeros(clients, dtype=torch.int64)
    return replace(root, population=InMemoryPopulation(p.data, p.indices.repeat(clients), offsets, domain))


@pytest.mark.parametrize("where", [WHERE, BN], ids=["plain", "counting"])
def test_where_nobody_is_trusted_the_model_stays(where):
    everybody, where = Attackers(torch.arange(30)), alike(where)
    (record,) = records(under(SignFlip(share=0), fltrust(where, 4), everybody), where, 1)
    assert record.metrics == {"trusted": 0.0, "attackers": 1.0}
    assert torch.equal(flat(record.state.state.z), flat(where.task.init(0)))


@pytest.mark.parametrize("of", [{}, {"name": "scaffold"}, {"server_optimizer": {"lr": 0.5, "momentum": 0.8}}])
def test_where_all_learn_what_the_server_does_it_is_the_algorithm_itself(of):
    """SCAFFOLD: the server keeps a control of its own as its clients do, or it would move elsewhere from the second round on."""
    where, of = alike(EXACT), {**OF, "batch_size": 40, **of}
    plain = build(of["name"], where.task, CohortOptions(size=6), **{k: v for k, v in of.items() if k != "name"})
    trusting = play(fltrust(where, 6, **of), where, 3, z=BEFORE)
    for one, other in zip(trusting, play(plain, where, 3, z=BEFORE), strict=True):
        torch.testing.assert_close(flat(one), flat(other), rtol=1e-9, atol=1e-12)


def test_a_run_is_the_same_however_clients_are_computed_and_wherever_uploads_lie():
    algorithm = under(SignFlip(share=0, scale=2.0), fltrust(name="scaffold"))
    one = play(algorithm, WHERE, 3, spilled_bytes=sys.maxsize, policy=Siwer())[-1]
    assert torch.equal(flat(one), flat(play(algorithm, WHERE, 3, spilled_bytes=0, policy=Siwer())[-1]))
    for inner in ("batched", "factored"):
        other = play(algorithm, WHERE, 3, inner=inner, policy=Siwer())[-1]
        torch.testing.assert_close(flat(other), flat(one), rtol=1e-4, atol=1e-5)
    assert not torch.equal(flat(one), flat(play(algorithm, WHERE, 3, policy=Siwer(), seed=1)[-1]))


def test_what_layers_count_is_averaged_by_trust():
    (record,) = records(under(SignFlip(share=0), fltrust(BN)), BN, 1)
    (honest,) = records(fltrust(BN), BN, 1)
    counted = flat(record.state.state.z["b"])
    assert 0 < record.metrics["trusted"] < honest.metrics["trusted"]
    assert not torch.equal(counted, flat(BN.task.init(0)["b"]))
    assert not torch.allclose(counted, flat(honest.state.state.z["b"]))


@pytest.mark.parametrize(
    ("of", "says"),
    [("fedga", "its clients hold out examples"), ("vrex", "each of its clients is sent something of its own")],
)
def test_work_that_the_server_cannot_do_is_refused(of, says):
    with pytest.raises(ConfigError, match=says):
        play(
            build(
                "robust",
                WHERE.task,
                of={"name": of, "steps": 1, **({"rounds": 2} if of == "fedga" else {})},
                rule="fltrust",
            ),
            WHERE,
            1,
        )


def test_that_the_server_diverges_is_said_and_it_is_not_dropped():
    p = WHERE.root
    wild = replace(WHERE, root=replace(p, data={**p.data, "x": p.data["x"] * 1e38}))
    with pytest.raises(ClientError, match="the server's own work: client 0, phase 'root_train'"):
        play(fltrust(), wild, 1, faults=Faults(non_finite="drop_client"))
