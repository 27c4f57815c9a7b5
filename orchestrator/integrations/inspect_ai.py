"""Inspect AI: a scorer whose answer comes from a run of ours, over any backend.

    Task(dataset, solver=..., scorer=check_scorer(spec, LocalBackend()))

PASSED is CORRECT and FAILED is INCORRECT. UNRESOLVED is an error of the sample and no score, so
that `retry_on_error` and `fail_on_error` apply to it and no average has it as a wrong answer.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
from attrs import asdict, evolve
from inspect_ai.log import transcript
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer, stderr
from inspect_ai.util import concurrency, sandbox

from .. import tree
from ..batch import FINAL_REASONS
from ..core.errors import OrchestratorError
from ..core.verdict import Tally, Verdict
from ..runner import Runner

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inspect_ai.log import EvalLog
    from inspect_ai.scorer import Scorer, Target
    from inspect_ai.solver import TaskState

    from ..core.clocks import Bounds
    from ..core.spec import EvalSpec
    from ..ports import Backend
    from ..result import RunResult

TOLD: Final = 4000  # characters of each output stream in Inspect's log; the vault has more


class CheckUnresolvedError(OrchestratorError):
    """A check could not be determined, which says nothing about the sample's answer."""

    def __init__(self, result: RunResult) -> None:
        """Say which run it was, and everything that went wrong in it."""
        self.result = result
        faults = "; ".join(f"{each.phase} {each.kind}: {each.message}" for each in result.faults)
        kept = f"; sandbox {result.retained_sandbox} is kept" if result.retained_sandbox else ""
        super().__init__(
            f"run {result.run_id} of {result.name!r} on {result.backend} is UNRESOLVED "
            f"({result.reason}), expected a verdict: {faults or 'no fault'}{kept}"
        )


def _check_scorer(
    spec: EvalSpec | Callable[[TaskState, Target], EvalSpec | Awaitable[EvalSpec]],
    backend: Backend | Callable[[Any], Backend],
    *,
    work: Callable[[Any, Path], Awaitable[None]] | None = None,
    state_dir: str | os.PathLike[str] = ".orchestrator",
    bounds: Bounds | None = None,
    attempts: int = 1,
    jobs: int | None = None,
) -> Scorer:
    """Score a sample by a check.

    Args:
        spec: what to run, or a function that makes it of a sample's state and target.
        backend: where, or what makes that of the sample's sandbox: `InspectSandboxBackend` does.
        work: copies the workspace from the sample's sandbox, as `inspect_sandbox.copy_of` does;
            `files` of the spec are laid over it.
        state_dir: directory for journal and evidence.
        bounds: how long to wait for each phase.
        attempts: runs over the same work while they are unresolved, without the model; one where
            a check runs in the work's own directory, which the first may have changed.
        jobs: checks in flight at once, None for as many as there are processors.
    """
    state_dir = Path(state_dir).absolute()

    async def score(state: TaskState, target: Target) -> Score:
        made = spec(state, target) if callable(spec) else spec
        wanted = await made if isawaitable(made) else made
        place = Path(tempfile.mkdtemp(prefix="orchestrator-"))
        try:
            if work is not None:
                await work(sandbox(), place)
                wanted = evolve(wanted, workspace=str(place))
            where = backend(sandbox()) if callable(backend) else backend
            async with concurrency("orchestrator checks", jobs or os.cpu_count() or 1):
                with Runner(where, state_dir, bounds=bounds) as runner:
                    return _score(await _run(runner, wanted, attempts))
        finally:
            tree.remove(place)

    return score


check_scorer = scorer(metrics=[accuracy(), stderr()], name="check_scorer")(_check_scorer)


async def _run(runner: Runner, spec: EvalSpec, attempts: int) -> RunResult:
    result = await _tidied(runner.arun(spec))
    for _ in range(0 if getattr(runner.backend, "adopts", False) else attempts - 1):
        if result.verdict is not Verdict.UNRESOLVED or result.reason in FINAL_REASONS:
            break
        result = await _tidied(runner.arun(spec, retry_of=result.run_id))
    return result


async def _tidied(run: Awaitable[RunResult]) -> RunResult:
    """Await a run. A cancellation, which Inspect sends again and again, waits until it is tidy."""
    task = asyncio.ensure_future(run)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
        raise


def _score(result: RunResult) -> Score:
    told = result.as_json()
    for stream in ("stdout", "stderr"):
        if told[stream] is not None:
            told[stream]["text"] = told[stream]["text"][-TOLD:]
    told["receipt"] = asdict(result.receipt) if result.receipt else None
    if result.verdict is Verdict.UNRESOLVED:
        transcript().info(told, source="orchestrator")
        raise CheckUnresolvedError(result)
    return Score(
        value=CORRECT if result.verdict is Verdict.PASSED else INCORRECT,
        answer=str(result.outcome),
        explanation="\n".join(f"{each.name}: {each.message}" for each in result.expectations),
        metadata=told,
    )


def tally(log: EvalLog) -> Tally:
    """Count the verdicts of a log's samples; one that has none of ours is unresolved."""
    verdicts = []
    for sample in log.samples or ():
        found = [(each.metadata or {}).get("verdict") for each in (sample.scores or {}).values()]
        verdicts += [Verdict(each) for each in found if each] or [Verdict.UNRESOLVED]
    return Tally.of(verdicts)
