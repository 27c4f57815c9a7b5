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

import os
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from attrs import evolve, frozen

from .clock import Cancellation, SystemClock
from .core.clocks import Bounds
from .core.errors import (
    JournalConflictError,
    JournalError,
    SpecError,
)
from .core.facts import CleanupFailed
from .core.machine import (
    Command,
    Destroy,
    Run,
    Step,
    advance,
    sweep,
)
from .journal import Journal
from .performer import Performer
from .result import RunResult, result_of
from .vault import Vault
from .workspace import missing_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from . import ports
    from .core.facts import (
        Fact,
    )
    from .core.machine import CleanupPermit
    from .core.spec import EvalSpec
    from .ports import Backend, RunRecord


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


@frozen
class Swept:
    """What came of sweeping one sandbox.

    Attributes:
        run_id: the run that left it.
        sandbox_id: its id.
        problem: why it is not confirmed gone; empty where it is.
    """

    run_id: str
    sandbox_id: str
    problem: str


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

        Args:
            backend: where sandboxes come from.
            state_dir: directory for the journal and the evidence.
            bounds: how long to wait for each phase.
            observer: called on the run's own thread after every entry that is on disk; what it
                raises stops the run as an interrupt would.
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
        if getattr(backend, "state_dir", None) == "":
            backend.state_dir = str(self.state_dir)  # type: ignore[attr-defined] # see `ports`
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
        import asyncio  # noqa: PLC0415 - who does not await need not load it

        loop = asyncio.get_running_loop()
        future: asyncio.Future[RunResult] = loop.create_future()
        cancellation = Cancellation()

        def tell(method: Callable[[Any], None], value: object) -> None:
            if not future.done():
                method(value)

        def work() -> None:
            try:
                result = self.run(spec, retry_of=retry_of, cancellation=cancellation)
            except BaseException as error:  # noqa: BLE001 - handed to the awaiting task
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
            SpecError: its check may have to be started, and a secret of it is not set here.
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
        if self.journal.step(run_id).run.outcome is None:
            _refuse_missing_secrets(record.spec)
        self.journal.take_over(run_id)
        return self._drive(record, self.journal.step(run_id), cancellation)

    def sweep(self, *, kept: bool = False) -> list[Swept]:
        """Destroy the sandboxes that finished runs left on this backend. No verdict is touched.

        One whose creation was given up on stays listed, even if nothing is there: it may yet come.
        A run that is not finished is not touched either: `resume` finishes it, and its sandbox.

        Args:
            kept: also those that were kept on purpose, as `retain` of their specs asks.
        """
        done = []
        for run_id in self.journal.run_ids():
            record, run = self.journal.record(run_id), self.journal.step(run_id).run
            permit = sweep(run)
            if permit is None or record.backend != self.backend.name:
                continue
            if kept or not run.kept_on_purpose:
                done.append(self._sweep(record, run, permit))
        return done

    def destroy(self, permit: CleanupPermit) -> Swept:
        """Destroy what a finished run left, by the core's leave."""
        record, run = self.journal.record(permit.run_id), self.journal.step(permit.run_id).run
        return self._sweep(record, run, permit)

    def _sweep(self, record: RunRecord, run: Run, permit: CleanupPermit) -> Swept:
        sandbox_id = permit.sandbox_id or run.run_id
        try:
            self.journal.take_over(run.run_id)
        except JournalConflictError as error:
            return Swept(run.run_id, sandbox_id, str(error))
        try:
            fact = self._performer(record, None).perform(run, Destroy(permit))
            if isinstance(fact, CleanupFailed):
                return Swept(run.run_id, sandbox_id, fact.fault.message)
            self.journal.swept(run.run_id)
        finally:
            self.journal.release(run.run_id)
        return Swept(run.run_id, sandbox_id, "")

    def _performer(self, record: RunRecord, cancellation: Cancellation | None) -> Performer:
        return Performer(
            self.backend,
            self.vault,
            self.clock,
            self.bounds,
            self.state_dir,
            record,
            cancellation,
        )

    def result(self, run_id: str) -> RunResult:
        """Give what is known of a run, finished or not.

        Raises:
            JournalError: there is no such run.
        """
        return result_of(self.vault, self.journal.record(run_id), self.journal.step(run_id).run)

    def accept(self, spec: EvalSpec) -> EvalSpec:
        """Give the spec as it would be run here, without starting anything.

        Raises:
            SpecError: it cannot be honoured here.
        """
        spec = self._located(spec)
        _refuse_missing_secrets(spec)
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
        return result_of(self.vault, record, last.run)

    def steps(
        self, record: RunRecord, step: Step, cancellation: Cancellation | None = None
    ) -> Iterator[Step]:
        """The loop: give every step once its fact is on disk, before its command is performed."""
        performer = self._performer(record, cancellation)
        try:
            self._observer(Progress(record, step.run, None, step.command))
            yield step
            while step.command is not None:
                fact = performer.perform(step.run, step.command)
                step = advance(step.run, fact)
                self.journal.append(record.run_id, fact, step.command)
                self._observer(Progress(record, step.run, fact, step.command))
                yield step
        finally:
            self.journal.release(record.run_id)


def _refuse_missing_secrets(spec: EvalSpec) -> None:
    for name in spec.secrets:
        if name not in os.environ:
            raise SpecError("secrets", f"{name} is not set here", "a variable of this environment")


def time_sorted_run_id() -> str:
    """Make a name that sorts by time and names a sandbox anywhere (19 characters)."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    moment, stamp = int(time.time() * 1000), ""
    while moment:
        moment, digit = divmod(moment, len(digits))
        stamp = digits[digit] + stamp
    return f"r{stamp}-{''.join(secrets.choice(digits) for _ in range(17 - len(stamp)))}"
