"""A device whose memory does not hold a block: the block runs in halves, the run goes on and says so."""

import json

import pandas as pd
import pytest
import torch

from fedfleet.config import schema as config
from fedfleet.config.population import load_data
from fedfleet.experiments.experiment import Experiment
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import CollectUploads, Mean
from fedfleet.simulator.errors import ClientError


class Tight:
    """A population on a device that holds the data of a few clients at once."""

    def __init__(self, whole, most):
        self._whole, self._most = whole, most

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def to(self, device):
        return self

    def local_data(self, clients):
        if len(clients) > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self._whole.local_data(clients)


@pytest.mark.parametrize("reduction", [Mean(), CollectUploads()])
def test_halves_send_what_the_block_would_have(federation, inner, reduction):
    clients = [4, 0, 2, 5, 3]
    whole = federation.run(inner, clients, reduce={"z": reduction}, weight="num_examples")
    tight = federation.with_(population=Tight(federation.population, 2))
    found = tight.run(inner, clients, reduce={"z": reduction}, weight="num_examples")
    assert (whole.splits, found.splits) == (0, 2)  # 2 + 3, and the three again
    finals = [reduction.final(r.partials["z"]) for r in (whole, found)]
    a, b = (T.concat(f.blocks) if isinstance(reduction, CollectUploads) else f for f in finals)
    T.map(lambda x, y: torch.testing.assert_close(x, y), a, b)
    for name in ("steps", "measured", "floats_up", "bytes_up"):
        assert getattr(whole, name) == getattr(found, name)
    assert sum(found.loss) == pytest.approx(sum(whole.loss))


def test_a_device_too_small_for_one_client_is_a_clear_error(federation, inner):
    tight = federation.with_(population=Tight(federation.population, 0))
    with pytest.raises(ClientError, match=r"client 4, phase 'train': the memory of cpu .*lower algorithm.batch_size"):
        tight.run(inner, [4, 0, 2])


@pytest.mark.parametrize("most", [100, 2])
def test_a_run_says_that_it_depended_on_the_machine(tmp_path, most):
    given = config.load(
        {
            "rounds": 2,
            "population": {"clients": 20},
            "algorithm": {"name": "scaffold", "steps": 1},
            "cohort": {"size": 8},
            "executor": {"kind": "local", "block_size": 4},
        }
    )
    plain = Experiment(given)
    x = Experiment(given, population=Tight(plain.population, most), data=load_data(given))
    run = x.run(tmp_path / "run")
    assert run.summary["bit_exact"] is (most == 100)
    log = tmp_path / "run" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    assert all(e["event"] == "out_of_memory" and e["splits"] == 1 for e in events)
    assert [e["round"] for e in events] == ([] if most == 100 else [0, 0, 1, 1])
    counts = pd.read_parquet(tmp_path / "run" / "rounds.parquet")
    assert counts.completed.tolist() == [8, 8]
    expected = plain.run(tmp_path / "plain")
    assert run.summary["final"]["eval/loss"] == pytest.approx(expected.summary["final"]["eval/loss"], rel=1e-4)
