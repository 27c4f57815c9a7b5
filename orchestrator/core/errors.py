"""Every error this library raises on purpose, in one place.

`OrchestratorError` is their root. An error names the run, the state, what was attempted and what
would have been legal, because it is read by somebody who was not there.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class OrchestratorError(Exception):
    """Root of every error raised on purpose by this library."""


class IllegalFactError(OrchestratorError):
    """A fact was reported that the lifecycle table does not allow in the run's state.

    Raised before anything changed: the run and its journal are as they were.
    """

    def __init__(
        self, *, run_id: str, state: str, fact: str, legal: Iterable[str], why: str = ""
    ) -> None:
        """Say which run refused which fact in which state, and which facts are legal there."""
        self.run_id = run_id
        self.state = state
        self.fact = fact
        self.legal = tuple(legal)
        self.why = why
        allowed = ", ".join(self.legal) or f"none ({state} is final)"
        because = f" ({why})" if why else ""
        super().__init__(f"run {run_id}: {fact} is not legal in {state}{because}; legal: {allowed}")

    def __reduce__(self) -> tuple[object, ...]:
        """Let it be sent from one process to another."""
        said = {name: getattr(self, name) for name in ("run_id", "state", "fact", "legal", "why")}
        return partial(type(self), **said), ()


class SpecError(OrchestratorError):
    """A spec, or something else that a person wrote, cannot be meant. Nothing has been started.

    `key` is the path of the offending key (`expect.files[0].sha256`), `expected` what belongs
    there.
    """

    def __init__(self, key: str, problem: str, expected: str) -> None:
        """Say which key is wrong, in what way, and what was expected."""
        self.key = key
        self.problem = problem
        self.expected = expected
        super().__init__(f"{key}: {problem}; expected {expected}")

    def __reduce__(self) -> tuple[object, ...]:
        """Let it be sent from one process to another."""
        return type(self), (self.key, self.problem, self.expected)


class EvidenceIncompleteError(OrchestratorError):
    """What arrived is not, byte for byte, what the sandbox says it has."""


class OutputTruncatedError(OrchestratorError):
    """A question about output cannot be answered because its middle was not kept.

    Missing is not absent: a truncated stream is never searched as if it were whole.
    """


class PermitError(OrchestratorError):
    """A sandbox was asked to be destroyed with a permit that is not for it."""


class SandboxGoneError(OrchestratorError):
    """The sandbox is no longer there, or is not the one that this run created."""


class StorageError(OrchestratorError):
    """This machine could not keep what it has to keep. The run stops where it is, to be resumed.

    Not a fault of the run: the sandbox is left as it is, and nothing is concluded.
    """


class VaultError(StorageError):
    """The vault cannot be read or written."""


class JournalError(StorageError):
    """The journal cannot be read or written. What it already holds is untouched."""


class JournalConflictError(JournalError):
    """Another writer has already written this entry: two runners were driving one run."""
