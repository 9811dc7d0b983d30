"""The methods FedMM is compared with: rounds by hand, limits, and the cases in which one is another."""

import pytest
import torch
from cases import CASES
from harness import Bowl, Game, World, build, digits, flat, play, point, records, rows, script, xy

from fedfleet.algorithms.fedrobust import FedRobustOptions
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import Siwer
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import Batch
from fedfleet.tasks.adaptation import AdaptationOptions, DomainAdaptation
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.options import DataShape, ModelOptions

CLIENTS = [(1.0, 1.0, 1.0, 2.0, -1.0), (3.0, -0.5, 2.0, -4.0, 3.0), (2.0, 0.3, 1.0, 1.0, 0.5)]
GAME = World(Game(), rows(*([c] for c in CLIENTS[:2])))
THREE = World(Game(), rows(*([c] for c in CLIENTS)))
SADDLE = (20 / 49, 36 / 49)
STEP = {"batch_size": 1, "lr": 0.05}
COHORTS = [[0], [1, 2], [0, 2], [1], [0, 1, 2]]
ADAPTATION = digits("domain_adaptation")
INVITE = CohortOptions(size=9)


def slope(client, x, y):
    """The direction at a point: descent in x, ascent in y."""
    a, b, c, p, q = client
    return a * x + b * y + p, -(b * x - c * y + q)


# -- GT-GDA


@pytest.mark.parametrize("steps", [1, 3])
def test_gradient_tracking_by_hand_whoever_is_heard(monkeypatch, steps):
    script(monkeypatch, COHORTS)
    algorithm = build("gt_gda", THREE.task, steps=steps, batch_size=1, lr=0.06, dual_lr=0.04)
    z, mean, last = (1.0, -2.0), (0.0, 0.0), [(0.0, 0.0)] * 3
    for cohort, r in zip(COHORTS, records(algorithm, THREE, 5, z=point(*z)), strict=True):
        ends, change = [], [0.0, 0.0]
        for i in cohort:
            at, g = z, last[i]
            s = mean
            for _ in range(steps):
                new = slope(CLIENTS[i], *at)
                s = tuple(a + b - c for a, b, c in zip(s, new, g, strict=True))
                at, g = (at[0] - 0.06 * s[0], at[1] - 0.04 * s[1]), new
            ends.append(at)
            change = [c + b - a for c, b, a in zip(change, g, last[i], strict=True)]
            last[i] = g
        z = tuple(sum(e[k] for e in ends) / len(ends) for k in range(2))
        mean = tuple(m + c / 3 for m, c in zip(mean, change, strict=True))
        assert xy(r.state.z) == pytest.approx(z, abs=1e-12)
        assert xy(r.state.s) == pytest.approx(mean, abs=1e-12)
        assert mean == pytest.approx([sum(g[k] for g in last) / 3 for k in range(2)], abs=1e-12)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.slow
def test_gradient_tracking_comes_to_the_saddle_without_noise(steps):
    algorithm = build("gt_gda", GAME.task, steps=steps, **STEP)
    assert xy(play(algorithm, GAME, 400 // steps, z=point(0, 0))[-1]) == pytest.approx(SADDLE, abs=1e-6)


# -- GT-HSGD


class Drawn(Game):
    """d (x^2 / 2 + y), with the noise d of a step."""

    def _loss(self, z, batch, ctx, key):
        d = rng.normal(key, (), torch.float64)
        return d * (z["x"]["x"] ** 2 / 2 + z["y"]["y"]) + 0 * batch.x.sum(), {}


def test_estimates_recurse_on_the_noise_of_the_step():
    """y moves by v_y = b d + (1 - b) v_y, which tells d; x then by d x + (1 - b) (v_x - d x_before)."""
    drawn, b, lr = World(Drawn(), rows([CLIENTS[0]])), 0.3, 0.2
    algorithm = build("gt_hsgd", drawn.task, CohortOptions(size=1), batch_size=1, lr=lr, b=b)
    x, y = before = (1.0, -1.0)
    vx = vy = None
    seen = []
    for z in play(algorithm, drawn, 5, z=point(x, y)):
        moved = (xy(z)[1] - y) / lr
        d = moved if vy is None else (moved - (1 - b) * vy) / b
        vx, vy = (d * x if vx is None else d * x + (1 - b) * (vx - d * before[0])), moved
        assert xy(z)[0] == pytest.approx(x - lr * vx, abs=1e-12)
        before, (x, y) = (x, y), xy(z)
        seen.append(round(d, 6))
    assert len(set(seen)) == 5


def test_an_estimate_without_noise_is_the_gradient_whoever_is_heard(monkeypatch):
    for b in (0.1, 1.0):
        script(monkeypatch, COHORTS)
        z = (1.0, -2.0)
        found = play(build("gt_hsgd", THREE.task, **STEP, dual_lr=0.08, b=b), THREE, 5, z=point(*z))
        for cohort, after in zip(COHORTS, found, strict=True):
            d = [sum(slope(CLIENTS[i], *z)[k] for i in cohort) / len(cohort) for k in range(2)]
            z = (z[0] - 0.05 * d[0], z[1] - 0.08 * d[1])
            assert xy(after) == pytest.approx(z, abs=1e-12)


def test_with_nothing_kept_it_is_one_step_of_descent_ascent():
    options = {"batch_size": 7, "lr": 0.05}
    a, b, c = (
        play(build(name, ADAPTATION.task, INVITE, **options, **more), ADAPTATION, 3, inner="batched", policy=Siwer())
        for name, more in (("gt_hsgd", {"b": 1.0}), ("fedsgda", {}), ("gt_hsgd", {"b": 0.1}))
    )
    torch.testing.assert_close(flat(a[-1]), flat(b[-1]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(flat(c[0]), flat(b[0]), rtol=1e-5, atol=1e-6)  # the first estimate is a gradient
    assert not torch.allclose(flat(a[-1]), flat(c[-1]), rtol=1e-3, atol=1e-4)


# -- FedRobust


def images(clients=2, channels=3):
    """A few small images a client, in double precision, and a logistic regression."""
    key, n = rng.key(2), 4 * clients
    x = rng.normal(rng.fold(key, "x"), (n, channels, 2, 2), torch.float64)
    y = (3 * rng.uniform(rng.fold(key, "y"), n)).long()
    offsets = 4 * torch.arange(clients + 1)
    population = InMemoryPopulation({"x": x, "y": y}, torch.arange(n), offsets, torch.zeros(clients).long())
    task = Classification(ModelOptions(model="logistic"), DataShape((channels, 2, 2), 3))
    return World(task, population)


@pytest.mark.parametrize(("kind", "shape"), [("channel", (3, 1, 1)), ("diagonal", (3, 2, 2))])
def test_affine_shifts_by_hand(kind, shape):
    """Two clients, two steps, three rounds: weights averaged, shifts kept."""
    world = images()
    z0 = T.map(torch.Tensor.double, world.task.init(0))
    options = {"steps": 2, "batch_size": 4, "lr": 0.3, "shift_lr": 0.7, "penalty": 0.2, "shift": kind}
    found = play(build("fedrobust", world.task, **options), world, 3, z=z0)
    w, b = z0["x"]["1.weight"], z0["x"]["1.bias"]
    shifts = [(torch.ones(shape).double(), torch.zeros(shape).double())] * 2
    for z in found:
        ends = []
        for i in range(2):
            x, y = (world.population.data[k][4 * i : 4 * i + 4] for k in ("x", "y"))
            at = [w, b, *shifts[i]]
            for _ in range(2):
                u, v, scale, offset = (t.clone().requires_grad_() for t in at)
                logits = (scale * x + offset).flatten(1) @ u.T + v
                loss = torch.nn.functional.cross_entropy(logits, y)
                value = loss - 0.2 * (((scale - 1) ** 2).sum() + (offset**2).sum())
                g = torch.autograd.grad(value, (u, v, scale, offset))
                at = [t + r * d for t, r, d in zip(at, (-0.3, -0.3, 0.7, 0.7), g, strict=True)]
            ends.append(at[:2])
            shifts[i] = (at[2], at[3])
        w, b = ((ends[0][k] + ends[1][k]) / 2 for k in range(2))
        torch.testing.assert_close(z["x"]["1.weight"], w, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(z["x"]["1.bias"], b, rtol=1e-12, atol=1e-12)
    assert set(found[-1]) == {"x"}


def test_shifts_of_vectors_and_on_a_minimax_task():
    made = Classification(ModelOptions(model="logistic"), DataShape((5,), 3))
    for kind in ("channel", "diagonal"):
        assert [tuple(v.shape) for v in T.leaves(made.no_shift(kind))] == [(5,), (5,)]
    algorithm = build("fedrobust", ADAPTATION.task, INVITE, steps=2, batch_size=7, lr=0.05)
    z = play(algorithm, ADAPTATION, 2, inner="batched")[-1]
    assert set(z) == {"x", "y"}
    still = build("fedrobust", ADAPTATION.task, INVITE, steps=2, batch_size=7, lr=0.05, shift_lr=1e-12)
    plain = build("fedavg_sgda", ADAPTATION.task, INVITE, steps=2, batch_size=7, lr=0.05)
    a, b = (play(one, ADAPTATION, 2, inner="batched")[-1] for one in (still, plain))
    torch.testing.assert_close(flat(a), flat(b), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(flat(z), flat(b), rtol=1e-4, atol=1e-5)


def test_the_rate_of_shifts_follows_the_schedule():
    options = {"steps": 1, "batch_size": 4, "lr_schedule": {"kind": "step", "every": 1, "factor": 0.5}}
    (phase,) = build("fedrobust", images().task, **options).phases
    assert phase.client_state is not None
    assert FedRobustOptions(**options, lr=0.2).rates(1, ("x",)) == {"x": 0.1, "shift": 0.1}
    assert FedRobustOptions(**options, lr=0.2, shift_lr=1.0).rates(1, ("x",)) == {"x": 0.1, "shift": 0.5}
    assert FedRobustOptions(**options, adversary="shared").rates(0, ("x", "y")) == {"x": 0.1, "y": 0.1}


def test_with_a_shared_adversary_it_is_local_sgda():
    options = {"steps": 2, "batch_size": 7, "lr": 0.05}
    a, b = (
        flat(play(build(name, ADAPTATION.task, INVITE, **options, **more), ADAPTATION, 2, inner="batched")[-1])
        for name, more in (("fedrobust", {"adversary": "shared"}), ("local_sgda", {}))
    )
    assert torch.equal(a, b)


# -- all of them


@pytest.mark.parametrize("name", [n for n, (task, _) in CASES.items() if task in ("auc", "domain_adaptation")])
@pytest.mark.parametrize("loss", ["cdan_e", "mdd"])
@pytest.mark.slow
def test_every_minimax_method_runs_on_domain_adaptation(name, loss):
    world = digits("domain_adaptation", net={"hidden": (8,), "loss": loss})
    if name in ("fedka", "fada"):
        with pytest.raises(ConfigError, match="loss=dann"):
            build(name, world.task, INVITE, **CASES[name][1])
        return
    algorithm = build(name, world.task, INVITE, **CASES[name][1])
    z = play(algorithm, world, 2, inner="batched")[-1]
    assert bool(torch.isfinite(flat(z)).all())
    assert not torch.equal(flat(z), flat(world.task.init(0)))


@pytest.mark.parametrize("net", [{"loss": "dann"}, {"loss": "mdd", "mdd_reduction": "per_domain_mean"}])
def test_chunks_of_a_full_gradient_hold_both_kinds_in_proportion(net):
    """With all labelled rows in the first chunks the labels would count by the half, and the gradient be another by 0.3."""
    world, found = digits("domain_adaptation", clients=3, net={"hidden": (8,), **net}), []
    where = World(world.task, world.population.withholding(torch.arange(len(world.population.data["y"])) % 3 == 0))
    z = world.task.init(0)
    for chunk in (10_000, 40):
        algorithm = build("parallel_sgda", world.task, CohortOptions(size=3), gradient_chunk=chunk, lr=1.0)
        (end,) = play(algorithm, where, 1, z=z)
        found.append(flat(T.sub(z, end)))
    assert (found[0] - found[1]).norm() < 0.03 * found[0].norm()


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold"])
def test_minimisation_learns_from_sources_alone(name):
    world = digits("domain_adaptation", net={"hidden": (8,), "loss": "none"})
    assert "target" not in world.population.data
    z = play(build(name, world.task, INVITE, steps=3, batch_size=7), world, 1, inner="batched")[-1]
    assert set(z) == {"x"}


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [("fedsgda", 1, 1), ("fedavg_sgda", 1, 1), ("fedprox_sgda", 1, 1), ("gt_gda", 2, 2), ("gt_hsgd", 1, 1)],
)
def test_what_travels(name, up, down):
    d = len(flat(ADAPTATION.task.init(0)))
    for r in records(build(name, ADAPTATION.task, INVITE, batch_size=7), ADAPTATION, 2, inner="batched"):
        assert r.phases[0].counts["floats_up"] == 9 * up * d
        assert r.phases[0].counts["floats_down"] == 9 * down * d


def test_shifts_do_not_travel():
    world = images()
    d = len(flat(world.task.init(0)))
    z = T.map(torch.Tensor.double, world.task.init(0))
    for r in records(build("fedrobust", world.task, steps=1, batch_size=4), world, 2, z=z):
        assert r.phases[0].counts["floats_up"] == r.phases[0].counts["floats_down"] == 2 * d


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("fedsgda", {"steps": 5}, "steps"),
        ("fedsgda", {"epochs": 1}, "give steps or epochs"),
        ("gt_hsgd", {"b": 0}, "b"),
        ("fedrobust", {"adversary": "shared", "penalty": 3.0}, "penalty=3.0 is not for adversary=shared: leave it out"),
        ("fedprox_sgda", {"mu2": -1}, "mu2"),
    ],
)
def test_options_without_meaning_are_refused(name, options, line):
    with pytest.raises(ValueError, match=line):
        build(name, ADAPTATION.task, **options)


def test_inputs_that_cannot_be_shifted_are_refused():
    for task in (GAME.task, Bowl()):
        with pytest.raises(ConfigError, match=r"algorithm.adversary='affine': .* has no objective of shifted inputs"):
            build("fedrobust", task, **STEP)


def test_shifted_integers_are_read_as_numbers():
    made = DomainAdaptation(AdaptationOptions(hidden=(4,)), DataShape((3,), 2))
    z = {**made.init(0), **made.no_shift("diagonal")}

    def value(objective, x):
        batch = Batch({"x": torch.tensor([x]), "y": torch.tensor([1])}, torch.ones(1))
        return float(made.objectives[objective].loss(z, batch, None, rng.key(0))[0])

    assert value("shifted", [1, 2, 3]) == value("train", [1, 2, 3])
    z["shift"] = {"scale": torch.tensor([2.0, 1, 1]), "offset": torch.tensor([0.0, 0, -4])}
    assert value("shifted", [1, 2, 3]) == value("train", [2, 2, -1])
