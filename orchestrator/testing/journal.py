"""The twin of the journal: a dictionary, under which the runner can be killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ..core.errors import (
    JournalConflictError,
    JournalError,
)
from ..core.machine import Step, advance, begin
from ..ports import RunRecord
from .clock import Crash
from .faults import Way

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core.facts import Fact
    from ..core.machine import Command
    from ..core.spec import EvalSpec
    from .simulate import World


class SimulatedJournal:
    """A journal in a dictionary, under which the runner can be killed. See `ports.Journal`."""

    def __init__(self, world: World) -> None:
        """Begin empty."""
        self._world = world
        self._records: dict[str, RunRecord] = {}
        self._begun: dict[str, Step] = {}
        self._swept: set[str] = set()
        self._folds: dict[str, tuple[int, Step]] = {}
        self.facts: dict[str, list[Fact]] = {}
        self.owners: dict[str, int] = {}
        self.writes = 0

    def _write(self, what: str, write: Callable[[], None]) -> None:
        way = self._world.disturbance("journal")
        if way is Way.CRASH_BEFORE:
            raise Crash
        if way is Way.DISK_FULL:
            raise JournalError("journal: database or disk is full")
        write()
        self.writes += 1
        self._world.tell(f"journal: {what}")
        if way is Way.CRASH_AFTER:
            raise Crash

    def begin(
        self,
        run_id: str,
        spec: EvalSpec,
        *,
        backend: str,
        isolation: str,
        retry_of: str | None = None,
    ) -> tuple[RunRecord, Step]:
        """Begin a run."""
        record = RunRecord(
            run_id=run_id,
            spec=spec,
            backend=backend,
            isolation=isolation,
            nonce="nonce",
            retry_of=retry_of,
            created_at=0.0,
        )
        step = begin(run_id, spec.retain)

        def write() -> None:
            self._records[run_id] = record
            self._begun[run_id] = step
            self.facts[run_id] = []
            self.owners[run_id] = self._world.lives

        self._write(f"{run_id} begins, intent Upload", write)
        return record, step

    def append(self, run_id: str, fact: Fact, command: Command | None) -> None:
        """Record a fact and the next intent."""
        if self.owners[run_id] != self._world.lives:
            raise JournalConflictError(f"another runner drives {run_id}")
        intent = f", intent {type(command).__name__}" if command else ""
        fault = getattr(fact, "fault", None)
        why = f" ({fault.phase} {fault.kind}: {fault.message})" if fault else ""
        self._write(
            f"{run_id} {type(fact).__name__}{why}{intent}",
            lambda: self.facts[run_id].append(fact),
        )

    def take_over(self, run_id: str) -> None:
        """Become the owner."""

        def write() -> None:
            self.owners[run_id] = self._world.lives

        self._write(f"{run_id} is taken over", write)

    def swept(self, run_id: str) -> None:
        """Record that what a finished run left is gone."""
        self._write(f"{run_id} is swept", lambda: self._swept.add(run_id))

    def release(self, run_id: str) -> None:
        """Do nothing: a simulated runner dies with the runs that it drives."""

    def record(self, run_id: str) -> RunRecord:
        """Give a run as it was begun."""
        return self._records[run_id]

    def step(self, run_id: str) -> Step:
        """Fold the facts, from where they were folded before."""
        folded, step = self._folds.get(run_id) or (0, self._begun[run_id])
        for fact in self.facts[run_id][folded:]:
            step = advance(step.run, fact)
        self._folds[run_id] = (len(self.facts[run_id]), step)
        swept = run_id in self._swept
        return evolve(step, run=evolve(step.run, sandbox_gone=True)) if swept else step

    def run_ids(self) -> list[str]:
        """Give every run."""
        return list(self._records)

    def driven(self, run_id: str) -> bool:
        """Tell whether the runner that lives drives it."""
        return self.owners[run_id] == self._world.lives

    def close(self) -> None:
        """Do nothing."""
