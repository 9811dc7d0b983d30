"""What Ray is given for a tensor, without Ray."""

import pickle

import numpy as np
import pytest
import torch

from fedfleet.simulator.executors.cluster import from_numpy, to_numpy

TENSORS = {
    "float": torch.tensor([[0.0, -0.0], [float("nan"), 1e-40]]),
    "half": torch.tensor([65504.0, 6e-8]).half(),
    "brain": torch.tensor([[1.5, -0.0, float("inf")], [3e38, 1e-40, 7.0]]).to(torch.bfloat16),
    "number": torch.tensor(2.5, dtype=torch.bfloat16),
    "none": torch.zeros(0, 4, dtype=torch.bfloat16),
    "turned": torch.arange(12.0).reshape(3, 4).to(torch.bfloat16).T,
    "eight": torch.tensor([1.0, 0.5]).to(torch.float8_e4m3fn),
    "mask": torch.tensor([True, False]),
    "whole": torch.arange(3),
    "complex": torch.tensor([1 + 2j]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_any_type_arrives_bit_by_bit(name):
    given = TENSORS[name]
    values, dtype = to_numpy(given)
    assert isinstance(values, np.ndarray)
    there = from_numpy(pickle.loads(pickle.dumps((values.copy(order="K"), dtype))))
    assert (there.dtype, there.shape, there.stride()) == (given.dtype, given.shape, given.stride())
    assert to_numpy(there)[0].tobytes() == values.tobytes()


def test_nothing_is_copied_on_the_way_out_and_in():
    for given in (torch.ones(3), torch.ones(3, dtype=torch.bfloat16, requires_grad=True)):
        values, dtype = to_numpy(given)
        assert from_numpy((values, dtype)).data_ptr() == given.data_ptr()
