"""What a run on the local backend costs, beside the least that the same work could cost.

    python benchmarks/local.py                     everything, about ten minutes
    python benchmarks/local.py --only tiny,core    some of it
    python benchmarks/local.py --json figures.json

Contestants take turns in one process, so that noise of the machine falls on all alike; figures are
medians with their spread. Absolute times are not stable between machines: read the ratios.

* `bare` is what a script without any promises does: copy the workspace, run the command, copy the
  files that it is known to change out, remove the copy. `bare copy` and `hash pass` are the two
  pieces of work that evidence cannot do without.
* `ours, cold` opens a state directory and a backend that have never been used. `ours, warm` has run
  the same spec before: the vault knows the workspace, and the helper process is up.
* `durability` is `ours, warm` against the same with `os.fsync` and SQLite's own flushing switched
  off, here and nowhere else.
* Client memory is the growth of the peak resident set of a fresh process, over its size when idle.

Before every turn of the larger workloads the page cache is flushed, outside the clock: what one
contestant left unwritten is not to be paid for by the next one.

Every contestant makes thousands of files and removes them. An ext4 without a journal (that of many
virtual machines) does not take an inode again for minutes after its file was removed, and searches
longer and longer for one: making files takes up to forty times as long, for everybody. Where upload
is slow for `bare` too, `--dir` on another file system, a tmpfs for one, shows the work itself; but
on a tmpfs nothing waits for a disk, so durability costs nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from rich.console import Console
from rich.table import Table

from orchestrator import EvalSpec, Runner, Verdict, begin, replay
from orchestrator.backends.local import LocalBackend
from orchestrator.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator import RunResult
    from orchestrator.core.facts import Fact
    from orchestrator.core.machine import Command

MIB: Final = 1 << 20
TOUCHED: Final = 5
PRINT: Final = "yes 'a line of text, over and over and over again' | head -c 200000000"
WORKLOADS: Final = ("tiny", "medium", "large", "output", "core", "import")
PHASES: Final = ("upload", "check", "download", "destroy", "score")
HEAVY: Final = (
    "docker",
    "grpc",
    "hypothesis",
    "ray",
    "pytest",
    "rich",
    "typer",
    "transitions",
    "cattrs",
    "asyncio",
    "sqlite3",
)

SMALL: Final = EvalSpec(name="small", check="true")

Sample = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table: what was measured, its samples, and what to hold it against."""

    name: str
    samples: list[float]
    unit: str = "s"
    ratio: float | None = None
    goal: str = ""

    @property
    def median(self) -> float:
        """The figure."""
        return statistics.median(self.samples)

    def as_json(self) -> dict[str, Any]:
        """Give the line as JSON types."""
        return {
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "n": len(self.samples),
            "unit": self.unit,
            "ratio": self.ratio,
            "goal": self.goal,
        }


# --- trees and the bare contestants ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Load:
    """A tree to run over, and the command to run over it."""

    tree: Path
    check: str
    touched: tuple[str, ...]

    @classmethod
    def make(cls, tree: Path, files: int, total: int, *, touch: int) -> Load:
        """Write `files` files of `total` bytes, a hundred to a directory, the same every time."""
        source = random.Random(20)
        size = total // files
        names = []
        for index in range(files):
            name = f"d{index // 100:03}/f{index:05}.bin"
            place = tree / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.randbytes(size))
            names.append(name)
        touched = tuple(names[:: files // touch][:touch]) if touch else ()
        check = "; ".join(f"echo more >> {name}" for name in touched) or "true"
        return cls(tree, check, touched)

    @property
    def spec(self) -> EvalSpec:
        """The same work for the runner."""
        return EvalSpec(name="benchmark", workspace=str(self.tree), check=self.check)


def bare(load: Load, place: Path) -> Sample:
    """Do the work without any promises."""
    copy, out = place / "copy", place / "out"
    clock = Clock()
    shutil.copytree(load.tree, copy, symlinks=True)
    clock.lap("upload")
    subprocess.run(["/bin/sh", "-c", load.check], cwd=copy, check=True)
    clock.lap("check")
    for name in load.touched:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(copy / name, out / name)
    clock.lap("download")
    shutil.rmtree(copy)
    clock.lap("destroy")
    sample = clock.done()
    shutil.rmtree(out, ignore_errors=True)
    return sample


def bare_copy(load: Load, place: Path) -> Sample:
    """Copy the tree and do nothing else."""
    clock = Clock()
    shutil.copytree(load.tree, place / "copy", symlinks=True)
    sample = clock.done()
    shutil.rmtree(place / "copy")
    return sample


def hash_pass(load: Load, place: Path) -> Sample:
    """Read every file once, for its SHA-256."""
    del place
    clock = Clock()
    digests = {}
    for folder, _, names in os.walk(load.tree):
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118 - the fast way is the fair way
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                digests[path] = hashlib.sha256(file.read()).hexdigest()
    return clock.done()


class Clock:
    """Laps of a stopwatch."""

    def __init__(self) -> None:
        """Start."""
        self._start = self._last = time.perf_counter()
        self._laps: Sample = {}

    def lap(self, name: str) -> None:
        """End a lap."""
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def done(self) -> Sample:
        """Give the laps and the total."""
        return {**self._laps, "total": time.perf_counter() - self._start}


# --- ours -----------------------------------------------------------------------------------------


class Ours:
    """A runner on a local backend, in a directory of its own."""

    def __init__(self, place: Path) -> None:
        """Open state and backend: new ones where `place` is new."""
        clock = Clock()
        self.backend = LocalBackend(place / "sandboxes")
        self.journal = Journal(place / "state" / "journal.db")
        self.runner = Runner(self.backend, place / "state", journal=self.journal)
        self.open_s = clock.done()["total"]

    def close(self) -> None:
        """Let go of both."""
        self.runner.close()
        self.backend.close()

    def run(self, spec: EvalSpec) -> Sample:
        """Run a spec; give seconds by phase."""
        clock = Clock()
        result = self.runner.run(spec)
        total = clock.done()["total"]
        return {**timings(result), "total": total, "around": total - sum(result.timings.values())}


def timings(result: RunResult) -> Sample:
    """Give a result's timings, once it is sure that it is the result of what was to be measured."""
    if result.verdict is not Verdict.PASSED:
        raise SystemExit(f"the run that was to be measured is {result.verdict}: {result.faults}")
    return dict(result.timings)


def ours_cold(load: Load, place: Path) -> Sample:
    """Run with state and backend that have never been used."""
    ours = Ours(place / "cold")
    try:
        sample = ours.run(load.spec)
    finally:
        ours.close()
    shutil.rmtree(place / "cold")
    sample["open"] = ours.open_s
    sample["total"] += ours.open_s
    return sample


@contextlib.contextmanager
def volatile(journal: Journal) -> Iterator[None]:
    """Switch off everything that waits for the disk."""
    connection = journal._connection  # noqa: SLF001 - there is no such switch, on purpose
    connection.execute("PRAGMA synchronous = OFF")
    try:
        with mock.patch("os.fsync"):
            yield
    finally:
        connection.execute("PRAGMA synchronous = FULL")


# --- workloads ------------------------------------------------------------------------------------


def take_turns(
    contestants: dict[str, Callable[[], Sample]], runs: int, *, flush: bool
) -> dict[str, list[Sample]]:
    """Run each contestant once a round, each round beginning with another one."""
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(runs):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if flush:
                os.sync()
            samples[name].append(contestants[name]())
    return samples


def whole_life(place: Path, size: str, runs: int) -> list[Row]:
    """Measure whole runs over a tree."""
    files, total, touch = {
        "tiny": (3, 3 * 1024, 0),
        "medium": (2_000, 50 * MIB, TOUCHED),
        "large": (20_000, 500 * MIB, TOUCHED),
    }[size]
    load = Load.make(place / "tree", files, total, touch=touch)
    warm = Ours(place / "warm")
    warm.run(load.spec)

    def flushless() -> Sample:
        with volatile(warm.journal):
            return warm.run(load.spec)

    hash_pass(load, place)
    try:
        samples = take_turns(
            {
                "bare": lambda: bare(load, place),
                "bare copy": lambda: bare_copy(load, place),
                "hash pass": lambda: hash_pass(load, place),
                "ours, cold": lambda: ours_cold(load, place),
                "ours, warm": lambda: warm.run(load.spec),
                "ours, warm, no fsync": flushless,
            },
            runs,
            flush=size != "tiny",
        )
    finally:
        warm.close()
    return life_rows(samples, size)


def life_rows(samples: dict[str, list[Sample]], size: str) -> list[Row]:
    """Lay out what was measured over a tree."""

    def column(name: str, key: str = "total") -> list[float]:
        return [sample[key] for sample in samples[name] if key in sample]

    reference = statistics.median(column("bare"))
    rows = []
    for name in samples:
        ours = name.startswith("ours")
        goal = "2x bare at most" if name == "ours, warm, no fsync" and size == "tiny" else ""
        total = column(name)
        rows.append(Row(name, total, ratio=statistics.median(total) / reference, goal=goal))
        phases = ("open", *PHASES, "around") if ours else PHASES
        rows.extend(
            Row(f"  {phase}", found) for phase in phases if (found := column(name, phase)) and found
        )
    pairs = zip(column("ours, warm"), column("ours, warm, no fsync"), strict=True)
    rows.append(Row("durability", [durable - volatile_ for durable, volatile_ in pairs]))
    pairs = zip(column("ours, warm"), column("bare"), strict=True)
    goal = "within 15 ms" if size == "tiny" else ""
    rows.append(Row("ours, warm - bare", [ours - bare_ for ours, bare_ in pairs], goal=goal))
    if size != "tiny":
        rows.append(beside_one_pass(samples))
    return rows


def beside_one_pass(samples: dict[str, list[Sample]]) -> Row:
    """Compare all of a warm run but the copy itself with one hash pass and the changes out."""
    rest, least = [], []
    for ours, copy, hashed, plain in zip(
        samples["ours, warm"],
        samples["bare copy"],
        samples["hash pass"],
        samples["bare"],
        strict=True,
    ):
        rest.append(ours["total"] - copy["total"])
        least.append(hashed["total"] + plain["download"])
    return Row(
        "ours, warm - bare copy",
        rest,
        ratio=statistics.median(rest) / statistics.median(least),
        goal="1.3x of hash pass + changes out",
    )


def output(place: Path, runs: int) -> list[Row]:
    """Measure a check that prints 200 MB, each turn in a fresh process of its own."""
    contestants: dict[str, Callable[[Path], Sample]] = {
        "bare, straight to a file": output_to_file,
        "bare, streamed to a file": output_streamed,
        "ours": output_ours,
    }

    def fresh(function: Callable[[Path], Sample]) -> Sample:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
            return pool.submit(function, place).result()

    turns: dict[str, Callable[[], Sample]] = {
        name: partial(fresh, function) for name, function in contestants.items()
    }
    samples = take_turns(turns, runs, flush=True)
    reference = statistics.median(s["total"] for s in samples["bare, streamed to a file"])
    rows = []
    for name, taken in samples.items():
        total = [sample["total"] for sample in taken]
        ours = name == "ours"
        rows.append(
            Row(
                name,
                total,
                ratio=statistics.median(total) / reference,
                goal="1.3x of the stream" if ours else "",
            )
        )
        if grown := [sample["grown"] for sample in taken if "grown" in sample]:
            rows.append(Row("  client memory", grown, "MB", goal="32 MB over idle" if ours else ""))
        rows.extend(
            Row(f"  {phase}", [sample[phase] for sample in taken])
            for phase in PHASES
            if phase in taken[0]
        )
    return rows


def output_to_file(place: Path) -> Sample:
    """Give the command a file to print to."""
    with (place / "printed").open("wb") as file:
        clock, idle = Clock(), resident("VmRSS")
        subprocess.run(["/bin/sh", "-c", PRINT], stdout=file, check=True)
        sample = clock.done()
    return sample | grown(idle)


def output_streamed(place: Path) -> Sample:
    """Read what the command prints, and write it to a file."""
    with (place / "printed").open("wb") as file:
        clock, idle = Clock(), resident("VmRSS")
        with subprocess.Popen(["/bin/sh", "-c", PRINT], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            shutil.copyfileobj(process.stdout, file, 1 << 16)
        sample = clock.done()
    return sample | grown(idle)


def output_ours(place: Path) -> Sample:
    """Run it as a check, with the default limit on what is kept."""
    ours = Ours(place / f"output-{os.getpid()}")
    try:
        ours.run(SMALL)  # so that what idles is loaded and warm
        idle = resident("VmRSS")
        sample = ours.run(EvalSpec(name="output", check=PRINT))
        return sample | grown(idle)
    finally:
        ours.close()


def resident(field: str) -> float | None:
    """Give VmRSS or VmHWM of this process in MB; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    return None


def grown(idle: float | None) -> Sample:
    """Say how far the peak is above the resident set as it was when idle."""
    peak = resident("VmHWM")
    return {} if idle is None or peak is None else {"grown": max(peak - idle, 0.0)}


def core(place: Path, runs: int) -> list[Row]:
    """Measure the pure core, and the journal under it."""
    ours = Ours(place / "core")
    run_id = ours.runner.run(SMALL).run_id
    facts = [entry.fact for entry in ours.journal.entries(run_id) if entry.fact is not None]
    commands = [replay(run_id, facts[:end]).command for end in range(1, len(facts) + 1)]
    entries = list(zip(facts, commands, strict=True))
    folds = 400
    micros, starts = [], []
    for _ in range(max(runs, 5)):
        clock = Clock()
        for _ in range(folds):
            replay(run_id, facts)
        micros.append(clock.done()["total"] / folds / len(facts) * 1e6)
        clock = Clock()
        for _ in range(folds):
            begin(run_id)
        starts.append(clock.done()["total"] / folds * 1e6)
    durable = [journal_cost(ours.journal, entries) for _ in range(max(runs, 5))]
    with volatile(ours.journal):
        loose = [journal_cost(ours.journal, entries) for _ in range(max(runs, 5))]
    ours.close()
    whole = [
        1e6 / (per_fact * len(facts) + start)
        for per_fact, start in zip(micros, starts, strict=True)
    ]
    return [
        Row("replay, a fact", micros, "us", goal="under 15 us"),
        Row("replay, facts a second", [1e6 / per_fact for per_fact in micros], "/s"),
        Row("replay, whole runs a second", whole, "/s", goal="2,000/s simulated"),
        Row("journal, a fact and its intent", durable, "us"),
        Row("journal, the same without fsync", loose, "us"),
    ]


def journal_cost(journal: Journal, entries: list[tuple[Fact, Command | None]]) -> float:
    """Give microseconds to record a fact with the intent that follows from it."""
    spent, runs = 0.0, 20
    for _ in range(runs):
        run_id = f"journal-{os.urandom(8).hex()}"
        journal.begin(run_id, SMALL, backend="local", isolation="none")
        clock = Clock()
        for fact, command in entries:
            journal.append(run_id, fact, command)
        spent += clock.done()["total"]
    return spent / runs / len(entries) * 1e6


def imports(place: Path, runs: int) -> list[Row]:
    """Measure `import orchestrator` in fresh interpreters."""
    del place
    program = (
        "import json, sys, time\n"
        "start = time.perf_counter()\n"
        "import orchestrator\n"
        "took = time.perf_counter() - start\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(json.dumps([took, loaded, len(sys.modules)]))\n"
    )
    took, whole, empty, loaded, modules = [], [], [], [], 0
    for _ in range(max(runs, 10)):
        clock = Clock()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        whole.append(clock.done()["total"] * 1e3)
        seconds, loaded, modules = json.loads(done.stdout)
        took.append(seconds * 1e3)
        clock = Clock()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        empty.append(clock.done()["total"] * 1e3)
    return [
        Row(
            "import orchestrator", took, "ms", goal="under 80 ms; no docker, grpc, hypothesis, ray"
        ),
        Row("interpreter that imports it", whole, "ms"),
        Row("interpreter that does nothing", empty, "ms"),
        Row(f"modules; of the heavy ones: {', '.join(loaded) or 'none'}", [float(modules)], ""),
        *slowest_imports(),
    ]


def slowest_imports(count: int = 8) -> list[Row]:
    """Give the imports that take longest by themselves with all they pull in, from one run."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import orchestrator"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for line in done.stderr.splitlines():
        parts = line.removeprefix("import time:").split("|")
        name = parts[-1].strip()
        depth = (len(parts[-1]) - len(parts[-1].lstrip()) - 1) // 2
        if len(parts) == 3 and parts[1].strip().isdigit() and depth <= 4 and name != "site":
            found.append((int(parts[1]) / 1e3, name))
    found.sort(reverse=True)
    return [Row(f"  {name}, with what it imports", [took], "ms") for took, name in found[:count]]


# --- reporting ------------------------------------------------------------------------------------


def show(console: Console, title: str, rows: list[Row]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("what", no_wrap=True)
    for name in ("median", "min .. max", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("goal")
    for row in rows:
        low, high = plain(min(row.samples), row.unit), plain(max(row.samples), row.unit)
        table.add_row(
            row.name,
            f"{plain(row.median, row.unit)} {row.unit}".rstrip(),
            f"{low} .. {high}" if len(row.samples) > 1 else "",
            "" if row.ratio is None else f"{row.ratio:.2f}x",
            f"goal: {row.goal}" if row.goal else "",
        )
    console.print(table)


def plain(value: float, unit: str) -> str:
    """Give a number with as many digits as mean something."""
    if unit == "s":
        return f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(WORKLOADS),
        metavar="NAMES",
        help=f"of {', '.join(WORKLOADS)}",
    )
    parser.add_argument(
        "--runs", type=int, help="of each contestant (tiny: 30, medium: 5, all others: 3)"
    )
    parser.add_argument("--dir", type=Path, help="directory to work in (a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    found = parser.parse_args()
    for name in found.only:
        if name not in WORKLOADS:
            parser.error(
                f"--only: no workload is called {name!r}; there are {', '.join(WORKLOADS)}"
            )
    if found.runs is not None and found.runs < 1:
        parser.error("--runs: expected a whole number above 0")
    return found


def main() -> None:
    """Measure what was asked for."""
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    figures: dict[str, Any] = {"python": sys.version.split()[0], "cpus": os.cpu_count()}
    for name in options.only:
        runs = options.runs or {"tiny": 30, "medium": 5}.get(name, 3)
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.dir) as scratch:
            place = Path(scratch)
            match name:
                case "output":
                    rows = output(place, runs)
                case "core":
                    rows = core(place, runs)
                case "import":
                    rows = imports(place, runs)
                case _:
                    rows = whole_life(place, name, runs)
        show(console, f"{name} (n = {runs})", rows)
        figures[name] = {"runs": runs, "figures": nested(rows)}
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


def nested(rows: list[Row]) -> dict[str, Any]:
    """Name every line in full: phases after the contestant they are of."""
    figures: dict[str, Any] = {}
    above = ""
    for row in rows:
        if row.name.startswith("  "):
            figures[f"{above}: {row.name.strip()}"] = row.as_json()
        else:
            above = row.name
            figures[above] = row.as_json()
    return figures


if __name__ == "__main__":
    main()
