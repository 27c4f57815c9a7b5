"""Performs the core's commands for one run, and says what came of each, as a fact.

Every failure of the world is turned into a fact here, once for each command; what a fact means is
the core's to say. No call into a backend is waited for beyond the bound of its phase.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import define, evolve

from .clock import BoundExceededError, Cancellation, CancelledError
from .core.clocks import Bounds, latest_start_s
from .core.errors import (
    EvidenceIncompleteError,
    SandboxGoneError,
    StorageError,
    VaultError,
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
    Upload,
)
from .core.spec import BACKSTOP_SLACK_S, EvalSpec
from .core.verdict import Outcome, OutcomeKind
from .ports import Backend, Ending, Order, Record, RunRecord, Sandbox, Slot
from .scoring import ExpectationsMissingError, score
from .workspace import SpecWorkspace, WorkspaceError

if TYPE_CHECKING:
    from pathlib import Path

    from . import ports
    from .core.evidence import Receipt

DOWNLOAD_ATTEMPTS: Final = 3
DEADLINE_TOLERANCE_S: Final = 0.1
"""Seconds before its deadline at which a check can be said to have exceeded it, by rounding."""
UNSEEN: Final = "unseen"
"""Identity of a sandbox that may exist, and that the client never saw."""
PENDING: Final = "pending"
"""Identity of one whose creation was given up on: whatever is destroyed, it may come afterwards."""


@define(eq=False)
class Performer:
    """Performs commands for one run, on behalf of its runner, and says what came of them."""

    backend: Backend
    vault: ports.Vault
    clock: ports.Clock
    bounds: Bounds
    state_dir: Path
    record: RunRecord
    cancellation: Cancellation | None

    @property
    def spec(self) -> EvalSpec:
        """The run's spec."""
        return self.record.spec

    @property
    def run_id(self) -> str:
        """The run's id."""
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
        workspace = SpecWorkspace(self.spec.workspace, self.spec.files, self.state_dir)
        created: list[tuple[Sandbox, SandboxRef]] = []
        asked = False  # for a sandbox: before that, none can come
        try:
            sent = self.clock.call(workspace.manifest, self.bounds.upload_s, self.cancellation)
            asked = True
            conditions = self.clock.call(
                lambda: self._create_and_send(workspace, created),
                self.bounds.upload_s,
                self.cancellation,
            )
            ((sandbox, ref),), baseline, setup_s = created, sent, None
            if getattr(self.backend, "adopts", False):
                baseline = self.clock.call(
                    sandbox.manifest, self.bounds.upload_s, self.cancellation
                )
            if self.spec.setup is not None:
                phase, before = Phase.SETUP, self.clock.now()
                faults = self._set_up(sandbox)
                setup_s = self.clock.now() - before
                if faults:
                    return UploadFailed(fault=faults[0], faults=tuple(faults[1:]), sandbox=ref)
                baseline = self.clock.call(
                    sandbox.manifest, self.bounds.upload_s, self.cancellation
                )
            return Uploaded(
                sandbox=ref,
                workspace=self.vault.keep_manifest(sent),
                baseline=self.vault.keep_manifest(baseline),
                setup_s=setup_s,
                conditions=conditions,
            )
        except StorageError:
            raise
        except Exception as error:
            given_up = isinstance(error, BoundExceededError | CancelledError)
            pending = given_up and asked and not created
            return UploadFailed(
                fault=_fault(phase, error), sandbox=self._left_behind(pending=pending)
            )

    def _create_and_send(
        self, workspace: SpecWorkspace, created: list[tuple[Sandbox, SandboxRef]]
    ) -> dict[str, str]:
        """Create the sandbox, send the workspace, prove that it arrived; give the conditions.

        Whatever becomes of the rest, `created` says if there is one. A sandbox says which it is
        here, within the bound: it may have to ask somebody.
        """
        sandbox = self.backend.create(self.run_id, self.spec)
        created.append((sandbox, sandbox.ref))
        if sandbox.upload(workspace):
            sent, arrived = workspace.manifest(), sandbox.manifest()
            if getattr(self.backend, "adopts", False):  # what was there already is no fault
                arrived = Manifest.of(entry for entry in arrived if entry.path in sent.entries)
            _same(sent, arrived, "the sandbox's workspace is not the one that was sent")
        return dict(getattr(sandbox, "conditions", {}))

    def _set_up(self, sandbox: Sandbox) -> list[Fault]:
        """Run setup; give the faults if it did anything but exit with 0."""
        order = self._order("setup")
        bound_s = order.deadline_s + order.grace_s + BACKSTOP_SLACK_S
        try:
            record = self.clock.call(lambda: sandbox.execute(order), bound_s, self.cancellation)
        except Exception as error:  # whatever it was, setup may be running
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

        def look() -> SandboxRef | None:
            sandbox = self.backend.open(self.run_id)
            return sandbox.ref if sandbox is not None else None

        try:
            return self.clock.call(look, self.bounds.settle_s)
        except Exception:
            return SandboxRef(self.run_id, UNSEEN)

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
        early = record.ending is Ending.DEADLINE and (
            record.elapsed_s < self.spec.deadline_s - DEADLINE_TOLERANCE_S
        )
        if record.ending not in _OUTCOMES or not _sane(record) or early:
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
                oom_kills=record.oom_kills,
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
            env={**spec.env, **{name: os.environ.get(name, "") for name in spec.secrets}},
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
        try:
            baseline = self.vault.manifest(run.baseline) if run.baseline else Manifest({})
        except EvidenceIncompleteError as error:
            raise VaultError(f"run {self.run_id}: {error}") from error
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
