import pytest
import torch
from torch import nn

from fedfleet.simulator.arithmetic import rng
from fedfleet.tasks.pooling import MaxPool2


def images(*shape: int) -> torch.Tensor:
    """Few distinct values, so that windows have ties."""
    return (rng.uniform(rng.key(3), shape) * 4).floor()


@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (1, 1, 7, 5), (3, 2, 2, 600), (0, 2, 4, 4)])
def test_equals_the_stock_kernel_bit_for_bit_ties_included(shape):
    x, y = images(*shape).requires_grad_(), images(*shape).requires_grad_()
    ours, stock = MaxPool2()(x), nn.MaxPool2d(2)(y) if shape[0] else y[..., ::2, ::2]
    assert torch.equal(ours, stock)
    weight = rng.normal(rng.key(4), tuple(ours.shape))
    (a,) = torch.autograd.grad((ours * weight).sum(), x)
    (b,) = torch.autograd.grad((stock * weight).sum(), y)
    assert torch.equal(a, b)


def test_under_vmap_each_client_pools_its_own():
    x = images(4, 2, 3, 6, 8)
    torch.testing.assert_close(
        torch.func.vmap(MaxPool2())(x), torch.stack([nn.MaxPool2d(2)(c) for c in x]), rtol=0, atol=0
    )
