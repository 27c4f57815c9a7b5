"""The transducer: what facts do to a run, and what may be done next.

Lives are drawn from the table with random payloads; what a run must say about itself is computed
from its facts by other means than folding them, and compared.
"""

from __future__ import annotations

import copy
import sys
import threading
from functools import cache

import pytest
from attrs import evolve
from attrs.exceptions import FrozenInstanceError
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import machine
from orchestrator.core.clocks import Bounds, latest_start_s
from orchestrator.core.errors import IllegalFactError
from orchestrator.core.evidence import Receipt
from orchestrator.core.facts import (
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
from orchestrator.core.machine import (
    Check,
    CleanupPermit,
    Destroy,
    Download,
    Keep,
    Run,
    Score,
    SealedEvidence,
    Settle,
    Upload,
    advance,
    begin,
    legal_facts,
    replay,
    sweep,
)
from orchestrator.core.states import State
from orchestrator.core.table import TABLE, edges
from orchestrator.core.verdict import (
    ExpectationResult,
    ObservedBy,
    Outcome,
    OutcomeKind,
    Reason,
    Tally,
    Verdict,
)
from orchestrator.testing import strategies

FACTS = Fact.__subclasses__()
RUN = "r1"

# --- facts with random payloads -------------------------------------------------------------------

words = st.text(
    st.characters(codec="utf-8") | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    max_size=12,
)
"""Text as it may reach a fact: anything, with undecodable bytes as surrogate escapes."""
seconds = st.floats(0, 1e6) | st.integers(0, 100)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
counts = st.integers(0, 2**63)
sandboxes = st.builds(SandboxRef, words, words)
outcomes = st.builds(
    Outcome,
    kind=st.sampled_from(OutcomeKind),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    deadline_s=seconds,
    elapsed_s=seconds,
    observed_by=st.sampled_from(ObservedBy),
    escalated=st.booleans(),
    descendants=st.integers(0, 9),
)


def faults(*phases, kinds=tuple(set(FaultKind) - {FaultKind.RETAINED})):
    return st.builds(Fault, st.sampled_from(phases), st.sampled_from(kinds), words)


def several(strategy):
    return st.lists(strategy, max_size=2).map(tuple)


def receipts(run_id, *, sealed):
    return st.builds(
        Receipt,
        run_id=st.just(run_id),
        sealed=st.just(sealed),
        record=digests,
        manifest=digests,
        **dict.fromkeys(("entries", "bytes", "created", "modified", "deleted"), counts),
    )


@cache
def facts(kind, *, run_id=RUN, sealed=True):
    """Give a strategy for facts of one kind that tell a possible story of the run."""
    found = st.builds(ExpectationResult, words, st.booleans(), words)
    unknown = st.builds(ExpectationResult, words, st.none(), words)
    gave_up = (FaultKind.BOUND_EXCEEDED, FaultKind.CANCELLED)
    payloads = {
        Uploaded: {
            "sandbox": sandboxes,
            "workspace": digests,
            "baseline": digests,
            "setup_s": st.none() | seconds,
        },
        UploadFailed: {
            "fault": faults(Phase.UPLOAD)
            | faults(Phase.SETUP, kinds=(FaultKind.SETUP_FAILED, FaultKind.ERROR)),
            "faults": several(faults(Phase.SETUP, Phase.SETTLE)),
            "sandbox": st.none() | sandboxes,
        },
        Checked: {"outcome": outcomes, "faults": several(faults(Phase.CHECK, Phase.SETTLE))},
        ClientTimedOut: {"fault": faults(Phase.CHECK, kinds=gave_up)},
        CheckLost: {
            "fault": faults(Phase.CHECK, Phase.SETTLE),
            "faults": several(faults(Phase.SETTLE)),
        },
        Downloaded: {
            "receipt": receipts(run_id, sealed=sealed),
            "faults": several(faults(Phase.DOWNLOAD)),
        },
        DownloadFailed: {
            "fault": faults(Phase.DOWNLOAD),
            "faults": several(faults(Phase.DOWNLOAD)),
            "receipt": st.none() | receipts(run_id, sealed=False),
        },
        CleanedUp: {},
        CleanupFailed: {"fault": faults(Phase.DESTROY, kinds=tuple(FaultKind))},
        Scored: {"expectations": st.lists(found, min_size=1, max_size=3).map(tuple)},
        ScoringFailed: {
            "fault": faults(Phase.SCORE),
            "expectations": several(st.one_of(found, unknown)),
        },
    }
    return st.builds(kind, elapsed_s=seconds, **payloads[kind])


@st.composite
def lives(draw, run_id=RUN, *, whole=True):
    """Draw the facts of a run, from NEW to a final state; of any length if not `whole`."""
    state, told = State.NEW, []
    while TABLE[state] and (whole or draw(st.booleans())):
        kind = draw(st.sampled_from(list(TABLE[state])))
        told.append(draw(facts(kind, run_id=run_id, sealed=state is State.CHECKED)))
        state = TABLE[state][kind]
    return told


retains = st.sampled_from(["never", "unresolved"])

# --- facts with one payload, for stories told by hand ---------------------------------------------

BOX = SandboxRef("box", "i-1")
OUTCOME = Outcome(kind=OutcomeKind.EXITED, exit_code=0, signal=None, deadline_s=60.0, elapsed_s=1.5)


def receipt(*, run_id=RUN, sealed=True):
    return Receipt(
        run_id=run_id,
        sealed=sealed,
        record="0" * 64,
        manifest="1" * 64,
        entries=3,
        bytes=10,
        created=1,
        modified=1,
        deleted=0,
    )


def fault(phase, kind=FaultKind.ERROR):
    return Fault(phase, kind, "it broke")


def fact(kind, *, sealed=True, run_id=RUN):
    """Give the plainest fact of a kind."""
    return {
        Uploaded: Uploaded(sandbox=BOX, workspace="2" * 64, baseline="3" * 64),
        UploadFailed: UploadFailed(fault=fault(Phase.UPLOAD), sandbox=BOX),
        Checked: Checked(outcome=OUTCOME),
        ClientTimedOut: ClientTimedOut(fault=fault(Phase.CHECK, FaultKind.BOUND_EXCEEDED)),
        CheckLost: CheckLost(fault=fault(Phase.CHECK)),
        Downloaded: Downloaded(receipt=receipt(sealed=sealed, run_id=run_id)),
        DownloadFailed: DownloadFailed(fault=fault(Phase.DOWNLOAD)),
        CleanedUp: CleanedUp(),
        CleanupFailed: CleanupFailed(fault=fault(Phase.DESTROY)),
        Scored: Scored(expectations=(ExpectationResult("exit_code", passed=True, message="ok"),)),
        ScoringFailed: ScoringFailed(fault=fault(Phase.SCORE)),
    }[kind]


def story(*kinds, retain="never"):
    """Tell a run by the kinds of its facts; give the last step."""
    step = begin(RUN, retain)
    for kind in kinds:
        step = advance(step.run, fact(kind, sealed=step.run.state is State.CHECKED))
    return step


WAYS = {
    State.NEW: (),
    State.UPLOADED: (Uploaded,),
    State.CLIENT_TIMED_OUT: (Uploaded, ClientTimedOut),
    State.CHECKED: (Uploaded, Checked),
    State.BROKEN: (UploadFailed,),
    State.DOWNLOADED: (Uploaded, Checked, Downloaded),
    State.SALVAGED: (Uploaded, Checked, DownloadFailed),
    State.CLEANED_UP: (Uploaded, Checked, Downloaded, CleanedUp),
    State.CLEANUP_FAILED: (Uploaded, Checked, Downloaded, CleanupFailed),
    State.SCORED: (Uploaded, Checked, Downloaded, CleanedUp, Scored),
    State.UNRESOLVED: (UploadFailed, DownloadFailed, CleanedUp),
}
"""A shortest way to every state."""

LEGAL = [(state, kind) for state, kind, _ in edges()]
ILLEGAL = [(state, kind) for state in State for kind in FACTS if kind not in TABLE[state]]


def named(pair):
    return f"{pair[0].value}-{pair[1].__name__}"


# --- every state and every fact -------------------------------------------------------------------


def test_every_pair_of_state_and_fact_is_tried():
    assert len(LEGAL) + len(ILLEGAL) == len(State) * len(FACTS) == 121


@pytest.mark.parametrize("pair", LEGAL, ids=named)
def test_a_legal_fact_leads_where_the_table_says(pair):
    state, kind = pair
    run = story(*WAYS[state]).run
    assert run.state is state
    step = advance(run, fact(kind, sealed=state is State.CHECKED))
    assert step.run.state is TABLE[state][kind]
    assert isinstance(step.run.state, State)


@pytest.mark.parametrize("pair", ILLEGAL, ids=named)
def test_an_illegal_fact_is_refused_and_nothing_has_happened(pair):
    state, kind = pair
    run = story(*WAYS[state]).run
    before = copy.deepcopy(run)
    with pytest.raises(IllegalFactError) as refused:
        advance(run, fact(kind))
    error = refused.value
    assert (error.run_id, error.state, error.fact) == (RUN, state, kind.__name__)
    assert error.legal == tuple(kind.__name__ for kind in legal_facts(state))
    assert str(error).startswith(f"run {RUN}: {kind.__name__} is not legal in {state.value}; legal")
    for name in error.legal:
        assert name in str(error)
    assert ("none" in str(error)) == (not TABLE[state])
    assert run == before


def test_a_fact_of_no_known_kind_is_refused():
    applauded = type("Applauded", (), {"elapsed_s": 0.0})
    with pytest.raises(IllegalFactError, match="Applauded is not legal in NEW"):
        advance(begin(RUN).run, applauded())


def test_a_fact_is_known_by_its_class_and_not_by_the_name_of_its_class():
    impostor = type("CleanedUp", (), {"elapsed_s": 0.0})
    run = story(*WAYS[State.DOWNLOADED]).run
    with pytest.raises(IllegalFactError, match="CleanedUp"):
        advance(run, impostor())


def test_a_run_cannot_be_changed():
    run = story(Uploaded).run
    with pytest.raises(FrozenInstanceError):
        run.state = State.SCORED


def test_advancing_leaves_the_run_it_started_from():
    run = story(Uploaded).run
    before = copy.deepcopy(run)
    first, second = advance(run, fact(Checked)), advance(run, fact(CheckLost))
    assert run == before
    assert (first.run.state, second.run.state) == (State.CHECKED, State.BROKEN)


# --- the engine -----------------------------------------------------------------------------------


@given(kinds=st.lists(st.sampled_from(FACTS), max_size=8))
def test_the_engine_and_the_bare_table_keep_step(kinds):
    state, run = State.NEW, begin(RUN).run
    for kind in kinds:
        told = fact(kind, sealed=state is State.CHECKED)
        if kind in TABLE[state]:
            state = TABLE[state][kind]
            run = advance(run, told).run
        else:
            with pytest.raises(IllegalFactError):
                advance(run, told)
        assert run.state is state


def test_the_engine_has_the_edges_of_the_table_and_no_other():
    found = {
        (transition.source, name, transition.dest)
        for name, event in machine._ENGINE.events.items()
        for transitions in event.transitions.values()
        for transition in transitions
    }
    assert found == {(state.value, kind.__name__, target.value) for state, kind, target in edges()}
    assert set(machine._ENGINE.states) == {state.value for state in State}


def test_the_engine_has_no_automatic_transitions_wildcards_or_models():
    story(*WAYS[State.SCORED])
    engine = machine._ENGINE
    assert engine.models == []
    assert not engine.auto_transitions
    assert not [name for name in engine.events if name.startswith("to")]
    assert not [name for name in dir(engine) if name.startswith("to_")]
    assert not [name for name in dir(machine._Cursor(State.NEW)) if name.startswith("to_")]
    for event in engine.events.values():
        assert "*" not in event.transitions
        for transitions in event.transitions.values():
            assert len(transitions) == 1


def test_the_engine_has_no_callbacks_conditions_queue_or_deaf_ears():
    engine = machine._ENGINE
    assert not engine.ignore_invalid_triggers
    assert not engine.has_queue
    for hook in (
        "before_state_change",
        "after_state_change",
        "prepare_event",
        "finalize_event",
        "on_exception",
        "on_final",
    ):
        assert getattr(engine, hook) == [], hook
    for state in engine.states.values():
        assert (state.on_enter, state.on_exit, state.ignore_invalid_triggers) == ([], [], None)
    for event in engine.events.values():
        for (transition,) in event.transitions.values():
            assert (transition.prepare, transition.conditions) == ([], [])
            assert (transition.before, transition.after) == ([], [])


@pytest.fixture
def hurry():
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_eight_threads_share_the_engine(hurry):
    told = [
        [fact(kind, sealed=WAYS[state] and state is not State.BROKEN) for kind in WAYS[state]]
        for state in State
    ]
    alone = [replay(RUN, life) for life in told]
    together = {}
    start = threading.Barrier(8)

    def fold(number):
        start.wait()
        together[number] = [replay(RUN, life) for _ in range(15) for life in told]

    threads = [threading.Thread(target=fold, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == dict.fromkeys(range(8), alone * 15)


# --- commands -------------------------------------------------------------------------------------

PERMIT = CleanupPermit(RUN, BOX.sandbox_id)
COMMANDS = {
    State.NEW: Upload(),
    State.UPLOADED: Check(),
    State.CLIENT_TIMED_OUT: Settle(),
    State.CHECKED: Download(salvage=False),
    State.BROKEN: Download(salvage=True),
    State.DOWNLOADED: Destroy(PERMIT),
    State.SALVAGED: Destroy(PERMIT),
    State.CLEANED_UP: Score(SealedEvidence(receipt())),
    State.CLEANUP_FAILED: Score(SealedEvidence(receipt())),
    State.SCORED: None,
    State.UNRESOLVED: None,
}


@pytest.mark.parametrize("state", State)
def test_each_state_allows_one_command(state):
    assert story(*WAYS[state]).command == COMMANDS[state]


@given(life=lives(), retain=retains)
def test_the_only_way_to_destroy_is_after_a_recorded_download_and_for_that_sandbox(life, retain):
    step, told = begin(RUN, retain), []
    for each in [*life, None]:
        if isinstance(step.command, Destroy):
            assert any(isinstance(past, Downloaded | DownloadFailed) for past in told)
            known = [past.sandbox for past in told if isinstance(past, Uploaded | UploadFailed)]
            ref = known[0]
            assert step.command.permit == CleanupPermit(RUN, ref.sandbox_id if ref else None)
        if isinstance(each, CleanedUp | CleanupFailed):
            assert isinstance(step.command, Destroy | Keep)
        if each is not None:
            told.append(each)
            step = advance(step.run, each)


@given(life=lives(), retain=retains)
def test_the_only_way_to_score_is_with_the_sealed_evidence_of_that_run(life, retain):
    step, told = begin(RUN, retain), []
    for each in [*life, None]:
        if isinstance(step.command, Score):
            (proof,) = [past.receipt for past in told if isinstance(past, Downloaded)]
            assert step.command.evidence == SealedEvidence(proof)
            assert proof.sealed
            assert proof.run_id == RUN
            assert [past for past in told if isinstance(past, Checked)]
        if isinstance(each, Scored | ScoringFailed):
            assert isinstance(step.command, Score)
        if each is not None:
            told.append(each)
            step = advance(step.run, each)


@given(life=lives(whole=False), retain=retains)
def test_there_is_a_command_until_the_run_is_finished(life, retain):
    step = replay(RUN, life, retain)
    assert (step.command is None) == step.run.finished == (not TABLE[step.run.state])


@given(life=lives(whole=False), retain=retains)
def test_a_sandbox_is_kept_only_if_the_spec_asks_and_the_run_cannot_be_scored(life, retain):
    step = replay(RUN, life, retain)
    if isinstance(step.command, Keep):
        assert retain == "unresolved"
        assert step.run.state is State.SALVAGED
        assert step.run.sandbox is not None
    if step.run.state is State.SALVAGED and retain == "unresolved" and step.run.sandbox:
        assert step.command == Keep()


def test_a_sandbox_that_was_never_seen_cannot_be_kept():
    blind = UploadFailed(fault=fault(Phase.UPLOAD))
    step = replay(RUN, [blind, fact(DownloadFailed)], "unresolved")
    assert step.command == Destroy(CleanupPermit(RUN, None))


def test_a_run_that_claims_to_be_downloaded_without_a_receipt_has_nothing_to_score():
    run = Run(run_id=RUN, state=State.DOWNLOADED)
    assert advance(run, CleanedUp()).command is None


# --- receipts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Downloaded, DownloadFailed])
@pytest.mark.parametrize("state", [State.CHECKED, State.BROKEN])
def test_a_receipt_of_another_run_is_refused(state, kind):
    run = story(*WAYS[state]).run
    foreign = receipt(run_id="r2", sealed=kind is Downloaded and state is State.CHECKED)
    told = evolve(fact(kind), receipt=foreign)
    before = copy.deepcopy(run)
    with pytest.raises(IllegalFactError, match="its receipt is for run r2"):
        advance(run, told)
    assert run == before


@pytest.mark.parametrize(
    ("state", "kind", "sealed"),
    [
        (State.CHECKED, Downloaded, False),
        (State.BROKEN, Downloaded, True),
        (State.CHECKED, DownloadFailed, True),
        (State.BROKEN, DownloadFailed, True),
    ],
)
def test_a_receipt_that_does_not_prove_the_fact_is_refused(state, kind, sealed):
    run = story(*WAYS[state]).run
    before = copy.deepcopy(run)
    with pytest.raises(IllegalFactError, match=f"its receipt says sealed={sealed}") as refused:
        advance(run, evolve(fact(kind), receipt=receipt(sealed=sealed)))
    assert refused.value.state == state
    assert refused.value.legal
    assert run == before


@pytest.mark.parametrize("nothing", [None, "a receipt"])
def test_downloaded_cannot_be_said_without_a_receipt(nothing):
    run = story(Uploaded, Checked).run
    with pytest.raises(IllegalFactError, match="receipt"):
        advance(run, Downloaded(receipt=nothing))


def test_scored_cannot_be_said_of_an_expectation_that_was_not_evaluated():
    run = story(*WAYS[State.CLEANED_UP]).run
    unknown = ExpectationResult("greets", passed=None, message="it raised")
    with pytest.raises(IllegalFactError, match="greets"):
        advance(run, Scored(expectations=(unknown,)))


def test_scored_cannot_be_said_of_nothing():
    run = story(*WAYS[State.CLEANED_UP]).run
    with pytest.raises(IllegalFactError, match="expectation"):
        advance(run, Scored(expectations=()))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (State.NEW, UploadFailed(fault=fault(Phase.DESTROY))),
        (State.NEW, UploadFailed(fault=fault(Phase.UPLOAD, FaultKind.RETAINED))),
        (State.UPLOADED, ClientTimedOut(fault=fault(Phase.SCORE))),
        (State.UPLOADED, CheckLost(fault=fault(Phase.DOWNLOAD))),
        (State.UPLOADED, Checked(outcome=OUTCOME, faults=(fault(Phase.SCORE),))),
        (State.CHECKED, DownloadFailed(fault=fault(Phase.CHECK))),
        (State.DOWNLOADED, CleanupFailed(fault=fault(Phase.UPLOAD))),
        (State.CLEANED_UP, ScoringFailed(fault=fault(Phase.CHECK))),
    ],
    ids=lambda value: value.value if isinstance(value, State) else type(value).__name__,
)
def test_a_fault_of_another_phase_is_no_cause_of_the_fact(state, told):
    with pytest.raises(IllegalFactError, match="fault"):
        advance(story(*WAYS[state]).run, told)


# --- what a run says about itself -----------------------------------------------------------------


def told_faults(life):
    """Collect the faults that facts carry, in order, without those that are none."""
    found = []
    for each in life:
        beside = list(getattr(each, "faults", ()))
        cause = [each.fault] if hasattr(each, "fault") else []
        found += beside + cause if isinstance(each, DownloadFailed) else cause + beside
    return tuple(told for told in found if told.kind is not FaultKind.RETAINED)


@given(life=lives(), retain=retains)
def test_replayed_facts_are_the_run(life, retain):
    step = begin(RUN, retain)
    for each in life:
        step = advance(step.run, each)
    assert replay(RUN, life, retain) == step
    assert replay(RUN, iter(life), retain) == step


@given(life=lives(), retain=retains)
def test_a_run_keeps_what_its_facts_say(life, retain):
    run = replay(RUN, life, retain).run
    by_kind = {type(each): each for each in life}
    uploaded = by_kind.get(Uploaded)
    upload = uploaded or by_kind[UploadFailed]
    download = by_kind.get(Downloaded) or by_kind[DownloadFailed]
    scoring = by_kind.get(Scored) or by_kind.get(ScoringFailed)
    assert (run.run_id, run.retain) == (RUN, retain)
    assert run.sandbox == upload.sandbox
    assert run.workspace == (uploaded.workspace if uploaded else None)
    assert run.baseline == (uploaded.baseline if uploaded else None)
    assert run.receipt == download.receipt
    assert run.expectations == (scoring.expectations if scoring else ())
    assert run.faults == told_faults(life)
    assert run.sandbox_gone == (CleanedUp in by_kind)
    if Checked in by_kind:
        late = ClientTimedOut in by_kind
        said = evolve(by_kind[Checked].outcome, settled_after_client_timeout=late)
        assert run.outcome == said
    else:
        assert run.outcome is None


@given(life=lives())
def test_a_run_has_one_verdict_and_has_it_at_its_end(life):
    step = begin(RUN)
    for each in life:
        assert step.run.verdict is None
        assert step.run.reason is None
        assert not step.run.finished
        step = advance(step.run, each)
    assert step.run.finished
    assert isinstance(step.run.verdict, Verdict)
    assert (step.run.reason is not None) == (step.run.verdict is Verdict.UNRESOLVED)
    for kind in FACTS:
        with pytest.raises(IllegalFactError, match="is final"):
            advance(step.run, fact(kind))


@given(life=lives())
def test_a_run_passes_only_if_everything_that_was_expected_was_found(life):
    run = replay(RUN, life).run
    last = life[-1]
    if isinstance(last, Scored):
        passed = False not in [result.passed for result in last.expectations]
        assert run.verdict is (Verdict.PASSED if passed else Verdict.FAILED)
    else:
        assert run.verdict is Verdict.UNRESOLVED


def first_cause(life):
    """Say from the kinds of facts alone why a run is unresolved: the first thing not overcome."""
    by_kind = {type(each): each for each in life}
    if UploadFailed in by_kind:
        cause = by_kind[UploadFailed].fault
        if cause.phase is Phase.SETUP:
            return Reason.SETUP_FAILED
        cancelled = cause.kind is FaultKind.CANCELLED
        return Reason.CANCELLED if cancelled else Reason.UPLOAD_FAILED
    if CheckLost in by_kind:
        cause = by_kind.get(ClientTimedOut, by_kind[CheckLost]).fault
        if cause.phase is Phase.SETTLE:
            return Reason.CHECK_LOST
        return {
            FaultKind.CANCELLED: Reason.CANCELLED,
            FaultKind.BOUND_EXCEEDED: Reason.CLIENT_TIMED_OUT,
        }.get(cause.kind, Reason.CHECK_LOST)
    if DownloadFailed in by_kind:
        return Reason.DOWNLOAD_FAILED
    truncated = by_kind[ScoringFailed].fault.kind is FaultKind.OUTPUT_TRUNCATED
    return Reason.OUTPUT_TRUNCATED if truncated else Reason.SCORER_ERROR


@given(life=lives(), retain=retains)
def test_the_reason_is_the_first_cause_that_was_not_overcome(life, retain):
    run = replay(RUN, life, retain).run
    if run.verdict is Verdict.UNRESOLVED:
        assert run.reason is first_cause(life)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (Reason.UPLOAD_FAILED, [UploadFailed(fault=fault(Phase.UPLOAD, FaultKind.BOUND_EXCEEDED))]),
        (Reason.CANCELLED, [UploadFailed(fault=fault(Phase.UPLOAD, FaultKind.CANCELLED))]),
        (Reason.SETUP_FAILED, [UploadFailed(fault=fault(Phase.SETUP, FaultKind.SETUP_FAILED))]),
        (Reason.CANCELLED, [UploadFailed(fault=fault(Phase.SETUP, FaultKind.CANCELLED))]),
        (
            Reason.CLIENT_TIMED_OUT,
            [
                fact(Uploaded),
                ClientTimedOut(fault=fault(Phase.CHECK, FaultKind.BOUND_EXCEEDED)),
                CheckLost(fault=fault(Phase.SETTLE, FaultKind.STOPPED)),
            ],
        ),
        (
            Reason.CANCELLED,
            [
                fact(Uploaded),
                ClientTimedOut(fault=fault(Phase.CHECK, FaultKind.CANCELLED)),
                CheckLost(fault=fault(Phase.SETTLE, FaultKind.STOPPED)),
            ],
        ),
        (
            Reason.CHECK_LOST,
            [fact(Uploaded), CheckLost(fault=fault(Phase.CHECK, FaultKind.RECORD_LOST))],
        ),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else type(value[-1]).__name__,
)
def test_what_breaks_a_run_gives_the_reason(reason, told):
    run = replay(RUN, [*told, fact(DownloadFailed), fact(CleanupFailed)]).run
    assert run.reason is reason


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FaultKind.SCORER_ERROR, Reason.SCORER_ERROR),
        (FaultKind.INCOMPLETE, Reason.SCORER_ERROR),
        (FaultKind.BOUND_EXCEEDED, Reason.SCORER_ERROR),
        (FaultKind.OUTPUT_TRUNCATED, Reason.OUTPUT_TRUNCATED),
    ],
)
@pytest.mark.parametrize("cleanup", [CleanedUp, CleanupFailed])
def test_what_keeps_sealed_evidence_from_being_scored_gives_the_reason(kind, reason, cleanup):
    told = ScoringFailed(fault=fault(Phase.SCORE, kind))
    assert advance(story(Uploaded, Checked, Downloaded, cleanup).run, told).run.reason is reason


def test_a_failed_download_is_the_reason_whatever_the_cleanup_came_to():
    for cleanup in (CleanedUp, CleanupFailed):
        run = story(Uploaded, ClientTimedOut, Checked, DownloadFailed, cleanup).run
        assert run.reason is Reason.DOWNLOAD_FAILED


def test_a_fault_that_was_overcome_is_listed_and_is_not_the_reason():
    told = [
        fact(Uploaded),
        fact(ClientTimedOut),
        Checked(outcome=OUTCOME, faults=(fault(Phase.SETTLE),)),
        Downloaded(receipt=receipt(), faults=(fault(Phase.DOWNLOAD),)),
        fact(CleanupFailed),
        ScoringFailed(fault=fault(Phase.SCORE, FaultKind.SCORER_ERROR)),
    ]
    run = replay(RUN, told).run
    assert run.reason is Reason.SCORER_ERROR
    assert [each.phase for each in run.faults] == [
        Phase.CHECK,
        Phase.SETTLE,
        Phase.DOWNLOAD,
        Phase.DESTROY,
        Phase.SCORE,
    ]
    assert run.outcome.settled_after_client_timeout


def test_codes_that_journals_and_reports_hold_are_stable():
    assert [each.value for each in Reason] == [
        "upload_failed",
        "setup_failed",
        "client_timed_out",
        "cancelled",
        "check_lost",
        "download_failed",
        "scorer_error",
        "output_truncated",
        "unknown",
    ]
    assert [each.value for each in FaultKind] == [
        "error",
        "bound_exceeded",
        "cancelled",
        "workspace",
        "setup_failed",
        "not_started",
        "stopped",
        "record_lost",
        "not_still",
        "incomplete",
        "sandbox_gone",
        "scorer_error",
        "output_truncated",
        "retained",
    ]
    assert " ".join(Phase) == "upload setup check settle download destroy score"
    assert [each.value for each in State] == [each.name for each in State]


@given(several_lives=st.lists(lives(), max_size=4))
def test_a_tally_counts_every_run_once(several_lives):
    verdicts = [replay(RUN, life).run.verdict for life in several_lives]
    tally = Tally.of(verdicts)
    assert tally.total == len(several_lives)
    assert (tally.passed, tally.failed, tally.unresolved) == tuple(
        verdicts.count(verdict) for verdict in Verdict
    )


# --- sandboxes ------------------------------------------------------------------------------------


@given(life=lives(whole=False), retain=retains)
def test_a_sandbox_that_is_not_confirmed_gone_keeps_its_id(life, retain):
    run = replay(RUN, life, retain).run
    over = run.finished or run.state is State.CLEANUP_FAILED
    gone = any(isinstance(each, CleanedUp) for each in life)
    if gone or not over:
        assert run.retained_sandbox is None
    else:
        assert run.retained_sandbox == (run.sandbox.sandbox_id if run.sandbox else None)


def test_a_sandbox_that_was_kept_on_purpose_is_listed_and_is_no_fault():
    kept = CleanupFailed(fault=Fault(Phase.DESTROY, FaultKind.RETAINED, "as asked"))
    step = replay(RUN, [fact(Uploaded), fact(Checked), fact(DownloadFailed)], "unresolved")
    run = advance(step.run, kept).run
    assert step.command == Keep()
    assert run.retained_sandbox == BOX.sandbox_id
    assert [each.phase for each in run.faults] == [Phase.DOWNLOAD]


def test_a_fault_always_has_a_message():
    assert Fault(Phase.CHECK, FaultKind.ERROR, "  \n").message == "no further text was given"
    assert Fault(Phase.CHECK, FaultKind.ERROR, " late\n").message == "late"


# --- time -----------------------------------------------------------------------------------------


@given(life=lives(whole=False))
def test_timings_say_how_long_each_phase_took(life):
    expected = {}
    for each in life:
        match each:
            case Uploaded() | UploadFailed():
                phase = "upload"
            case Downloaded() | DownloadFailed():
                phase = "download"
            case CleanedUp() | CleanupFailed():
                phase = "destroy"
            case Scored() | ScoringFailed():
                phase = "score"
            case _:
                phase = "settle" if "check" in expected else "check"
        expected[phase] = each.elapsed_s
        if isinstance(each, Uploaded) and each.setup_s is not None:
            expected["setup"] = each.setup_s
    assert replay(RUN, life).run.timings == expected


@given(deadline_s=seconds, grace_s=seconds, backstop_s=seconds)
def test_a_check_that_starts_late_still_has_its_deadline_before_the_client_gives_up(
    deadline_s, grace_s, backstop_s
):
    latest_s = latest_start_s(deadline_s, grace_s, backstop_s)
    assert latest_s + deadline_s + grace_s == pytest.approx(backstop_s, abs=1e-6)


@pytest.mark.parametrize("name", ["upload_s", "settle_s", "download_s", "destroy_s", "score_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_bound_is_a_time_that_ends(name, value):
    with pytest.raises(ValueError, match=name):
        Bounds(**{name: value})


@given(life=strategies.walks("run"), retain=st.sampled_from(["never", "unresolved"]))
def test_what_is_left_may_be_swept_when_the_run_is_over_and_not_before(life, retain):
    step = begin("run", retain)
    for fact in life:
        assert sweep(step.run) is None
        step = advance(step.run, fact)
    permit = sweep(step.run)
    if step.run.retained_sandbox is None:
        assert permit is None
    else:
        assert permit == CleanupPermit("run", step.run.retained_sandbox)
