"""Ray actors, however many, give the bits of this process."""

import json

import pandas as pd
import pytest
import ray

import fedfleet

CASES = {
    "stateless": {"task": "classification", "algorithm": {"name": "fedavg", "epochs": 1}},
    "stateful": {"task": "classification", "algorithm": {"name": "scaffold", "epochs": 1}},
    "two phases": {"task": "auc", "algorithm": {"name": "cdma_ada", "steps": 3, "alpha": 0.5}},
}


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False, _node_ip_address="127.0.0.1"
    )
    yield
    ray.shutdown()


def run(out, case, **executor):
    config = {
        "rounds": 4,
        "population": {"clients": 40, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 10}},
        "cohort": {"invite": 12, "respond": "siwer"},
        "availability": {"kind": "bernoulli", "rate": 0.8},
        "executor": {"block_size": 3, **executor},
        "evaluation": {"every": 2, "per_client": True},
        **case,
    }
    done = fedfleet.run(config, out=out)
    tables = {
        t: done.table(t).drop(columns="seconds", errors="ignore") for t in ("rounds", "phases", "fates", "clients")
    }
    return (out / "model.safetensors").read_bytes(), tables


@pytest.mark.ray
@pytest.mark.parametrize("inner", ["batched", "factored"])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_actors_gives_equal_bytes(tmp_path, cluster, name, inner):
    model, tables = run(tmp_path / "local", CASES[name], kind="local", inner=inner)
    for actors in (1, 2, 3) if name == "two phases" else (2,):
        on = {"kind": "ray", "actors": actors, "cpus_per_actor": 0.5, "inner": inner}
        found, same = run(tmp_path / f"ray{actors}", CASES[name], **on)
        assert found == model
        for table, frame in tables.items():
            pd.testing.assert_frame_equal(frame, same[table], check_exact=True)


@pytest.mark.ray
def test_client_errors_travel_with_their_traceback(tmp_path, cluster):
    from fedfleet.algorithms.fedavg import fedavg
    from fedfleet.algorithms.options import CohortOptions

    x = fedfleet.Experiment(fedfleet.load({"executor": {"kind": "ray", "actors": 1}, "population": {"clients": 40}}))

    def broken(z, batch, ctx, key):
        raise RuntimeError("no such luck")

    x.task.objectives["train"] = type(x.task.objectives["train"])(loss=broken, sign={"x": 1})
    algorithm = fedavg(fedfleet.config.options(x.config, "algorithm"), x.task, CohortOptions())
    with pytest.raises(
        fedfleet.ClientError, match=r"round 0: client \d+, phase 'train', stage 0, step 0: RuntimeError: no such luck"
    ) as e:
        fedfleet.Experiment(x.config, task=x.task, algorithm=algorithm).run(tmp_path / "run")
    assert "in broken" in str(e.value)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
