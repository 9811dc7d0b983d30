"""Tensors as Ray is given them, without Ray; and which process keeps the actors of a machine."""

import os
import pickle
import signal
import socket
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfleet.experiments.side_by_side import run_jobs
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors import cluster
from fedfleet.simulator.executors.cluster import LOOPBACK, from_numpy, to_numpy
from fedfleet.simulator.executors.ray import RayExecutor
from fedfleet.simulator.executors.vital import Ping, Vitals
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
def test_the_processes_of_a_cluster_that_was_joined_are_watched():
    vitals = Vitals()
    vitals.check()
    lines = [line for fd in vitals.descriptors for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()]
    watched = len(vitals.descriptors)
    vitals.close()
    pids = [line.split()[1] for line in lines if line.startswith("Pid:")]
    assert any("/raylet/raylet\0" in Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
    assert watched == 2, "the GCS is not watched"


def test_a_control_server_that_answers_no_more_is_missed():
    with socket.create_server((LOOPBACK, 0)) as server:
        ping = Ping(f"{LOOPBACK}:{server.getsockname()[1]}", pause_s=0.01, patience_s=0.1)
        assert not wait([ping.descriptor], 0.5)
    assert wait([ping.descriptor], 60)
    ping.close()
    assert not ping._thread.is_alive()


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


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_ray_that_cannot_start_is_told_in_one_line_and_what_came_up_is_stopped(monkeypatch, subtests, address):
    """Whatever it is that Ray raises: of a run, and of several at a time, as those of a paper's table."""
    stopped = []
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: stopped.append(1))
    errors = [
        RuntimeError("something else"),
        OSError("AF_UNIX path length cannot exceed 107 bytes: '/tmp/ray'"),
        TimeoutError("Timed out\nwaiting for the raylet"),
        ValueError("Can't find a node_ip_address.json file"),
        Exception(
            "The current node timed out during startup. This\ncould happen because some of the Ray processes failed"
        ),
        AssertionError(),
    ]
    for error in errors:

        def init(error=error, **given):
            raise error

        monkeypatch.setattr(cluster.ray, "init", init)
        for call in (
            lambda: cluster.start_ray(address, 1),
            lambda: RayExecutor(1, address=address).start(SETUP),
            lambda: next(run_jobs(lambda: None, {}, 2, address)),
        ):
            with subtests.test(repr(error)):
                refused(call, "executor: Ray cannot start", FedfleetError)
    assert len(stopped) == 3 * len(errors)
