"""What a run came to: everything that is known of it, as one value and as one JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from .core.errors import EvidenceIncompleteError
from .core.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .core.evidence import Receipt
    from .core.facts import Fault
    from .core.machine import Run
    from .core.states import State
    from .core.verdict import ExpectationResult, Reason
    from .evidence import Evidence
    from .ports import RunRecord, Stream, Vault


@frozen(kw_only=True)
class RunResult:
    """What a run came to.

    Attributes:
        run_id: unique name of the run.
        name: of its spec.
        backend: that it ran on.
        isolation: what that backend kept the check away from; `none` if nothing.
        state: where the run stands; final unless it was looked at while it was running.
        verdict: PASSED, FAILED or UNRESOLVED; None while the run is not finished.
        reason: why it is UNRESOLVED, a stable code.
        outcome: how the check ended, None where that is not known.
        expectations: what each expectation found.
        evidence: what the run left behind, sealed or put aside; None if nothing was saved.
        receipt: the vault's receipt for it.
        faults: everything that went wrong around the program, in order.
        retained_sandbox: id of a sandbox that is not confirmed gone.
        timings: seconds by phase.
        retry_of: the run that this one is another attempt at.
        tags: of its spec.
        conditions: what the sandbox was made with and enforced, as its backend says: the image by
            its id, limits, user, network.
    """

    run_id: str
    name: str
    backend: str
    isolation: str
    state: State
    verdict: Verdict | None
    reason: Reason | None
    outcome: Outcome | None
    expectations: tuple[ExpectationResult, ...]
    evidence: Evidence | None
    receipt: Receipt | None
    faults: tuple[Fault, ...]
    retained_sandbox: str | None
    timings: Mapping[str, float]
    retry_of: str | None
    tags: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the verdict is PASSED; False says nothing about which other one it is."""
        return self.verdict is Verdict.PASSED

    def as_json(self) -> dict[str, Any]:
        """Give the result as JSON types. Bytes that are no text become U+FFFD."""
        return {
            "run_id": self.run_id,
            "name": self.name,
            "backend": self.backend,
            "isolation": self.isolation,
            "conditions": dict(self.conditions),
            "state": self.state.value,
            "verdict": self.verdict.value if self.verdict is not None else None,
            "reason": self.reason.value if self.reason is not None else None,
            "outcome": _outcome(self.outcome),
            "expectations": [
                {"name": found.name, "passed": found.passed, "message": found.message}
                for found in self.expectations
            ],
            "evidence": self._evidence(),
            "stdout": self._output("stdout"),
            "stderr": self._output("stderr"),
            "faults": [
                {"phase": fault.phase.value, "kind": fault.kind.value, "message": fault.message}
                for fault in self.faults
            ],
            "retained_sandbox": self.retained_sandbox,
            "timings": {phase: round(seconds, 6) for phase, seconds in self.timings.items()},
            "retry_of": self.retry_of,
            "tags": list(self.tags),
        }

    def _evidence(self) -> dict[str, Any] | None:
        if self.receipt is None:
            return None
        return {
            "sealed": self.receipt.sealed,
            "entries": self.receipt.entries,
            "bytes": self.receipt.bytes,
            "created": self.receipt.created,
            "modified": self.receipt.modified,
            "deleted": self.receipt.deleted,
            "path": str(self.evidence.path) if self.evidence else None,
        }

    def _output(self, stream: Stream) -> dict[str, Any] | None:
        output = self.evidence.output(stream) if self.evidence else None
        if output is None:
            return None
        return {"text": output.text, "bytes": output.total, "truncated": output.truncated}


def _outcome(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return {
        "kind": outcome.kind.value,
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "deadline_s": outcome.deadline_s,
        "elapsed_s": outcome.elapsed_s,
        "observed_by": outcome.observed_by.value,
        "escalated": outcome.escalated,
        "descendants": outcome.descendants,
        "oom_kills": outcome.oom_kills,
        "settled_after_client_timeout": outcome.settled_after_client_timeout,
    }


def result_of(vault: Vault, record: RunRecord, run: Run) -> RunResult:
    """Give what is known of a run, with what its vault has of its evidence."""
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
        tags=record.spec.tags,
        conditions=run.conditions,
    )
