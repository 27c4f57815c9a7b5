"""The transducer: facts in, commands out.

A table of facts cannot stop an act; by the time `CleanedUp` is refused, the sandbox is gone. So the
core also hands out what may be done next: `advance(run, fact)` gives the new run and the one
command that the runner may perform. `Destroy` carries a `CleanupPermit` and `Score` carries
`SealedEvidence`, and both are made here and nowhere else, only for a run whose recorded facts allow
them. A backend that is asked to destroy compares the permit with the sandbox, so a permit for
another one is refused. Python cannot make a value unforgeable: somebody who means to can build one.
Nobody can by mistake.

`transitions` executes the table, unbound and without any of its conveniences: no auto transitions
(`to_CLEANED_UP` would work from anywhere), no wildcards, no conditions (a truthy non-bool denies in
silence), no callbacks, no queue, no ignored triggers. One machine serves the process; it holds no
run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from attrs import Factory, define, evolve, frozen
from transitions import Machine, MachineError

from .errors import IllegalFactError
from .evidence import Receipt
from .facts import (
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
from .states import State
from .table import INITIAL, TABLE, edges, final_states
from .verdict import ExpectationResult, Outcome, Reason, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .table import Table

FINAL = final_states()

Retain = Literal["never", "unresolved"]


@frozen(kw_only=True)
class Run:
    """All that is known of a run: the fold of its facts. A new value for every fact.

    Attributes:
        run_id: unique name of the run.
        retain: the spec's policy for the sandbox of an unresolved run.
        state: where the run stands.
        sandbox: the sandbox, as soon as it is known to exist.
        workspace: manifest digest of the tree that was sent.
        baseline: manifest digest of the tree that the check saw.
        conditions: what the sandbox was made with and enforces.
        outcome: how the check ended.
        receipt: the vault's receipt for the evidence, sealed or put aside.
        expectations: what each expectation found.
        faults: everything that went wrong around the program, in order.
        sandbox_gone: the sandbox is confirmed gone.
        timings: seconds by phase.
    """

    run_id: str
    retain: Retain = "never"
    state: State = INITIAL
    sandbox: SandboxRef | None = None
    workspace: str | None = None
    baseline: str | None = None
    outcome: Outcome | None = None
    receipt: Receipt | None = None
    expectations: tuple[ExpectationResult, ...] = ()
    faults: tuple[Fault, ...] = ()
    sandbox_gone: bool = False
    timings: Mapping[str, float] = Factory(dict)
    conditions: Mapping[str, str] = Factory(dict)

    @property
    def finished(self) -> bool:
        """Whether the run is in a final state."""
        return self.state in FINAL

    @property
    def verdict(self) -> Verdict | None:
        """The verdict, None while the run is not finished."""
        if self.state is State.UNRESOLVED:
            return Verdict.UNRESOLVED
        if self.state is State.SCORED:
            passed = all(result.passed for result in self.expectations)
            return Verdict.PASSED if passed else Verdict.FAILED
        return None

    @property
    def reason(self) -> Reason | None:
        """Why the run is UNRESOLVED: the first fault that made it so, not what followed."""
        if self.state is not State.UNRESOLVED:
            return None
        overcome: set[Phase] = set()
        if self.outcome is not None:
            overcome |= {Phase.CHECK, Phase.SETTLE}
        if self.receipt is not None and self.receipt.sealed:
            overcome.add(Phase.DOWNLOAD)
        causes = (_reason(fault) for fault in self.faults if fault.phase not in overcome)
        return next((reason for reason in causes if reason), Reason.UNKNOWN)

    @property
    def kept_on_purpose(self) -> bool:
        """Whether the sandbox was kept because the spec asks for it, and not for a fault."""
        faults = any(fault.phase is Phase.DESTROY for fault in self.faults)
        return self.retained_sandbox is not None and not faults

    @property
    def retained_sandbox(self) -> str | None:
        """Id of a sandbox that is not confirmed gone although the run is finished with it."""
        done = self.finished or self.state is State.CLEANUP_FAILED
        return self.sandbox.sandbox_id if done and self.sandbox and not self.sandbox_gone else None


@frozen
class CleanupPermit:
    """Leave to destroy one sandbox: its download has been attempted, and how it went is recorded.

    Attributes:
        run_id: the run that gives leave.
        sandbox_id: the sandbox it may be used on; None where the run never saw one, and whatever
            bears the run's id may go.
    """

    run_id: str
    sandbox_id: str | None


@frozen
class SealedEvidence:
    """Leave to score: the evidence of this run is proven whole. `receipt` says which it is."""

    receipt: Receipt


@frozen
class Upload:
    """Create the run's sandbox, send the workspace and run setup."""


@frozen
class Check:
    """Start the check unless it was started already, and wait for its end."""


@frozen
class Settle:
    """Find out how the check ended, stop what is left of it, and see to it that it cannot start."""


@frozen
class Download:
    """Bring the evidence here. `salvage`: put aside what can be had; it will not be scored."""

    salvage: bool


@frozen
class Destroy:
    """Destroy the sandbox, with leave."""

    permit: CleanupPermit


@frozen
class Keep:
    """Leave the sandbox as it is, as the spec asks for runs that cannot be scored."""


@frozen
class Score:
    """Evaluate every expectation over the evidence."""

    evidence: SealedEvidence


Command = Upload | Check | Settle | Download | Destroy | Keep | Score


@frozen
class Step:
    """What a fact led to.

    Attributes:
        run: the run with the fact in it.
        command: the only thing that may be done next; None when the run is finished.
    """

    run: Run
    command: Command | None


def begin(run_id: str, retain: Retain = "never") -> Step:
    """Start a run: NEW, and the command to upload."""
    run = Run(run_id=run_id, retain=retain)
    return Step(run, _command(run))


def advance(run: Run, fact: Fact) -> Step:
    """Take a fact into a run.

    Raises:
        IllegalFactError: the table does not have the fact in the run's state, or what the fact
            carries does not prove it. Nothing has changed.
    """
    name = type(fact).__name__
    if type(fact) not in _PHASES:
        raise _illegal(run, name)
    cursor = _Cursor(run.state)
    try:
        _ENGINE.events[name].trigger(cursor)
    except MachineError:
        raise _illegal(run, name) from None
    _check_claim(run, fact)
    after = _fold(run, fact, cursor.state)
    return Step(after, _command(after))


def replay(run_id: str, facts: Iterable[Fact], retain: Retain = "never") -> Step:
    """Fold recorded facts from the beginning: the same run and command as when they happened.

    Raises:
        IllegalFactError: the facts are not a lifecycle.
    """
    step = begin(run_id, retain)
    for fact in facts:
        step = advance(step.run, fact)
    return step


def sweep(run: Run, found: str | None = None) -> CleanupPermit | None:
    """Give leave to destroy what a finished run left; None where nothing is left, or it goes on.

    No step of the lifecycle: the run has its verdict, and keeps it whatever becomes of this.

    Args:
        run: the run.
        found: a sandbox of it that was found although nothing should be left.
    """
    left = run.retained_sandbox or found
    return CleanupPermit(run.run_id, left) if run.finished and left is not None else None


def legal_facts(state: State, table: Table = TABLE) -> tuple[type[Fact], ...]:
    """Give the facts that may follow in a state, in the table's order."""
    return tuple(table[state])


@define(eq=False)
class _Cursor:
    """What `transitions` moves: it reads and writes `state` and leaves nothing else behind."""

    state: State


def _engine(table: Table = TABLE) -> Machine:
    return Machine(
        model=None,
        states=[state.value for state in table],
        transitions=[
            {"trigger": fact.__name__, "source": state.value, "dest": target.value}
            for state, fact, target in edges(table)
        ],
        initial=INITIAL.value,
        auto_transitions=False,
        send_event=True,
    )


_ENGINE = _engine()


def _illegal(run: Run, fact: str, why: str = "") -> IllegalFactError:
    legal = (kind.__name__ for kind in legal_facts(run.state))
    return IllegalFactError(run_id=run.run_id, state=run.state, fact=fact, legal=legal, why=why)


_CAUSES: Mapping[type[Fact], tuple[Phase, ...]] = {
    UploadFailed: (Phase.UPLOAD, Phase.SETUP, Phase.SETTLE),
    Checked: (Phase.CHECK, Phase.SETTLE),
    ClientTimedOut: (Phase.CHECK,),
    CheckLost: (Phase.CHECK, Phase.SETTLE),
    Downloaded: (Phase.DOWNLOAD,),
    DownloadFailed: (Phase.DOWNLOAD,),
    CleanupFailed: (Phase.DESTROY,),
    ScoringFailed: (Phase.SCORE,),
}
"""The phases whose faults a fact may carry: `reason` reads the phase, and has to find one."""


def _faults(fact: Fact) -> tuple[Fault, ...]:
    """Give the faults that a fact carries: of a failed download in order, else the cause first."""
    cause = (fact.fault,) if hasattr(fact, "fault") else ()
    beside = getattr(fact, "faults", ())
    return (*beside, *cause) if isinstance(fact, DownloadFailed) else (*cause, *beside)


def _check_claim(run: Run, fact: Fact) -> None:
    """Refuse a fact that carries something which does not prove it."""
    name = type(fact).__name__
    for fault in _faults(fact):
        kept = _on_purpose(fault) and not isinstance(fact, CleanupFailed)
        if fault.phase not in _CAUSES[type(fact)] or kept:
            raise _illegal(run, name, f"a fault of {fault.phase}, {fault.kind}, is no cause of it")
    if isinstance(fact, Downloaded | DownloadFailed):
        _check_receipt(run, fact)
    if isinstance(fact, Scored):
        unknown = [found.name for found in fact.expectations if not isinstance(found.passed, bool)]
        if unknown or not fact.expectations:
            which = f"expectation {unknown[0]!r}" if unknown else "no expectation"
            raise _illegal(run, name, f"{which} was {'not ' if unknown else ''}evaluated")


def _check_receipt(run: Run, fact: Downloaded | DownloadFailed) -> None:
    """Refuse a receipt that does not prove what the fact says."""
    name, receipt = type(fact).__name__, fact.receipt
    if receipt is None and isinstance(fact, DownloadFailed):
        return
    if not isinstance(receipt, Receipt):
        raise _illegal(run, name, f"{receipt!r} is no receipt")
    if receipt.run_id != run.run_id:
        raise _illegal(run, name, f"its receipt is for run {receipt.run_id}")
    sealed = isinstance(fact, Downloaded) and run.state is State.CHECKED
    if receipt.sealed != sealed:
        raise _illegal(run, name, f"its receipt says sealed={receipt.sealed}")


def _fold(run: Run, fact: Fact, state: str) -> Run:
    """Give the run with the fact taken in."""
    changed: dict[str, Any] = {"state": State(state)}
    match fact:
        case Uploaded():
            changed |= {
                "sandbox": fact.sandbox,
                "workspace": fact.workspace,
                "baseline": fact.baseline,
                "conditions": fact.conditions,
            }
        case UploadFailed():
            changed["sandbox"] = fact.sandbox
        case Checked():
            late = run.state is State.CLIENT_TIMED_OUT
            changed["outcome"] = evolve(fact.outcome, settled_after_client_timeout=late)
        case Downloaded() | DownloadFailed():
            changed["receipt"] = fact.receipt
        case CleanedUp():
            changed["sandbox_gone"] = True
        case Scored() | ScoringFailed():
            changed["expectations"] = fact.expectations
    faults = (fault for fault in _faults(fact) if not _on_purpose(fault))
    changed["faults"] = (*run.faults, *faults)
    changed["timings"] = _timings(run.timings, fact)
    return evolve(run, **changed)


_PHASES: Mapping[type[Fact], Phase] = {
    Uploaded: Phase.UPLOAD,
    UploadFailed: Phase.UPLOAD,
    Checked: Phase.CHECK,
    ClientTimedOut: Phase.CHECK,
    CheckLost: Phase.CHECK,
    Downloaded: Phase.DOWNLOAD,
    DownloadFailed: Phase.DOWNLOAD,
    CleanedUp: Phase.DESTROY,
    CleanupFailed: Phase.DESTROY,
    Scored: Phase.SCORE,
    ScoringFailed: Phase.SCORE,
}


def _timings(before: Mapping[str, float], fact: Fact) -> Mapping[str, float]:
    """Add a fact's seconds to its phase. After a client timeout it is settling."""
    phase: Phase = _PHASES[type(fact)]
    if phase is Phase.CHECK and Phase.CHECK in before:
        phase = Phase.SETTLE
    timings = {**before, phase.value: fact.elapsed_s}
    if isinstance(fact, Uploaded) and fact.setup_s is not None:
        timings[Phase.SETUP.value] = fact.setup_s
    return timings


def _on_purpose(fault: Fault) -> bool:
    return fault.kind is FaultKind.RETAINED


def _reason(fault: Fault) -> Reason | None:
    """Give the reason that a fault is for an unresolved verdict, None where it is none."""
    match fault.phase, fault.kind:
        case ((Phase.UPLOAD | Phase.SETUP), FaultKind.CANCELLED):
            return Reason.CANCELLED
        case Phase.SETUP, _:
            return Reason.SETUP_FAILED
        case Phase.UPLOAD, _:
            return Reason.UPLOAD_FAILED
        case Phase.CHECK, FaultKind.CANCELLED:
            return Reason.CANCELLED
        case Phase.CHECK, FaultKind.BOUND_EXCEEDED:
            return Reason.CLIENT_TIMED_OUT
        case ((Phase.CHECK | Phase.SETTLE), _):
            return Reason.CHECK_LOST
        case Phase.DOWNLOAD, _:
            return Reason.DOWNLOAD_FAILED
        case Phase.SCORE, FaultKind.OUTPUT_TRUNCATED:
            return Reason.OUTPUT_TRUNCATED
        case Phase.SCORE, _:
            return Reason.SCORER_ERROR
        case _:
            return None


def _command(run: Run) -> Command | None:
    """Say what may be done next in the run's state. The one place that makes permits."""
    match run.state:
        case State.NEW:
            return Upload()
        case State.UPLOADED:
            return Check()
        case State.CLIENT_TIMED_OUT:
            return Settle()
        case State.CHECKED:
            return Download(salvage=False)
        case State.BROKEN:
            return Download(salvage=True)
        case State.SALVAGED if run.retain == "unresolved" and run.sandbox is not None:
            return Keep()
        case State.DOWNLOADED | State.SALVAGED:
            sandbox_id = run.sandbox.sandbox_id if run.sandbox else None
            return Destroy(CleanupPermit(run.run_id, sandbox_id))
        case State.CLEANED_UP | State.CLEANUP_FAILED if run.receipt is not None:
            return Score(SealedEvidence(run.receipt))
        case _:
            return None
