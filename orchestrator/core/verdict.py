"""How a check ended, what was expected of it, and what may be concluded.

A verdict has three values. The third, UNRESOLVED, is POSIX 1003.3's word for "could not be
determined"; it is neither a zero nor a false, and Python is told so: a verdict has no truth value
and cannot be added up.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Never, assert_never

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable


class OutcomeKind(StrEnum):
    """How a check can end."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    OUT_OF_MEMORY = "out_of_memory"


class ObservedBy(StrEnum):
    """Who saw the check end, in rising order of trust."""

    GUEST = "guest"
    """The supervisor beside the check; on some backends the check runs as the same user."""

    BACKEND = "backend"
    """The daemon or kernel that owns the sandbox."""


@frozen(kw_only=True)
class Outcome:
    """How the check ended.

    Attributes:
        kind: the way it ended. `deadline_exceeded` is said only by who enforced the deadline inside
            the sandbox, whatever status the program left with.
        exit_code: of its own exit, or None.
        signal: number of the signal that ended it, or None. A shell cannot tell a program that
            SIGINT or SIGPIPE killed from one that exited 130 or 141; those two are given as exits.
        deadline_s: the deadline that was in force, in seconds.
        elapsed_s: seconds from the start of its process to its end, on the sandbox's clock.
        observed_by: who saw it.
        escalated: the program did not end on SIGTERM within the grace and was killed.
        descendants: processes of the check that outlived it and were then stopped.
        oom_kills: processes that the kernel killed in the sandbox meanwhile, for want of memory.
        settled_after_client_timeout: the client had already given up when this was learned.
    """

    kind: OutcomeKind
    exit_code: int | None
    signal: int | None
    deadline_s: float
    elapsed_s: float
    observed_by: ObservedBy = ObservedBy.GUEST
    escalated: bool = False
    descendants: int = 0
    oom_kills: int = 0
    settled_after_client_timeout: bool = False

    def __str__(self) -> str:
        """Say it in a few words: `exited(0)`, `deadline exceeded (5 s)`."""
        match self.kind:
            case OutcomeKind.EXITED:
                return f"exited({self.exit_code})"
            case OutcomeKind.SIGNALLED:
                return f"signalled({self.signal})"
            case OutcomeKind.DEADLINE_EXCEEDED:
                return f"deadline exceeded ({self.deadline_s:g} s)"
            case OutcomeKind.OUT_OF_MEMORY:
                return "out of memory"
            case _:
                assert_never(self.kind)


class Verdict(Enum):
    """What a run established about the program."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    UNRESOLVED = "UNRESOLVED"

    def __bool__(self) -> Never:
        """Refuse: a verdict has three values."""
        raise TypeError(
            f"a verdict has three values and no truth value; compare {self} with Verdict.PASSED"
        )


class Reason(StrEnum):
    """Why a run is UNRESOLVED: stable codes, from the first thing that went wrong."""

    UPLOAD_FAILED = "upload_failed"
    SETUP_FAILED = "setup_failed"
    CLIENT_TIMED_OUT = "client_timed_out"
    CANCELLED = "cancelled"
    CHECK_LOST = "check_lost"
    DOWNLOAD_FAILED = "download_failed"
    SCORER_ERROR = "scorer_error"
    OUTPUT_TRUNCATED = "output_truncated"
    UNKNOWN = "unknown"


@frozen
class ExpectationResult:
    """What one expectation found.

    Attributes:
        name: of the expectation.
        passed: None where it could not be evaluated.
        message: for a person.
    """

    name: str
    passed: bool | None
    message: str


@frozen
class Tally:
    """How many runs ended in each verdict, and what that says about a rate.

    No rate drops or zeroes a run in silence: the unresolved ones leave the true rate of all runs
    somewhere between the two `bounds`.
    """

    passed: int = 0
    failed: int = 0
    unresolved: int = 0

    @classmethod
    def of(cls, verdicts: Iterable[Verdict]) -> Tally:
        """Count verdicts."""
        counts = dict.fromkeys(Verdict, 0)
        for verdict in verdicts:
            counts[verdict] += 1
        return cls(counts[Verdict.PASSED], counts[Verdict.FAILED], counts[Verdict.UNRESOLVED])

    @property
    def total(self) -> int:
        """All runs."""
        return self.passed + self.failed + self.unresolved

    @property
    def rate(self) -> float | None:
        """Passed over resolved, a number from 0 to 1; None where nothing was resolved."""
        resolved = self.passed + self.failed
        return self.passed / resolved if resolved else None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Lowest and highest rate over all runs that is consistent with what is known."""
        if not self.total:
            return None
        return self.passed / self.total, (self.passed + self.unresolved) / self.total

    def __str__(self) -> str:
        """Say all three counts, the rate over resolved runs and the bounds over all."""
        counts = f"{self.passed} passed, {self.failed} failed, {self.unresolved} unresolved"
        if self.rate is None or self.bounds is None:
            return counts
        low, high = self.bounds
        resolved = self.passed + self.failed
        return (
            f"{counts}; rate {self.rate:.1%} of {resolved} resolved, "
            f"between {low:.1%} and {high:.1%} of all {self.total}"
        )
