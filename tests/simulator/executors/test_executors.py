"""Ray actors, however many, give the bits of this process."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import ray

import fedfleet
from fedfleet.algorithms.local import Local, local_training
from fedfleet.simulator.algorithm import Algorithm, View
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import CollectUploads, Mean
from fedfleet.simulator.arithmetic.spill import Spilled, SpillFile
from fedfleet.simulator.driver import answers, sharding
from fedfleet.simulator.driver import round as driver
from fedfleet.simulator.executors import messages, shared_buffer
from fedfleet.simulator.work import BatchPlan, LocalWork, Message, Phase
from tests.parts import slow_but

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import tests

CASES = {
    "stateless": {"task": "classification", "algorithm": {"name": "fedavg", "epochs": 1}},
    "stateful": {"task": "classification", "algorithm": {"name": "scaffold", "epochs": 1}},
    "two phases": {"task": "auc", "algorithm": {"name": "cdma_ada", "steps": 3, "alpha": 0.5}},
    "asynchronous": {
        "task": "classification",
        "algorithm": {"name": "fedbuff", "steps": 3, "buffer": 7, "concurrency": 15},
    },
    "anchored": {"task": "auc", "algorithm": {"name": "coda_plus", "steps": 3, "theta": 0.5}},  # sends one tensor twice
    "personalised": {"task": "classification"},
    "stored": {"task": "classification"},
}
TRAINING = local_training(BatchPlan(size=4, steps=3))


def one_phase(phase, server):
    def round_(z, rnd):
        message = Message(send={"z": z}, config={"lr": dict.fromkeys(z, 0.1)})
        return server(rnd.map_reduce(phase, shared=message, cohort=rnd.invite(12))["z"]), {}

    return Algorithm(lambda z, key, problem: z, round_, (phase,), {"global": View(lambda z: z)})


def personalised():
    """Clients start half way between the server's model and their own last one."""

    def client_init(shared, client_state, client_input, key):
        return Local(T.axpy(0.5, T.sub(client_state, shared["z"]), shared["z"]), None, client_state)

    def client_final(shared, client_state, client_input, local):
        return Message(send={"z": local.z}), local.z

    work = LocalWork(client_init=client_init, loops=TRAINING.loops, client_final=client_final)
    return one_phase(
        Phase(name="train", work=work, reduce={"z": Mean()}, client_state=lambda shared: shared["z"]), lambda z: z
    )


def stored():
    """The server takes the median of the uploads."""
    return one_phase(
        Phase(name="train", work=TRAINING, reduce={"z": CollectUploads()}), lambda uploads: uploads.median()
    )


OWN = {"personalised": personalised, "stored": stored}


def run(out, name, **executor):
    config = {
        "rounds": 4,
        "population": {"clients": 40, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 10}},
        "cohort": {"size": 12, "wait_for": "siwer"},
        "availability": {"kind": "bernoulli", "rate": 0.8},
        "executor": {"block_size": 3, **executor},
        "evaluation": {"every": 2, "per_client": True},
        **CASES[name],
    }
    if name == "asynchronous":
        del config["cohort"]
    done = fedfleet.run(config, out=out, algorithm=OWN[name]() if name in OWN else None)
    tables = {
        t: done.table(t).drop(columns="seconds", errors="ignore") for t in ("rounds", "phases", "outcomes", "clients")
    }
    return (out / "model.safetensors").read_bytes(), tables


def check_equal(found, expected):
    assert found[0] == expected[0]
    for table, frame in expected[1].items():
        pd.testing.assert_frame_equal(found[1][table], frame, check_exact=True)


@pytest.mark.ray
@pytest.mark.parametrize("inner", slow_but(["batched", "factored"], "factored"))
@pytest.mark.parametrize("name", slow_but(CASES, "stateful"))
def test_three_actors_give_the_bytes_of_this_process(tmp_path, name, inner, monkeypatch):
    expected = run(tmp_path / "local", name, kind="local", inner=inner)
    if inner == "batched":  # and add blocks themselves
        monkeypatch.setattr(sharding, "blocks_a_task", lambda blocks, workers, size: 2)
    on = {"kind": "ray", "actors": 3, "cpus_per_actor": 0.25, "inner": inner}
    check_equal(run(tmp_path / "ray", name, **on), expected)


@pytest.mark.ray
@pytest.mark.parametrize(("actors", "way"), slow_but([(1, "lines"), (2, "calls"), (2, "store")], (2, "store")))
def test_any_number_of_actors_gives_equal_bytes_and_so_does_any_way_to_them(tmp_path, actors, way, monkeypatch):
    expected = run(tmp_path / "local", "two phases", kind="local", inner="batched")
    on = {"kind": "ray", "actors": actors, "cpus_per_actor": 0.1, "inner": "batched"}
    if way != "lines":  # as to other machines: a small model with the blocks,
        monkeypatch.setattr(shared_buffer, "own", lambda count: [])
    if way == "store":  # and a larger one through the object store, where results stay until they are joined
        monkeypatch.setattr(sharding, "parts_a_task", lambda parts, nodes, size: 2)
        monkeypatch.setattr(messages, "INLINE_BYTES", 0)
        monkeypatch.setattr(messages, "TOGETHER_BYTES", 0)
    check_equal(run(tmp_path / "ray", "two phases", **on), expected)


class Elsewhere(SpillFile):
    """A file that workers cannot reach, as from another machine."""

    def __init__(self, least):
        super().__init__(least)
        self.address = "/nowhere"


@pytest.mark.ray
@pytest.mark.parametrize("way", slow_but(["lines", "calls"], "lines"))
@pytest.mark.parametrize("writer", slow_but(["workers", "driver"], "workers"))
def test_uploads_that_are_kept_lie_in_a_file_and_change_no_bit(tmp_path, writer, way, monkeypatch):
    expected = run(tmp_path / "local", "stored", kind="local", inner="batched")
    came, fell = [], answers.put_down

    def put_down(phase, spill, partials):
        found = fell(phase, spill, partials)
        leaves = [T.leaves(p["z"].blocks) for p in (partials, found)]
        came.append([all(isinstance(leaf, Spilled) for leaf in each) for each in leaves])
        return found

    monkeypatch.setattr(answers, "put_down", put_down)
    monkeypatch.setattr(driver, "SpillFile", lambda least: (SpillFile if writer == "workers" else Elsewhere)(0))
    if way == "calls":
        monkeypatch.setattr(shared_buffer, "own", lambda count: [])
    on = {"kind": "ray", "actors": 2, "cpus_per_actor": 0.1, "inner": "batched"}
    check_equal(run(tmp_path / "ray", "stored", **on), expected)
    assert all(after for _, after in came)
    by_driver = [before for before, _ in came].count(False)  # not of the trial before the run, which is this process's
    assert by_driver >= 8 if writer == "driver" else by_driver == 0
    assert not any("/fedfleet-" in str(d.readlink()) for d in Path("/proc/self/fd").iterdir() if d.is_symlink())


@pytest.mark.ray
def test_client_errors_travel_with_their_traceback(tmp_path):
    from fedfleet.algorithms.fedavg import fedavg
    from fedfleet.algorithms.options import CohortOptions

    x = fedfleet.Experiment(fedfleet.load({"executor": {"kind": "ray", "actors": 1}, "population": {"clients": 40}}))

    def broken(z, batch, ctx, key):
        raise RuntimeError("no such luck")

    x.task.objectives["train"] = type(x.task.objectives["train"])(loss=broken, sign={"x": 1})
    algorithm = fedavg(x.config.algorithm, x.task, CohortOptions())
    with pytest.raises(
        fedfleet.ClientError, match=r"round 0: client \d+, phase 'train', stage 0, step 0: RuntimeError: no such luck"
    ) as e:
        fedfleet.Experiment(x.config, task=x.task, algorithm=algorithm).run(tmp_path / "run")
    assert "in broken" in str(e.value)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
