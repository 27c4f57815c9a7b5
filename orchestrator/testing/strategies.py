"""Hypothesis strategies for what a run lives through, from the table and the fault contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from ..core.evidence import Receipt
from ..core.facts import (
    Checked,
    CheckLost,
    CleanedUp,
    CleanupFailed,
    ClientTimedOut,
    Downloaded,
    DownloadFailed,
    Fact,
    Fault,
    FaultKind,
    Phase,
    SandboxRef,
    Scored,
    ScoringFailed,
    Uploaded,
    UploadFailed,
)
from ..core.machine import Run, advance, begin, legal_facts
from ..core.states import State
from ..core.verdict import ExpectationResult, Outcome, OutcomeKind
from .explore import SCENARIOS
from .faults import CONTRACT, Injection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .simulate import Scenario


def injections(verbs: Iterable[str] = CONTRACT, *, calls: int = 3) -> st.SearchStrategy[Injection]:
    """Give faults of the contract, at one of the first `calls` calls of one of `verbs`."""
    return st.sampled_from(
        [
            Injection(verb, way, call)
            for verb in verbs
            for way in CONTRACT[verb]
            for call in _to(calls)
        ]
    )


def _to(calls: int) -> range:
    return range(1, calls + 1)


def plans(
    verbs: Iterable[str] = CONTRACT, *, faults: int = 3, calls: int = 3
) -> st.SearchStrategy[tuple[Injection, ...]]:
    """Give plans of up to `faults` faults, none at all among them, no two at one call."""
    return st.lists(
        injections(verbs, calls=calls),
        max_size=faults,
        unique_by=lambda each: (each.verb, each.call),
    ).map(tuple)


def scenarios() -> st.SearchStrategy[Scenario]:
    """Give the explorer's scenarios."""
    return st.sampled_from(SCENARIOS)


def outcomes() -> st.SearchStrategy[Outcome]:
    """Give ways for a check to have ended."""
    seconds = st.floats(0, 100)

    def outcome(kind: OutcomeKind, code: int, elapsed_s: float) -> Outcome:
        return Outcome(
            kind=kind,
            exit_code=code if kind is OutcomeKind.EXITED else None,
            signal=code % 64 + 1 if kind is OutcomeKind.SIGNALLED else None,
            deadline_s=100.0,
            elapsed_s=elapsed_s,
        )

    return st.builds(outcome, st.sampled_from(OutcomeKind), st.integers(0, 255), seconds)


def run_faults(*phases: Phase) -> st.SearchStrategy[Fault]:
    """Give faults as runs list them, met in one of `phases`."""
    kinds = st.sampled_from([kind for kind in FaultKind if kind is not FaultKind.RETAINED])
    return st.builds(Fault, st.sampled_from(phases), kinds, st.text(max_size=20))


def _expectations(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    result = st.builds(
        ExpectationResult, st.text(min_size=1, max_size=9), values, st.text(max_size=9)
    )
    return st.lists(result, min_size=1, max_size=4).map(tuple)


def facts(run: Run, kind: type[Fact]) -> st.SearchStrategy[Fact]:
    """Give facts of a kind that could be said of a run, whether or not they are legal now."""
    sandboxes = st.just(SandboxRef(run.run_id, "identity"))
    receipts = st.builds(
        Receipt,
        run_id=st.just(run.run_id),
        sealed=st.just(kind is Downloaded and run.state is State.CHECKED),
        record=st.just("record"),
        manifest=st.just("manifest"),
        entries=st.integers(0, 9),
        bytes=st.integers(0, 9),
        created=st.integers(0, 9),
        modified=st.integers(0, 9),
        deleted=st.integers(0, 9),
    )
    fault = run_faults
    digests = st.just("digest")
    made: dict[type[Fact], st.SearchStrategy[Any]] = {
        Uploaded: st.builds(Uploaded, sandbox=sandboxes, workspace=digests, baseline=digests),
        UploadFailed: st.builds(
            UploadFailed, fault=fault(Phase.UPLOAD, Phase.SETUP), sandbox=st.none() | sandboxes
        ),
        Checked: st.builds(Checked, outcome=outcomes()),
        ClientTimedOut: st.builds(ClientTimedOut, fault=fault(Phase.CHECK)),
        CheckLost: st.builds(CheckLost, fault=fault(Phase.CHECK, Phase.SETTLE)),
        Downloaded: st.builds(Downloaded, receipt=receipts),
        DownloadFailed: st.builds(
            DownloadFailed, fault=fault(Phase.DOWNLOAD), receipt=st.none() | receipts
        ),
        CleanedUp: st.builds(CleanedUp),
        CleanupFailed: st.builds(CleanupFailed, fault=fault(Phase.DESTROY)),
        Scored: st.builds(Scored, expectations=_expectations(st.booleans())),
        ScoringFailed: st.builds(
            ScoringFailed, fault=fault(Phase.SCORE), expectations=_expectations(st.none())
        ),
    }
    strategy: st.SearchStrategy[Fact] = made[kind]
    return strategy


@st.composite
def walks(draw: st.DrawFn, run_id: str = "run") -> list[Fact]:
    """Give the facts of a run, from its beginning to a final state, by legal steps."""
    step = begin(run_id, draw(st.sampled_from(["never", "unresolved"])))
    walked: list[Fact] = []
    while not step.run.finished:
        kind = draw(st.sampled_from(legal_facts(step.run.state)))
        walked.append(draw(facts(step.run, kind)))
        step = advance(step.run, walked[-1])
    return walked
