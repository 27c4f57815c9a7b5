"""Known-bad tables, runners, guests and backends, each of which the explorer must catch.

A proof that nothing is wrong is worth what its search would find. Each mutant is one mistake, most
of them once made by somebody: the defect is put into the real code for as long as a context lasts,
and the explorer has to break the named property, by as short a story as there is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from attrs import evolve, frozen

from .. import performer
from ..core import machine, table
from ..core.errors import EvidenceIncompleteError
from ..core.evidence import Manifest
from ..core.facts import (
    Checked,
    CheckLost,
    CleanedUp,
    CleanupFailed,
    ClientTimedOut,
    Downloaded,
    DownloadFailed,
    Fact,
    Scored,
)
from ..core.machine import CleanupPermit, Run
from ..core.states import State
from ..core.verdict import ExpectationResult, Outcome, OutcomeKind
from ..performer import Performer
from ..ports import Ending, Order, Record
from ..vault import Vault, VaultIntake
from .backend import SimulatedSandbox
from .clock import SimulatedClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..ports import Workspace


PutIn = Callable[[], AbstractContextManager[object]]


@frozen
class Mutant:
    """One mistake.

    Attributes:
        name: of the mutant.
        mistake: what it does, in a sentence.
        property: the one that must be found broken.
        put_in: puts the mistake into the code, for as long as a context lasts.
    """

    name: str
    mistake: str
    property: str
    put_in: PutIn


MUTANTS: Final[dict[str, Mutant]] = {}


def _mutant(name: str, mistake: str, breaks: str) -> Callable[[PutIn], PutIn]:
    def register(put_in: PutIn) -> PutIn:
        MUTANTS[name] = Mutant(name, mistake, breaks, put_in)
        return put_in

    return register


def _method(owner: type, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[object]:
    """Put a method in place of another, made from the one that is there."""
    return patch.object(owner, name, make(getattr(owner, name)))


# --- tables ---------------------------------------------------------------------------------------


@contextmanager
def _with_table(changes: Mapping[State, Mapping[type[Fact], State]]) -> Iterator[None]:
    changed = {state: {**row, **changes.get(state, {})} for state, row in table.TABLE.items()}
    with (
        patch.object(table, "TABLE", changed),
        patch.object(table.violations, "__defaults__", (changed,)),
        patch.object(machine, "_ENGINE", machine._engine(changed)),  # noqa: SLF001
    ):
        yield


@_mutant("cleanup from CHECKED", "The table lets a sandbox go before its download.", "P1")
def _cleanup_from_checked() -> AbstractContextManager[object]:
    return _with_table({State.CHECKED: {CleanedUp: State.CLEANED_UP}})


@_mutant("partial goes on to be scored", "A failed download leads where a whole one leads.", "P2")
def _partial_row() -> AbstractContextManager[object]:
    return _with_table({State.CHECKED: {DownloadFailed: State.DOWNLOADED}})


@_mutant("lost check goes on", "A check that was lost leads where one that ended leads.", "P2")
def _lost_row() -> AbstractContextManager[object]:
    return _with_table({State.UPLOADED: {CheckLost: State.CHECKED}})


@_mutant("download unsettled", "A client timeout leads straight to a download.", "P3")
def _unsettled_row() -> AbstractContextManager[object]:
    return _with_table({State.CLIENT_TIMED_OUT: {Downloaded: State.DOWNLOADED}})


@_mutant("check again", "A client timeout leads back to the check.", "P4")
def _again_row() -> AbstractContextManager[object]:
    return _with_table({State.CLIENT_TIMED_OUT: {ClientTimedOut: State.UPLOADED}})


# --- runners --------------------------------------------------------------------------------------


@_mutant(
    "deadline shortened",
    "The check's deadline is cut to fit the client's patience.",
    "what loses nothing changes no verdict",
)
def _deadline_shortened() -> AbstractContextManager[object]:
    def make(order: Callable[..., Order]) -> Callable[..., Order]:
        def shortened(self: Performer, slot: Any) -> Order:
            given = order(self, slot)
            return evolve(given, deadline_s=min(given.deadline_s, self.spec.backstop - 19.5))

        return shortened

    return _method(Performer, "_order", make)


@_mutant(
    "cleanup before download",
    "The runner destroys before it downloads, and reports the cleanup afterwards.",
    "P1 cleanup follows a recorded download attempt",
)
def _cleanup_first() -> AbstractContextManager[object]:
    def make(download: Callable[..., Fact]) -> Callable[..., Fact]:
        def tidy_first(self: Performer, run: Run, *, salvage: bool) -> Fact:
            sandbox = self.backend.open(run.run_id)
            if sandbox is not None and run.faults:
                sandbox.destroy(CleanupPermit(run.run_id, run.run_id))
            return download(self, run, salvage=salvage)

        return tidy_first

    return _method(Performer, "_download", make)


@_mutant(
    "id cleared",
    "The sandbox's id is forgotten when its cleanup fails.",
    "a sandbox that exists has its id kept",
)
def _id_cleared() -> AbstractContextManager[object]:
    return patch.object(Run, "retained_sandbox", None)


@_mutant(
    "failed deletion forgotten",
    "A deletion that failed is reported as done.",
    "a sandbox that exists has its id kept",
)
def _deletion_forgotten() -> AbstractContextManager[object]:
    def make(destroy: Callable[..., Fact]) -> Callable[..., Fact]:
        def optimistic(self: Performer, run: Run, permit: CleanupPermit) -> Fact:
            fact = destroy(self, run, permit)
            return CleanedUp() if isinstance(fact, CleanupFailed) else fact

        return optimistic

    return _method(Performer, "_destroy", make)


@_mutant(
    "partial scored",
    "What arrived is sealed without being compared with what there is.",
    "P2 a score is of the tree that the check left",
)
def _partial_scored() -> AbstractContextManager[object]:
    def seal(self: Vault, intake: VaultIntake, manifest: Manifest) -> object:
        arrived = {
            path: intake.arrived.get(path, entry)
            for path, entry in manifest.entries.items()
            if entry.sha256 is None or path in intake.arrived or self.has(entry.sha256)
        }
        return self._record(intake, Manifest.of(arrived.values()), sealed=True)

    def make(receive: Callable[..., None]) -> Callable[..., None]:
        def forgiving(self: VaultIntake, entry: Any, stream: Any) -> None:
            with _forgiving():
                receive(self, entry, stream)

        return forgiving

    @contextmanager
    def both() -> Iterator[None]:
        with patch.object(Vault, "seal", seal), _method(VaultIntake, "receive", make):
            yield

    return both()


@contextmanager
def _forgiving() -> Iterator[None]:
    try:
        yield
    except EvidenceIncompleteError:
        return


@_mutant(
    "timeouts collapsed",
    "The client's giving up is taken for the check's deadline.",
    "P2 an outcome is how the check ended",
)
def _timeouts_collapsed() -> AbstractContextManager[object]:
    def make(check: Callable[..., Fact]) -> Callable[..., Fact]:
        def collapsed(self: Performer, run: Run) -> Fact:
            fact = check(self, run)
            if not isinstance(fact, ClientTimedOut):
                return fact
            outcome = Outcome(
                kind=OutcomeKind.DEADLINE_EXCEEDED,
                exit_code=None,
                signal=None,
                deadline_s=self.spec.deadline_s,
                elapsed_s=self.spec.deadline_s,
            )
            return Checked(outcome=outcome)

        return collapsed

    return _method(Performer, "_check", make)


@_mutant(
    "124 read as a timeout",
    "A program that exits with 124 is said to have been late.",
    "what loses nothing changes no verdict",
)
def _timeout_124() -> AbstractContextManager[object]:
    def make(conclude: Callable[..., Fact]) -> Callable[..., Fact]:
        def misread(self: Performer, record: Record, phase: Any) -> Fact:
            if record.ending is Ending.EXITED and record.code == 124:  # noqa: PLR2004 - the code
                record = evolve(record, ending=Ending.DEADLINE, code=None)
            return conclude(self, record, phase)

        return misread

    return _method(Performer, "_concluded", make)


@_mutant(
    "missing exit code is 0",
    "An answer without an exit code is taken for success.",
    "P2 an outcome is how the check ended",
)
def _missing_is_zero() -> AbstractContextManager[object]:
    def make(conclude: Callable[..., Fact]) -> Callable[..., Fact]:
        def generous(self: Performer, record: Record | None, phase: Any) -> Fact:
            return conclude(self, record or Record(ending=Ending.EXITED, code=0), phase)

        return generous

    return _method(Performer, "_concluded", make)


@_mutant(
    "infrastructure counted as failure",
    "A check that was lost is reported as one that failed.",
    "P2 an outcome is how the check ended",
)
def _infra_is_failure() -> AbstractContextManager[object]:
    def make(check: Callable[..., Fact]) -> Callable[..., Fact]:
        def harsh(self: Performer, run: Run) -> Fact:
            fact = check(self, run)
            if not isinstance(fact, CheckLost):
                return fact
            outcome = Outcome(
                kind=OutcomeKind.EXITED, exit_code=1, signal=None, deadline_s=1.0, elapsed_s=0.0
            )
            return Checked(outcome=outcome)

        return harsh

    return _method(Performer, "_check", make)


@_mutant(
    "broken expectation counted as failure",
    "An expectation that raises is taken for one that is not met.",
    "P2 a verdict is the one that the program deserves",
)
def _scorer_is_failure() -> AbstractContextManager[object]:
    def make(score: Callable[..., Fact]) -> Callable[..., Fact]:
        def harsh(self: Performer, run: Run, receipt: Any) -> Fact:
            fact = score(self, run, receipt)
            return (
                fact
                if isinstance(fact, Scored)
                else Scored(
                    expectations=(ExpectationResult("broken", passed=False, message="raised"),)
                )
            )

        return harsh

    return _method(Performer, "_score", make)


@_mutant(
    "download before settling",
    "After a client timeout the check is not stopped before its files are taken.",
    "P3 nothing is downloaded while the check may run",
)
def _never_settled() -> AbstractContextManager[object]:
    def make(_: object) -> Callable[..., Fact]:
        def assume(self: Performer, run: Run) -> Fact:
            del run
            outcome = Outcome(
                kind=OutcomeKind.EXITED,
                exit_code=0,
                signal=None,
                deadline_s=self.spec.deadline_s,
                elapsed_s=0.0,
            )
            return Checked(outcome=outcome)

        return assume

    return _method(Performer, "_settle", make)


@_mutant(
    "upload taken on trust",
    "What arrived in the sandbox is not compared with what was sent.",
    "P2 a verdict is the one that the program deserves",
)
def _upload_trusted() -> AbstractContextManager[object]:
    return patch.object(performer, "_same", lambda *_: None)


@_mutant(
    "late creation forgotten",
    "A creation that was given up on is believed not to come.",
    "a sandbox that exists has its id kept",
)
def _late_creation() -> AbstractContextManager[object]:
    def make(left: Callable[..., Any]) -> Callable[..., Any]:
        def sure(self: Performer, *, pending: bool) -> Any:
            del pending
            return left(self, pending=False)

        return sure

    return _method(Performer, "_left_behind", make)


@_mutant(
    "fault dropped",
    "Only the last fault of a run is kept.",
    "P5 every fault stays listed",
)
def _fault_dropped() -> AbstractContextManager[object]:
    def make(fold: Callable[..., Run]) -> Callable[..., Run]:
        def forgetful(run: Run, fact: Fact, state: str) -> Run:
            after = fold(run, fact, state)
            return evolve(after, faults=after.faults[-1:] if run.sandbox else ())

        return forgetful

    return patch.object(machine, "_fold", make(machine._fold))  # noqa: SLF001


@_mutant(
    "wait without a bound",
    "A call into the backend is waited for without end.",
    "P4 every run comes to an end",
)
def _no_bound() -> AbstractContextManager[object]:
    def call(self: SimulatedClock, function: Any, bound_s: float, _: Any = None) -> Any:
        del self, bound_s
        return function()

    return patch.object(SimulatedClock, "call", call)


# --- guests and backends --------------------------------------------------------------------------


@_mutant(
    "check retried in the same sandbox",
    "An order that is dispatched again is run again.",
    "a command is started at most once",
)
def _retried() -> AbstractContextManager[object]:
    def make(execute: Callable[..., Record]) -> Callable[..., Record]:
        def eager(self: SimulatedSandbox, order: Order) -> Record:
            self.commands.pop(order.slot, None)
            return execute(self, order)

        return eager

    return _method(SimulatedSandbox, "execute", make)


@_mutant(
    "late dispatch",
    "Settling an order that was never started does not keep it from starting.",
    "a command is started at most once",
)
def _late_dispatch() -> AbstractContextManager[object]:
    def make(settle: Callable[..., Record]) -> Callable[..., Record]:
        def careless(self: SimulatedSandbox, order: Order) -> Record:
            record = settle(self, order)
            if record.ending is Ending.NOT_STARTED:
                del self.commands[order.slot]
                self._start(order, self.world.clock.time + 1.0)
                self._start(order, self.world.clock.time + 1.0)
            return record

        return careless

    return _method(SimulatedSandbox, "settle", make)


@_mutant(
    "pipe-EOF taken for exit",
    "The check is said to have ended while a process that it left still writes.",
    "P2 a score is of the tree that the check left",
)
def _pipe_eof() -> AbstractContextManager[object]:
    def make(manifest: Callable[..., Manifest]) -> Callable[..., Manifest]:
        def moving(self: SimulatedSandbox) -> Manifest:
            if "check" in self.commands:
                self.tree["output"] = b"still being written"
            return manifest(self)

        return moving

    return _method(SimulatedSandbox, "manifest", make)


@_mutant(
    "ignored files not uploaded",
    "A file that is ignored by version control is left out of the upload, and of its account.",
    "P2 a verdict is the one that the program deserves",
)
def _ignored() -> AbstractContextManager[object]:
    def make(upload: Callable[..., bool]) -> Callable[..., bool]:
        def filtered(self: SimulatedSandbox, workspace: Workspace) -> bool:
            sent = upload(self, workspace)
            self.tree.pop("other", None)
            return sent

        return filtered

    @contextmanager
    def both() -> Iterator[None]:
        with _upload_trusted(), _method(SimulatedSandbox, "upload", make):
            yield

    return both()


@_mutant(
    "refused permit reported as done",
    "The runner shows a permit of another run, and reports the refusal as done.",
    "a sandbox that exists has its id kept",
)
def _wrong_permit() -> AbstractContextManager[object]:
    def make(destroy: Callable[..., Fact]) -> Callable[..., Fact]:
        def confused(self: Performer, run: Run, permit: CleanupPermit) -> Fact:
            fact = destroy(self, run, evolve(permit, run_id="another run"))
            return CleanedUp() if isinstance(fact, CleanupFailed) else fact

        return confused

    return _method(Performer, "_destroy", make)
