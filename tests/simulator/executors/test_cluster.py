"""What Ray is given for a tensor, without Ray; and which process keeps the actors of a machine."""

import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors import cluster
from fedfleet.simulator.executors.cluster import from_numpy, raylet, to_numpy
from fedfleet.simulator.executors.ray import RayExecutor
from tests.refusals import refused

SETUP = Setup(population=None, phases={}, objectives={}, functions={}, evaluation={}, inner="serial")  # pyright: ignore[reportArgumentType]

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


@pytest.mark.ray
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no descriptors of processes")
@pytest.mark.usefixtures("cluster")
def test_the_raylet_of_a_cluster_that_was_joined_is_watched():
    watched = raylet()
    assert watched is not None
    lines = Path(f"/proc/self/fdinfo/{watched}").read_text().splitlines()
    os.close(watched)
    pid = next(line.split()[1] for line in lines if line.startswith("Pid:"))
    assert "/raylet/raylet\0" in Path(f"/proc/{pid}/cmdline").read_text()


def test_an_interruption_waits_until_ray_has_started_or_stopped(monkeypatch):
    done = []

    def interrupted(what):
        def call(**given):
            signal.signal(signal.SIGTERM, lambda *_: os.abort())  # as Ray does
            signal.raise_signal(signal.SIGINT)
            done.append(what)

        return call

    def on_term(*given):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_term)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", interrupted("up"))
    monkeypatch.setattr(cluster.ray, "shutdown", interrupted("down"))
    executor = RayExecutor(1)
    try:
        with pytest.raises(KeyboardInterrupt):
            executor.start(SETUP)
        assert done == ["up"]
        assert signal.getsignal(signal.SIGTERM) is on_term
        with pytest.raises(KeyboardInterrupt):
            executor.close()
        assert done == ["up", "down"]
        executor.close()
        assert done == ["up", "down"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_cluster_of_another_ray_or_python_is_told_in_one_line(monkeypatch):
    said = "Version mismatch: The cluster was started with:\n    Ray: 2.40.0\n"

    def init(**given):
        raise RuntimeError(said)

    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", init)
    begins = "executor.address='10.0.0.1:6379': the cluster there has another Ray or Python (Version mismatch"
    refused(lambda: cluster.start_ray("10.0.0.1:6379", None), begins, FedfleetError)
    said = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        cluster.start_ray("10.0.0.1:6379", None)
