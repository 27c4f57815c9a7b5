"""Many runs at once: each on its own thread, none of them any other's business.

An unresolved run may be tried again: in a new run, in a new sandbox, which names the run that it
retries; both keep their evidence. A failed run is a result and is never tried again.
"""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from attrs import frozen

from .core.verdict import Reason, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .core.spec import EvalSpec
    from .result import RunResult
    from .runner import Runner

T = TypeVar("T")

FINAL_REASONS = frozenset({Reason.CANCELLED, Reason.SCORER_ERROR, Reason.OUTPUT_TRUNCATED})
"""Reasons that another attempt at the same spec would meet again."""


@frozen
class Stopped:
    """A run that stopped without a verdict, to be resumed, and why.

    Attributes:
        name: of its spec, or its id.
        error: what stopped it.
    """

    name: str
    error: BaseException


@frozen
class Attempt:
    """What came of one attempt at a spec.

    Attributes:
        result: of the run, or what stopped it.
        number: of the attempt, from 1.
        last: whether no other attempt at its spec follows.
    """

    result: RunResult | Stopped
    number: int
    last: bool


def run_batch(
    runner: Runner, specs: Iterable[EvalSpec], *, jobs: int = 1, attempts: int = 1
) -> Iterator[Attempt]:
    """Run specs, `jobs` at a time, giving every attempt as it ends.

    Args:
        runner: what runs them.
        specs: what to run.
        jobs: runs in flight at once.
        attempts: at each spec, while it is unresolved for a reason that may pass.
    """
    if attempts < 1:
        raise ValueError(f"got attempts={attempts}, expected at least 1")

    def run(spec: EvalSpec) -> Iterator[Attempt]:
        before: str | None = None
        for number in range(1, attempts + 1):
            result = _guarded(spec.name, partial(runner.run, spec, retry_of=before))
            again = _may_pass(result) and number < attempts
            yield Attempt(result, number, last=not again)
            if not again or isinstance(result, Stopped):
                return
            before = result.run_id

    yield from _in_threads(run, list(specs), jobs)


def resume_batch(runner: Runner, run_ids: Iterable[str], *, jobs: int = 1) -> Iterator[Attempt]:
    """Resume runs, `jobs` at a time, giving each as it ends."""

    def resume(run_id: str) -> Iterator[Attempt]:
        yield Attempt(_guarded(run_id, lambda: runner.resume(run_id)), 1, last=True)

    yield from _in_threads(resume, list(run_ids), jobs)


def _guarded(name: str, call: Callable[[], RunResult]) -> RunResult | Stopped:
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - even a defect of ours in one run is its own
        return Stopped(name, error)


def _may_pass(result: RunResult | Stopped) -> bool:
    return (
        not isinstance(result, Stopped)
        and result.verdict is Verdict.UNRESOLVED
        and result.reason not in FINAL_REASONS
    )


def _in_threads(
    work: Callable[[T], Iterator[Attempt]], items: list[T], jobs: int
) -> Iterator[Attempt]:
    """Work through items on daemon threads: an interrupt leaves them where their journal says."""
    if jobs < 1:
        raise ValueError(f"got jobs={jobs}, expected at least 1")
    todo: queue.SimpleQueue[T] = queue.SimpleQueue()
    done: queue.SimpleQueue[Attempt] = queue.SimpleQueue()
    for item in items:
        todo.put(item)

    def worker() -> None:
        while True:
            try:
                item = todo.get_nowait()
            except queue.Empty:
                return
            for attempt in work(item):
                done.put(attempt)

    for _ in range(min(jobs, len(items))):
        threading.Thread(target=worker, name="orchestrator job", daemon=True).start()
    remaining = len(items)
    while remaining:
        attempt = done.get()
        remaining -= attempt.last
        yield attempt
