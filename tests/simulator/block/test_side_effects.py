"""Nothing that client code or an evaluation holds may change under way: not by a net's buffers, nor in any other way."""

import itertools
import pickle
import random
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.chunk import Chunk, run_chunk
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.block.side_effects import ClosureTensors, Impure, Writes
from fedfleet.simulator.errors import ClientError
from fedfleet.simulator.work import BatchPlan, Message, Objective

CLIENTS = [4, 1, 5]
MODULE_LEVEL = nn.BatchNorm1d(3, affine=False)
"""A net that no closure holds, only the module."""


def squares(predict):
    """An objective on ``z["x"]["w"]`` (3,) and inputs that went through ``predict``."""
    return Objective(
        loss=lambda z, batch, ctx, key: (batch.mean((predict(batch.x) @ z["x"]["w"] - 1.0) ** 2), {}), sign={"x": 1}
    )


def in_a_closure():
    net = nn.BatchNorm1d(3, affine=False)
    return lambda x: functional_call(net, {}, (x,))


def in_an_object():
    class Task:
        def __init__(self):
            self.net = nn.Sequential(nn.Identity(), nn.BatchNorm1d(3, affine=False))

        def predict(self, x):
            return self.net(x)

    return Task().predict


def of_the_module():
    return lambda x: MODULE_LEVEL(x)


def without_a_module():
    mean, variance = torch.zeros(3), torch.ones(3)
    return lambda x: F.batch_norm(x, mean, variance, training=True)


def beyond_the_walk():
    """A tensor in an iterator, which no walk looks into."""
    endless = itertools.repeat(torch.zeros(3))

    def predict(x):
        next(endless).add_(1.0)
        return x

    return predict


def a_buffer_put_in_its_place():
    net = nn.Module()
    net.register_buffer("count", torch.zeros(()))

    def predict(x):
        net.count = net.get_buffer("count") + 1
        return x + 0 * net.get_buffer("count")

    return predict


def by_out():
    held = torch.zeros(3)
    return lambda x: x + 0 * torch.mul(torch.ones(3), 2.0, out=held)


WRITING = (
    in_a_closure, in_an_object, of_the_module, without_a_module, beyond_the_walk, a_buffer_put_in_its_place, by_out,
)  # fmt: skip


def test_writing_into_what_is_held_is_refused(federation, inner, subtests):
    for net in WRITING:
        with subtests.test(net.__name__):
            refused(federation, inner, net(), r"wrote into .*GroupNorm.*eval mode")


def refused(federation, inner, net, says):
    with pytest.raises(Impure, match=rf"phase 'train': client code {says}") as e:
        federation.with_(objective=squares(net)).run(inner, CLIENTS)
    assert "serial" not in str(e.value)  # which would give wrong numbers


SEEN = []
"""A list that no closure holds, only the module."""


def counted():
    calls = 0

    def predict(x):
        nonlocal calls
        calls += 1
        return x * calls

    return predict


def listed():
    return lambda x: x * (SEEN.append(1) or len(SEEN))


def by_its_own_generator():
    generator = torch.Generator().manual_seed(0)
    return lambda x: x + torch.rand(3, generator=generator)


def by_numpy():
    generator = np.random.default_rng(0)
    return lambda x: x * float(generator.random())


def by_numpy_s_global():
    return lambda x: x * float(np.random.rand())


def by_random():
    return lambda x: x * random.random()


def by_the_clock():
    return lambda x: x * (1.0 + time.perf_counter() % 1.0)  # no two calls lie a second apart


REMEMBERING = {
    counted: "changed 'calls'",
    listed: r"changed 'SEEN' \(a list\)",
    by_its_own_generator: r"changed 'generator' \(a Generator\)",
    by_numpy: r"changed 'generator' \(a Generator\)",
    by_numpy_s_global: 'changed "numpy\'s global generator"',
    by_random: 'changed "random\'s global generator"',
    by_the_clock: "does not give the same twice",
}


def test_what_python_remembers_is_refused(federation, inner, subtests):
    for net, says in REMEMBERING.items():
        with subtests.test(net.__name__):
            refused(federation, inner, net(), f"{says}.*draw from keys")


def test_what_is_remembered_once_and_for_all_is_welcome(federation, inner):
    known = {}

    def predict(x):
        return x * known.setdefault(x.shape[-1], len(known) + 1.0)

    federation.with_(objective=squares(predict)).run(inner, CLIENTS)


def test_a_generator_that_is_drawn_from_late_is_no_reason_to_run_serially(federation):
    generator = torch.Generator()

    def step(ops, shared, z, batch, at, key):
        return T.map(lambda v: v + (torch.rand(3, generator=generator) if at.k == 2 else 0.0), z)

    with pytest.raises(Impure, match=r"step 2: client code drew from a generator of torch: draw from keys"):
        federation.run("batched", CLIENTS, step=step)


def test_rows_that_do_not_count_may_change_nothing(federation, inner):
    for net in (nn.BatchNorm1d(3, track_running_stats=False), lambda x: x - x.mean(0)):
        refused(federation, inner, net, r"lets rows of weight 0.*GroupNorm or LayerNorm.*batch\.mean")


@pytest.mark.parametrize("per_step", [1, 2])
def test_statistics_of_the_rows_that_count_are_welcome(federation, inner, per_step):
    def loss(z, batch, ctx, key):
        weight = batch.weight[:, None]
        mean = (weight * batch.x).sum(0) / batch.count().clamp(min=1.0)
        shift = (batch.x @ z["x"]["w"]).detach().max()  # over all rows: no more than the last digits depend on it
        return batch.mean(((batch.x - mean) @ z["x"]["w"] - shift + shift) ** 2), {}

    def step(ops, shared, z, batch, at, key):
        for b in batch if per_step > 1 else (batch,):
            z = ops.step("train", z, 0.1, ops.grad("train", z, b, key)[0])
        return z

    plan = BatchPlan(size=2, steps=3, per_step=per_step)
    federation.with_(objective=Objective(loss=loss, sign={"x": 1}), plan=plan).run(inner, CLIENTS, step=step)


def test_statistics_that_stay_as_they_are_are_welcome(federation, inner):
    net = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.GroupNorm(1, 3), nn.Dropout(0.5)).eval()
    with torch.no_grad():
        net[0].get_buffer("running_mean").fill_(2.0)
    fine = federation.with_(objective=squares(lambda x: functional_call(net, {}, (x,))))
    reference = federation.with_(objective=squares(lambda x: F.group_norm((x - 2.0) / (1 + 1e-5) ** 0.5, 1)))
    found, wanted = (f.run(inner, CLIENTS).partials["z"].blocks for f in (fine, reference))
    torch.testing.assert_close(T.concat(found), T.concat(wanted))


def test_what_client_code_makes_itself_it_may_write_into(federation, inner):
    def loss(z, batch, ctx, key):
        total = torch.zeros(())
        total.add_(1.0)
        total = torch.tensor(0.5).mul_(2.0) + total + torch.zeros(4)[1:2].fill_(0.0)[0]
        return batch.mean((batch.x @ z["x"]["w"]) ** 2) * total, {}

    federation.with_(objective=Objective(loss=loss, sign={"x": 1})).run(inner, CLIENTS)


def test_dropout_in_training_mode_is_refused(federation, inner):
    refused(federation, inner, nn.Dropout(0.5), "drew from torch's global generator.*Dropout")


def test_a_write_after_the_trial_is_found_too(federation, inner):
    """The trial takes two steps; what begins at the third is found around the block."""
    held = torch.zeros(3)

    def step(ops, shared, z, batch, at, key):
        if at.k == 2:
            held.add_(1.0)
        return T.scale(1.0, z)

    with pytest.raises(Impure, match="wrote into 'held'"):
        federation.run(inner, CLIENTS, step=step)


def test_clients_at_fault_are_no_excuse(federation):
    with pytest.raises(Impure):
        federation.with_(objective=squares(in_a_closure())).run(
            "serial", CLIENTS, faults=Faults(on_client_error="drop_client")
        )


def evaluation(function):
    data = {"x": rng.normal(rng.key(0), (40, 3)), "y": torch.zeros(40, dtype=torch.int64)}
    return Setup(
        population=None,  # pyright: ignore[reportArgumentType]
        phases={},
        objectives={},
        functions={"predict": function},
        evaluation={"test": data},
        inner="serial",
        captures=Captures(after=None),
    )


def test_an_evaluation_that_writes_or_draws_is_refused():
    for net in (in_a_closure, without_a_module, lambda: nn.Dropout(0.5), counted, by_numpy, by_random, by_the_clock):
        setup = evaluation(lambda z, batch, predict=net(): predict(batch.x))  # noqa: B008
        with pytest.raises(ClientError, match=r"the task's 'predict' (wrote into|drew from|changed|does not give)"):
            run_chunk(setup, Message(send={"z": {"x": torch.zeros(3)}}), Chunk("predict", "test", 0, 40))


def test_an_evaluation_of_a_pure_function_is_what_the_function_returns():
    setup, z = evaluation(lambda z, batch: batch.x @ z["x"]), {"x": torch.arange(3.0)}
    found = run_chunk(setup, Message(send={"z": z}), Chunk("predict", "test", 5, 30))
    assert torch.equal(found, setup.evaluation["test"]["x"][5:30] @ z["x"])


def test_what_a_process_has_tried_stays_with_it():
    held = ClosureTensors()
    assert (held.first("a"), held.first("a"), held.first("b")) == (True, False, True)
    assert pickle.loads(pickle.dumps(held)).first("a")


def test_watching_changes_no_result():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with Writes() as writes:
        found = torch.func.vmap(lambda row: (row * 2).add_(1.0).sum())(x)
    assert torch.equal(found, torch.func.vmap(lambda row: (row * 2 + 1.0).sum())(x))
    assert writes.into is None
    with Writes() as writes:
        x.view(-1)[2:3].zero_()
    assert writes.into is not None
    assert "zero_" in writes.into
