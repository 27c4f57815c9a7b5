"""What the checks work with: backends, a directory of their own, and words for what they find."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from attrs import Factory, define

from ...core.facts import DownloadFailed, Fault, FaultKind, Phase, SandboxRef, UploadFailed
from ...core.machine import Destroy, advance, begin
from ...core.spec import EvalSpec
from ...core.verdict import Reason, Verdict
from ...ports import Ending, Order
from ...runner import Runner, time_sorted_run_id
from ...workspace import SpecWorkspace
from ..faults import FaultyBackend, Injection, Release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from ...core.clocks import Bounds
    from ...core.evidence import Manifest
    from ...core.machine import CleanupPermit
    from ...evidence import Evidence
    from ...ports import Backend, Record, Sandbox, Slot
    from ...result import RunResult
    from ...runner import Progress


TOLERANCE_S: Final = 2.0
"""Seconds beyond deadline and grace within which the end of a check must be known."""
BOUND_S: Final = 120.0
"""Seconds that a check may take before it counts as one that hangs."""
STILL_S: Final = 0.3
"""Seconds that lie between two accounts of a workspace in which nothing may move."""
CLOSE_S: Final = 30.0


class NotApplicableError(Exception):
    """Raised by a check that needs something which is not there."""


@define(eq=False)
class Bench:
    """What a check works with: backends, a directory of its own, and runs that leave nothing.

    Attributes:
        make_backend: the factory.
        directory: fresh, and removed after the check.
    """

    make_backend: Callable[[], Backend]
    directory: Path
    _made: list[Backend] = Factory(list)
    _runners: list[Runner] = Factory(list)
    _run_ids: list[str] = Factory(list)
    _numbers: Iterator[int] = Factory(itertools.count)
    _lock: Any = Factory(threading.Lock)

    @property
    def backend(self) -> Backend:
        """The check's backend: the same one every time."""
        with self._lock:
            if not self._made:
                self._made.append(self.make_backend())
            return self._made[0]

    def another_backend(self) -> Backend:
        """Make another one, as another runner would."""
        made = self.make_backend()
        self._made.append(made)
        return made

    def new_run_id(self) -> str:
        """Name a run that is tidied away after the check."""
        run_id = time_sorted_run_id()
        self._run_ids.append(run_id)
        return run_id

    def fresh(self, name: str) -> Path:
        """Make a new directory."""
        made = self.directory / f"{name}-{next(self._numbers)}"
        made.mkdir()
        return made

    def runner(
        self,
        backend: Backend | None = None,
        state_dir: Path | None = None,
        *,
        bounds: Bounds | None = None,
        observer: Callable[[Progress], None] | None = None,
    ) -> Runner:
        """Open a runner, in a state directory of its own unless one is given."""
        made = Runner(
            backend or self.backend,
            state_dir or self.fresh("state"),
            bounds=bounds,
            observer=observer,
            new_run_id=self.new_run_id,
        )
        self._runners.append(made)
        return made

    def run(
        self,
        program: str | list[str],
        *,
        faults: Iterable[str | Injection] = (),
        pause_s: float = 0.2,
        bounds: Bounds | None = None,
        **spec: Any,
    ) -> RunResult:
        """Have the runner run a program to its verdict, with faults injected if any are given."""
        wanted = _spec(program, **spec)
        faulty = FaultyBackend(self.backend, tuple(faults), Release(pause_s))
        with faulty:
            chosen: Backend = faulty if faulty.plan else self.backend
            result = self.runner(chosen, bounds=bounds).run(wanted)
        _that(
            faulty.happened == list(faulty.plan),
            f"faults were planned and not met: {faulty.plan}, of which {faulty.happened}",
        )
        return result

    def sandbox(self, **spec: Any) -> Sandbox:
        """Create a sandbox and upload a workspace, as a runner does."""
        wanted = _spec("true", **spec)
        sandbox = self.backend.create(self.new_run_id(), wanted)
        _that(sandbox.upload(_tree(wanted)) is True, "a first upload was refused")
        return sandbox

    def order(self, program: str, *, slot: Slot = "check", late_s: float = 0.0) -> Order:
        """Write an order; one that is late by some seconds must not start."""
        shell = getattr(self.backend, "shell", "/bin/sh")
        return Order(
            slot=slot,
            argv=(shell, "-c", program),
            env={},
            deadline_s=30.0,
            grace_s=0.3,
            start_by=time.monotonic() - late_s if late_s else time.monotonic() + 60.0,
            now=time.monotonic,
            output_bytes=1 << 20,
            nonce=f"conformance{next(self._numbers)}",
        )

    def kill(self, run_id: str) -> None:
        """Destroy a run's sandbox behind the back of its runner."""
        sandbox = self.backend.open(run_id)
        if sandbox is not None:
            sandbox.destroy(permit(run_id, sandbox.ref))

    def close(self) -> None:
        """Let go of everything, and destroy what is left of the sandboxes."""
        for runner in self._runners:
            runner.close()
        for run_id in self._run_ids if self._made else ():
            try:
                self.kill(run_id)
            except Exception:  # noqa: BLE001 - something of it runs: it is stopped, then destroyed
                with suppress(Exception):
                    self._stop(run_id)
        for backend in self._made:
            if callable(close := getattr(backend, "close", None)):
                close()

    def _stop(self, run_id: str) -> None:
        if sandbox := self.backend.open(run_id):
            sandbox.settle(self.order("true"))
            self.kill(run_id)


def permit(run_id: str, ref: SandboxRef | None) -> CleanupPermit:
    """Have the core give leave to destroy a sandbox: of a run whose download has failed."""
    why = "a conformance check is done with it"
    not_sent = Fault(Phase.UPLOAD, FaultKind.ERROR, why)
    not_had = Fault(Phase.DOWNLOAD, FaultKind.ERROR, why)
    broken = advance(begin(run_id).run, UploadFailed(fault=not_sent, sandbox=ref)).run
    command = advance(broken, DownloadFailed(fault=not_had)).command
    assert isinstance(command, Destroy)  # said for the type checker
    return command.permit


def _spec(program: str | list[str], **spec: Any) -> EvalSpec:
    return EvalSpec(
        **{"name": "conformance", "deadline_s": 20.0, "grace_s": 0.5, "check": program, **spec}
    )


def _tree(spec: EvalSpec) -> SpecWorkspace:
    return SpecWorkspace(spec.workspace, spec.files)


def _that(holds: object, reason: str) -> None:
    """Assert, also where Python was told to leave assertions out."""
    if not holds:
        raise AssertionError(reason)


def _same(what: str, got: object, wanted: object) -> None:
    _that(got == wanted, f"{what}: {_short(got)}, where it should be {_short(wanted)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:140]} ... {text[-140:]}"  # noqa: PLR2004


def _story(result: RunResult) -> str:
    """Say in a line how a run went, for the reason of a finding."""
    words = [result.state.value if result.verdict is None else result.verdict.value]
    words += [f"({result.reason})"] if result.reason else []
    words += [str(result.outcome)] if result.outcome else []
    words += [found.message for found in result.expectations if found.passed is not True]
    words += [f"[{fault.phase} {fault.kind}: {fault.message}]" for fault in result.faults]
    if result.evidence and (stderr := result.evidence.output("stderr")):
        words += [f"stderr: {stderr.text[-200:].strip()}"] if stderr.total else []
    return " ".join(words)


def _passed(result: RunResult) -> Evidence:
    """Make sure that a run passed; give its evidence."""
    _that(result.verdict is Verdict.PASSED and result.evidence is not None, _story(result))
    assert result.evidence is not None  # said for the type checker
    return result.evidence


def _unresolved(result: RunResult, reason: Reason) -> None:
    unscored = result.verdict is Verdict.UNRESOLVED and not result.expectations
    _that(unscored and result.reason is reason, f"it should be {reason}, and is {_story(result)}")


def _holds_still(sandbox: Sandbox) -> Manifest:
    """Make sure that nothing moves in a sandbox's workspace."""
    first = sandbox.manifest()
    time.sleep(STILL_S)
    moved = first.differences(sandbox.manifest())
    _that(not moved, f"files still change after the check: {'; '.join(moved[:3])}")
    return first


@contextmanager
def _within(seconds: float, what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    elapsed_s = time.monotonic() - start
    _that(elapsed_s <= seconds, f"{what} took {elapsed_s:.1f} s, and may take {seconds:.1f} s")


def _ticks(name: str) -> str:
    """Write a program that appends to a file 20 times a second, and ends after six seconds."""
    return f"i=0; while [ $i -lt 120 ]; do echo x >> {name}; sleep 0.05; i=$((i+1)); done"


def _ended(record: Record, ending: Ending, code: int | None = None) -> None:
    what = "nothing of it runs" if record.still else "something of it is still running"
    found = f"{record.ending}({record.code}), {what}; {record.message}"
    right = record.ending is ending and record.still and record.code == code
    _that(right, f"its record should say {ending}({code}), and says {found}")
