"""Verdicts have three values, and a tally of them drops none and zeroes none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.verdict import ObservedBy, Outcome, OutcomeKind, Tally, Verdict

counts = st.integers(0, 10**6)
tallies = st.builds(Tally, counts, counts, counts)


def outcome(kind, *, exit_code=None, signal=None, deadline_s=60.0):
    return Outcome(
        kind=kind, exit_code=exit_code, signal=signal, deadline_s=deadline_s, elapsed_s=0.1
    )


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_has_no_truth_value(verdict):
    with pytest.raises(TypeError, match=r"three values .* compare Verdict\.\w+ with Verdict"):
        bool(verdict)
    with pytest.raises(TypeError, match="no truth value"):
        assert not verdict


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_cannot_be_added_up_or_ordered(verdict):
    with pytest.raises(TypeError):
        sum([verdict])
    with pytest.raises(TypeError):
        verdict + verdict
    with pytest.raises(TypeError):
        float(verdict)
    with pytest.raises(TypeError):
        sorted([verdict, Verdict.PASSED])
    assert verdict not in {0, 1, None}


def test_there_are_three_verdicts_under_stable_names():
    assert [verdict.value for verdict in Verdict] == ["PASSED", "FAILED", "UNRESOLVED"]


# --- tallies --------------------------------------------------------------------------------------


@given(verdicts=st.lists(st.sampled_from(Verdict)))
def test_a_tally_counts_each_verdict(verdicts):
    tally = Tally.of(iter(verdicts))
    assert tally.total == len(verdicts)
    assert tally.passed == verdicts.count(Verdict.PASSED)
    assert tally.failed == verdicts.count(Verdict.FAILED)
    assert tally.unresolved == verdicts.count(Verdict.UNRESOLVED)


@given(tally=tallies)
def test_the_rate_is_over_resolved_runs_and_there_is_none_without_them(tally):
    resolved = tally.passed + tally.failed
    if resolved:
        assert tally.rate == tally.passed / resolved
        assert 0 <= tally.rate <= 1
    else:
        assert tally.rate is None


@given(tally=tallies)
def test_unresolved_runs_change_the_bounds_and_never_the_rate(tally):
    assert Tally(tally.passed, tally.failed).rate == tally.rate


@given(tally=tallies, passed=st.data())
def test_the_bounds_hold_whatever_the_unresolved_runs_would_have_been(tally, passed):
    if not tally.total:
        assert tally.bounds is None
        return
    low, high = tally.bounds
    lucky = passed.draw(st.integers(0, tally.unresolved))
    settled = Tally(tally.passed + lucky, tally.failed + tally.unresolved - lucky)
    assert low <= settled.rate <= high
    assert Tally(tally.passed, tally.failed + tally.unresolved).rate == low
    assert Tally(tally.passed + tally.unresolved, tally.failed).rate == high
    if tally.rate is not None:
        assert low <= tally.rate <= high
    if not tally.unresolved:
        assert low == high == tally.rate


def test_a_tally_says_all_three_counts_the_rate_and_the_bounds():
    assert str(Tally(2, 1, 1)) == (
        "2 passed, 1 failed, 1 unresolved; rate 66.7% of 3 resolved, "
        "between 50.0% and 75.0% of all 4"
    )
    assert str(Tally()) == "0 passed, 0 failed, 0 unresolved"


def test_a_tally_of_nothing_resolved_claims_no_rate():
    tally = Tally.of([Verdict.UNRESOLVED] * 3)
    assert tally.rate is None
    assert tally.bounds == (0, 1)
    assert str(tally) == "0 passed, 0 failed, 3 unresolved"


# --- outcomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (outcome(OutcomeKind.EXITED, exit_code=0), "exited(0)"),
        (outcome(OutcomeKind.EXITED, exit_code=124), "exited(124)"),
        (outcome(OutcomeKind.SIGNALLED, signal=9), "signalled(9)"),
        (outcome(OutcomeKind.DEADLINE_EXCEEDED, deadline_s=5.0), "deadline exceeded (5 s)"),
        (outcome(OutcomeKind.DEADLINE_EXCEEDED, deadline_s=0.25), "deadline exceeded (0.25 s)"),
        (outcome(OutcomeKind.OUT_OF_MEMORY), "out of memory"),
    ],
)
def test_an_outcome_says_how_the_check_ended(ended, text):
    assert str(ended) == text


def test_an_outcome_is_the_guests_word_unless_the_backend_saw_it():
    assert outcome(OutcomeKind.EXITED, exit_code=0).observed_by is ObservedBy.GUEST
    assert list(ObservedBy) == ["guest", "backend"]
