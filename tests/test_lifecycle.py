"""Interleavings under Hypothesis, of the simulated world and of the local backend."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis.stateful import run_state_machine_as_test

from orchestrator.backends.local import LocalBackend, LocalSandbox
from orchestrator.core.machine import replay
from orchestrator.core.table import edges
from orchestrator.testing import strategies
from orchestrator.testing.explore import tell
from orchestrator.testing.lifecycle import LifecycleMachine, run_lifecycle_suite
from orchestrator.testing.mutants import MUTANTS

MACHINE = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def test_interleaved_runs_with_crashes_and_stray_facts_break_nothing():
    run_state_machine_as_test(LifecycleMachine, settings=MACHINE)


@pytest.mark.parametrize(
    "name",
    ["pipe-EOF taken for exit", "ignored files not uploaded"],
)
def test_the_machine_finds_a_mistake_too(name):
    with MUTANTS[name].put_in(), pytest.raises(AssertionError):
        run_state_machine_as_test(LifecycleMachine, settings=MACHINE)


@settings(max_examples=300)
@given(strategies.scenarios(), strategies.plans())
def test_any_plan_of_faults_breaks_nothing(scenario, plan):
    world = tell(scenario, plan)
    assert world.problems == [], "\n".join(world.log)


def test_walks_reach_every_edge_and_replay_to_their_end():
    walked = Counter()

    @settings(max_examples=1000)
    @given(strategies.walks())
    def walk(facts):
        for number, fact in enumerate(facts):
            walked[replay("run", facts[:number]).run.state, type(fact)] += 1
        assert replay("run", facts).run.finished

    walk()
    assert [edge for edge in edges() if not walked[edge[:2]]] == []


def test_the_local_backend_keeps_every_promise_under_random_faults(tmp_path):
    run_lifecycle_suite(lambda: LocalBackend(tmp_path / "sandboxes"), examples=40)


def test_the_suite_finds_a_backend_that_runs_an_order_again(tmp_path, monkeypatch):
    execute = LocalSandbox.execute

    def eager(self, order):
        execute(self, order)
        shutil.rmtree(self.home / "records" / order.slot, ignore_errors=True)
        return execute(self, order)

    monkeypatch.setattr(LocalSandbox, "execute", eager)
    with pytest.raises(AssertionError, match="a wrong verdict after no fault"):
        run_lifecycle_suite(lambda: LocalBackend(tmp_path / "sandboxes"), examples=60)
