"""Facts: what has happened to a run, in the past tense, with what each of them establishes.

A fact carries the proof of itself. `Downloaded` cannot be said without a `Receipt`, which the vault
gives only for evidence that it compared with the sandbox's own account; `Checked` cannot be said
without an `Outcome`. So the lifecycle needs no guards: a claim without its proof cannot be built.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .evidence import Receipt
    from .verdict import ExpectationResult, Outcome


class Phase(StrEnum):
    """The part of a run in which a fault was met, and for which a bound is set."""

    UPLOAD = "upload"
    SETUP = "setup"
    CHECK = "check"
    SETTLE = "settle"
    DOWNLOAD = "download"
    DESTROY = "destroy"
    SCORE = "score"


class FaultKind(StrEnum):
    """Stable codes of what went wrong. None of them says anything about the program."""

    ERROR = "error"
    """The backend, or a library under it, raised or reported an error."""

    BOUND_EXCEEDED = "bound_exceeded"
    """The client stopped waiting for a call at the bound of its phase."""

    CANCELLED = "cancelled"
    """The client was asked to stop waiting."""

    WORKSPACE = "workspace"
    """The workspace could not be read, or has an entry that cannot be copied."""

    SETUP_FAILED = "setup_failed"
    """The setup command did not end with exit code 0."""

    NOT_STARTED = "not_started"
    """The check never started, and never will."""

    STOPPED = "stopped"
    """The check was still running when the client settled it, and was stopped."""

    RECORD_LOST = "record_lost"
    """No trustworthy record says how the check ended."""

    NOT_STILL = "not_still"
    """Something of the check could not be proven stopped."""

    INCOMPLETE = "incomplete"
    """What arrived, or what was kept of it, is not what the sandbox has."""

    SANDBOX_GONE = "sandbox_gone"
    """The sandbox vanished, or another one answers under its name."""

    SCORER_ERROR = "scorer_error"
    """An expectation raised, or answered neither True nor False."""

    OUTPUT_TRUNCATED = "output_truncated"
    """An expectation asked about output that was not kept."""

    RETAINED = "retained"
    """The sandbox was kept on purpose, as the spec's `retain` asks."""


def _never_empty(text: str) -> str:
    return text.strip() or "no further text was given"


@frozen
class Fault:
    """Something that went wrong outside the program under check.

    Attributes:
        phase: where it was met.
        kind: a stable code.
        message: for a person; never empty.
    """

    phase: Phase
    kind: FaultKind
    message: str = field(converter=_never_empty)


@frozen
class SandboxRef:
    """Which sandbox, exactly.

    Attributes:
        sandbox_id: the name under which the backend finds it again.
        identity: a value that another sandbox of the same name would not have.
    """

    sandbox_id: str
    identity: str


@frozen(kw_only=True)
class Fact:
    """Root of the eleven facts. `elapsed_s`: seconds spent in the phase that it ends."""

    elapsed_s: float = 0.0


@frozen(kw_only=True)
class Uploaded(Fact):
    """The workspace arrived whole in a fresh sandbox, and setup, if any, succeeded.

    Attributes:
        sandbox: the sandbox.
        workspace: digest of the manifest of the tree as it was sent.
        baseline: digest of the manifest of the tree that the check will see.
        setup_s: seconds that setup took, None where there is none.
        conditions: what the sandbox was made with and enforces, as its backend says.
    """

    sandbox: SandboxRef
    workspace: str
    baseline: str
    setup_s: float | None = None
    conditions: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class UploadFailed(Fact):
    """The workspace did not arrive whole, or setup failed. The check was never started.

    Attributes:
        fault: what went wrong.
        faults: what was met beside that.
        sandbox: the sandbox that may be there; None where there certainly is none.
    """

    fault: Fault
    faults: tuple[Fault, ...] = ()
    sandbox: SandboxRef | None = None


@frozen(kw_only=True)
class Checked(Fact):
    """The check ended, and nothing of it is running any more. `faults`: what was met on the way."""

    outcome: Outcome
    faults: tuple[Fault, ...] = ()


@frozen(kw_only=True)
class ClientTimedOut(Fact):
    """The client gave up waiting: a fact about the client, not about the check."""

    fault: Fault


@frozen(kw_only=True)
class CheckLost(Fact):
    """How the check ended will never be known. `faults`: what was met beside that."""

    fault: Fault
    faults: tuple[Fault, ...] = ()


@frozen(kw_only=True)
class Downloaded(Fact):
    """The evidence arrived whole and is sealed on disk. `faults`: attempts that failed before."""

    receipt: Receipt
    faults: tuple[Fault, ...] = ()


@frozen(kw_only=True)
class DownloadFailed(Fact):
    """The evidence did not arrive whole. `receipt`: what was put aside, None if nothing."""

    fault: Fault
    faults: tuple[Fault, ...] = ()
    receipt: Receipt | None = None


@frozen(kw_only=True)
class CleanedUp(Fact):
    """The sandbox is confirmed gone."""


@frozen(kw_only=True)
class CleanupFailed(Fact):
    """The sandbox is not confirmed gone: its deletion failed, or it was kept on purpose."""

    fault: Fault


@frozen(kw_only=True)
class Scored(Fact):
    """Every expectation was evaluated over sealed evidence."""

    expectations: tuple[ExpectationResult, ...]


@frozen(kw_only=True)
class ScoringFailed(Fact):
    """At least one expectation could not be evaluated. The others keep their results.

    Attributes:
        fault: of the first of them.
        faults: of further ones.
        expectations: what each found, or did not.
    """

    fault: Fault
    faults: tuple[Fault, ...] = ()
    expectations: tuple[ExpectationResult, ...] = ()
