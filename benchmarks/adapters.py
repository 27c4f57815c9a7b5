"""What an adapter costs, beside its host's own sandbox on the same work.

    python benchmarks/adapters.py                  every host that is installed
    python benchmarks/adapters.py --only gptme --runs 30 --json figures.json

Contestants take turns in one process, and figures are medians with their spread: read the ratios.
Each turn is a whole life: an environment is made, files go up, a check runs, files come back, and
the environment goes. `runner alone` is the same work without an adapter: what is between it and the
host's verbs is the adapter, what is between it and the host's own sandbox is what evidence costs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from local import MIB, Clock, Row, nested, show, take_turns
from rich.console import Console

from orchestrator import EvalSpec, Runner
from orchestrator.backends.local import LocalBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from local import Sample

WORKLOADS: Final = {
    "tiny": (3, 3 * 1024, "true"),
    "python": (3, 3 * 1024, "python3 -c 'print(42)'"),
    "files": (200, 2 * MIB, "echo more >> f0"),
}
"""Files, bytes of all of them together, and the check."""


def files_of(count: int, total: int) -> dict[str, str]:
    """Make the files of a workload: text, so that every host takes it as it is."""
    line = "a line of text\n"
    return {f"f{number}": line * (total // count // len(line)) for number in range(count)}


def rows_of(samples: dict[str, list[Sample]], own: str, alone: str, adapter: str) -> Iterator[Row]:
    """Lay out totals against the host's own, and what the adapter adds to the runner alone."""
    totals = {name: [sample["total"] for sample in taken] for name, taken in samples.items()}
    base = Row(own, totals[own])
    for name, taken in totals.items():
        yield Row(name, taken, ratio=Row(name, taken).median / base.median)
    for name, beside in (("evidence", own), ("adapter", alone)):
        pairs = zip(totals[adapter], totals[beside], strict=True)
        yield Row(f"{name}: {adapter} - {beside}", [ours - theirs for ours, theirs in pairs])


# --- gptme ----------------------------------------------------------------------------------------


def gptme(place: Path, runs: int) -> Iterator[tuple[str, list[Row]]]:
    """Measure gptme's own environment on this machine, and the same verbs through the adapter."""
    from gptme.eval.execenv import SimpleExecutionEnv  # noqa: PLC0415 - only if it is installed

    from orchestrator.integrations.gptme import GptmeExecutionEnv  # noqa: PLC0415

    logging.getLogger().setLevel(logging.WARNING)  # gptme shows all that its libraries say
    backend = LocalBackend(place / "sandboxes")
    state = place / "state"

    def life(make: Callable[[], Any], files: dict[str, str], check: str) -> Sample:
        clock = Clock()
        env = make()
        env.upload(files)
        assert env.run(check)[2] == 0
        assert len(env.download()) == len(files)
        env.cleanup()
        return clock.done()

    def alone(runner: Runner, files: dict[str, str], check: str) -> Sample:
        clock = Clock()
        path = {"PATH": os.environ["PATH"]}
        argv = ("/bin/bash", "-c", check)
        assert runner.run(EvalSpec(name="alone", check=argv, files=files, env=path)).passed
        return clock.done()

    for name, (count, total, check) in WORKLOADS.items():
        files = files_of(count, total)
        with Runner(backend, state) as runner:
            contestants: dict[str, Callable[[], Sample]] = {
                "gptme's own": partial(life, SimpleExecutionEnv, files, check),
                "gptme, through us": partial(
                    life, partial(GptmeExecutionEnv, backend, state=state), files, check
                ),
                "runner alone": partial(alone, runner, files, check),
            }
            for turn in contestants.values():
                turn()  # what idles is loaded and warm
            samples = take_turns(contestants, runs, flush=False)
        rows = rows_of(samples, "gptme's own", "runner alone", "gptme, through us")
        yield f"gptme, {name}: {count} files, `{check}`", list(rows)
    backend.close()


HOSTS: Final = {"gptme": gptme}
"""Another host is another function; what it needs is imported in it."""


# --- the command line -----------------------------------------------------------------------------


def main() -> None:
    """Measure the hosts that are asked for and installed."""
    from adapters_inspect import HOSTS as MORE  # noqa: PLC0415 - it uses this module

    HOSTS.update(MORE)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=HOSTS, action="append", help="one of the hosts")
    parser.add_argument("--runs", type=int, default=20, help="of each contestant (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    figures: dict[str, Any] = {"python": sys.version.split()[0], "cpus": os.cpu_count()}
    for name in options.only or HOSTS:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
            try:
                for title, rows in HOSTS[name](Path(place), options.runs):
                    show(console, f"{title} (n = {options.runs})", rows)
                    figures[title] = nested(rows)
            except ModuleNotFoundError as missing:
                console.print(f"{name}: not installed ({missing.name})")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
