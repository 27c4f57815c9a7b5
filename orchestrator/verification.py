"""`orchestrator verify` and `conform`: the testing kit, told to a person."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from attrs import asdict
from rich.markup import escape
from rich.text import Text

from .core.errors import SpecError
from .core.expect import nearest
from .core.table import violations
from .testing import heat as heat_file
from .testing.conformance import Finding, conform, report_of
from .testing.explore import ALWAYS, SCENARIOS, CounterExample, explore, tell, wander
from .testing.faults import Injection
from .testing.mutants import MUTANTS, Mutant
from .testing.simulate import CLEANED_EARLY, MOVING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rich.console import Console

    from .ports import Backend
    from .testing.explore import Report
    from .testing.simulate import World

HOLDS, BROKEN = 0, 1
_BY_THE_TABLE = (
    "P1 every path to CleanedUp or CleanupFailed passes Downloaded or DownloadFailed",
    "P2 every path to SCORED passes Checked, then Downloaded, and no failure of either",
    "P3 a client timeout is settled before anything is downloaded",
    "P4 from every state a final one is reached, and no way leads round",
    "P5 what is final has a verdict, and what has one is final",
)
_BY_THE_WORLD = (CLEANED_EARLY, MOVING)


def prove(console: Console, faults: int, heat: Path | None = None) -> int:
    """Prove every property of the table and of every story; give the exit status."""
    for broken in violations():
        console.print(Text(f"BROKEN {broken}", "red"))
    if not violations():
        for name in _BY_THE_TABLE:
            console.print(f"[green]holds[/] on the table: {name}")
    before = time.perf_counter()
    report = explore(faults=faults)
    taken_s = time.perf_counter() - before
    for name in (*_BY_THE_WORLD, *ALWAYS):
        if name not in report.counter_examples:
            console.print(f"[green]holds[/] in every story: {name}")
    for found in report.counter_examples.values():
        console.print(Text(f"BROKEN {found}", "red"), soft_wrap=True)
    missed = report.missed() if faults > 1 else []
    for line in missed:
        console.print(Text(f"MISSED {line}", "red"))
    console.print(_counts(report, faults, taken_s), soft_wrap=True)
    if heat is not None:
        heat_file.write(heat, report.walked)
    return BROKEN if report.counter_examples or missed else HOLDS


def _counts(report: Report, faults: int, taken_s: float) -> str:
    verdicts = ", ".join(f"{n} {verdict.value}" for verdict, n in report.verdicts.items())
    return (
        f"{report.stories} stories with up to {faults} faults, {report.steps} facts, "
        f"{len(report.states)} states of the world, {len(report.walked)} edges walked; {verdicts}; "
        f"{taken_s:.1f} s, {report.stories / taken_s:.0f} stories a second"
    )


def put_in(name: str | None) -> AbstractContextManager[object]:
    """Put a mutant in for as long as a context lasts; nothing if none is named.

    Raises:
        SpecError: there is no such mutant.
    """
    return nullcontext() if name is None else _mutant(name).put_in()


def _mutant(name: str) -> Mutant:
    if name not in MUTANTS:
        raise SpecError("--mutant", f"got {name!r}", nearest(name, MUTANTS))
    return MUTANTS[name]


def hunt(console: Console, name: str, faults: int, *, mermaid: bool) -> int:
    """Put a mutant in, and tell the shortest story that breaks the property it should break.

    Raises:
        SpecError: there is no such mutant.
    """
    mutant = _mutant(name)
    console.print(f"mutant {name!r}: {mutant.mistake}", soft_wrap=True)
    with mutant.put_in():
        report = explore(faults=faults, until=mutant.property)
    for broken, found in report.counter_examples.items():
        if broken.startswith(mutant.property):
            console.print(f"killed after {report.stories} stories")
            _show(console, found, mermaid=mermaid)
            console.print(f"with --mutant {name!r}", markup=False)
            return BROKEN
    console.print(Text(f"SURVIVED {report.stories} stories: {mutant.property} holds", "red"))
    return HOLDS


def tell_one(console: Console, story: str | None, seed: int | None, *, mermaid: bool) -> int:
    """Tell one story, by its faults or its seed.

    Raises:
        SpecError: there is no such scenario, or a fault is not in the contract.
    """
    plan: tuple[Injection, ...] = ()
    if story is None:
        world, scenario = wander(seed or 0), f"seed {seed}"
    else:
        scenario, *faults = story.split(",")
        known = {each.name: each for each in SCENARIOS}
        if scenario not in known:
            raise SpecError("--story", f"no scenario {scenario!r}", nearest(scenario, known))
        plan = tuple(map(Injection.parse, faults))
        world = tell(known[scenario], plan)
    broken, what = next(iter(world.problems), ("nothing is broken", "every property holds"))
    found = CounterExample(broken, what, scenario, plan, tuple(world.log))
    _show(console, found, mermaid=mermaid)
    _verdicts(console, world)
    return BROKEN if world.problems else HOLDS


def conform_to_ports(
    console: Console, make: Callable[[], Backend], only: list[str] | None, *, as_json: bool
) -> int:
    """Put a backend to every check of the conformance kit; give the exit status.

    Raises:
        SpecError: there is no check of a name in `only`.
    """

    def tell(finding: Finding) -> None:
        if as_json:
            console.print(json.dumps(asdict(finding)), soft_wrap=True, markup=False)
        else:
            words = {True: "[green]ok[/]", False: "[red]FAILED[/]", None: "[yellow]n/a[/]"}
            reason = f" [dim]{escape(finding.reason)}[/]" if finding.reason else ""
            console.print(f"{words[finding.ok]} {finding.name}{reason}", soft_wrap=True)

    findings = conform(make, only=only or None, report=tell)
    failed = sum(finding.ok is False for finding in findings)
    if not as_json:
        console.print(report_of(findings).splitlines()[-1])
    return BROKEN if failed else HOLDS


def _verdicts(console: Console, world: World) -> None:
    for run_id in world.journal.run_ids():
        run = world.journal.step(run_id).run
        reason = f" ({run.reason})" if run.reason else ""
        verdict = run.state if run.verdict is None else run.verdict.value
        console.print(f"{run_id}: {verdict}{reason}")


def _show(console: Console, found: CounterExample, *, mermaid: bool) -> None:
    console.print(Text(found.mermaid() if mermaid else str(found)), soft_wrap=True)
