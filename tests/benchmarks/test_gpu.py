"""Benchmarks of a device run at a small scale, without one. Nothing is timed here."""

import json

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import actors, cells, device, jobs
from benchmarks.peers.environments import Failure
from fedfleet.simulator.executors.local import LocalExecutor

SMALL = ["--scale", "small", "--device", "cpu"]


def measured(tmp_path, *words):
    gpu.main([*SMALL, *words, "--json", str(tmp_path / "gpu.json")])
    return json.loads((tmp_path / "gpu.json").read_text())


def test_without_a_cuda_device_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as e:
        gpu.main([])
    assert e.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("no CUDA device")
    assert shown.count("\n") == 1


def test_the_table_of_a_device_is_made_unattended(capsys, tmp_path):
    precisions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    found = measured(tmp_path, "--part", "cells")
    assert [(c["mode"], c["case"], c["inner"], c["cohort"]) for c in found["cells"]] == [
        (mode, name, inner, cohort)
        for mode in cells.SMALL.modes
        for name in cells.NAMES
        for inner in cells.INNERS
        for cohort in cells.SMALL.cohorts
    ]
    assert all(c["client_updates_per_s"] > 0 and c["note"] == "" for c in found["cells"])
    assert all(("ratio" in c) == (c["inner"] != "serial") for c in found["cells"])
    assert all(("share" in c) == (c["case"] != "cdma") for c in found["cells"])
    logistic = next(c for c in found["cells"] if c["case"] == "logistic")
    flop = 2 * 2 * 784 * 10 * 4  # forward and backward, of four examples; no gradient of inputs is taken
    assert logistic["share"] == pytest.approx(logistic["client_updates_per_s"] * flop / found["flop_per_s"]["float32"])
    assert "times serial" in capsys.readouterr().out
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == precisions


def test_ratios_that_must_be_are_told_of_the_fastest_way():
    cell = lambda inner, ratio, cohort=1000: {  # noqa: E731
        **{"case": "mlp", "mode": "tf32", "inner": inner, "cohort": cohort, "ratio": ratio}
    }
    (line,) = cells.musts([cell("batched", 29.0), cell("factored", 30.0), cell("factored", 99.0, 10)])
    assert line == "mlp, cohort 1,000: 30.0 times serial, factored in tf32 (must be 30: met)"
    (line,) = cells.musts([cell("batched", 29.9)])
    assert line.endswith("(must be 30: missed)")
    assert cells.musts([]) == []


def test_published_jobs_are_tried_at_a_small_scale(tmp_path, capsys, monkeypatch):
    asked = []

    def pfl(case, args, processes):
        asked.append(case)
        return {"client_updates_per_s": 2.0, "version": "pfl 1"}

    monkeypatch.setattr(jobs.peers, "pfl", pfl)
    found = measured(tmp_path, "--part", "jobs")
    assert [job["job"] for job in found["jobs"]] == list(jobs.JOBS)
    for job in found["jobs"]:
        assert job["rounds"] == job["of"] == 2
        assert 0 < job["share"] < 1
        small = jobs.reduced(jobs.JOBS[job["job"]])
        assert job["flop"] == pytest.approx(jobs.flop(small) * small.samples * 2 * 2)  # of two rounds
    shown = capsys.readouterr().out
    assert "Published jobs" in shown
    (case,) = asked
    assert (case.model, case.clients, case.cohort, case.samples) == ("cnn", 4, 2, 4)
    ours = found["jobs"][0]["client_updates_per_s"]
    assert f"pfl_cifar10, float32: {ours / 2:.1f} times pfl 1 on this device (must be 10)" in shown


def test_a_long_round_is_reckoned_from_a_few_steps(monkeypatch):
    args = gpu.arguments().parse_args([*SMALL, "--budget", "1e-9"])
    job = jobs.reduced(jobs.JOBS["pfl_cifar10"])
    long = job._replace(options={**job.options, "epochs": 50})
    found = jobs.measure(long, "float32", 1.0, args)
    assert found["rounds"] == 0
    assert found["note"] == "reckoned from 10 of a round's 100 steps"
    assert found["seconds"] == pytest.approx(long.rounds * long.cohort / found["client_updates_per_s"])
    assert found["share"] == pytest.approx(found["flop"] / found["seconds"])


def test_a_peer_that_is_not_there_is_told(monkeypatch, capsys):
    def pfl(case, args, processes):
        raise Failure("not installed: no network")

    monkeypatch.setattr(jobs.peers, "pfl", pfl)
    args = gpu.arguments().parse_args(SMALL)
    jobs.show([], jobs.pfl(args))
    assert "pfl-research did not run: not installed: no network" in capsys.readouterr().out


def test_the_arithmetic_of_a_published_job_is_that_of_its_layers():
    job = jobs.JOBS["pfl_cifar10"]
    multiplications = 30 * 30 * 32 * 27 + 28 * 28 * 64 * 288 + 12544 * 128 + 128 * 10
    first = 30 * 30 * 32 * 27  # of whose inputs no gradient is taken
    assert jobs.flop(job) == pytest.approx(2 * (3 * multiplications - first))
    sizes = jobs.population(jobs.JOBS["nvflare_cifar10"]).offsets.diff()
    assert len(sizes) == 8
    assert float(sizes.double().mean()) == pytest.approx(6250, rel=0.01)
    assert sizes.max() > 2 * sizes.min()


def test_actors_that_share_a_device_are_measured_beside_one(capsys):
    args = gpu.arguments().parse_args([*SMALL, "--rounds", "1", "--warmup", "1"])
    args.actors = [1, 2]
    asked = []

    def executor(count, args):
        asked.append(count)
        return LocalExecutor(args.threads)

    found = list(actors.measured(args, executor))
    assert [(r["case"], r["actors"]) for r in found] == [(name, n) for name in actors.NAMES for n in (1, 2)]
    assert asked == [1, 2] * len(actors.NAMES)
    assert all(r["client_updates_per_s"] > 0 and not r["note"] for r in found)
    assert [r["ratio"] for r in found[::2]] == [1.0] * len(actors.NAMES)
    actors.show(found)
    assert "Actors that share the device" in capsys.readouterr().out


def test_actors_have_equal_parts_of_a_device(monkeypatch):
    args = gpu.arguments().parse_args([])
    assert actors.on_ray(4, args).pool_spec.need.gpus == 0.25
    args.device = "cpu"
    assert actors.on_ray(4, args).pool_spec.need.gpus == 0.0


def test_a_job_for_which_the_memory_is_too_small_says_so(monkeypatch):
    def measure(*_):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(jobs, "measure", measure)
    args = gpu.arguments().parse_args([*SMALL, "--mode", "float32"])
    found = list(jobs.measured(args, {"float32": 1.0}))
    assert {r["note"] for r in found} == {"out of memory"}
    assert device.why(RuntimeError("a\nb")) == "a b"
