"""Optimisers of clients that last from round to round."""

import itertools

import pytest
import torch

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.author import Lasting, rng
from fedfleet.simulator.fleet.responses import Federation
from tests.algorithms.cases import ASYNCHRONOUS, ROWS
from tests.algorithms.harness import build, digits, flat, play, positions
from tests.algorithms.histories import How, history
from tests.algorithms.scripted import BOWLS, HEARD, Scripted
from tests.algorithms.test_contract import check_close, check_equal, options_of
from tests.parts import slow_but

LR, M = 0.2, 0.7
PERSIST = {"momentum": M, "state": "persist"}
TAKE = [name for name in ROWS if "client_optimizer" in options_of(name) and name not in ASYNCHRONOUS]
"""Rows whose clients have an optimiser. Asynchronous ones are refused."""
ALONE = digits("classification", "iid", clients=1, dtype=torch.float64)


@pytest.mark.parametrize("name", slow_but(TAKE, "fedavg", "fedpac", "fedawe", "fedprox, mifa"))
def test_lasting_optimisers_keep_the_contract(name):
    """In all ways to run, also resumed; a round is another from the second on, where a client is heard again."""
    serial, factored = (history(name, How(inner, lasts=True)) for inner in ("serial", "factored"))
    check_close(serial, history(name, How("batched", block_size=3, lasts=True)), 1e-10)
    check_close(serial, factored, 1e-10)
    check_equal(factored, history(name, How("factored", lasts=True, resumed=True)))
    reset, lasting = (history(name, How("factored", momentum=0.9, lasts=lasts)) for lasts in (False, True))
    assert lasting.kept.numel() > reset.kept.numel()
    torch.testing.assert_close(lasting.models[0], reset.models[0], rtol=1e-10, atol=1e-10)
    assert float((lasting.models[-1] - reset.models[-1]).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("given", "torchs"),
    [
        ({"momentum": 0.9}, lambda z: torch.optim.SGD(z, LR, momentum=0.9)),
        ({"momentum": 0.9, "nesterov": True}, lambda z: torch.optim.SGD(z, LR, momentum=0.9, nesterov=True)),
        ({"name": "adam", "eps": 1e-3}, lambda z: torch.optim.Adam(z, LR, eps=1e-3)),
        ({"name": "AdamW", "weight_decay": 0.3}, lambda z: torch.optim.AdamW(z, LR, weight_decay=0.3)),
        ({"name": "Adagrad"}, lambda z: torch.optim.Adagrad(z, LR)),
    ],
)
def test_one_client_is_centralised_training(given, torchs):
    """A round is a step."""
    data = ALONE.population.data
    options = {"steps": 1, "batch_size": len(data["y"]), "client_optimizer": {**given, "state": "persist"}}
    z = T.map(lambda v: v.double(), ALONE.task.init(0))
    found = play(build("fedavg", ALONE.task, CohortOptions(size=1), lr=LR, **options), ALONE, 4, z=z)
    z = T.map(lambda v: v.clone().requires_grad_(), z)
    optimizer = torchs(T.leaves(z))
    for each in found:
        _step(optimizer, z)
        torch.testing.assert_close(flat(each), flat(T.map(torch.detach, z)), rtol=1e-8, atol=1e-10)


def _step(*optimizers, pull=None):
    *optimizers, z = optimizers
    data = ALONE.population.data
    for leaf in T.leaves(z):
        leaf.grad = None
    loss = torch.nn.functional.cross_entropy(ALONE.task.logits(z, data["x"]), data["y"])
    if pull is not None:
        weight, to = pull
        away = (a - b.detach() for a, b in zip(T.leaves(z), T.leaves(to), strict=True))
        loss = loss + weight / 2 * sum(d.square().sum() for d in away)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("name", ["fedrep", "fedpac"])
def test_head_and_body_have_an_optimiser_each(name):
    whole = {"batch_size": len(ALONE.population.data["y"]), "steps": 1, "head_steps": 1}
    more = {"pull": 0.0} if name == "fedpac" else {}
    given = {**whole, **more, "client_optimizer": {"name": "adam", "eps": 1e-3, "state": "persist"}}
    algorithm = build(name, ALONE.task, CohortOptions(size=1), lr=LR, **given)
    z = T.map(lambda v: v.double(), ALONE.task.init(0))
    found = play(algorithm, ALONE, 4, z=z)
    z = T.map(lambda v: v.clone().requires_grad_(), z)
    at_head = ALONE.task.leaves["head"]
    parts = [[leaf for key, leaf in z["x"].items() if (key in at_head) == head] for head in (True, False)]
    head, body = (torch.optim.Adam(part, LR, eps=1e-3) for part in parts)
    for each in found:
        _step(head, z)
        _step(body, z)
        got = tuple(leaf for key, leaf in each["x"].items() if key not in at_head)
        torch.testing.assert_close(flat(got), flat(tuple(leaf.detach() for leaf in parts[1])), rtol=1e-7, atol=1e-9)


def test_own_models_of_ditto_have_an_optimiser_of_their_own(monkeypatch):
    whole = {"batch_size": len(ALONE.population.data["y"]), "steps": 1, "own_steps": 1, "pull": 0.5}
    algorithm = build("ditto", ALONE.task, CohortOptions(size=1), lr=LR, client_optimizer=PERSIST, **whole)
    start, where = T.map(lambda v: v.double(), ALONE.task.init(0)), positions(monkeypatch)
    found = play(algorithm, ALONE, 4, z=start)
    common, own = (T.map(lambda v: v.clone().requires_grad_(), start) for _ in range(2))
    of_common, of_own = (torch.optim.SGD(T.leaves(z), LR, momentum=M) for z in (common, own))
    for each in found:
        before = T.map(lambda v: v.detach().clone(), common)
        _step(of_common, common)
        _step(of_own, own, pull=(0.5, before))
        torch.testing.assert_close(flat(each), flat(T.map(torch.detach, common)), rtol=1e-8, atol=1e-10)
    kept = where[0].memory.store.get(torch.tensor([0]), lambda: None)
    torch.testing.assert_close(flat(kept.client_state), flat(T.map(torch.detach, own)), rtol=1e-8, atol=1e-10)


def test_a_client_that_is_not_heard_keeps_its_velocity(monkeypatch):
    options = {"steps": 1, "batch_size": 1, "lr": LR, "client_optimizer": PERSIST}
    where, algorithm = positions(monkeypatch), build("fedavg", BOWLS.task, CohortOptions(size=4), **options)
    online = Federation(availability=Scripted(HEARD))
    found = [float(z["x"]["w"]) for z in play(algorithm, BOWLS, len(HEARD), federation=online)]
    rows, w, v, hand = BOWLS.population.data["x"].tolist(), 1.0, dict.fromkeys(range(4), 0.0), []
    for heard in HEARD:
        for c in heard:
            a, m = rows[c]
            v[c] = M * v[c] + a * (w - m)
        w -= LR * sum(v[c] for c in heard) / len(heard)
        hand.append(w)
    assert found == pytest.approx(hand, rel=1e-12)
    kept = where[0].memory.store.get(torch.arange(4), lambda: None)
    assert kept.optimizer["x"]["w"].tolist() == pytest.approx(list(v.values()), rel=1e-12)


def test_own_models_go_on_where_a_round_would():
    """With the optimiser that was kept, where they come of a round's training; else as they did."""
    z = {"x": {"w": torch.tensor(1.0, dtype=torch.float64)}}
    algorithm = build("fedavg", BOWLS.task, client_optimizer=PERSIST)
    kept = Lasting(None, {"x": {"w": torch.tensor(3.0, dtype=torch.float64)}})
    own = algorithm.personal
    begun = own.work.client_init({"z": z}, kept, None, rng.key(0))
    assert begun.optimizer == kept.optimizer
    assert own.client_state({"z": z}) == Lasting(None, T.zeros_like(z))
    babu = build("fedbabu", ALONE.task, client_optimizer=PERSIST).personal
    assert babu.client_state is None
    rep = build("fedrep", ALONE.task, client_optimizer=PERSIST)
    z = ALONE.task.init(0)
    shared = rep.personal.message(rep.init(z, rng.key(0), None), 0).merged()
    fresh = rep.personal.client_state(shared)
    ones = T.map(torch.ones_like, fresh)
    begun = rep.personal.work.client_init(shared, ones, None, rng.key(0))
    assert float(flat(begun.optimizer).abs().max()) == 0.0
    assert rep.personal.work.client_final(shared, ones, None, begun)[1] == ones


def test_all_that_take_one_say_so_in_one_option():
    taking = {name for name, entry in ALGORITHMS.items() if "client_optimizer" in entry.options.model_fields}
    assert taking == {name.partition(",")[0] for name in itertools.chain(TAKE, ASYNCHRONOUS)}
    for name in taking:
        with pytest.raises(ValueError, match="state=persist: sgd without momentum"):
            ALGORITHMS[name].options(client_optimizer={"state": "persist"})
