"""Work shared by processes, which are threads here."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("lm_eval")

from stochastic_attention.evaluation.harness import sharing


class Threads:
    """As much of `torch.distributed` as sharing needs."""

    def __init__(self, count):
        self.parts = [None] * count
        self._barrier = threading.Barrier(count, timeout=10)
        self._own = threading.local()

    def run(self, work):
        def one(rank):
            self._own.rank = rank
            return work()

        with ThreadPoolExecutor(len(self.parts)) as pool:
            return list(pool.map(one, range(len(self.parts))))

    def get_world_size(self):
        return len(self.parts)

    def get_rank(self):
        return self._own.rank

    def all_gather_object(self, into, part):
        self.parts[self.get_rank()] = part
        self._barrier.wait()
        into[:] = self.parts

    def broadcast_object_list(self, holder):
        parts = [None] * len(self.parts)
        self.all_gather_object(parts, holder[0])
        holder[0] = copy.deepcopy(parts[0])


@pytest.fixture
def group_of(monkeypatch):
    def make(count):
        threads = Threads(count)
        monkeypatch.setattr(sharing, "dist", threads)
        monkeypatch.setattr(sharing, "_in_group", True)
        return threads

    return make


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_process_gets_all_answers_in_order_and_keeps_together_what_belongs_together(group_of, count):
    threads = group_of(count)
    questions = [f"{question} {answer}" for answer in "xyz" for question in "abcd"]

    def run(share):
        return [question.upper() for question in share]

    found = threads.run(lambda: sharing.shared(run, questions, together=lambda question: question[0]))
    assert found == [[question.upper() for question in questions]] * count
    owned = [{question[0] for question in part} for part in threads.parts]
    assert sum(map(len, owned)) == 4  # none has a letter of another's
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    assert threads.run(lambda: sharing.shared(run, questions[:1])) == [["A X"]] * count


def test_the_first_process_alone_reads_and_writes_the_journal(group_of, tmp_path):
    threads = group_of(3)
    path = tmp_path / "cells.jsonl"

    def work(config, facts, value):
        journal = sharing.open_journal(path, config, facts)
        before = dict(journal.done)
        journal.add("cell", value)
        return before, journal.done["cell"]

    assert threads.run(lambda: work({"a": 1}, {"rows": "x"}, 5)) == [({"rows": "x"}, 5)] * 3
    assert len(path.read_text().splitlines()) == 3
    assert threads.run(lambda: work({"a": 1}, {}, 6)) == [({"rows": "x", "cell": 5}, 6)] * 3

    def refused(config, facts):
        with pytest.raises(ValueError, match=r"another configuration|other rows"):
            sharing.open_journal(path, config, facts)

    threads.run(lambda: refused({"a": 2}, {}))
    threads.run(lambda: refused({"a": 1}, {"rows": "y"}))


def test_outside_of_a_group_nothing_is_shared():
    assert sharing.shared(list, "abc") == ["a", "b", "c"]
