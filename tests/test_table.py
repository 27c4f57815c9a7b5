"""The lifecycle table is the designed one, and `violations` finds every way to spoil it.

`violations` proves the properties by dominance: delete the edges that must come first, and what
must come after has to be out of reach. The oracle here does the opposite, and shares no code with
it: it walks every path from NEW and remembers what it has seen.
"""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.facts import (
    Checked,
    CheckLost,
    CleanedUp,
    CleanupFailed,
    ClientTimedOut,
    Downloaded,
    DownloadFailed,
    Fact,
    Scored,
    ScoringFailed,
    Uploaded,
    UploadFailed,
)
from orchestrator.core.machine import legal_facts
from orchestrator.core.states import State
from orchestrator.core.table import INITIAL, TABLE, edges, final_states, violations

S = State
FACTS = Fact.__subclasses__()
ROWS = [
    (S.NEW, Uploaded, S.UPLOADED),
    (S.NEW, UploadFailed, S.BROKEN),
    (S.UPLOADED, Checked, S.CHECKED),
    (S.UPLOADED, ClientTimedOut, S.CLIENT_TIMED_OUT),
    (S.UPLOADED, CheckLost, S.BROKEN),
    (S.CLIENT_TIMED_OUT, Checked, S.CHECKED),
    (S.CLIENT_TIMED_OUT, CheckLost, S.BROKEN),
    (S.CHECKED, Downloaded, S.DOWNLOADED),
    (S.CHECKED, DownloadFailed, S.SALVAGED),
    (S.BROKEN, Downloaded, S.SALVAGED),
    (S.BROKEN, DownloadFailed, S.SALVAGED),
    (S.DOWNLOADED, CleanedUp, S.CLEANED_UP),
    (S.DOWNLOADED, CleanupFailed, S.CLEANUP_FAILED),
    (S.SALVAGED, CleanedUp, S.UNRESOLVED),
    (S.SALVAGED, CleanupFailed, S.UNRESOLVED),
    (S.CLEANED_UP, Scored, S.SCORED),
    (S.CLEANED_UP, ScoringFailed, S.UNRESOLVED),
    (S.CLEANUP_FAILED, Scored, S.SCORED),
    (S.CLEANUP_FAILED, ScoringFailed, S.UNRESOLVED),
]
"""The table of design.md, section 2, row by row."""


# --- the oracle -----------------------------------------------------------------------------------


def with_edge(state, fact, target):
    """Give the table with one edge added or redirected."""
    return {**TABLE, state: {**TABLE[state], fact: target}}


def without_edge(state, fact):
    """Give the table with one edge removed."""
    return {**TABLE, state: {kind: to for kind, to in TABLE[state].items() if kind is not fact}}


def broken_by_walking(table):
    """Walk every path from NEW, remembering what it passed; name the properties that one breaks.

    Two walks that stand in the same state with the same memory have the same future, so one of
    them is followed. That makes the walk finite, also round in circles.
    """
    broken = {"P4"} if goes_in_circles(table) else set()
    pending = [(INITIAL, Memory())]
    seen = set(pending)
    while pending:
        state, memory = pending.pop()
        for fact, target in table[state].items():
            if fact in CLEANUPS and not memory.attempted:
                broken.add("P1")
            if fact in DOWNLOADS and memory.unsettled:
                broken.add("P3")
            after = (target, memory.passing(fact))
            if target is S.SCORED and not after[1].proven:
                broken.add("P2")
            if after not in seen:
                seen.add(after)
                pending.append(after)
    return broken


CLEANUPS = {CleanedUp, CleanupFailed}
DOWNLOADS = {Downloaded, DownloadFailed}
SPOILERS = {DownloadFailed, CheckLost, UploadFailed}


@frozen
class Memory:
    """What a walk has seen on its way: a download tried, a timeout not settled, and what is proven.

    `proof` is how much of "checked, and downloaded after that" was passed: 0, 1 or 2.
    """

    attempted: bool = False
    unsettled: bool = False
    proof: int = 0
    spoiled: bool = False

    def passing(self, fact):
        settled = fact in {Checked, CheckLost}
        proof = {Checked: 1, Downloaded: 2 if self.proof else 0}.get(fact, self.proof)
        return Memory(
            attempted=self.attempted or fact in DOWNLOADS,
            unsettled=fact is ClientTimedOut or (self.unsettled and not settled),
            proof=proof,
            spoiled=self.spoiled or fact in SPOILERS,
        )

    @property
    def proven(self):
        return self.proof == 2 and not self.spoiled


def goes_in_circles(table):
    """Tell whether a path from NEW comes back to a state it has passed."""
    done = set()

    def circles(state, trail):
        if state in trail:
            return True
        if state in done:
            return False
        done.add(state)
        return any(circles(target, {*trail, state}) for target in table[state].values())

    return circles(INITIAL, set())


def reached(table):
    """Give the states that some path from NEW passes."""
    found, pending = set(), [INITIAL]
    while pending:
        state = pending.pop()
        if state not in found:
            found.add(state)
            pending += table[state].values()
    return found


def reported(table):
    """Name the properties that `violations` says are broken, of the four that are paths' own."""
    return {line.split(":")[0] for line in violations(table)} & {"P1", "P2", "P3", "P4"}


def paths(table=TABLE):
    """Give every path from NEW to a final state, as facts."""

    def onward(state):
        if not table[state]:
            yield []
        for fact, target in table[state].items():
            for rest in onward(target):
                yield [fact, *rest]

    return list(onward(INITIAL))


# --- the table ------------------------------------------------------------------------------------


def test_the_table_is_the_designed_one_row_by_row():
    assert list(edges()) == ROWS


def test_every_state_is_a_row_and_every_fact_is_used():
    assert set(TABLE) == set(State)
    assert {fact for _, fact, _ in ROWS} == set(FACTS)
    assert len(FACTS) == 11


def test_every_state_can_be_reached():
    assert reached(TABLE) == set(State)


def test_nothing_but_being_left_by_nothing_makes_a_state_final():
    assert final_states() == {S.SCORED, S.UNRESOLVED}
    assert final_states(without_edge(S.NEW, Uploaded)) == {S.SCORED, S.UNRESOLVED}
    bare = {**TABLE, S.DOWNLOADED: {}}
    assert final_states(bare) == {S.SCORED, S.UNRESOLVED, S.DOWNLOADED}
    assert final_states(with_edge(S.SCORED, CleanedUp, S.UNRESOLVED)) == {S.UNRESOLVED}


def test_legal_facts_are_the_row_of_the_state():
    for state in State:
        assert legal_facts(state) == tuple(fact for start, fact, _ in ROWS if start is state)


def test_the_real_table_violates_nothing():
    assert violations() == []
    assert violations(TABLE) == []
    assert broken_by_walking(TABLE) == set()


def test_there_are_24_lives_and_each_has_at_most_six_facts():
    found = paths()
    assert len(found) == 24
    assert max(map(len, found)) == 6
    assert min(map(len, found)) == 3


def test_each_life_cleans_up_once_and_only_after_one_attempt_to_download():
    for path in paths():
        downloads = [i for i, fact in enumerate(path) if fact in {Downloaded, DownloadFailed}]
        cleanups = [i for i, fact in enumerate(path) if fact in {CleanedUp, CleanupFailed}]
        assert len(downloads) == len(cleanups) == 1
        assert downloads < cleanups


# --- mutants --------------------------------------------------------------------------------------

MUTANTS = [
    # Cleanup before a download.
    ("P1", S.NEW, CleanedUp, S.UNRESOLVED),
    ("P1", S.UPLOADED, CleanupFailed, S.UNRESOLVED),
    ("P1", S.CLIENT_TIMED_OUT, CleanedUp, S.UNRESOLVED),
    ("P1", S.CHECKED, CleanedUp, S.CLEANED_UP),
    ("P1", S.BROKEN, CleanedUp, S.UNRESOLVED),
    ("P1", S.UPLOADED, Checked, S.DOWNLOADED),
    ("P1", S.NEW, UploadFailed, S.SALVAGED),
    # A score without evidence.
    ("P2", S.NEW, Scored, S.SCORED),
    ("P2", S.CHECKED, Scored, S.SCORED),
    ("P2", S.BROKEN, Downloaded, S.DOWNLOADED),
    ("P2", S.CHECKED, DownloadFailed, S.DOWNLOADED),
    ("P2", S.CLIENT_TIMED_OUT, CheckLost, S.CHECKED),
    ("P2", S.NEW, UploadFailed, S.UPLOADED),
    ("P2", S.UPLOADED, ScoringFailed, S.CHECKED),
    ("P2", S.SALVAGED, CleanedUp, S.CLEANED_UP),
    ("P2", S.SALVAGED, Scored, S.SCORED),
    ("P2", S.UNRESOLVED, Scored, S.SCORED),
    ("P2", S.DOWNLOADED, Checked, S.CLEANED_UP),
    # A download before the timeout is settled.
    ("P3", S.CLIENT_TIMED_OUT, Downloaded, S.DOWNLOADED),
    ("P3", S.CLIENT_TIMED_OUT, DownloadFailed, S.SALVAGED),
    ("P3", S.UPLOADED, ClientTimedOut, S.CHECKED),
    ("P3", S.UPLOADED, ClientTimedOut, S.BROKEN),
    ("P3", S.CHECKED, ClientTimedOut, S.BROKEN),
    ("P3", S.NEW, ClientTimedOut, S.CHECKED),
    # No end.
    ("P4", S.CHECKED, ClientTimedOut, S.UPLOADED),
    ("P4", S.UNRESOLVED, Uploaded, S.NEW),
    ("P4", S.SALVAGED, CleanupFailed, S.SALVAGED),
    ("P4", S.CLEANUP_FAILED, CleanupFailed, S.DOWNLOADED),
    ("P4", S.SCORED, Scored, S.SCORED),
]


@pytest.mark.parametrize(
    ("law", "state", "fact", "target"),
    MUTANTS,
    ids=[f"{law}-{s.value}-{f.__name__}-{t.value}" for law, s, f, t in MUTANTS],
)
def test_a_mutant_is_reported_under_its_property(law, state, fact, target):
    mutant = with_edge(state, fact, target)
    assert law in broken_by_walking(mutant)
    assert law in reported(mutant)


def test_a_violation_says_where():
    found = violations(with_edge(S.CHECKED, CleanedUp, S.CLEANED_UP))
    assert "P1: CleanedUp in CHECKED can come before any download attempt" in found
    assert "P2: SCORED can be reached without Downloaded after Checked in UPLOADED" in found
    found = violations(with_edge(S.CLIENT_TIMED_OUT, Downloaded, S.DOWNLOADED))
    assert any("before ClientTimedOut in UPLOADED is settled" in line for line in found)
    found = violations(with_edge(S.SALVAGED, CleanupFailed, S.SALVAGED))
    assert "P4: CleanupFailed in SALVAGED leads back to SALVAGED" in found


def test_a_way_round_without_a_way_out_is_reported_twice():
    table = {**TABLE, S.DOWNLOADED: {CleanedUp: S.DOWNLOADED}}
    assert "P4: no final state can be reached from DOWNLOADED" in violations(table)
    assert "P4: CleanedUp in DOWNLOADED leads back to DOWNLOADED" in violations(table)


def test_violations_are_listed_in_the_same_order_in_every_process():
    # Sets of text are not: their order changes with the seed of the process.
    round_and_round = with_edge(S.UNRESOLVED, Uploaded, S.NEW)
    places = [line.split()[-1] for line in violations(round_and_round) if line.startswith("P4")]
    assert len(set(places)) > 5
    assert places == sorted(places)


def test_a_state_without_a_row_is_no_end():
    table = {state: row for state, row in TABLE.items() if state is not S.UNRESOLVED}
    assert "P4: no final state can be reached from SALVAGED" in violations(table)


def test_every_removal_of_one_edge_is_judged_as_walking_judges_it():
    for state, fact, _ in ROWS:
        mutant = without_edge(state, fact)
        assert reported(mutant) == broken_by_walking(mutant), f"without {fact.__name__} in {state}"


def test_every_redirection_of_one_edge_is_judged_as_walking_judges_it():
    judged = Counter()
    for state, fact, target in ROWS:
        for other in set(State) - {target}:
            mutant = with_edge(state, fact, other)
            found = broken_by_walking(mutant)
            judged[bool(found)] += 1
            story = f"{fact.__name__} in {state} leads to {other}"
            assert found <= reported(mutant), story
            assert reported(mutant) == found or reached(mutant) != set(State), story
    assert sum(judged.values()) == 19 * 10
    assert judged[True] > 100


def test_every_addition_of_one_edge_is_judged_as_walking_judges_it():
    judged = Counter()
    for state in State:
        for fact in set(FACTS) - set(TABLE[state]):
            for target in State:
                mutant = with_edge(state, fact, target)
                found = broken_by_walking(mutant)
                judged["additions"] += 1
                judged.update(found)
                judged["harmless"] += not found
                assert reported(mutant) == found, f"{fact.__name__} in {state} leads to {target}"
    assert judged["additions"] == (11 * 11 - 19) * 11
    assert min(judged[law] for law in ("P1", "P2", "P3", "P4", "harmless")) > 10


@st.composite
def tables(draw):
    """Draw any table at all, with a row for every state."""
    rows = st.dictionaries(st.sampled_from(FACTS), st.sampled_from(list(State)), max_size=4)
    return {state: draw(rows) for state in State}


@st.composite
def near_tables(draw):
    """Draw the real table with a few edges changed: most of it still makes sense."""
    table = {state: dict(row) for state, row in TABLE.items()}
    for _ in range(draw(st.integers(1, 4))):
        row = table[draw(st.sampled_from(list(State)))]
        fact = draw(st.sampled_from(FACTS))
        if draw(st.booleans()):
            row[fact] = draw(st.sampled_from(list(State)))
        else:
            row.pop(fact, None)
    return table


@settings(max_examples=3 * settings.default.max_examples)
@given(table=st.one_of(tables(), near_tables()))
def test_violations_miss_nothing_that_a_walk_can_break(table):
    assert broken_by_walking(table) <= reported(table)


@settings(max_examples=3 * settings.default.max_examples)
@given(table=st.one_of(tables(), near_tables()))
def test_violations_report_only_what_a_walk_can_break_where_every_row_can_be_reached(table):
    live = reached(table)
    trimmed = {state: row if state in live else {} for state, row in table.items()}
    assert reported(trimmed) == broken_by_walking(trimmed)


# --- verdicts are final ---------------------------------------------------------------------------


def test_a_final_state_without_a_verdict_is_reported():
    table = {**TABLE, S.CLEANED_UP: {}}
    assert any("CLEANED_UP" in line for line in violations(table))


def test_a_way_out_of_a_verdict_is_reported():
    table = with_edge(S.SCORED, CleanedUp, S.UNRESOLVED)
    assert any("SCORED" in line for line in violations(table))
