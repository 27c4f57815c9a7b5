"""The lifecycle, as one table. Everything else is derived from it.

Everything that decides which fact may follow which must live here: the engine, the diagrams, the
documentation and the tests all read this table, and a rule that is written elsewhere is a rule that
they do not see. Every state is a key, also those that nothing leaves, so that a final state is seen
to be final.

Facts are past tense: a table of facts cannot stop an *act*. That is `machine.py`'s half of the
work.

Those properties that are properties of the graph alone are checked by dominance (`violations`):
delete every edge that must come first, and what must come after has to be out of reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .facts import (
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
from .states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Table = Mapping[State, Mapping[type[Fact], State]]

TABLE: Table = {
    State.NEW: {
        Uploaded: State.UPLOADED,
        UploadFailed: State.BROKEN,
    },
    State.UPLOADED: {
        Checked: State.CHECKED,
        ClientTimedOut: State.CLIENT_TIMED_OUT,
        CheckLost: State.BROKEN,
    },
    State.CLIENT_TIMED_OUT: {
        Checked: State.CHECKED,
        CheckLost: State.BROKEN,
    },
    State.CHECKED: {
        Downloaded: State.DOWNLOADED,
        DownloadFailed: State.SALVAGED,
    },
    State.BROKEN: {
        Downloaded: State.SALVAGED,
        DownloadFailed: State.SALVAGED,
    },
    State.DOWNLOADED: {
        CleanedUp: State.CLEANED_UP,
        CleanupFailed: State.CLEANUP_FAILED,
    },
    State.SALVAGED: {
        CleanedUp: State.UNRESOLVED,
        CleanupFailed: State.UNRESOLVED,
    },
    State.CLEANED_UP: {
        Scored: State.SCORED,
        ScoringFailed: State.UNRESOLVED,
    },
    State.CLEANUP_FAILED: {
        Scored: State.SCORED,
        ScoringFailed: State.UNRESOLVED,
    },
    State.SCORED: {},
    State.UNRESOLVED: {},
}

INITIAL = State.NEW


def final_states(table: Table = TABLE) -> frozenset[State]:
    """Give the states that nothing leaves."""
    return frozenset(state for state, row in table.items() if not row)


def edges(table: Table = TABLE) -> Iterator[tuple[State, type[Fact], State]]:
    """Give every row of the table as (state, fact, next state), in the table's order."""
    for state, row in table.items():
        for fact, target in row.items():
            yield state, fact, target


def violations(table: Table = TABLE) -> list[str]:
    """List what the graph of `table` breaks of its properties; empty for the real table.

    P1: every path to `CleanedUp` or `CleanupFailed` passes `Downloaded` or `DownloadFailed`. P2:
    every path to SCORED passes `Checked`, and after it `Downloaded`; none passes `DownloadFailed`,
    `CheckLost` or `UploadFailed`. P3: after `ClientTimedOut`, nothing is downloaded before
    `Checked` or `CheckLost` settled it. P4: from every state that can be reached a final one can
    be, and there is no way round in circles. P5: what is final has a verdict, and what has one is
    final.
    """
    return [
        *_cleanup_before_download(table),
        *_scored_without_evidence(table),
        *_downloaded_unsettled(table),
        *_without_end(table),
        *_without_verdict(table),
    ]


def _reachable(table: Table, start: State, allow: Callable[[type[Fact]], bool]) -> set[State]:
    """Give the states that can be reached from `start` over the facts that `allow` admits."""
    seen: set[State] = set()
    pending = [start]
    while pending:
        state = pending.pop()
        if state in seen:
            continue
        seen.add(state)
        pending.extend(target for fact, target in table.get(state, {}).items() if allow(fact))
    return seen


def _cleanup_before_download(table: Table) -> list[str]:
    without = _reachable(table, INITIAL, lambda fact: fact not in {Downloaded, DownloadFailed})
    return [
        f"P1: {fact.__name__} in {state} can come before any download attempt"
        for state, fact, _ in edges(table)
        if state in without and fact in {CleanedUp, CleanupFailed}
    ]


def _scored_without_evidence(table: Table) -> list[str]:
    found = []
    if State.SCORED in _reachable(table, INITIAL, lambda fact: fact is not Checked):
        found.append("P2: SCORED can be reached without Checked")
    for state, fact, target in edges(table):
        onward = _reachable(table, target, lambda _: True)
        if fact in {DownloadFailed, CheckLost, UploadFailed} and State.SCORED in onward:
            found.append(f"P2: SCORED can be reached after {fact.__name__} in {state}")
        if fact is Checked and State.SCORED in _reachable(
            table, target, lambda later: later is not Downloaded
        ):
            found.append(f"P2: SCORED can be reached without Downloaded after Checked in {state}")
    return found


def _downloaded_unsettled(table: Table) -> list[str]:
    found = []
    for origin, fact, target in edges(table):
        if fact is not ClientTimedOut:
            continue
        unsettled = _reachable(table, target, lambda later: later not in {Checked, CheckLost})
        found += [
            f"P3: {later.__name__} in {state} can come before ClientTimedOut in {origin} is settled"
            for state, later, _ in edges(table)
            if state in unsettled and later in {Downloaded, DownloadFailed}
        ]
    return found


def _without_end(table: Table) -> list[str]:
    final = final_states(table)
    found = []
    for state in sorted(_reachable(table, INITIAL, lambda _: True)):
        onward = _reachable(table, state, lambda _: True)
        if not onward & final:
            found.append(f"P4: no final state can be reached from {state}")
        for fact, target in table.get(state, {}).items():
            if state in _reachable(table, target, lambda _: True):
                found.append(f"P4: {fact.__name__} in {state} leads back to {state}")
    return found


def _without_verdict(table: Table) -> list[str]:
    decided = {State.SCORED, State.UNRESOLVED}
    return [
        *(
            f"P5: {state} is final and has no verdict"
            for state in sorted(final_states(table) - decided)
        ),
        *(
            f"P5: {fact.__name__} leaves {state}, which has a verdict"
            for state, fact, _ in edges(table)
            if state in decided
        ),
    ]
