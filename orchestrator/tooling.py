"""Commands about the library itself and its backends, rather than about runs.

Each loads what it needs when it is given: the testing kit, or a daemon's SDK.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import diagrams
from .batch import Attempt
from .catalogue import BackendName, Options, make, place_of_sandboxes
from .core.errors import SpecError
from .report import Display, printable
from .result import result_of
from .specfile import load
from .testing.heat import read as read_heat
from .vault import Vault

if TYPE_CHECKING:
    from .runner import Progress

INTERRUPTED: Final = 130


class DiagramFormat(StrEnum):
    """Formats that the lifecycle can be drawn in."""

    MERMAID = "mermaid"
    DOT = "dot"
    SVG = "svg"


def diagram(
    *,
    format_: Annotated[DiagramFormat, typer.Option("--format", "-f")] = DiagramFormat.MERMAID,
    output: Annotated[Path | None, typer.Option(help="File to write, instead of printing.")] = None,
    heat: Annotated[
        Path | None, typer.Option(help="File of counts by edge (`verify --heat`) to colour it by.")
    ] = None,
    embed: Annotated[
        Path | None,
        typer.Option(help="Text file whose lifecycle block to update."),
    ] = None,
) -> None:
    """Draw the lifecycle, from the table that is executed."""
    if embed is not None:
        embed.write_text(diagrams.embed(embed.read_text("utf-8")), "utf-8")
        return
    draw = {"mermaid": diagrams.mermaid, "dot": diagrams.dot, "svg": diagrams.svg}
    text = draw[format_.value](heat=read_heat(heat) if heat is not None else None)
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, "utf-8")


def verify(
    *,
    faults: Annotated[int, typer.Option(min=0, max=3, help="Faults in one story, at most.")] = 2,
    mutant: Annotated[
        str | None, typer.Option(help="Put a known mistake in first, and tell what finds it.")
    ] = None,
    story: Annotated[str | None, typer.Option(help="Tell one story: SCENARIO,FAULT,...")] = None,
    seed: Annotated[int | None, typer.Option(help="Tell one random story.")] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Draw what is found.")] = False,
    heat: Annotated[
        Path | None, typer.Option(help="File to write how often each edge was walked.")
    ] = None,
) -> None:
    """Prove the promises of the lifecycle by telling every story of it, under every fault."""
    from . import verification  # noqa: PLC0415 - the testing kit loads where it is used

    console = _console()
    if story is not None or seed is not None:
        with verification.put_in(mutant):
            status = verification.tell_one(console, story, seed, mermaid=mermaid)
    elif mutant is not None:
        status = verification.hunt(console, mutant, faults, mermaid=mermaid)
    else:
        status = verification.prove(console, faults, heat)
    raise typer.Exit(status)


def conform(
    backend: Annotated[BackendName, typer.Argument(help="The backend to put to the checks.")],
    *,
    only: Annotated[list[str] | None, typer.Option(help="Make only the checks so named.")] = None,
    image: Annotated[str | None, typer.Option(help="Of the sandboxes.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Of the OpenShell gateway.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a check.")] = False,
) -> None:
    """Check that a backend does what every backend must do."""
    from . import verification  # noqa: PLC0415 - the testing kit loads where it is used

    factory = partial(make, backend, Options(image=image, endpoint=endpoint))
    raise typer.Exit(verification.conform_to_ports(_console(), factory, only, as_json=as_json))


def parity(
    specs: Annotated[list[Path], typer.Argument(help="TOML files of evals.", metavar="SPEC")],
    *,
    backends: Annotated[
        str, typer.Option(metavar="A,B", help="What to compare; A,A tells what varies by itself.")
    ] = "local,docker",
    declare: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=REASON", help="A difference that is meant to be."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Of sandboxes whose spec names none.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Of the OpenShell gateway.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    state_dir: Annotated[
        Path, typer.Option(envvar="ORCHESTRATOR_STATE_DIR", help="Where the runs are kept.")
    ] = Path(".orchestrator"),
) -> None:
    """Run evals on several backends, and tell every point in which these differ."""
    from . import parity as comparison  # noqa: PLC0415 - see above

    evals = [spec for file in specs for spec in load(file)]
    declared = dict(map(_declaration, declare or []))
    names = backends.split(",")
    with ExitStack() as stack:
        display = stack.enter_context(Display(Console(stderr=True, highlight=False), 0))
        options = Options(
            sandboxes=place_of_sandboxes(state_dir),
            image=image,
            endpoint=endpoint,
            progress=display.waiting,
        )
        made = comparison.numbered((name, make(name, options)) for name in names)
        for backend in made.values():
            stack.callback(getattr(backend, "close", lambda: None))
        vault = Vault(state_dir.absolute() / "vault")

        def observe(progress: Progress) -> None:
            display.observe(progress)
            if progress.command is None:
                result = result_of(vault, progress.record, progress.run)
                display.show(Attempt(result, 1, last=True))

        display.total = len(made) * len(evals)
        report = comparison.parity(made, evals, state_dir, declared=declared, observer=observe)
    text = json.dumps(report.as_json()) if as_json else printable(str(report))
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except (OSError, UnicodeError):  # nobody can be told: that is not what "equal" looks like
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit({"equal": 0, "different": 1, "unresolved": 3}[report.status])


def _declaration(text: str) -> tuple[str, str]:
    """Read `PATTERN=REASON`; the reason is what follows the last `=`, as paths may have one."""
    pattern, _, reason = (part.strip() for part in text.rpartition("="))
    if not pattern or not reason:
        raise SpecError("--declare", f"got {text!r}", "PATTERN=REASON")
    return pattern, reason


def doctor(
    *,
    image: Annotated[str | None, typer.Option(help="An image to look for.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Of the OpenShell gateway.")] = None,
    backend: Annotated[
        BackendName | None, typer.Option(help="Exit with 1 unless this one can be used here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a backend.")] = False,
) -> None:
    """Tell what each backend can do here, and what it lacks."""
    from .doctor import examine, landlock  # noqa: PLC0415 - see above

    examinations = examine(image, endpoint)
    if as_json:
        for each in examinations:
            sys.stdout.write(json.dumps(each.as_json()) + "\n")
    else:
        table = Table("backend", "", "what", "found", box=None)
        marks = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}
        for each in examinations:
            table.add_row(f"[bold]{each.backend}[/]", marks[each.usable], "", "")
            for found in each.found:
                said = escape(printable(found.said))
                table.add_row("", marks[found.ok], found.subject, said)
        table.add_row("[bold]kernel[/]", "", "Landlock", landlock())
        _console().print(table)
    usable = {each.backend: each.usable for each in examinations}
    raise typer.Exit(0 if backend is None or usable[backend] else 1)


def _console() -> Console:
    plain = not sys.stdout.isatty()  # a table in a file is not cut to the width of a screen
    return Console(highlight=False, width=10_000 if plain else None)
