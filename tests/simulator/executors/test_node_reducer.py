"""Tasks that the workers of a node share: who has which part, where results are joined, and what becomes of those that are lost."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors import node_reducer, pool
from fedfleet.simulator.executors.batch import AHEAD, Batch, Held
from fedfleet.simulator.executors.fingerprint import Place
from fedfleet.simulator.executors.node_reducer import NodeReducers
from fedfleet.simulator.work import Message
from tests.simulator.executors.threads import joining, reducer, threaded


class Letters:
    """Tasks are words, and their parts are letters; what comes of a word says in brackets what it was joined of."""

    def split(self, task):
        return list(task)

    def bare(self, part):
        return part.lower()

    def join(self, parts, results):
        if "!" in parts:
            raise ValueError("no letter")
        return f"({''.join(parts)}: {''.join(results)})"


def batch(*words: str) -> Batch:
    return Batch(None, Message(), words, sharding=Letters())  # pyright: ignore[reportArgumentType]


def given(of: Batch, nodes: str) -> list[str]:
    """Give actors on nodes, one after the other, what comes next; return the letters."""
    found = []
    for node in nodes:
        part = of.next(node)
        of.begun(part)
        found.append(part.task)
    return found


def test_a_task_is_the_nodes_that_began_it_and_is_finished_by_others_once_they_have_nothing_else():
    assert given(batch("abcd", "efgh", "ijkl"), "xyxyxx") == ["a", "e", "b", "f", "c", "d"]
    assert given(batch("abcd", "efgh", "ijkl"), "xyzzyx") == ["a", "e", "i", "j", "f", "b"]
    # y has no task of its own any more, and takes the last part of the last one
    assert given(batch("abcd", "ef"), "xyyyy") == ["a", "e", "f", "d", "c"]
    assert given(batch("ab", "cd", "ef"), "xxxxxx") == ["a", "b", "c", "d", "e", "f"]


def test_no_task_is_begun_far_ahead_of_the_first_that_is_not_done():
    of = batch(*["ab"] * (AHEAD + 2))
    numbers = []
    for i in range(AHEAD + 3):
        part = of.next(str(i))
        of.begun(part)
        numbers.append(part.number)
    assert numbers[:AHEAD] == list(range(AHEAD))
    assert numbers[AHEAD:] == [AHEAD - 1, AHEAD - 2, AHEAD - 3]  # what others have begun
    of.front = 1
    assert of.next("new").number == AHEAD


def test_parts_that_run_again_come_in_their_order_and_a_task_with_an_error_holds_up_those_before_it_alone():
    of = batch("abc", "def")
    first, second, *_ = of.waiting
    assert given(of, "xx") == ["a", "b"]
    of.again(second)
    of.again(first)
    assert [p.task for p in of.waiting] == list("abcdef")
    of.fail(1, ValueError())
    assert [p.task for p in of.waiting] == list("abc")


class World:
    """Joiners on nodes, whose answers come when they are told to; ``lost`` is what is told of those that do not."""

    def __init__(self, monkeypatch):
        self.calls: list[tuple[str, Any, Future[Any]]] = []
        self.made, self.killed, self.lost, self.checked, self.renewed = [], [], [], [], []
        monkeypatch.setattr(node_reducer.ray, "kill", lambda actor: self.killed.append(actor.node))
        lost, checked = (lambda *told: self.lost.append(told)), self.checked.append
        self.joins = NodeReducers(self.when, lost, checked, self.create, lambda: "here")

    def create(self, node):
        self.made.append(node)
        join = SimpleNamespace(remote=lambda *a: self.calls.append((node, a, Future())) or self.calls[-1])
        return SimpleNamespace(node=node, join=join, renew=SimpleNamespace(remote=lambda: self.renewed.append(node)))

    def when(self, call, tell):
        call[2].add_done_callback(tell)

    def do(self):
        """Have the joiners do what they were given."""
        for _, (sharding, parts, *found), future in self.calls:
            if not future.done():
                future.set_result(reducer().join(sharding, parts, *found))


def settle(of: Batch, found: list[Any]) -> list[Any]:
    """Settle all parts of the first task, in another order; return what is to be joined."""
    parts = of._parts[0]
    order = [*range(1, len(parts)), 0]
    for i in order[:-1]:
        assert of.settle(parts[i], found[i]) is None
    whole = of.settle(parts[0], found[0])
    assert whole == found
    return whole


def test_results_are_joined_where_most_of_them_are_once_all_are_there(monkeypatch):
    world, of = World(monkeypatch), batch("ABC", "DE")
    world.joins.join(of, 0, settle(of, [Held("1", "x"), Held("2", "y"), Held("3", "y")]))
    assert world.made == ["y"]
    assert world.joins
    assert of.done == {}
    world.do()
    assert of.done == {0: "(abc: 123)"}
    assert not world.joins
    world.joins.join(of, 1, [Held("4", "y"), "5"])  # one of them is in this process
    world.do()
    assert of.done[1] == "(de: 45)"
    assert world.made == ["y"]
    world.joins.join(of, 0, ["6", "7", Held("8", "y")])  # most of them are
    world.do()
    assert of.done[0] == "(abc: 678)"
    assert world.made == ["y", "here"]
    assert world.checked == [Place("here", {})] * 3
    world.joins.renew()
    assert world.renewed == ["y", "here"]
    world.joins.close()
    assert world.killed == ["y", "here"]


def test_what_this_process_has_it_joins_itself(monkeypatch):
    world, of = World(monkeypatch), batch("AB", "!")
    world.joins.join(of, 0, settle(of, ["1", "2"]))
    assert of.done == {0: "(ab: 12)"}
    world.joins.join(of, 1, ["3"])
    assert isinstance(of.done[1], ValueError)
    assert world.made == []


def test_the_first_error_of_a_part_is_the_tasks(monkeypatch):
    world, of = World(monkeypatch), batch("ABC")
    first, second = ValueError("first"), ValueError("second")
    world.joins.join(of, 0, settle(of, [Held("1", "x"), first, second]))
    assert of.done == {0: first}
    assert not world.joins


def test_an_error_in_joining_is_the_tasks(monkeypatch):
    world, of = World(monkeypatch), batch("AB")
    world.joins.join(of, 0, [Held("1", "x"), Held("2", "x")])
    error = ValueError("as weights are zero")
    world.calls[0][2].set_exception(error)
    assert of.done == {0: error}
    assert world.lost == []


@pytest.mark.parametrize("error", [ray.exceptions.ActorDiedError(), ray.exceptions.ObjectLostError("a" * 56, None, "")])
def test_what_is_lost_before_it_was_joined_is_told_and_another_joiner_comes(monkeypatch, error):
    world, of = World(monkeypatch), batch("AB")
    world.joins.join(of, 0, [Held("1", "x"), Held("2", "x")])
    world.calls[0][2].set_exception(error)
    assert world.lost == [(of, 0, error)]
    assert world.killed == ["x"]
    assert not world.joins
    world.joins.join(of, 0, [Held("1", "x"), Held("2", "x")])
    assert world.made == ["x", "x"]
    world.do()
    assert of.done == {0: "(ab: 12)"}


def test_what_a_silent_node_was_to_join_runs_again_elsewhere_and_its_answer_is_not_heard(monkeypatch):
    world, of = World(monkeypatch), batch("AB", "CD")
    given(of, "xxyy")
    world.joins.join(of, 0, [Held("1", "x"), Held("2", "x")])
    world.joins.join(of, 1, [Held("3", "y"), Held("4", "y")])
    world.joins.gone({"x"})
    assert [p.task for p in of.waiting] == ["A", "B"]
    assert given(of, "yy") == ["A", "B"]
    world.joins.join(of, 0, [Held("5", "y"), Held("6", "y")])
    world.do()  # the one that was silent answers, too
    assert of.done == {0: "(ab: 56)", 1: "(cd: 34)"}
    assert world.killed == ["x"]


def test_results_that_a_silent_node_has_are_made_again():
    of = batch("ABC", "D")
    given(of, "xxyx")
    parts = of._parts[0]
    of.settle(parts[0], Held("1", "x"))
    of.settle(parts[2], Held("3", "y"))
    of.gone({"x"})
    assert [p.task for p in of.waiting] == ["A"]
    assert of.next("y").task == "A"
    assert of.settle(parts[1], "2") is None
    assert of.settle(parts[0], "1") == ["1", "2", Held("3", "y")]


def test_all_parts_of_a_task_run_again_and_one_count_stands_for_them():
    of = batch("AB", "CD")
    given(of, "xxyy")
    lost = of.all_again(1)
    assert (lost.number, lost.task) == (1, "C")
    assert (lost.number, lost.of) not in {(p.number, p.of) for p in of._parts[1]}
    assert [p.task for p in of.waiting] == ["C", "D"]
    assert given(of, "zz") == ["C", "D"]


def letter(setup, shared, task):
    return task


@pytest.mark.parametrize("near", [True, False])
def test_an_executor_yields_what_is_joined_in_the_order_of_tasks(monkeypatch, near):
    if not near:
        monkeypatch.setattr(pool, "offered", lambda slabs: None)
    asked = joining(monkeypatch)
    with threaded(3, monkeypatch) as executor:
        words = ["ABCD", "EFG", "H", "IJKLMNOPQR"]
        found = list(executor.map(letter, Message(), words, sharding=Letters()))
    assert found == ["(abcd: ABCD)", "(efg: EFG)", "H", "(ijklmnopqr: IJKLMNOPQR)"]
    assert sorted(asked) == ([] if near else [3, 4, 10])


def test_a_task_whose_results_are_lost_runs_again_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(pool, "offered", lambda slabs: None)
    asked = joining(monkeypatch, lose=2)
    with threaded(2, monkeypatch) as executor:
        assert list(executor.map(letter, Message(), ["AB", "C"], sharding=Letters())) == ["(ab: AB)", "C"]
    assert asked == [2, 2, 2]
    joining(monkeypatch, lose=3)
    with threaded(2, monkeypatch) as executor, pytest.raises(FedfleetError, match="lost 3 times on Ray actors"):
        list(executor.map(letter, Message(), ["AB", "C"], sharding=Letters()))
