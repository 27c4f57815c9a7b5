"""Runs for people: a line, a page, and a display of runs in progress.

What a check printed is shown with its control characters escaped: output is evidence, not commands
to somebody's terminal.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

from rich.console import Group
from rich.markup import escape
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .batch import Attempt, Stopped
from .core.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import TaskID

    from .core.verdict import Tally
    from .journal import JournalEntry
    from .result import RunResult
    from .runner import Progress

_STYLES = {Verdict.PASSED: "green", Verdict.FAILED: "red", Verdict.UNRESOLVED: "yellow"}
_SHOWN_LINES = 40


def printable(text: str) -> str:
    """Escape control characters, except line ends and tabs."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def verdict_text(result: RunResult) -> Text:
    """Give the verdict, with the reason where there is one."""
    if result.verdict is None:
        return Text("unfinished", "dim")
    reason = f" ({result.reason})" if result.reason else ""
    return Text(f"{result.verdict.value}{reason}", _STYLES[result.verdict])


def row(result: RunResult) -> tuple[Text | str, ...]:
    """Give a run as a row: id, name, backend, state, verdict, outcome, sandbox that is not gone."""
    return (
        result.run_id,
        Text(printable(result.name)),
        result.backend,
        result.state.value,
        verdict_text(result),
        str(result.outcome) if result.outcome else "unknown",
        result.retained_sandbox or "",
    )


def complaints(result: RunResult) -> list[str]:
    """Say what was not as expected, and what went wrong around the program."""
    lines = [
        f"{'failed' if found.passed is False else 'not evaluated'}: {found.name}: {found.message}"
        for found in result.expectations
        if found.passed is not True
    ]
    lines += [f"fault: {fault.phase} {fault.kind}: {fault.message}" for fault in result.faults]
    if result.retained_sandbox:
        lines.append(f"sandbox not confirmed gone: {result.retained_sandbox}")
    return [printable(line) for line in lines]


def details(result: RunResult, entries: list[JournalEntry]) -> RenderableType:
    """Give all that is known of a run, as a page."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", result.run_id)
    facts.add_row("name", Text(printable(result.name)))
    facts.add_row("backend", f"{result.backend} (isolation: {result.isolation})")
    facts.add_row("state", result.state.value)
    facts.add_row("verdict", verdict_text(result))
    if result.retry_of:
        facts.add_row("retry of", result.retry_of)
    if result.outcome:
        facts.add_row("outcome", _outcome(result))
    for found in result.expectations:
        mark = {True: "[green]passed[/]", False: "[red]failed[/]", None: "[yellow]unknown[/]"}
        text = "" if found.passed else f"  {escape(printable(found.message))}"
        facts.add_row("expected", f"{mark[found.passed]} {escape(printable(found.name))}{text}")
    for fault in result.faults:
        line = f"{fault.phase} {fault.kind}: {fault.message}"
        facts.add_row("fault", Text(printable(line)))
    if result.retained_sandbox:
        facts.add_row("sandbox", f"{result.retained_sandbox} is not confirmed gone")
    if result.conditions:
        said = ", ".join(f"{name} {value}" for name, value in result.conditions.items())
        facts.add_row("conditions", Text(printable(said)))
    if result.receipt:
        facts.add_row("evidence", _evidence(result))
    facts.add_row("seconds", ", ".join(f"{k} {v:.3f}" for k, v in result.timings.items()))
    journal = Table("seq", "at (UTC)", "kind", "what", box=None, title="journal")
    for entry in entries:
        at = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        journal.add_row(str(entry.seq), at, entry.kind, entry.name)
    return Group(facts, "", journal, *_streams(result))


def _outcome(result: RunResult) -> str:
    outcome = result.outcome
    if outcome is None:
        return "unknown"
    notes = [f"{outcome.elapsed_s:g} s of {outcome.deadline_s:g} s", f"by {outcome.observed_by}"]
    if outcome.escalated:
        notes.append("killed after the grace")
    if outcome.descendants:
        notes.append(f"{outcome.descendants} descendants outlived it and were stopped")
    if outcome.oom_kills:
        notes.append(f"{outcome.oom_kills} processes killed for want of memory")
    if outcome.settled_after_client_timeout:
        notes.append("settled after client timeout")
    return f"{outcome} ({', '.join(notes)})"


def _evidence(result: RunResult) -> str:
    receipt = result.receipt
    if receipt is None:
        return "none"
    where = result.evidence.path if result.evidence else "missing or damaged"
    return (
        f"{'sealed' if receipt.sealed else 'partial'}: {receipt.entries} entries, "
        f"{receipt.bytes} bytes; {receipt.created} created, {receipt.modified} modified, "
        f"{receipt.deleted} deleted; {where}"
    )


def _streams(result: RunResult) -> list[RenderableType]:
    shown: list[RenderableType] = []
    for stream in ("stdout", "stderr"):
        output = result.evidence.output(stream) if result.evidence else None
        if output is None or not output.total:
            continue
        lines = printable(output.text).splitlines()
        if len(lines) > _SHOWN_LINES:
            lines = [f"[… {len(lines) - _SHOWN_LINES} lines …]", *lines[-_SHOWN_LINES:]]
        shown += ["", Text(f"{stream} ({output.total} bytes)", "bold"), Text("\n".join(lines))]
    return shown


class Display:
    """Shows runs as they go: a live list on a terminal, a line for each that ends elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        """Show on a console how `total` runs go."""
        self.total = total
        self._console = console
        self._ended = 0
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._waiting: TaskID | None = None
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        """Start showing."""
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop showing."""
        self._bars.stop()

    def observe(self, progress: Progress) -> None:
        """Take in what a runner tells its observers."""
        doing = type(progress.command).__name__.lower() if progress.command else "done"
        text = f"{escape(printable(progress.record.spec.name))} [dim]{doing}[/]"
        with self._lock:
            task = self._tasks.get(progress.run.run_id)
            if task is None:
                self._tasks[progress.run.run_id] = self._bars.add_task(text, total=None)
            elif progress.command is None:
                self._bars.remove_task(task)
            else:
                self._bars.update(task, description=text)

    def waiting(self, text: str) -> None:
        """Show what is being waited for before a run can begin."""
        with self._lock:
            if self._waiting is None:
                self._waiting = self._bars.add_task("", total=None)
            self._bars.update(self._waiting, description=f"[dim]{escape(printable(text))}[/]")

    def show(self, attempt: Attempt) -> None:
        """Show how an attempt ended."""
        self._ended += attempt.last
        count = f"[dim]{self._ended}/{self.total}[/]"
        result = attempt.result
        if isinstance(result, Stopped):
            text = f"{result.name}: {type(result.error).__name__}: {result.error}"
            text = escape(printable(text))
            self._console.print(f"{count} [bold red]stopped[/] {text}", soft_wrap=True)
            return
        verdict = verdict_text(result)
        again = "" if attempt.last else " [dim]to be tried again[/]"
        retried = " [dim]after a retry[/]" if result.retry_of else ""
        name = escape(printable(result.name))
        seconds = sum(result.timings.values())
        ended = result.outcome or "outcome unknown"
        self._console.print(
            f"{count} [{verdict.style}]{escape(verdict.plain)}[/] {name} [dim]{ended} "
            f"{seconds:.2f} s {result.run_id}[/]{retried}{again}",
            soft_wrap=True,
        )
        for line in complaints(result):
            self._console.print(f"    {escape(line)}", soft_wrap=True)

    def close(self, tally: Tally, stopped: int) -> None:
        """Show what the runs add up to."""
        text = str(tally) if tally.total else "no runs"
        if stopped:
            text += f"; {stopped} stopped without a verdict, to be resumed"
        self._console.print(text, soft_wrap=True)
