"""Rounds whose server keeps every upload: in a file or in memory they are the same rounds."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import build, digits, flat, play, records

from fedfleet.algorithms.local import local_training
from fedfleet.algorithms.options import CohortOptions
from fedfleet.middleware.cosines import watched as cosines
from fedfleet.simulator.algorithm import Algorithm, View
from fedfleet.simulator.arithmetic import spill
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import CollectUploads
from fedfleet.simulator.arithmetic.spill import Spilled
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.driver import round as driver
from fedfleet.simulator.errors import ClientError
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.policies import Siwer
from fedfleet.simulator.fleet.responses import Federation, Outcome
from fedfleet.simulator.work import BatchPlan, Message, Phase
from tests.parts import slow_but

WHERE = digits("classification", "dirichlet", alpha=1.0, min_size=8)
OMG = build("omg", WHERE.task, CohortOptions(size=7), of={"name": "fedavg", "steps": 3, "batch_size": 7})
CASES = {
    "all heard": {},
    "batched": {"inner": "batched", "block_size": 3},
    "factored": {"inner": "factored", "block_size": 3},
    "aborted rounds": {"federation": Federation(availability=Bernoulli(0.5)), "min_responses": 4, "attempts": 20},
    "late answers": {"federation": Federation(policy=Siwer(0.3, 0.6)), "stale_discount": 0.5},
    "nobody wasted": {"federation": Federation(policy=Siwer(0.3, 0.6)), "train_all": True},
}


def open_files() -> set[str]:
    return {str(d.readlink()) for d in Path("/proc/self/fd").iterdir() if d.is_symlink()}


@pytest.mark.parametrize("case", CASES)
def test_where_uploads_lie_changes_no_bit(case, monkeypatch):
    written = []
    keep = driver.SpillFile.keep
    monkeypatch.setattr(driver.SpillFile, "keep", lambda self, tree: written.append(keep(self, tree)) or written[-1])
    before = open_files()
    spilled, memory = (list(records(OMG, WHERE, 4, spilled_bytes=least, **CASES[case])) for least in (0, sys.maxsize))
    assert len(written) >= 2 * 4
    del written[:]
    assert open_files() <= before
    for a, b in zip(spilled, memory, strict=True):
        assert torch.equal(flat(a.state.z), flat(b.state.z))
        assert a.metrics == b.metrics
        assert [p.counts for p in a.phases] == [p.counts for p in b.phases]
    phases = [p for r in spilled for p in r.phases]
    assert {p.attempt for p in phases} == {0} or case == "aborted rounds"
    assert sum(p.counts["merged_stale"] for p in phases) > 0 or case != "late answers"


WATCHED = {
    "fedavg": build("fedavg", WHERE.task, CohortOptions(size=7), steps=3, batch_size=7),
    "scaffold": build("scaffold", WHERE.task, CohortOptions(size=7), steps=3, batch_size=7),
    "omg": OMG,
}


@pytest.mark.parametrize("case", slow_but(["all heard", "factored"], "factored"))
@pytest.mark.parametrize("name", WATCHED)
def test_uploads_kept_for_their_cosines_lie_in_the_file_once(name, case, monkeypatch):
    plain, seen, written = WATCHED[name], cosines.watched(WATCHED[name], 1), []
    keep = driver.SpillFile._written
    monkeypatch.setattr(driver.SpillFile, "_written", lambda *given: written.append(keep(*given)) or written[-1])
    gram, found = cosines.cosines, []
    monkeypatch.setattr(cosines, "cosines", lambda *given: found.append(given[0]) or gram(*given))
    spilled = list(records(seen, WHERE, 3, spilled_bytes=0, **CASES[case]))
    assert all(isinstance(leaf, Spilled) for kept in found for b in kept.blocks for leaf in T.leaves(b))
    blocks = sum(len(kept.blocks) for kept in found)
    # Each block is written once, and what is sent beside, such as controls, is not.
    assert len(written) == blocks >= 3 * 2
    memory = list(records(seen, WHERE, 3, spilled_bytes=sys.maxsize, **CASES[case]))
    assert len(written) == blocks
    unwatched = play(plain, WHERE, 3, **CASES[case])
    for a, b, c in zip(spilled, memory, unwatched, strict=True):
        ends = [seen.views["global"].params(r.state) for r in (a, b)]
        assert torch.equal(flat(ends[0]), flat(ends[1]))
        assert torch.equal(flat(ends[0]), flat(c))
        assert a.metrics == b.metrics
        assert "cosine_worst" in a.metrics


def test_how_clients_are_cut_into_blocks_changes_no_bit():
    cut = [play(OMG, WHERE, 3, spilled_bytes=0, block_size=size) for size in (1, 4, 7)]
    for other in cut[1:]:
        assert torch.equal(flat(cut[0][-1]), flat(other[-1]))


def test_uploads_may_be_looked_at_one_by_one():
    seen = []

    def round_(z, rnd):
        found = rnd.map_reduce(phase, shared=Message({"z": z}, {"lr": {"x": 0.1}}), cohort=rnd.invite(5))["z"]
        seen.append(found)
        return found.mean(), {}

    phase = Phase(name="train", work=local_training(BatchPlan(size=4, steps=2)), reduce={"z": CollectUploads()})
    algorithm = Algorithm(lambda z, key, problem: z, round_, (phase,), {"global": View(lambda z: z)})
    ends = [flat(r.state) for least in (0, sys.maxsize) for r in records(algorithm, WHERE, 2, spilled_bytes=least)]
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[3])
    in_file, in_memory = seen[1].stacked(), seen[3].stacked()  # the file is there as long as they are
    for name, leaf in in_memory["x"].items():
        assert torch.equal(in_file["x"][name], leaf)
        assert len(leaf) == 5


def test_a_client_that_is_dropped_is_not_in_the_file():
    people = WHERE.population
    x = people.data["x"].double()
    for client in range(0, people.size, 4):
        x[people.indices[people.offsets[client]]] = torch.nan
    where = replace(WHERE, population=replace(people, data={**people.data, "x": x.float()}))
    drop = Faults(non_finite="drop_client")
    runs = [list(records(OMG, where, 3, spilled_bytes=least, faults=drop)) for least in (0, sys.maxsize)]
    dropped = [sum(f == Outcome.FAILED for f in r.phases[0].responses.outcome.tolist()) for r in runs[0]]
    assert 0 < sum(dropped) < 3 * 7
    for a, b in zip(*runs, strict=True):
        assert torch.equal(flat(a.state.z), flat(b.state.z))
    assert torch.isfinite(flat(runs[0][-1].state.z)).all()


def test_a_full_disk_ends_the_run_in_one_line(monkeypatch):
    write = spill.write_at

    def full(descriptor, data, offset):
        if offset:  # what tells the file from others is there
            raise OSError(28, "No space left on device")
        write(descriptor, data, offset)

    monkeypatch.setattr(spill, "write_at", full)
    with pytest.raises(ClientError, match=r"round 0: phase 'train': uploads are kept in a file.*set TMPDIR"):
        play(OMG, WHERE, 1, spilled_bytes=0)
