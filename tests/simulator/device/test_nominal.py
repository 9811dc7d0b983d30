"""The device in name only is as strict as a GPU, and no stricter."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.simulator.device.nominal import DEVICE, REAL, TwoDevices, placed

REFUSED = {
    "vectors": lambda x: x + torch.ones(3),
    "a sum in place": lambda x: torch.zeros(3).add_(x),
    "a number in place": lambda x: torch.zeros(()).add_(x.sum()),
    "numbers side by side": lambda x: torch.stack([x.sum(), torch.zeros(())]),
    "choices": lambda x: torch.where(x > 0, x, torch.zeros(3)),
    "a product": lambda x: x[None] @ torch.ones(3, 2),
    "places to gather": lambda x: x.gather(0, torch.arange(3)),
    "a CPU tensor's places": lambda x: torch.ones(3)[x.long()],
    "values put in": lambda x: x.clone().index_put_((torch.arange(2),), torch.ones(2)),
    "what is like a CPU tensor": lambda x: x + torch.zeros_like(torch.ones(3)),
    "rows of a table": lambda x: F.embedding(x.long(), torch.ones(4, 2)),
    "one client's": lambda x: torch.func.vmap(lambda one: one + torch.ones(2))(x),
    "a layer's": lambda x: F.linear(x, torch.ones(2, 3)),
    "what came back": lambda x: x + x.cpu(),
    "what came back in another type": lambda x: x + x.to("cpu", torch.float64),
    "labels": lambda x: F.cross_entropy(x[None], torch.tensor([1])),
}
DONE = {
    "a number": lambda x: x + torch.tensor(1.0),
    "a number of Python's": lambda x: torch.where(x > 0, x, 0.0) ** 2,
    "places on the CPU": lambda x: x[torch.tensor([0, 2])],
    "a mask on the CPU": lambda x: x[torch.tensor([True, False, True])],
    "a number put in": lambda x: x.clone().index_put_((torch.arange(2),), torch.tensor(2.0)),
    "a number filled in": lambda x: x.masked_fill(x > 0, torch.tensor(2.0)),
    "a copy": lambda x: torch.empty_like(x).copy_(torch.ones(3)),
    "what is like it": lambda x: x + torch.zeros_like(x) + x.new_ones(3) + torch.full_like(x, 2.0),
    "what was made there": lambda x: x + torch.arange(3, device=x.device) + torch.tensor([1, 2, 3], device=x.device),
    "what was brought": lambda x: (
        x + torch.ones(3).to(x) + torch.ones(3).to(x.device) + torch.ones(3).to(device=str(x.device))
    ),
    "one client's": lambda x: torch.func.vmap(lambda one: one + torch.zeros((), device=one.device))(x),
    "the gradient of a choice": lambda x: torch.func.grad(lambda v: v[v.argmax()].square() + v.max(0).values)(x),
    "the gradient of places": lambda x: torch.func.vmap(torch.func.grad(lambda v: v[torch.tensor([0, 0])].sum()))(
        x[None]
    ),
}


def brought() -> Tensor:
    return torch.tensor([1.0, 0.0, 2.0]).to(DEVICE)


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_of_two_devices_are_refused(what):
    with placed(), pytest.raises(TwoDevices):
        REFUSED[what](brought())


@pytest.mark.parametrize("what", DONE)
def test_what_a_gpu_does_is_done(what):
    with placed():
        found = DONE[what](brought())
        assert found.device == DEVICE
        back = found.cpu()
        assert back.device.type == "cpu"
    assert torch.equal(back, DONE[what](torch.tensor([1.0, 0.0, 2.0])))


def test_its_tensors_are_none_of_numpys():
    with placed(), pytest.raises(TypeError, match="numpy"):
        brought().numpy()


@pytest.mark.skipif(REAL, reason="the device is a GPU")
def test_nothing_of_it_stays():
    with placed():
        x = brought()
        assert x.is_cuda
    assert x.device.type == "cpu"
    assert torch.equal(x + torch.ones(3), torch.tensor([2.0, 1.0, 3.0]))
    assert not {"device", "is_cuda", "cpu", "numpy"} & set(vars(torch.Tensor))
