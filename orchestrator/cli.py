"""The command line. It parses, calls the library, and prints; it decides nothing.

Results go to standard output, everything else to standard error. Exit status of `run` and `resume`:
0 every run passed, 1 some failed and none is unresolved, 3 some are unresolved or stopped, 2 bad
usage or a bad spec (nothing was started), 130 interrupted (everything can be resumed).
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Self

import typer
from attrs import evolve
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import ports, tooling
from .batch import Attempt, Stopped, resume_batch, run_batch
from .catalogue import BackendName, Options, make, place_of_sandboxes
from .core.errors import EvidenceIncompleteError, OrchestratorError, SpecError
from .core.verdict import Tally, Verdict
from .journal import Journal
from .report import Display, details, printable, row
from .result import result_of
from .runner import Runner
from .specfile import load
from .strays import sweep_all
from .vault import Vault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .result import RunResult
    from .runner import Swept

PASSED, FAILED, USAGE, UNRESOLVED, INTERRUPTED = 0, 1, 2, 3, 130

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Eval runs that cannot delete a sandbox before its evidence is safely on your disk.",
)


StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        envvar="ORCHESTRATOR_STATE_DIR",
        help="Directory of the journal and the evidence.",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at once.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a run, on standard output.")]
BackendOption = Annotated[BackendName, typer.Option("--backend", help="Where sandboxes come from.")]
Image = Annotated[str | None, typer.Option(help="Of sandboxes whose spec names none.")]
Endpoint = Annotated[str | None, typer.Option(help="Of the OpenShell gateway.")]
STATE_DIR = Path(".orchestrator")


@app.command()
def run(
    specs: Annotated[list[Path], typer.Argument(help="TOML files of evals.", metavar="SPEC")],
    *,
    backend: BackendOption = BackendName.LOCAL,
    image: Image = None,
    endpoint: Endpoint = None,
    jobs: Jobs = 1,
    attempts: Annotated[
        int, typer.Option(min=1, help="Runs of each eval, while it is unresolved.")
    ] = 1,
    as_json: AsJson = False,
    state_dir: StateDir = STATE_DIR,
) -> None:
    """Run evals to their verdicts."""
    evals = [spec for file in specs for spec in load(file)]
    options = Options(image=image, endpoint=endpoint)
    with _Session(backend, state_dir, options, as_json=as_json) as session:
        session.display.total = len(evals)
        accepted = [session.runner.accept(spec) for spec in evals]
        session.finish(run_batch(session.runner, accepted, jobs=jobs, attempts=attempts))


@app.command()
def resume(
    run_ids: Annotated[
        list[str] | None,
        typer.Argument(help="Runs; all unfinished if none.", metavar="RUN"),
    ] = None,
    *,
    backend: BackendOption = BackendName.LOCAL,
    image: Image = None,
    endpoint: Endpoint = None,
    jobs: Jobs = 1,
    as_json: AsJson = False,
    state_dir: StateDir = STATE_DIR,
) -> None:
    """Finish runs whose runner was interrupted or killed."""
    _require(state_dir)
    options = Options(image=image, endpoint=endpoint)
    with _Session(backend, state_dir, options, as_json=as_json) as session:
        journal = session.runner.journal
        chosen = [_find(journal, text) for text in run_ids or []] or session.runner.unfinished()
        session.display.total = len(chosen)
        session.finish(resume_batch(session.runner, chosen, jobs=jobs))


@app.command()
def sweep(
    *,
    kept: Annotated[
        bool, typer.Option("--kept", help="Also those kept on purpose, as `retain` asks.")
    ] = False,
    workspaces: Annotated[
        bool, typer.Option("--workspaces", help="Also workspaces that a daemon keeps.")
    ] = False,
    backends: Annotated[
        list[BackendName] | None,
        typer.Option("--backend", help="Of these only; all that the journal names if none."),
    ] = None,
    endpoint: Endpoint = None,
    jobs: Jobs = 1,
    state_dir: StateDir = STATE_DIR,
) -> None:
    """Finish what can be resumed, then destroy every sandbox that no live runner needs."""
    swept: list[Swept] = []
    for name in backends or _named_by(state_dir):
        options = Options(endpoint=endpoint)
        with _Session(name, state_dir, options, as_json=False) as session:
            session.display.total = len(session.runner.unfinished())
            sweeping = sweep_all(session.runner, kept=kept, jobs=jobs, observe=session.display.show)
            swept += sweeping
            if workspaces and callable(
                forget := getattr(session.backend, "forget_workspaces", None)
            ):
                _console().print(f"{name}: {forget()} workspaces removed")
    for each in swept:
        _console().print(f"{each.sandbox_id}: {escape(printable(each.problem)) or 'gone'}")
    raise typer.Exit(UNRESOLVED if any(each.problem for each in swept) else PASSED)


@app.command()
def runs(*, as_json: AsJson = False, state_dir: StateDir = STATE_DIR) -> None:
    """List all runs, oldest first."""
    results = []
    if (state_dir / "journal.db").exists():
        with _opened(state_dir) as (journal, vault):
            results = [_look(journal, vault, run_id) for run_id in journal.run_ids()]
    if as_json:
        _print_json(result.as_json() for result in results)
        return
    table = Table("run", "name", "backend", "state", "verdict", "outcome", "sandbox", box=None)
    for result in results:
        table.add_row(*row(result))
    _console().print(table if results else f"no runs in {state_dir}")


@app.command()
def show(
    run_id: Annotated[str, typer.Argument(help="A run, or the start of its id.", metavar="RUN")],
    *,
    as_json: AsJson = False,
    stream: Annotated[
        str | None, typer.Option("--stream", help="Write stdout or stderr of the check as it is.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the tree that the check left to a new directory.")
    ] = None,
    state_dir: StateDir = STATE_DIR,
) -> None:
    """Show all that is known of a run."""
    _require(state_dir)
    with _opened(state_dir) as (journal, vault):
        chosen = _find(journal, run_id)
        result = _look(journal, vault, chosen)
        entries = journal.entries(chosen)
    if stream is not None or export is not None:
        if result.evidence is None:
            raise EvidenceIncompleteError(f"run {result.run_id} has no evidence")
        if export is not None:
            result.evidence.export(export)
        if stream is not None:
            _write_stream(result, stream)
        return
    if as_json:
        _print_json([result.as_json()])
        return
    _console().print(details(result, entries))


for command in (
    tooling.verify,
    tooling.conform,
    tooling.parity,
    tooling.doctor,
    tooling.diagram,
):
    app.command()(command)


def main() -> NoReturn:
    """Run the command line, and exit with its status."""
    _prepare()
    try:
        status = app(standalone_mode=False)
    except typer.Exit as done:
        status = done.exit_code
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except BrokenPipeError:
        _mute()  # nobody reads what was asked for
        status = PASSED
    except (OrchestratorError, OSError) as error:
        _errors().print(f"[bold red]error:[/] {escape(printable(str(error)))}", soft_wrap=True)
        status = USAGE
    except Exception as error:
        # What the parser of the command line found wrong is its own to show; the rest is a defect.
        show_usage = getattr(error, "show", None)
        if show_usage is None:
            raise
        show_usage()
        status = getattr(error, "exit_code", USAGE)
    if status == INTERRUPTED:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # one is enough
        _errors().print("interrupted; `orchestrator resume` finishes what was begun")
    sys.exit(status or 0)


def _prepare() -> None:
    """Take TERM for what Ctrl-C is, and write whatever the locale can show."""
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class _Session:
    """A runner with a display, and the exit status that its results add up to."""

    def __init__(
        self, name: BackendName, state_dir: Path, options: Options, *, as_json: bool
    ) -> None:
        self.as_json = as_json
        self.display = Display(_errors(), 0)
        self._stack = ExitStack()
        options = evolve(
            options, sandboxes=place_of_sandboxes(state_dir), progress=self.display.waiting
        )
        self.backend = make(name, options)
        self.runner = Runner(self.backend, state_dir, observer=self.display.observe)

    def __enter__(self) -> Self:
        self._stack.enter_context(self.runner)
        self._stack.enter_context(self.display)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if callable(close := getattr(self.backend, "close", None)):
            close()

    def finish(self, attempts: Iterable[Attempt]) -> NoReturn:
        """Show attempts as they end; exit with the status that they add up to.

        Raises:
            typer.Exit: always.
        """
        verdicts, stopped = [], 0
        try:
            for attempt in attempts:
                self.display.show(attempt)
                if isinstance(attempt.result, Stopped):
                    stopped += 1
                    continue
                if self.as_json:
                    _print_json([attempt.result.as_json()])
                if attempt.last and attempt.result.verdict is not None:
                    verdicts.append(attempt.result.verdict)
            self.display.close(Tally.of(verdicts), stopped)
        except (OSError, UnicodeError, SystemExit):  # rich exits by itself at a broken pipe
            # Nobody can be told: what runs is left where its journal says, as by Ctrl-C.
            _mute()
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(_status(verdicts, stopped))


def _mute() -> None:
    """Have what is still in a buffer go nowhere, so that its flush at exit is no second error."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.close(null)


def _status(verdicts: list[Verdict], stopped: int) -> int:
    if stopped or Verdict.UNRESOLVED in verdicts:
        return UNRESOLVED
    return FAILED if Verdict.FAILED in verdicts else PASSED


def _named_by(state_dir: Path) -> list[BackendName]:
    """Give the backends that a journal has runs of."""
    _require(state_dir)
    with _opened(state_dir) as (journal, _):
        named = {journal.record(run_id).backend for run_id in journal.run_ids()}
    return [name for name in BackendName if name in named]


def _require(state_dir: Path) -> None:
    if not (state_dir / "journal.db").exists():
        raise SpecError("--state-dir", f"there are no runs in {state_dir}", "a directory with runs")


def _find(journal: ports.Journal, text: str) -> str:
    """Give the run whose id is, or uniquely begins with, a text."""
    known = journal.run_ids()
    found = [text] if text in known else [name for name in known if text and name.startswith(text)]
    if len(found) != 1:
        problem = f"{len(found)} runs begin with it" if found else "there is no such run"
        raise SpecError(f"RUN {text}", problem, "the id of a run (`orchestrator runs` lists them)")
    return found[0]


@contextmanager
def _opened(state_dir: Path) -> Iterator[tuple[Journal, Vault]]:
    """Open the journal and vault of a state directory that exists."""
    with closing(Journal(state_dir / "journal.db")) as journal:
        yield journal, Vault(state_dir.absolute() / "vault")


def _look(journal: Journal, vault: Vault, run_id: str) -> RunResult:
    return result_of(vault, journal.record(run_id), journal.step(run_id).run)


def _write_stream(result: RunResult, stream: str) -> None:
    if stream not in {"stdout", "stderr"}:
        raise SpecError("--stream", f"got {stream!r}", "stdout or stderr")
    output = result.evidence.output(stream) if result.evidence else None  # type: ignore[arg-type]
    if output is None:
        raise EvidenceIncompleteError(f"run {result.run_id}: {stream} never arrived")
    sys.stdout.buffer.write(output.head + output.tail)
    if output.truncated:
        _errors().print(printable(f"{stream} is truncated: {output.total} bytes were written"))


def _print_json(objects: Iterable[dict[str, Any]]) -> None:
    for each in objects:
        sys.stdout.write(json.dumps(each) + "\n")
    sys.stdout.flush()


def _console() -> Console:
    plain = not sys.stdout.isatty()  # a table in a file is not cut to the width of a screen
    return Console(highlight=False, width=10_000 if plain else None)


def _errors() -> Console:
    return Console(stderr=True, highlight=False)
