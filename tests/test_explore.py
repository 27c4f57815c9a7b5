"""The explorer: what it proves of the real runner, and that it would find what is wrong."""

from __future__ import annotations

import pytest

from orchestrator.testing.explore import ALWAYS, SCENARIOS, explore, tell, wander
from orchestrator.testing.faults import CONTRACT, Injection
from orchestrator.testing.mutants import MUTANTS
from orchestrator.testing.simulate import World

PINNED = (16465, 1236)
"""Stories, and distinct states of the world."""
HISTORICAL = {
    "deadline shortened",
    "id cleared",
    "cleanup before download",
    "partial scored",
    "timeouts collapsed",
    "failed deletion forgotten",
    "124 read as a timeout",
    "check retried in the same sandbox",
    "infrastructure counted as failure",
    "ignored files not uploaded",
    "pipe-EOF taken for exit",
}


def test_every_property_holds_in_every_story_of_up_to_two_faults():
    """Counts are pinned: a changed number is a changed protocol, to be looked at first."""
    report = explore(faults=2)
    assert report.counter_examples == {}
    assert report.missed() == []
    assert (report.stories, len(report.states)) == PINNED


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_killed_by_the_property_that_it_names(name):
    mutant = MUTANTS[name]
    with mutant.put_in():
        report = explore(faults=2, until=mutant.property)
    assert any(broken.startswith(mutant.property) for broken in report.counter_examples)


def test_mutants_leave_nothing_behind():
    assert explore(faults=1).counter_examples == {}


def test_the_historical_mistakes_are_among_the_mutants():
    assert set(MUTANTS) >= HISTORICAL


def test_a_counter_example_is_a_shortest_story_that_tells_itself_again():
    mutant = MUTANTS["partial scored"]
    with mutant.put_in():
        report = explore(faults=2, until=mutant.property)
        found = report.counter_examples[mutant.property]
        assert [str(each) for each in found.plan] == ["fetch:truncated"]
        story = found.replay.split("'")[1]
        scenario, *faults = story.split(",")
        (again,) = (each for each in SCENARIOS if each.name == scenario)
        world = tell(again, [Injection.parse(fault) for fault in faults])
    assert found.broken in {broken for broken, _ in world.problems}
    assert tuple(world.log) == found.log
    assert "  1. " in str(found)
    assert found.mermaid().startswith("sequenceDiagram\n")


def test_a_story_is_a_function_of_its_seed():
    first, second = wander(7), wander(7)
    assert first.log == second.log
    assert first.log != wander(8).log


def test_random_stories_of_several_runs_break_nothing_and_end():
    for seed in range(400):
        world = wander(seed)
        assert world.problems == [], "\n".join(world.log)
        for run_id in world.journal.run_ids():
            assert world.journal.step(run_id).run.finished, f"seed {seed}"


def test_every_fault_of_the_contract_has_its_written_form():
    for verb, ways in CONTRACT.items():
        for way in ways:
            for call in (1, 7):
                injection = Injection(verb, way, call)
                assert Injection.parse(str(injection)) == injection


def test_properties_say_what_they_break_and_not_that_nothing_happened():
    """A world in which nothing was run breaks nothing; each property is a function of a run."""
    world = World()
    assert world.journal.run_ids() == []
    assert all(callable(test) for test in ALWAYS.values())
