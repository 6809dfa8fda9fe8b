"""Many cases in a budget of time: what is left out, what is resumed, what a failure does. Clocks are injected."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from stochastic_attention.benchmark.sweep import Case, Outcome, cases, sweep

CASES = cases(("forward", "backward"), (8192, 2048, 32768), (64,), tokens=16384)


class Machine:
    """Measures at a fixed rate of work, after `compiling` seconds that no estimate may grow with the length."""

    def __init__(self, seconds: float, *, compiling: float = 0.0, broken: Case | None = None) -> None:
        self.now, self.seconds, self.compiling, self.broken = 1000.0, seconds, compiling, broken
        self.measured: list[Case] = []

    def clock(self) -> float:
        return self.now

    def measure(self, case: Case):
        if case == self.broken:
            raise RuntimeError("out of memory\nand much more")
        self.measured.append(case)
        steady = self.seconds * case.work / CASES[2].work
        self.now += steady + self.compiling
        return {"speed": [{"case": asdict(case)}]}, steady


def run(machine: Machine, results: dict, budget: float | None = None) -> list[str | None]:
    saved = []
    sweep(
        CASES,
        machine.measure,
        results,
        save=lambda: saved.append(len(results["cases"])),
        budget=budget,
        clock=machine.clock,
    )
    assert saved == sorted(saved)
    assert [row["case"] for row in results.get("speed", [])] == [asdict(case) for case in done(results)]
    return [row["reason"] for row in results["cases"]]


def done(results: dict) -> list[Case]:
    return [Outcome(**row).case for row in results["cases"] if row["seconds"] is not None]


def test_the_batch_holds_the_tokens_and_at_least_one_row():
    assert [(case.length, case.batch) for case in CASES[::2]] == [(8192, 2), (2048, 8), (32768, 1)]
    assert {case.batch for case in cases(("decode",), (8, 9), (1,), tokens=0)} == {1}


def test_without_a_budget_all_is_measured_in_the_order_asked_for():
    machine, results = Machine(1.0), {}
    assert run(machine, results) == [None] * 6
    assert machine.measured == CASES


@pytest.mark.parametrize("compiling", [0.0, 5.0])
def test_a_budget_drops_the_largest_first_and_says_so(compiling):
    machine, results = Machine(1.0, compiling=compiling), {}
    # At this rate 2,048 tokens take 1 s and 3 s, 8,192 take 4 and 12, 32,768 take 32 and 96.
    reasons = run(machine, results, budget=40.0 + 4 * compiling)
    assert [(case.direction, case.length) for case in machine.measured] == [
        ("forward", 2048), ("backward", 2048), ("forward", 8192), ("backward", 8192),
    ]  # fmt: skip
    assert [reason is None for reason in reasons] == [True] * 4 + [False] * 2
    assert reasons[4] == "left out: 20 s are left, and it would take 32 s or more"


def test_nothing_is_begun_when_the_time_is_over():
    machine, results = Machine(1.0), {}
    assert all("0 s are left" in reason for reason in run(machine, results, budget=0.0))
    assert machine.measured == []


def test_what_is_done_is_not_done_again_and_what_was_left_out_is():
    machine, results = Machine(1.0), {}
    run(machine, results, budget=40.0)
    again = Machine(1.0)
    assert run(again, results) == [None] * 6
    assert {*again.measured} == {*CASES} - {*machine.measured}


def test_a_case_that_fails_says_why_and_the_others_go_on():
    machine, results = Machine(1.0, broken=CASES[2]), {}
    assert run(machine, results) == [None, None, "failed: RuntimeError: out of memory", None, None, None]
    assert len(machine.measured) == 5
