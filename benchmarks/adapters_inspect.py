"""What Inspect AI's adapter costs, on the local provider, beside Inspect's own verbs.

    python benchmarks/adapters_inspect.py --runs 20

See `adapters.py`, whose table this is a part of. `runner alone` is the same work without Inspect.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import adapters
from adapters import WORKLOADS, files_of, rows_of
from local import Clock, Row, take_turns

from orchestrator import EvalSpec, Runner
from orchestrator.backends.local import LocalBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from local import Sample


def inspect(place: Path, runs: int) -> Iterator[tuple[str, list[Row]]]:
    """Measure Inspect's local sandbox, and runs of ours in it and beside it."""
    from inspect_ai.util._sandbox.local import LocalSandboxEnvironment  # noqa: PLC0415

    from orchestrator.integrations.inspect_sandbox import InspectSandboxBackend  # noqa: PLC0415

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def there(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def own(files: dict[str, str], check: str) -> Sample:
        clock = Clock()
        environment = LocalSandboxEnvironment()
        for name, content in files.items():
            await environment.write_file(name, content)
        assert (await environment.exec(["sh", "-c", check])).success
        for name in files:
            await environment.read_file(name)
        environment.directory.cleanup()
        return clock.done()

    async def ours(environment: Any, runner: Runner | None, spec: EvalSpec) -> Sample:
        clock = Clock()
        if runner is not None:
            assert (await runner.arun(spec)).passed
            return clock.done()
        backend = InspectSandboxBackend(environment, root=str(place / "inside"))
        with Runner(backend, place / "state") as made:
            assert (await made.arun(spec)).passed
        return clock.done()

    async def open_sandbox() -> Any:
        return LocalSandboxEnvironment()

    environment, backend = there(open_sandbox()), LocalBackend(place / "sandboxes")
    for name, (count, total, check) in WORKLOADS.items():
        files = files_of(count, total)
        spec = EvalSpec(name="inspect", check=check, files=files)
        with Runner(backend, place / "beside") as runner:
            contestants: dict[str, Callable[[], Sample]] = {
                "Inspect's own": lambda files=files, check=check: there(own(files, check)),
                "in its sandbox": lambda spec=spec: there(ours(environment, None, spec)),
                "runner alone": partial(
                    lambda runner, spec: there(ours(environment, runner, spec)), runner, spec
                ),
            }
            for turn in contestants.values():
                turn()  # what idles is loaded and warm
            samples = take_turns(contestants, runs, flush=False)
        rows = rows_of(samples, "Inspect's own", "runner alone", "in its sandbox")
        yield f"inspect, {name}: {count} files, `{check}`", list(rows)
    backend.close()
    environment.directory.cleanup()


HOSTS: Final = {"inspect": inspect}

if __name__ == "__main__":
    with mock.patch.dict(adapters.HOSTS, HOSTS, clear=True):
        adapters.main()
