"""The loop: journal the intent, perform the command, journal the fact, advance.

One loop for runs that are new and runs that are resumed, over any backend. It decides nothing: what
may be done next is the core's answer to the last fact, and what a failure means is decided by which
fact it is turned into, here, once for each command. No call into a backend is waited for beyond the
bound of its phase.

What stops the loop without a fact is trouble of this machine's own: a journal or vault that cannot
be written, a run that another runner took over, or an interrupt. The run is then where its journal
says, its sandbox is untouched, and `resume` goes on from there. That is why every command can be
performed twice: create finds what it created, execute joins what it started, download compares
again, destroy finds it gone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from attrs import define, evolve, frozen

from .clock import BoundExceededError, Cancellation, CancelledError, SystemClock
from .core.clocks import Bounds, latest_start_s
from .core.errors import (
    EvidenceIncompleteError,
    JournalError,
    SandboxGoneError,
    SpecError,
    StorageError,
)
from .core.evidence import Manifest
from .core.facts import (
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
    ScoringFailed,
    Uploaded,
    UploadFailed,
)
from .core.machine import (
    Check,
    CleanupPermit,
    Command,
    Destroy,
    Download,
    Keep,
    Run,
    Score,
    Settle,
    Step,
    Upload,
    advance,
)
from .core.spec import BACKSTOP_SLACK_S, EvalSpec
from .core.verdict import Outcome, OutcomeKind
from .journal import Journal
from .ports import Backend, Ending, Order, Record, RunRecord, Sandbox, Slot
from .result import RunResult
from .scoring import ExpectationsMissingError, score
from .vault import Vault
from .workspace import SpecWorkspace, WorkspaceError, missing_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from . import ports
    from .core.evidence import Receipt

DOWNLOAD_ATTEMPTS: Final = 3
UNSEEN: Final = "unseen"
"""Identity of a sandbox that may exist, and that the client never saw."""
PENDING: Final = "pending"
"""Identity of one whose creation was given up on: whatever is destroyed, it may come afterwards."""

T = TypeVar("T")


@frozen
class Progress:
    """What an observer is told after every entry that is on disk.

    Attributes:
        record: the run as it was begun.
        run: all that is known of it.
        fact: what has just happened, None at the beginning.
        command: what is about to be done, None at the end.
    """

    record: RunRecord
    run: Run
    fact: Fact | None
    command: Command | None


class Runner:
    """Runs specs on a backend, keeping everything below `state_dir`. Threads may share one.

    Use it as a context manager, or close it, to let go of the journal.
    """

    def __init__(
        self,
        backend: Backend,
        state_dir: str | os.PathLike[str] = ".orchestrator",
        *,
        bounds: Bounds | None = None,
        observer: Callable[[Progress], None] | None = None,
        clock: ports.Clock | None = None,
        journal: ports.Journal | None = None,
        vault: ports.Vault | None = None,
        new_run_id: Callable[[], str] | None = None,
    ) -> None:
        """Open, or make, the journal and vault of a state directory.

        Args: backend: where sandboxes come from. state_dir: directory for the journal and the
            evidence. bounds: how long to wait for each phase. observer: called on the run's own
            thread after every entry that is on disk; what it raises
                stops the run as an interrupt would.
            clock: in place of this machine's, for simulations, as all that follow.
            journal: in place of the one in `state_dir`.
            vault: in place of the one in `state_dir`.
            new_run_id: in place of names that sort by time.

        Raises:
            JournalError: there is a journal that cannot be used; it is left as it is.
            VaultError: the vault cannot be made.
        """
        self.backend = backend
        self.state_dir = Path(state_dir).absolute()
        self.bounds = bounds or Bounds()
        self.journal: ports.Journal = journal or Journal(self.state_dir / "journal.db")
        self.vault: ports.Vault = vault or Vault(self.state_dir / "vault")
        self.clock: ports.Clock = clock or SystemClock()
        self._observer = observer or (lambda _: None)
        self._new_run_id = new_run_id or time_sorted_run_id

    def __enter__(self) -> Self:
        """Give the runner."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the journal."""
        self.close()

    def close(self) -> None:
        """Close the journal. A run that is being driven stops at its next entry, to be resumed."""
        self.journal.close()

    # --- running ----------------------------------------------------------------------------------

    def run(
        self,
        spec: EvalSpec,
        *,
        retry_of: str | None = None,
        cancellation: Cancellation | None = None,
    ) -> RunResult:
        """Run a spec, in a new run, to its verdict.

        Args:
            spec: what to run; a relative workspace is relative to the working directory.
            retry_of: the run that this one is another attempt at.
            cancellation: lets another thread stop the waiting.

        Raises:
            SpecError: the spec cannot be honoured; nothing was started.
            StorageError: the run stopped, to be resumed: journal or vault cannot be written.
        """
        record, step = self.begin(spec, retry_of=retry_of)
        return self._drive(record, step, cancellation)

    def begin(self, spec: EvalSpec, *, retry_of: str | None = None) -> tuple[RunRecord, Step]:
        """Begin a run without performing anything; raises as `run` does."""
        spec = self.accept(spec)
        return self.journal.begin(
            self._new_run_id(),
            spec,
            backend=self.backend.name,
            isolation=self.backend.isolation,
            retry_of=retry_of,
        )

    async def arun(self, spec: EvalSpec, *, retry_of: str | None = None) -> RunResult:
        """Run a spec without blocking the event loop; raises as `run` does.

        Cancelling it stops the waiting, not the tidying: the check is settled and stopped, what
        there is of evidence is saved, the sandbox is destroyed, and then the cancellation goes on
        its way.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RunResult] = loop.create_future()
        cancellation = Cancellation()

        def tell(method: Callable[[Any], None], value: object) -> None:
            if not future.done():
                method(value)

        def work() -> None:
            try:
                result = self.run(spec, retry_of=retry_of, cancellation=cancellation)
            except BaseException as error:
                loop.call_soon_threadsafe(tell, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(tell, future.set_result, result)

        threading.Thread(target=work, name="orchestrator run", daemon=True).start()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            await asyncio.wait([future])
            raise

    def unfinished(self) -> list[str]:
        """Give the runs on this backend that are not finished and that no live runner drives."""
        return [
            run_id
            for run_id in self.journal.run_ids()
            if self.journal.record(run_id).backend == self.backend.name
            and not self.journal.step(run_id).run.finished
            and not self.journal.driven(run_id)
        ]

    def resume(
        self,
        run_id: str,
        spec: EvalSpec | None = None,
        *,
        cancellation: Cancellation | None = None,
    ) -> RunResult:
        """Go on with a run whose runner is gone, to its verdict. A finished run is given as it is.

        Args:
            run_id: the run.
            spec: the spec it was begun with, needed where it expects with functions.
            cancellation: lets another thread stop the waiting.

        Raises:
            JournalConflictError: a live runner drives it.
            JournalError: there is no such run, it is another backend's, or `spec` is another spec.
            ExpectationsMissingError: it needs the spec to be scored; it stays as it is until then.
        """
        record = self.journal.record(run_id)
        if record.backend != self.backend.name:
            raise JournalError(
                f"run {run_id} is on backend {record.backend}, not {self.backend.name}"
            )
        if spec is not None:
            spec = self._located(spec)
            if spec.digest != record.spec.digest:
                raise JournalError(f"run {run_id} was begun with another spec than the one given")
            record = evolve(record, spec=spec)
        if self.journal.step(run_id).run.finished:
            return self.result(run_id)
        self.journal.take_over(run_id)
        return self._drive(record, self.journal.step(run_id), cancellation)

    def result(self, run_id: str) -> RunResult:
        """Give what is known of a run, finished or not.

        Raises:
            JournalError: there is no such run.
        """
        return result_of(self.journal, self.vault, run_id)

    def accept(self, spec: EvalSpec) -> EvalSpec:
        """Give the spec as it would be run here, without starting anything.

        Raises:
            SpecError: it cannot be honoured here.
        """
        spec = self._located(spec)
        self.backend.refuse(spec)
        return spec

    def _located(self, spec: EvalSpec) -> EvalSpec:
        """Make the workspace absolute, so that a resumed run means the same one anywhere."""
        if spec.workspace is None:
            return spec
        directory = os.path.abspath(spec.workspace)  # noqa: PTH100 - `resolve` would follow symlinks
        if problem := missing_directory(directory):
            raise SpecError("workspace", problem, "a directory")
        return evolve(spec, workspace=directory)

    def _drive(self, record: RunRecord, step: Step, cancellation: Cancellation | None) -> RunResult:
        """Drive a run to its end."""
        *_, last = self.steps(record, step, cancellation)
        return _result(self.vault, record, last.run)

    def steps(
        self, record: RunRecord, step: Step, cancellation: Cancellation | None = None
    ) -> Iterator[Step]:
        """The loop: give every step once its fact is on disk, before its command is performed."""
        hands = _Hands(self, record, cancellation)
        self._observer(Progress(record, step.run, None, step.command))
        yield step
        while step.command is not None:
            fact = hands.perform(step.run, step.command)
            step = advance(step.run, fact)
            self.journal.append(record.run_id, fact, step.command)
            self._observer(Progress(record, step.run, fact, step.command))
            yield step


def time_sorted_run_id() -> str:
    """Make a name that sorts by time and names a sandbox anywhere (19 characters)."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    moment, stamp = int(time.time() * 1000), ""
    while moment:
        moment, digit = divmod(moment, len(digits))
        stamp = digits[digit] + stamp
    return f"r{stamp}-{''.join(secrets.choice(digits) for _ in range(17 - len(stamp)))}"


def result_of(journal: ports.Journal, vault: ports.Vault, run_id: str) -> RunResult:
    """Give what is known of a run from its journal and its evidence.

    Raises:
        JournalError: there is no such run.
    """
    return _result(vault, journal.record(run_id), journal.step(run_id).run)


def _result(vault: ports.Vault, record: RunRecord, run: Run) -> RunResult:
    try:
        evidence = vault.evidence(run.receipt, run.outcome) if run.receipt else None
    except EvidenceIncompleteError:
        evidence = None  # its receipt says what there was; what is left of it is not to be trusted
    return RunResult(
        run_id=run.run_id,
        name=record.spec.name,
        backend=record.backend,
        isolation=record.isolation,
        state=run.state,
        verdict=run.verdict,
        reason=run.reason,
        outcome=run.outcome,
        expectations=run.expectations,
        evidence=evidence,
        receipt=run.receipt,
        faults=run.faults,
        retained_sandbox=run.retained_sandbox,
        timings=run.timings,
        retry_of=record.retry_of,
    )


@define(eq=False)
class _Hands:
    """Performs commands for one run, and says what came of them."""

    runner: Runner
    record: RunRecord
    cancellation: Cancellation | None

    @property
    def backend(self) -> Backend:
        return self.runner.backend

    @property
    def vault(self) -> ports.Vault:
        return self.runner.vault

    @property
    def bounds(self) -> Bounds:
        return self.runner.bounds

    @property
    def clock(self) -> ports.Clock:
        return self.runner.clock

    @property
    def spec(self) -> EvalSpec:
        return self.record.spec

    @property
    def run_id(self) -> str:
        return self.record.run_id

    def perform(self, run: Run, command: Command) -> Fact:
        """Perform a command. Whatever goes wrong in the world is in the fact.

        Raises:
            StorageError: this machine cannot keep what came; no fact follows.
            ExpectationsMissingError: the expectations are not all here; no fact follows.
        """
        start = self.clock.now()
        match command:
            case Upload():
                fact = self._upload()
            case Check():
                fact = self._check(run)
            case Settle():
                fact = self._settle(run)
            case Download(salvage=salvage):
                fact = self._download(run, salvage=salvage)
            case Destroy(permit=permit):
                fact = self._destroy(run, permit)
            case Keep():
                kept = "kept, as retain = 'unresolved' asks"
                fact = CleanupFailed(fault=Fault(Phase.DESTROY, FaultKind.RETAINED, kept))
            case Score(evidence=sealed):
                fact = self._score(run, sealed.receipt)
        return evolve(fact, elapsed_s=self.clock.now() - start)

    # --- upload -----------------------------------------------------------------------------------

    def _upload(self) -> Fact:
        phase = Phase.UPLOAD
        created: list[Sandbox] = []
        try:
            sent = self.clock.call(
                lambda: self._create_and_send(created), self.bounds.upload_s, self.cancellation
            )
            (sandbox,), baseline, setup_s = created, sent, None
            if self.spec.setup is not None:
                phase, before = Phase.SETUP, self.clock.now()
                faults = self._set_up(sandbox)
                setup_s = self.clock.now() - before
                if faults:
                    return UploadFailed(
                        fault=faults[0], faults=tuple(faults[1:]), sandbox=sandbox.ref
                    )
                baseline = self.clock.call(
                    sandbox.manifest, self.bounds.upload_s, self.cancellation
                )
            return Uploaded(
                sandbox=sandbox.ref,
                workspace=self.vault.keep_manifest(sent),
                baseline=self.vault.keep_manifest(baseline),
                setup_s=setup_s,
            )
        except StorageError:
            raise
        except Exception as error:
            given_up = isinstance(error, BoundExceededError | CancelledError)
            pending = given_up and not created
            return UploadFailed(
                fault=_fault(phase, error), sandbox=self._left_behind(pending=pending)
            )

    def _create_and_send(self, created: list[Sandbox]) -> Manifest:
        """Create the sandbox, send the workspace, and prove that it arrived."""
        workspace = SpecWorkspace(self.spec.workspace, self.spec.files, self.runner.state_dir)
        sent = workspace.manifest()
        sandbox = self.backend.create(self.run_id, self.spec)
        created.append(sandbox)
        if sandbox.upload(workspace):
            _same(sent, sandbox.manifest(), "the sandbox's workspace is not the one that was sent")
        return sent

    def _set_up(self, sandbox: Sandbox) -> list[Fault]:
        """Run setup; give the faults if it did anything but exit with 0."""
        order = self._order("setup")
        bound_s = order.deadline_s + order.grace_s + BACKSTOP_SLACK_S
        try:
            record = self.clock.call(lambda: sandbox.execute(order), bound_s, self.cancellation)
        except (BoundExceededError, CancelledError) as error:
            faults = [_fault(Phase.SETUP, error)]
            try:
                self.clock.call(lambda: sandbox.settle(order), self.bounds.settle_s)
            except Exception as unsettled:
                faults.append(_fault(Phase.SETTLE, unsettled))
            return faults
        if record.ending is Ending.EXITED and record.code == 0 and record.still:
            return []
        code = "" if record.code is None else f"({record.code})"
        text = f"setup ended: {record.ending}{code} {record.message}"
        return [Fault(Phase.SETUP, FaultKind.SETUP_FAILED, text)]

    def _left_behind(self, *, pending: bool) -> SandboxRef | None:
        """Say which sandbox a failed upload may have left: none only if that is certain."""
        if pending:
            return SandboxRef(self.run_id, PENDING)
        try:
            sandbox = self.clock.call(lambda: self.backend.open(self.run_id), self.bounds.settle_s)
        except Exception:
            return SandboxRef(self.run_id, UNSEEN)
        return sandbox.ref if sandbox is not None else None

    # --- check ------------------------------------------------------------------------------------

    def _check(self, run: Run) -> Fact:
        order = self._order("check")
        try:
            record = self.clock.call(
                lambda: self._sandbox(run).execute(order), self.spec.backstop, self.cancellation
            )
            return self._concluded(record, Phase.CHECK)
        except (BoundExceededError, CancelledError) as error:
            return ClientTimedOut(fault=_fault(Phase.CHECK, error))
        except Exception as error:
            # Whether it started is not known: it may be running. What the guest says of it decides.
            fault = _fault(Phase.CHECK, error)
            settled = self._settle(run)
            if isinstance(settled, Checked):
                return evolve(settled, faults=(fault,))
            return CheckLost(fault=fault, faults=(settled.fault,))

    def _settle(self, run: Run) -> Checked | CheckLost:
        order = self._order("check")
        try:
            record = self.clock.call(lambda: self._sandbox(run).settle(order), self.bounds.settle_s)
            return self._concluded(record, Phase.SETTLE)
        except Exception as error:
            return CheckLost(fault=_fault(Phase.SETTLE, error))

    def _concluded(self, record: Record, phase: Phase) -> Checked | CheckLost:
        """Say what a record establishes: an outcome only if it is one and nothing runs any more."""
        if record.ending in _NO_OUTCOMES:
            text = record.message or f"the check was {record.ending.replace('_', ' ')}"
            return CheckLost(fault=Fault(phase, _NO_OUTCOMES[record.ending], text))
        if record.ending not in _OUTCOMES or not _sane(record):
            text = record.message or f"not a record of how the check ended: {record}"
            return CheckLost(fault=Fault(phase, FaultKind.RECORD_LOST, text))
        if not record.still:
            text = f"the check ended, but something of it is still running; {record.message}"
            return CheckLost(fault=Fault(phase, FaultKind.NOT_STILL, text))
        return Checked(
            outcome=Outcome(
                kind=_OUTCOMES[record.ending],
                exit_code=record.code if record.ending is Ending.EXITED else None,
                signal=record.code if record.ending is Ending.SIGNALLED else None,
                deadline_s=self.spec.deadline_s,
                elapsed_s=record.elapsed_s,
                observed_by=record.observed_by,
                escalated=record.escalated,
                descendants=record.descendants,
            )
        )

    def _order(self, slot: Slot) -> Order:
        spec = self.spec
        command = spec.setup if slot == "setup" else spec.check
        deadline_s = spec.setup_deadline_s if slot == "setup" else spec.deadline_s
        slack_s = latest_start_s(spec.deadline_s, spec.grace_s, spec.backstop)
        return Order(
            slot=slot,
            argv=command if isinstance(command, tuple) else (self._shell, "-c", command or ""),
            env=spec.env,
            deadline_s=deadline_s,
            grace_s=spec.grace_s,
            start_by=self.clock.now() + (BACKSTOP_SLACK_S if slot == "setup" else slack_s),
            now=self.clock.now,
            output_bytes=spec.limits.output_bytes,
            nonce=self.record.nonce,
        )

    @property
    def _shell(self) -> str:
        return getattr(self.backend, "shell", "/bin/sh")

    def _sandbox(self, run: Run) -> Sandbox:
        """Find the run's sandbox, and make sure that it is the one it was.

        Raises:
            SandboxGoneError: it is gone, or another one answers under its name.
        """
        sandbox = self.backend.open(self.run_id)
        if sandbox is None:
            raise SandboxGoneError(f"run {self.run_id}: its sandbox is gone")
        if run.sandbox is not None and run.sandbox.identity not in {
            sandbox.ref.identity,
            UNSEEN,
            PENDING,
        }:
            raise SandboxGoneError(
                f"run {self.run_id}: {sandbox.ref.sandbox_id} is not the sandbox that it created"
            )
        return sandbox

    # --- download ---------------------------------------------------------------------------------

    def _download(self, run: Run, *, salvage: bool) -> Fact:
        """Bring the evidence here; what failed may be tried again within the bound."""
        baseline = self.vault.manifest(run.baseline) if run.baseline else Manifest({})
        end = self.clock.now() + self.bounds.download_s
        faults: list[Fault] = []
        delivery = _Delivery(self.vault.intake(self.run_id, baseline))
        for _ in range(1 if salvage else DOWNLOAD_ATTEMPTS):
            delivery = _Delivery(self.vault.intake(self.run_id, baseline))
            try:
                left_s = max(end - self.clock.now(), 0.01)
                self.clock.call(partial(self._fetch, run, delivery), left_s)
                manifest = delivery.manifest or Manifest({})
                seal = self.vault.put_aside if salvage else self.vault.seal
                return Downloaded(receipt=seal(delivery.intake, manifest), faults=tuple(faults))
            except StorageError:
                raise
            except (BoundExceededError, SandboxGoneError) as error:
                faults.append(_fault(Phase.DOWNLOAD, error))
                break
            except Exception as error:
                faults.append(_fault(Phase.DOWNLOAD, error))
        receipt = self.vault.put_aside(delivery.intake, delivery.manifest)
        return DownloadFailed(fault=faults[-1], faults=tuple(faults[:-1]), receipt=receipt)

    def _fetch(self, run: Run, delivery: _Delivery) -> None:
        """Have the sandbox account for its workspace and deliver what is not here."""
        sandbox = self._sandbox(run)
        delivery.manifest = sandbox.manifest()
        failed_in_setup = any(fault.phase is Phase.SETUP for fault in run.faults)
        slot: Slot = "setup" if failed_in_setup else "check"
        sandbox.fetch(delivery.intake.missing(delivery.manifest), slot, delivery.intake)
        self._sandbox(run)

    # --- destroy and score ------------------------------------------------------------------------

    def _destroy(self, run: Run, permit: CleanupPermit) -> Fact:
        def destroy() -> str:
            sandbox = self.backend.open(self.run_id)
            if sandbox is not None:
                sandbox.destroy(permit)
            if run.sandbox is not None and run.sandbox.identity == PENDING:
                return "its creation was given up on, and may still come"
            return "deleted, and still there" if self.backend.open(self.run_id) else ""

        try:
            problem = self.clock.call(destroy, self.bounds.destroy_s)
            if not problem:
                return CleanedUp()
            fault = Fault(Phase.DESTROY, FaultKind.ERROR, problem)
        except Exception as error:
            fault = _fault(Phase.DESTROY, error)
        return CleanupFailed(fault=fault)

    def _score(self, run: Run, receipt: Receipt) -> Fact:
        def evaluate() -> Fact:
            return score(self.spec, self.vault.evidence(receipt, run.outcome))

        try:
            return self.clock.call(evaluate, self.bounds.score_s)
        except ExpectationsMissingError:
            raise
        except Exception as error:
            return ScoringFailed(fault=_fault(Phase.SCORE, error))


@define(eq=False)
class _Delivery:
    """One attempt at a download: what was accounted for, and what arrived."""

    intake: ports.Intake
    manifest: Manifest | None = None


_OUTCOMES: Final = {
    Ending.EXITED: OutcomeKind.EXITED,
    Ending.SIGNALLED: OutcomeKind.SIGNALLED,
    Ending.DEADLINE: OutcomeKind.DEADLINE_EXCEEDED,
    Ending.OUT_OF_MEMORY: OutcomeKind.OUT_OF_MEMORY,
}


_NO_OUTCOMES: Final = {
    Ending.NOT_STARTED: FaultKind.NOT_STARTED,
    Ending.STOPPED: FaultKind.STOPPED,
}


def _sane(record: Record) -> bool:
    """Tell whether a record that says how the check ended says it completely."""
    match record.ending:
        case Ending.EXITED:
            return isinstance(record.code, int) and 0 <= record.code <= 255  # noqa: PLR2004
        case Ending.SIGNALLED:
            return isinstance(record.code, int) and 1 <= record.code <= 127  # noqa: PLR2004
        case _:
            return True


def _same(sent: Manifest, arrived: Manifest, problem: str) -> None:
    differences = sent.differences(arrived)
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""  # noqa: PLR2004
        raise EvidenceIncompleteError(f"{problem}: {'; '.join(differences[:3])}{more}")


def _fault(phase: Phase, error: BaseException) -> Fault:
    """Turn an exception into the fault that it is evidence of."""
    match error:
        case BoundExceededError():
            kind = FaultKind.BOUND_EXCEEDED
        case CancelledError():
            kind = FaultKind.CANCELLED
        case WorkspaceError():
            kind = FaultKind.WORKSPACE
        case EvidenceIncompleteError():
            kind = FaultKind.INCOMPLETE
        case SandboxGoneError():
            kind = FaultKind.SANDBOX_GONE
        case _:
            kind = FaultKind.ERROR
    if kind is FaultKind.ERROR:
        return Fault(phase, kind, f"{type(error).__name__}: {error}")
    return Fault(phase, kind, str(error))
