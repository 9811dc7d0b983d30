"""The start of an inversion attack: it is what the server really got, and the client's code explains it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import pytest
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from fedfleet.assembly.prepared import Prepared
from fedfleet.config.schema import load
from fedfleet.inversion.attack import attacked, check
from fedfleet.inversion.observed_update import observed_update, total, upload
from fedfleet.inversion.rebuilding import How, inferred, matched, psnr, rebuilt, ssim
from fedfleet.simulator.algorithm import Exchanging
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.simulate import Position, play, start
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.population import decode
from tests.refusals import all_refused, refused

TINY = {
    "rounds": 3, "population": {"clients": 340, "partition": "iid"}, "task": {"model": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedavg", "steps": 3, "batch_size": 1, "lr": 0.1}, "cohort": {"size": 4},
    "executor": {"kind": "local"},
}  # fmt: skip
SKEWED = {"kind": "quantity_skew", "alpha": 20, "min_size": 2}
WHOLE = {
    "population.partition": SKEWED,
    "algorithm.batch_size": 8,
}  # all that a client has, two to eight examples, in a step
ROBUST = {"algorithm": {"name": "robust", "of": {"name": "fedavg", "steps": 2, "batch_size": 4}, "rule": "median"}}
PARTIAL = {
    "algorithm.steps": 20,
    "devices": {"kind": "lognormal", "flop_per_example": 1e9},
    "cohort": {"size": 8, "partial_work": True, "deadline_s": 2.0},
}
EXACTLY = {"clip_norm": 0.01, "delta": 1e-3, "noise_multiplier": 1e-9}


def made(**given: Any) -> Prepared:
    left_out = {key for key in TINY if key in given and given[key] is None}
    base = {key: value for key, value in TINY.items() if key not in left_out}
    return Prepared(load(base, {key: value for key, value in given.items() if key not in left_out}))


def begun(x: Prepared, rounds: int = 0) -> Position:
    at = start(x.algorithm, x.z, x.problem, x.conditions())
    executor = LocalExecutor()
    executor.start(x.setup())
    for _ in range(rounds):
        at.accept(play(x.algorithm, at, x.problem, x.conditions(), executor))
    return at


class Recording(LocalExecutor):
    """Keeps what blocks send."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Any]] = []

    def map(self, job: Any, shared: Any, tasks: Iterable[Any], **given: Any) -> Iterator[Any]:
        for task in tasks:
            for found in super().map(job, shared, [task], **given):
                self.seen.append((task.clients, found.partials["z"]))
                yield found


@pytest.mark.parametrize("given", [
    {}, {"executor.inner": "serial", "selection": "round_robin"},
    {"transforms.up": [{"name": "top_k", "share": 0.1, "error_feedback": True}],
     "availability": {"kind": "bernoulli", "rate": 0.7}},
    {"transforms.down": ["bf16"], "attack": {"kind": "sign_flip", "share": 0.5}},
], ids=str)  # fmt: skip
def test_it_is_to_the_bit_what_the_server_gets(given):
    x = made(**ROBUST, **given)
    at, executor = begun(x, 1), Recording()
    exchange = observed_update(x.algorithm, at, x.problem, x.conditions())
    executor.start(x.setup())
    play(x.algorithm, at, x.problem, x.conditions(), executor)  # after it was overheard: that has changed nothing
    for clients, stored in executor.seen:
        for row, client in enumerate(clients.tolist()):
            came, wanted = upload(x.setup(), exchange, client)["z"], T.index(stored.stacked(), row)
            assert all(map(torch.equal, T.leaves(came), T.leaves(wanted)))
    assert sorted(exchange.clients.tolist()) == sorted(torch.cat([c for c, _ in executor.seen]).tolist())


@pytest.mark.parametrize("execute", [False, True])
def test_of_a_secure_sum_it_is_the_mean_that_the_server_learns(execute):
    secure = {"secure_aggregation": {"bits": 12, "clip": 0.3, "dropout": {"masked": 0.2}, "execute": execute}}
    x = made(**WHOLE, **secure, **{"cohort.size": 8})
    at = begun(x, 1)
    exchange = observed_update(x.algorithm, at, x.problem, x.conditions())
    executor = LocalExecutor()
    executor.start(x.setup())
    state = play(x.algorithm, at, x.problem, x.conditions(), executor).state
    plain = Prepared(load(TINY, WHOLE)).algorithm.phases[0]
    came = total(x.setup(), exchange, plain)["z"]
    assert all(map(torch.equal, T.leaves(came), T.leaves(x.algorithm.views["global"].params(state))))


@pytest.mark.parametrize(("given", "close"), [
    ({"algorithm.steps": None, "algorithm.epochs": 2}, 1e-5),
    ({"algorithm": {"name": "drfa", "steps": 5}, "domains": "label"}, 1e-5),
    ({"algorithm": {"name": "extra_step"}, "task": {"name": "auc"}, "executor.inner": "serial"}, 1e-5),
    ({"transforms.up": [{"name": "clip", "norm": 0.01}]}, 1e-4),
    ({"transforms.up": [{"name": "top_k", "share": 1.0}], "transforms.down": ["bf16"]}, 1e-4),
    ({"example_privacy": EXACTLY}, 1e-4), ({"example_privacy": {**EXACTLY, "batches": "shuffled"}}, 1e-4),
    ({"secure_aggregation": {"bits": 24, "clip": 1.0}}, 1e-4),
    ({"secure_aggregation": {"bits": 24, "clip": 1.0}, "algorithm.weight": "uniform"}, 1e-4), (PARTIAL, 1e-5),
], ids=str)  # fmt: skip
def test_the_clients_own_examples_explain_it(given, close):
    x = made(**{"population.partition": SKEWED, "algorithm.batch_size": 2, **given})
    after = begun(x, 1)
    last = int(observed_update(x.algorithm, after, x.problem, x.conditions()).clients[-1])  # of the fewest steps
    at = attacked(x, after, last, 64)
    came = at.simulate(at.x, at.y)
    assert float((came - at.observed).norm()) <= close * float(at.observed.norm())
    others = at.simulate(at.x.flip(-1), at.y)
    assert float((others - at.observed).norm()) > 0.05 * float(at.observed.norm())


def test_a_round_may_ask_for_other_numbers_of_steps():
    x = made()
    whole = x.algorithm

    class Turn(Exchanging):
        def map_reduce(self, phase: Any, **given: Any) -> Any:
            return super().map_reduce(phase, **{**given, "steps": 7})

    phases = {p.name: p for p in whole.phases}
    vars(x)["algorithm"] = whole._replace(round=lambda state, rnd: whole.round(state, cast(Any, Turn(rnd, phases))))
    at = attacked(x, begun(x), None, 64)
    assert torch.allclose(at.simulate(at.x, at.y), at.observed, atol=1e-6)


def test_labels_are_told_by_the_last_layers_biases():
    moves = torch.eye(4) - torch.tensor([0.4, 0.3, 0.2, 0.1])  # a row a label: how far it moves each bias
    assert [int(inferred(3 * moves[c], moves, 1)) for c in range(4)] == [0, 1, 2, 3]
    seen = torch.tensor([0.5, 0.0, 0.375, 0.125]) @ moves
    assert inferred(seen, moves, 8).tolist() == [0, 0, 0, 0, 2, 2, 2, 3]
    assert inferred(seen + torch.tensor([0.02, 0.03, -0.03, -0.02]), moves, 8).tolist() == [0, 0, 0, 0, 2, 2, 2, 3]


def test_the_nearest_of_several_starts_is_kept():
    def simulate(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(3 * x).sum(0)

    wanted, shape = torch.tensor([1.0, -2.0]), (3, 2)
    found = [
        rebuilt(simulate, wanted, shape, torch.zeros(3), (-1.0, 1.0), How("dlg", 1, 0.0, n), rng.key(1)).distance
        for n in range(1, 7)
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_examples_are_matched_and_compared():
    a = torch.rand(3, 1, 12, 14, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([2, 0, 1])
    assert matched(a, a[order] + 0.01).tolist() == order.argsort().tolist()
    assert psnr(torch.tensor([0.04]), 2.0).item() == pytest.approx(20.0)
    noisy = (a + 0.3 * torch.randn(a.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    assert ssim(a, a, 2.0).tolist() == pytest.approx([1.0] * 3)
    blurred = lambda v: gaussian_filter(v, 1.5, truncate=3.5, axes=(2, 3))[..., 5:-5, 5:-5]  # noqa: E731
    p, q = a.double().numpy(), noisy.double().numpy()
    mp, mq, c1, c2 = blurred(p), blurred(q), 0.02**2, 0.06**2
    spread = blurred(p * p) - mp**2 + blurred(q * q) - mq**2
    wanted = (2 * mp * mq + c1) * (2 * (blurred(p * q) - mp * mq) + c2) / ((mp**2 + mq**2 + c1) * (spread + c2))
    assert ssim(a, noisy, 2.0).tolist() == pytest.approx(wanted.mean((1, 2, 3)).tolist())


def test_what_cannot_be_attacked_is_refused(subtests):
    def asked(given):
        x = made(**given)
        check(x)
        attacked(x, begun(x), None, 64)

    buffered = {"algorithm": {"name": "fedbuff", "concurrency": 4, "buffer": 2}, "cohort": None}
    rows = [
        ({"task": {"model": "cnn_bn"}}, "task.model='cnn_bn'"),
        (buffered, "algorithm.name='fedbuff': it is asynchronous"),
        ({"algorithm": {"name": "scaffold"}}, "algorithm.name='scaffold': its clients keep states"),
    ]
    all_refused(subtests, asked, rows)


def test_who_is_not_heard_and_too_many_examples_are_refused():
    x = made(**WHOLE)
    at = begun(x)
    heard = observed_update(x.algorithm, at, x.problem, x.conditions()).clients.sort().values.tolist()
    other = next(c for c in range(340) if c not in heard)
    refused(
        lambda: attacked(x, at, other, 64), f"--client {other}: it is not heard in round 0: choose one of {heard[0]}"
    )
    first, third = attacked(x, at, None, 64), attacked(x, at, heard[2], 64)
    assert [first.client, third.client] == [heard[0], heard[2]]
    test, label = x.evaluation["test"], int(first.y[0])
    assert torch.allclose(
        first.blind[0], decode(test["x"][test["y"] == label]).double().mean(0)
    )  # all that the label tells
    assert first.box == (-1.0, 1.0)
    with pytest.raises(ConfigError, match=r"^--examples 1: client \d+ has [2-8] to be rebuilt together: give more"):
        attacked(x, at, None, 1)
