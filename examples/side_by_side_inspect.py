"""Inspect AI beside itself, with the inputs of `side_by_side.py`: its usual scorer, and ours.

    python examples/side_by_side_inspect.py

Needs `pip install '.[inspect]'`. Every answer is read from a log that Inspect wrote.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import side_by_side
from side_by_side import Row

from orchestrator import EvalSpec
from orchestrator.core.evidence import EntryKind
from orchestrator.testing.faults import FaultyBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator import Evidence


class Asked(Mapping[str, str]):
    """Files by path, each read when it is asked for."""

    def __init__(self, read: Callable[[str], str]) -> None:
        self.read = read

    def __getitem__(self, path: str) -> str:
        """Read one; what there is none of is no key."""
        try:
            return self.read(path)
        except FileNotFoundError:
            raise KeyError(path) from None

    def __iter__(self) -> Iterator[str]:
        """Refuse: what there is was not asked for."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Refuse, as well."""
        raise NotImplementedError


def said(scorer: Any, place: Path) -> str:
    """Have Inspect evaluate one sample, and give what its log says."""
    from inspect_ai import Task, eval  # noqa: A004, PLC0415
    from inspect_ai.dataset import Sample  # noqa: PLC0415
    from inspect_ai.solver import solver  # noqa: PLC0415

    @solver
    def silent() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            del generate
            return state

        return solve

    [log] = eval(
        Task([Sample(input="?")], solver=silent(), sandbox="local", scorer=scorer),
        model="mockllm/model",
        display="none",
        log_dir=str(place / "logs"),
        fail_on_error=False,
    )
    [sample] = log.samples or ()
    if sample.error is not None:
        return f"error ({sample.error.message.partition('(')[0]})"
    [score] = (sample.scores or {}).values()
    return f"{'passed' if score.value == 'C' else 'failed'} ({score.answer})"


def inspect_itself(row: Row, place: Path) -> str:
    """Score as scorers of Inspect commonly do: run it, take a timeout for a wrong answer, read."""
    from inspect_ai.scorer import Score, accuracy, scorer  # noqa: PLC0415
    from inspect_ai.util import sandbox  # noqa: PLC0415
    from inspect_ai.util._sandbox.local import LocalSandboxEnvironment  # noqa: PLC0415

    async def score(state: Any, target: Any) -> Any:
        del state, target
        environment, loop = sandbox(), asyncio.get_running_loop()
        try:
            limit_s = math.ceil(row.deadline_s)
            done = await environment.exec(["sh", "-c", row.check], timeout=limit_s)
        except TimeoutError:
            return Score(value="I", answer="timed out")
        if row.lost:
            shutil.rmtree(environment.as_type(LocalSandboxEnvironment).directory.name)

        def read(path: str) -> str:
            return asyncio.run_coroutine_threadsafe(environment.read_file(path), loop).result()

        found = SimpleNamespace(
            files=Asked(read), stdout=done.stdout, stderr=done.stderr, exit_code=done.returncode
        )
        passed = await asyncio.to_thread(row.case, found)
        return Score(value="C" if passed else "I", answer=f"exited {done.returncode}")

    return said(scorer(metrics=[accuracy()], name="usual")(lambda: score)(), place)


def inspect_through_us(row: Row, place: Path) -> str:
    """Ask the same of the evidence of a run in the sample's own sandbox."""
    from orchestrator.integrations.inspect_ai import check_scorer  # noqa: PLC0415
    from orchestrator.integrations.inspect_sandbox import (  # noqa: PLC0415
        InspectSandbox,
        InspectSandboxBackend,
    )

    def case(evidence: Evidence) -> bool:
        def read(path: str) -> str:
            entry = evidence.entry(path)
            if entry is None or entry.kind is not EntryKind.FILE:
                raise FileNotFoundError(path)
            return evidence.text(path)

        streams = {"stdout": evidence.stdout.decode(), "stderr": evidence.stderr.decode()}
        found = SimpleNamespace(files=Asked(read), exit_code=evidence.exit_code, **streams)
        return row.case(found)

    def backend(environment: Any) -> FaultyBackend:
        inside = InspectSandboxBackend(environment, root=str(place / "sandboxes"))
        return FaultyBackend(inside, ["fetch:vanished"] if row.lost else ())

    spec = EvalSpec(name="row", check=row.check, deadline_s=row.deadline_s, expect={"case": case})
    home = property(lambda sandbox: Path(sandbox.base))  # by which the fault makes it vanish
    with mock.patch.object(InspectSandbox, "home", home, create=True):
        return said(check_scorer(spec, backend, state_dir=place / "state"), place)


HOSTS: dict[str, Callable[[Row, Path], str]] = {
    "Inspect": inspect_itself,
    "Inspect, through us": inspect_through_us,
}

if __name__ == "__main__":
    import inspect_ai  # noqa: F401 - loading it is not to be part of a figure

    with mock.patch.dict(side_by_side.HOSTS, HOSTS, clear=True):
        side_by_side.main()
