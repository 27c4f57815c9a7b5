"""What the runner needs of the world: a backend with its sandboxes, and what passes between them.

Somebody who writes a backend implements `Backend` and `Sandbox` and nothing else. Any call may
raise anything and may take for ever: the runner bounds each one, and what it may conclude from a
failure is decided in `core`. Only three things are asked of a backend beyond doing what a verb
says:

* create is idempotent: the sandbox is named after the run, and asking again finds it again;
* execute is at most once: the guest claims the order before it starts anything (`guest/`);
* destroy compares the permit with the sandbox, and confirms that it is gone or raises.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, TypeVar

from attrs import field, frozen

from .core.errors import PermitError
from .core.verdict import ObservedBy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .clock import Cancellation
    from .core.evidence import Entry, Manifest, Receipt
    from .core.facts import Fact, SandboxRef
    from .core.machine import CleanupPermit, Command, Step
    from .core.spec import EvalSpec
    from .core.verdict import Outcome
    from .evidence import Evidence

Slot = Literal["setup", "check"]
Stream = Literal["stdout", "stderr"]
T = TypeVar("T")


@frozen(kw_only=True)
class Order:
    """A command for the guest to run once.

    Attributes:
        slot: which of the run's commands it is.
        argv: the command.
        env: its whole environment, beside what the backend sees as sane.
        deadline_s: seconds from the start of its process.
        grace_s: seconds between SIGTERM and SIGKILL.
        start_by: moment on the client's clock after which it must not start, seconds.
        now: the client's clock.
        output_bytes: of each stream to keep.
        nonce: known to the supervisor and the client only; a record without it is not the
            supervisor's.
    """

    slot: Slot
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    deadline_s: float
    grace_s: float
    start_by: float
    now: Callable[[], float]
    output_bytes: int
    nonce: str = field(repr=False)

    @property
    def latest_start_s(self) -> float:
        """Seconds from now after which it must not start; 0 where that has passed."""
        return max(self.start_by - self.now(), 0.0)


class Ending(StrEnum):
    """How the guest's record says that a command ended."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    DEADLINE = "deadline"
    OUT_OF_MEMORY = "out_of_memory"
    STOPPED = "stopped"
    """Settling stopped it while it ran."""
    NOT_STARTED = "not_started"
    """It never started, and never will."""
    LOST = "lost"
    """There is no record, or none that the supervisor wrote."""


@frozen(kw_only=True)
class Record:
    """The guest's account of one command.

    Attributes:
        ending: how it ended.
        code: exit code or signal number, as `ending` says; None otherwise.
        elapsed_s: seconds from start to end on the sandbox's clock.
        escalated: it was killed after the grace.
        descendants: processes that outlived it and were stopped.
        still: nothing of it is running any more, as far as can be proven.
        observed_by: who saw it end.
        oom_kills: processes that the kernel killed in the sandbox for want of memory meanwhile.
        message: for a person, where there is something to say.
    """

    ending: Ending
    code: int | None = None
    elapsed_s: float = 0.0
    escalated: bool = False
    descendants: int = 0
    still: bool = True
    observed_by: ObservedBy = ObservedBy.GUEST
    oom_kills: int = 0
    message: str = ""


class Workspace(Protocol):
    """The tree to send."""

    def manifest(self) -> Manifest:
        """Give the account of the tree."""

    def open(self, entry: Entry) -> BinaryIO:
        """Open a file of the tree for reading."""


class Intake(Protocol):
    """Where a sandbox delivers evidence; every delivery is compared with its account."""

    def missing(self, manifest: Manifest) -> list[Entry]:
        """Give the files of `manifest` whose content is not here yet."""

    def receive(self, entry: Entry, stream: BinaryIO) -> None:
        """Take the content of a file.

        Raises:
            EvidenceIncompleteError: it is not the content that `entry` says.
        """

    def output(
        self, stream: Stream, head: Iterable[bytes], tail: Iterable[bytes], total: int
    ) -> None:
        """Take what was kept of an output stream of which there were `total` bytes."""


class Sandbox(Protocol):
    """One disposable place, owned by one run.

    It may have an attribute `conditions`, a mapping of text to text: what it was made with and what
    it enforces, pinned (an image by its id, say). They are a part of the result.
    """

    @property
    def ref(self) -> SandboxRef:
        """Which sandbox this is."""

    def upload(self, workspace: Workspace) -> bool:
        """Make the sandbox's workspace equal to `workspace`, whatever was there before.

        False if a command of the run was started here before: then nothing is touched.
        """

    def manifest(self) -> Manifest:
        """Give the storage's own account of the sandbox's workspace."""

    def execute(self, order: Order) -> Record:
        """Start the order unless it was started before, and wait until nothing of it runs."""

    def settle(self, order: Order) -> Record:
        """Give the order's record; stop it if it runs; see that it never starts from now on."""

    def fetch(self, entries: Iterable[Entry], slot: Slot, intake: Intake) -> None:
        """Deliver the content of `entries`, and the output of the command in `slot`."""

    def destroy(self, permit: CleanupPermit) -> None:
        """Destroy the sandbox and return when it is confirmed gone.

        Raises:
            PermitError: the permit is not for this sandbox.
        """


def demand(permit: CleanupPermit, sandbox_id: str) -> None:
    """Compare a permit with the sandbox that is to be destroyed, which bears its run's id.

    Raises:
        PermitError: it is for another one.
    """
    if permit.run_id != sandbox_id or permit.sandbox_id not in {None, sandbox_id}:
        raise PermitError(
            f"sandbox {sandbox_id}: the permit is for sandbox {permit.sandbox_id} "
            f"of run {permit.run_id}"
        )


@frozen
class Labelled:
    """What the label of a sandbox says.

    Attributes:
        run_id: the run that it was made for.
        owner: the process that made it (`owner.owner`).
        state_dir: absolute path of the journal and evidence of its runner; empty if unknown.
    """

    run_id: str
    owner: str
    state_dir: str


class Backend(Protocol):
    """Makes sandboxes.

    It may have besides:

    * an attribute `shell`, the path in its sandboxes of the shell for commands that are text
      (`/bin/sh` if it has none);
    * an attribute `adopts`, true if its sandboxes come with a tree of their own, which the
      workspace is laid over;
    * a method `labelled`, which lists every sandbox that there is as `Labelled`, whoever made it;
      and an attribute `state_dir`, text that it labels them with, set by a runner where empty;
    * a method `close`.
    """

    @property
    def name(self) -> str:
        """A short name, `local` for one."""

    @property
    def isolation(self) -> str:
        """What the check is kept away from, in a word or two; `none` if nothing."""

    def refuse(self, spec: EvalSpec) -> None:
        """Refuse a spec that this backend cannot honour.

        Raises:
            SpecError: naming the key.
        """

    def create(self, run_id: str, spec: EvalSpec) -> Sandbox:
        """Create the run's sandbox, or find it if it was created before."""

    def open(self, run_id: str) -> Sandbox | None:
        """Find the run's sandbox; None where it is certain that there is none."""


@frozen(kw_only=True)
class RunRecord:
    """A run as it was begun.

    Attributes:
        run_id: its unique name.
        spec: what it runs; functions among its expectations are None, a journal holds no code.
        backend: name of its backend.
        isolation: what that backend keeps the check away from.
        nonce: the guest's secret for this run.
        retry_of: the run that it is another attempt at, None for a first one.
        created_at: seconds since the epoch, for display.
    """

    run_id: str
    spec: EvalSpec
    backend: str
    isolation: str
    nonce: str
    retry_of: str | None
    created_at: float


class Journal(Protocol):
    """Where everything that happens to a run is on disk before the next thing is done."""

    def begin(
        self,
        run_id: str,
        spec: EvalSpec,
        *,
        backend: str,
        isolation: str,
        retry_of: str | None = None,
    ) -> tuple[RunRecord, Step]:
        """Begin a run, with the intent to upload."""

    def append(self, run_id: str, fact: Fact, command: Command | None) -> None:
        """Record a fact and the intent to perform the command that follows from it."""

    def take_over(self, run_id: str) -> None:
        """Become the owner of a run whose runner is gone."""

    def release(self, run_id: str) -> None:
        """Let go of a run: it is finished, or stopped where it is, to be taken up again."""

    def swept(self, run_id: str) -> None:
        """Record that what a finished run left is gone."""

    def record(self, run_id: str) -> RunRecord:
        """Give a run as it was begun."""

    def step(self, run_id: str) -> Step:
        """Give where a run stands and what may be done next."""

    def run_ids(self) -> list[str]:
        """Give every run, oldest first."""

    def driven(self, run_id: str) -> bool:
        """Tell whether a live runner drives a run."""

    def close(self) -> None:
        """Let go."""


class Vault(Protocol):
    """Where evidence is kept. An `intake` that is handed back is one that the same vault gave."""

    def keep_manifest(self, manifest: Manifest) -> str:
        """Store a manifest; give its digest."""

    def manifest(self, digest: str) -> Manifest:
        """Give a stored manifest."""

    def intake(self, run_id: str, baseline: Manifest) -> Intake:
        """Open a delivery for a run whose check was given the tree `baseline`."""

    def seal(self, intake: Any, manifest: Manifest) -> Receipt:
        """Seal what was delivered, after proving that it is all there."""

    def put_aside(self, intake: Any, manifest: Manifest | None) -> Receipt:
        """Keep what was delivered of evidence that will not be scored."""

    def evidence(self, receipt: Receipt, outcome: Outcome | None) -> Evidence:
        """Give the evidence that a receipt was given for."""


class Clock(Protocol):
    """Time as the client sees it, and calls that it waits for."""

    def now(self) -> float:
        """Give seconds on a clock that never jumps."""

    def call(
        self, function: Callable[[], T], bound_s: float, cancellation: Cancellation | None = None
    ) -> T:
        """Call a function and give what it gives, unless that takes longer than `bound_s` seconds.

        Raises:
            BoundExceededError: it did not come back in time. It may be running still.
            CancelledError: the cancellation came first. It may be running still.
            AbruptEndError: the function raised something that is not an `Exception`.
            Exception: whatever else the function raised.
        """
