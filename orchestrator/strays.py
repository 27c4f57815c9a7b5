"""Sandboxes that nobody will come back for, found by the labels that they carry.

A journal knows what its own runs left. What it cannot know is left by runners whose journal is
elsewhere, or gone, and by creations that came after everybody had stopped waiting. A backend that
can list its sandboxes (`labelled`) says whose each one is; one whose maker is alive is not touched,
nor one whose maker cannot be seen from here.

Nothing is destroyed without the lifecycle's leave. A run that some journal on this machine has is
finished there first. One that none has becomes a run of this journal, with what is certain of it:
that its upload came to nothing. So what it has is saved before it is destroyed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from .batch import resume_batch
from .core.facts import Fault, FaultKind, Phase, UploadFailed
from .core.machine import advance, sweep
from .core.spec import EvalSpec
from .core.states import State
from .owner import alive
from .ports import Labelled, Order
from .runner import Runner, Swept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .batch import Attempt

EMPTY = EvalSpec(name="a sandbox that was found", check="exit 1", setup="exit 1")
"""Of a sandbox that was adopted: nothing is to run in it, and were it run, it could not pass."""


def sweep_all(
    runner: Runner,
    *,
    kept: bool = False,
    jobs: int = 1,
    observe: Callable[[Attempt], None] = lambda _: None,
    been: set[Path] | None = None,
) -> Iterator[Swept]:
    """Finish what can be resumed on the runner's backend, then destroy what nobody needs.

    Args:
        runner: on the backend to sweep, with the journal to begin with.
        kept: also what was kept on purpose, as `retain` of its spec asks.
        jobs: runs to resume at once.
        observe: told of every run that was resumed.
        been: state directories that are being swept already.

    Yields:
        What came of each sandbox; those of live runners are not among them.
    """
    been = set() if been is None else been
    been.add(runner.state_dir)
    unfinished = runner.unfinished()
    adopted = [run_id for run_id in unfinished if _adopted(runner, run_id)]
    for run_id in adopted:  # by a sweep that did not come to its end
        yield _taken_over(runner, run_id)
    going = [run_id for run_id in unfinished if run_id not in adopted]
    for attempt in resume_batch(runner, going, jobs=jobs):
        observe(attempt)
    yield from runner.sweep(kept=kept)
    elsewhere: set[Path] = set()
    yield from _strays(runner, elsewhere)
    for place in sorted(elsewhere - been):  # what is left in one of those is left on purpose
        with Runner(runner.backend, place, bounds=runner.bounds) as other:
            yield from sweep_all(other, kept=kept, jobs=jobs, observe=observe, been=been)


def _strays(runner: Runner, elsewhere: set[Path]) -> Iterator[Swept]:
    """End what labels show and nobody drives; add to `elsewhere` the journals that have more."""
    here = set(runner.journal.run_ids())
    for found in _labelled(runner):
        living = alive(found.owner)
        if found.run_id in here:
            yield from _of_this_journal(runner, found)
        elif living is None:
            problem = "its runner, if there is one, is on another machine"
            yield Swept(found.run_id, found.run_id, problem)
        elif not living:
            try:
                if (place := _journal_of(found)) is not None:
                    elsewhere.add(place)
                else:
                    yield adopt(runner, found)
            except Exception as error:  # noqa: BLE001 - the others can be swept all the same
                yield Swept(found.run_id, found.run_id, str(error))


def _taken_over(runner: Runner, run_id: str) -> Swept:
    try:
        runner.journal.take_over(run_id)
        return _bring_to_its_end(runner, run_id)
    except Exception as error:  # noqa: BLE001 - the others can be swept all the same
        return Swept(run_id, run_id, str(error))
    finally:
        runner.journal.release(run_id)


def _labelled(runner: Runner) -> Iterable[Labelled]:
    labelled = getattr(runner.backend, "labelled", None)
    if labelled is None:
        return ()
    return runner.clock.call(lambda: list(labelled()), runner.bounds.settle_s)


def _of_this_journal(runner: Runner, found: Labelled) -> Iterator[Swept]:
    """Destroy what came after its run was finished and had been cleaned up."""
    run = runner.journal.step(found.run_id).run
    if run.finished and run.retained_sandbox is None:
        permit = sweep(run, found=found.run_id)
        if permit is not None:
            yield runner.destroy(permit)


def _journal_of(found: Labelled) -> Path | None:
    """Give the state directory on this machine that has the run; None where none has."""
    place = Path(found.state_dir)
    if not found.state_dir or not (place / "journal.db").is_file():
        return None
    from .journal import Journal  # noqa: PLC0415 - others' journals are seldom opened

    journal = Journal(place / "journal.db")
    try:
        return place if found.run_id in journal.run_ids() else None
    finally:
        journal.close()


def adopt(runner: Runner, found: Labelled) -> Swept:
    """Take a sandbox that no journal knows for a run of this one, and bring it to its end."""
    runner.journal.begin(
        found.run_id,
        EMPTY,
        backend=runner.backend.name,
        isolation=runner.backend.isolation,
    )
    try:
        return _bring_to_its_end(runner, found.run_id)
    finally:
        runner.journal.release(found.run_id)


def _adopted(runner: Runner, run_id: str) -> bool:
    """Tell whether a run is a sandbox that was found, and that nothing is known of yet."""
    spec = runner.journal.record(run_id).spec
    return spec == EMPTY and runner.journal.step(run_id).run.state is State.NEW


def _bring_to_its_end(runner: Runner, run_id: str) -> Swept:
    """Stop what runs in a sandbox that was found, save what it has, and destroy it."""
    record, step = runner.journal.record(run_id), runner.journal.step(run_id)
    problem = ""
    try:
        sandbox = runner.clock.call(lambda: runner.backend.open(run_id), runner.bounds.settle_s)
        if sandbox is not None:
            runner.clock.call(lambda: sandbox.settle(_nothing()), runner.bounds.settle_s)
    except Exception as error:  # noqa: BLE001 - what runs there is killed with its sandbox
        problem = str(error)
    fault = Fault(Phase.UPLOAD, FaultKind.ERROR, f"found by its label, without a journal {problem}")
    ref = runner.clock.call(
        lambda: opened.ref if (opened := runner.backend.open(run_id)) else None,
        runner.bounds.settle_s,
    )
    fact = UploadFailed(fault=fault, sandbox=ref)
    step = advance(step.run, fact)
    runner.journal.append(run_id, fact, step.command)
    *_, last = runner.steps(record, step)
    left = [fault.message for fault in last.run.faults if fault.phase is Phase.DESTROY]
    return Swept(run_id, run_id, "; ".join(left))


def _nothing() -> Order:
    """Give an order that never was: to settle it stops whatever runs in its place."""
    return Order(
        slot="check",
        argv=(":",),
        env={},
        deadline_s=1.0,
        grace_s=0.1,
        start_by=0.0,
        now=time.monotonic,
        output_bytes=2,
        nonce="none",
    )
