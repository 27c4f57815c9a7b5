r"""What every backend must do, as named checks over a factory that anybody's backend can be put to.

    from orchestrator.testing.conformance import conform, report_of

    findings = conform(lambda: MyBackend("sandboxes"))
    print(report_of(findings))

A check is an ordinary function. Its docstring is the claim, and it carries the field case that it
was learned from: somebody lost a result to a backend that did otherwise. Each one gets a backend
from the factory and a directory of its own, and drives either the real runner over the backend or
the verbs of a sandbox; what it finds is raised as `AssertionError`. A check that needs what the
sandbox does not have (git, say) is not applicable, which is neither green nor red and gives its
reason. Under pytest: parametrize over `CHECKS`, and assert on `conform(make, only=[name])`.

The factory is called more than once, and all the backends that it makes must see the same
sandboxes: that is how a second runner takes over from one that is gone. What a backend holds open
it lets go in a `close` of its own, if it has one. Nothing of the checks is left in the backend.

Programs of the checks are POSIX `sh` with `head -c`, `stat -c` and a `sleep` that knows fractions,
as coreutils and busybox have them. Whatever they leave running ends by itself within seconds, so
that a backend which does not stop it is found out and does not keep it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import Factory, define, evolve, frozen

from .. import tree
from ..clock import SystemClock
from ..core.clocks import Bounds
from ..core.errors import EvidenceIncompleteError, PermitError, SpecError
from ..core.evidence import EntryKind, Manifest, Provenance
from ..core.expect import nearest
from ..core.facts import DownloadFailed, Fault, FaultKind, Phase, SandboxRef, UploadFailed
from ..core.machine import Destroy, advance, begin
from ..core.spec import EvalSpec
from ..core.states import State
from ..core.verdict import OutcomeKind, Reason, Verdict
from ..ports import Ending, Order
from ..runner import Runner, time_sorted_run_id
from ..vault import Vault
from ..workspace import SpecWorkspace
from .faults import FaultyBackend, Injection, Release, Way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ..core.machine import CleanupPermit
    from ..core.verdict import Outcome
    from ..evidence import Evidence
    from ..ports import Backend, Record, Sandbox, Slot
    from ..result import RunResult
    from ..runner import Progress

    Check = Callable[["Bench"], None]

TOLERANCE_S: Final = 2.0
"""Seconds beyond deadline and grace within which the end of a check must be known."""
BOUND_S: Final = 120.0
"""Seconds that a check may take before it counts as one that hangs."""
STILL_S: Final = 0.3
"""Seconds that lie between two accounts of a workspace in which nothing may move."""
CLOSE_S: Final = 30.0

CHECKS: Final[dict[str, Check]] = {}
"""Every check by its name, in the order in which they are made."""
CASES: Final[dict[str, str]] = {}
"""The field case, or the port's own claim, that a check comes from, by its name."""


@frozen
class Finding:
    """What a check found.

    Attributes:
        name: of the check, as in `CHECKS`.
        ok: whether the backend does what the check claims; None where it is not applicable.
        reason: what is wrong, or why it is not applicable; empty where all is well.
        elapsed_s: seconds that the check took.
    """

    name: str
    ok: bool | None
    reason: str
    elapsed_s: float


class NotApplicableError(Exception):
    """Raised by a check that needs something which is not there."""


def check(*, case: str) -> Callable[[Check], Check]:
    """Register a function as a check that comes from a field case."""

    def register(function: Check) -> Check:
        name = function.__name__
        CHECKS[name] = function
        CASES[name] = case
        return function

    return register


def conform(
    make_backend: Callable[[], Backend],
    *,
    only: Iterable[str] | None = None,
    report: Callable[[Finding], None] | None = None,
    bound_s: float = BOUND_S,
) -> list[Finding]:
    """Put a backend to the checks, one after the other.

    Args:
        make_backend: makes a backend; all that it makes must see the same sandboxes.
        only: names of the checks to make; None for all.
        report: called with every finding as soon as there is one.
        bound_s: seconds after which a check that does not end has failed.

    Raises:
        SpecError: there is no check of a name in `only`.
    """
    names = list(CHECKS) if only is None else list(only)
    for name in names:
        if name not in CHECKS:
            raise SpecError("only", f"no check is called {name!r}", nearest(name, CHECKS))
    findings = []
    for name in names:
        findings.append(_find(name, make_backend, bound_s))
        if report is not None:
            report(findings[-1])
    return findings


def _find(name: str, make_backend: Callable[[], Backend], bound_s: float) -> Finding:
    start, clock = time.monotonic(), SystemClock()
    directory = Path(tempfile.mkdtemp(prefix="conformance-"))
    bench = Bench(make_backend, directory)
    ok: bool | None = True
    reason = ""
    try:
        clock.call(partial(CHECKS[name], bench), bound_s)
    except NotApplicableError as error:
        ok, reason = None, str(error)
    except AssertionError as error:
        ok, reason = False, str(error) or "an assertion without words"
    except Exception as error:  # noqa: BLE001 - whatever it raises, the check did not hold
        ok, reason = False, f"{type(error).__name__}: {error}"
    finally:
        with suppress(Exception):
            clock.call(bench.close, CLOSE_S)
        with suppress(OSError):
            tree.remove(directory)
    return Finding(name, ok, reason, time.monotonic() - start)


def report_of(findings: Iterable[Finding]) -> str:
    """Give findings as text: a line each, reasons below, and the count of them."""
    findings = list(findings)
    width = max((len(finding.name) for finding in findings), default=0)
    words = {True: "ok", False: "FAILED", None: "n/a"}
    lines = []
    for finding in findings:
        name, case = finding.name.ljust(width), CASES.get(finding.name, "")
        lines.append(f"{words[finding.ok]:<6} {name} {finding.elapsed_s:6.2f} s  {case}".rstrip())
        if finding.reason:
            lines.append(textwrap.indent(textwrap.fill(finding.reason, 90), "       "))
    counts = {ok: sum(finding.ok is ok for finding in findings) for ok in words}
    total_s = sum(finding.elapsed_s for finding in findings)
    lines.append(
        f"{counts[True]} ok, {counts[False]} failed, {counts[None]} not applicable, "
        f"in {total_s:.1f} s"
    )
    return "\n".join(lines)


# --- what a check works with ----------------------------------------------------------------------


@define(eq=False)
class Bench:
    """What a check works with: backends, a directory of its own, and runs that leave nothing.

    Attributes:
        make_backend: the factory.
        directory: fresh, and removed after the check.
    """

    make_backend: Callable[[], Backend]
    directory: Path
    _made: list[Backend] = Factory(list)
    _runners: list[Runner] = Factory(list)
    _run_ids: list[str] = Factory(list)
    _numbers: Iterator[int] = Factory(itertools.count)
    _lock: Any = Factory(threading.Lock)

    @property
    def backend(self) -> Backend:
        """The check's backend: the same one every time."""
        with self._lock:
            if not self._made:
                self._made.append(self.make_backend())
            return self._made[0]

    def another_backend(self) -> Backend:
        """Make another one, as another runner would."""
        made = self.make_backend()
        self._made.append(made)
        return made

    def new_run_id(self) -> str:
        """Name a run that is tidied away after the check."""
        run_id = time_sorted_run_id()
        self._run_ids.append(run_id)
        return run_id

    def fresh(self, name: str) -> Path:
        """Make a new directory."""
        made = self.directory / f"{name}-{next(self._numbers)}"
        made.mkdir()
        return made

    def runner(
        self,
        backend: Backend | None = None,
        state_dir: Path | None = None,
        *,
        bounds: Bounds | None = None,
        observer: Callable[[Progress], None] | None = None,
    ) -> Runner:
        """Open a runner, in a state directory of its own unless one is given."""
        made = Runner(
            backend or self.backend,
            state_dir or self.fresh("state"),
            bounds=bounds,
            observer=observer,
            new_run_id=self.new_run_id,
        )
        self._runners.append(made)
        return made

    def run(
        self,
        program: str | list[str],
        *,
        faults: Iterable[str | Injection] = (),
        pause_s: float = 0.2,
        bounds: Bounds | None = None,
        **spec: Any,
    ) -> RunResult:
        """Have the runner run a program to its verdict, with faults injected if any are given."""
        wanted = _spec(program, **spec)
        faulty = FaultyBackend(self.backend, tuple(faults), Release(pause_s))
        with faulty:
            chosen: Backend = faulty if faulty.plan else self.backend
            result = self.runner(chosen, bounds=bounds).run(wanted)
        _that(
            faulty.happened == list(faulty.plan),
            f"faults were planned and not met: {faulty.plan}, of which {faulty.happened}",
        )
        return result

    def sandbox(self, **spec: Any) -> Sandbox:
        """Create a sandbox and upload a workspace, as a runner does."""
        wanted = _spec("true", **spec)
        sandbox = self.backend.create(self.new_run_id(), wanted)
        _that(sandbox.upload(_tree(wanted)) is True, "a first upload was refused")
        return sandbox

    def order(self, program: str, *, slot: Slot = "check", late_s: float = 0.0) -> Order:
        """Write an order; one that is late by some seconds must not start."""
        shell = getattr(self.backend, "shell", "/bin/sh")
        return Order(
            slot=slot,
            argv=(shell, "-c", program),
            env={},
            deadline_s=30.0,
            grace_s=0.3,
            start_by=time.monotonic() - late_s if late_s else time.monotonic() + 60.0,
            now=time.monotonic,
            output_bytes=1 << 20,
            nonce=f"conformance{next(self._numbers)}",
        )

    def kill(self, run_id: str) -> None:
        """Destroy a run's sandbox behind the back of its runner."""
        sandbox = self.backend.open(run_id)
        if sandbox is not None:
            sandbox.destroy(permit(run_id, sandbox.ref))

    def close(self) -> None:
        """Let go of everything, and destroy what is left of the sandboxes."""
        for runner in self._runners:
            runner.close()
        for run_id in self._run_ids if self._made else ():
            try:
                self.kill(run_id)
            except Exception:  # noqa: BLE001 - something of it runs: it is stopped, then destroyed
                with suppress(Exception):
                    self._stop(run_id)
        for backend in self._made:
            if callable(close := getattr(backend, "close", None)):
                close()

    def _stop(self, run_id: str) -> None:
        if sandbox := self.backend.open(run_id):
            sandbox.settle(self.order("true"))
            self.kill(run_id)


def permit(run_id: str, ref: SandboxRef | None) -> CleanupPermit:
    """Have the core give leave to destroy a sandbox: of a run whose download has failed."""
    why = "a conformance check is done with it"
    not_sent = Fault(Phase.UPLOAD, FaultKind.ERROR, why)
    not_had = Fault(Phase.DOWNLOAD, FaultKind.ERROR, why)
    broken = advance(begin(run_id).run, UploadFailed(fault=not_sent, sandbox=ref)).run
    command = advance(broken, DownloadFailed(fault=not_had)).command
    assert isinstance(command, Destroy)  # said for the type checker
    return command.permit


def _spec(program: str | list[str], **spec: Any) -> EvalSpec:
    return EvalSpec(
        **{"name": "conformance", "deadline_s": 20.0, "grace_s": 0.5, "check": program, **spec}
    )


def _tree(spec: EvalSpec) -> SpecWorkspace:
    return SpecWorkspace(spec.workspace, spec.files)


def _that(holds: object, reason: str) -> None:
    """Assert, also where Python was told to leave assertions out."""
    if not holds:
        raise AssertionError(reason)


def _same(what: str, got: object, wanted: object) -> None:
    _that(got == wanted, f"{what}: {_short(got)}, where it should be {_short(wanted)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:140]} ... {text[-140:]}"  # noqa: PLR2004


def _story(result: RunResult) -> str:
    """Say in a line how a run went, for the reason of a finding."""
    words = [result.state.value if result.verdict is None else result.verdict.value]
    words += [f"({result.reason})"] if result.reason else []
    words += [str(result.outcome)] if result.outcome else []
    words += [found.message for found in result.expectations if found.passed is not True]
    words += [f"[{fault.phase} {fault.kind}: {fault.message}]" for fault in result.faults]
    if result.evidence and (stderr := result.evidence.output("stderr")):
        words += [f"stderr: {stderr.text[-200:].strip()}"] if stderr.total else []
    return " ".join(words)


def _passed(result: RunResult) -> Evidence:
    """Make sure that a run passed; give its evidence."""
    _that(result.verdict is Verdict.PASSED and result.evidence is not None, _story(result))
    assert result.evidence is not None  # said for the type checker
    return result.evidence


def _unresolved(result: RunResult, reason: Reason) -> None:
    unscored = result.verdict is Verdict.UNRESOLVED and not result.expectations
    _that(unscored and result.reason is reason, f"it should be {reason}, and is {_story(result)}")


def _holds_still(sandbox: Sandbox) -> Manifest:
    """Make sure that nothing moves in a sandbox's workspace."""
    first = sandbox.manifest()
    time.sleep(STILL_S)
    moved = first.differences(sandbox.manifest())
    _that(not moved, f"files still change after the check: {'; '.join(moved[:3])}")
    return first


@contextmanager
def _within(seconds: float, what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    elapsed_s = time.monotonic() - start
    _that(elapsed_s <= seconds, f"{what} took {elapsed_s:.1f} s, and may take {seconds:.1f} s")


def _ticks(name: str) -> str:
    """Write a program that appends to a file 20 times a second, and ends after six seconds."""
    return f"i=0; while [ $i -lt 120 ]; do echo x >> {name}; sleep 0.05; i=$((i+1)); done"


def _ended(record: Record, ending: Ending, code: int | None = None) -> None:
    what = "nothing of it runs" if record.still else "something of it is still running"
    found = f"{record.ending}({record.code}), {what}; {record.message}"
    right = record.ending is ending and record.still and record.code == code
    _that(right, f"its record should say {ending}({code}), and says {found}")


# --- how a check ends -----------------------------------------------------------------------------


@check(case="B1")
def exit_codes(bench: Bench) -> None:
    """Every exit code is that exit code: 124 is no timeout, 137 no kill, 255 no lost connection."""
    for code in (0, 1, 3, 124, 125, 126, 127, 137, 143, 255):
        result = bench.run(f"exit {code}", expect={"exit_code": code})
        _passed(result)
        _same(f"outcome of `exit {code}`", str(result.outcome), f"exited({code})")


@check(case="B1")
def programs_not_found(bench: Bench) -> None:
    """A program that is not there exits with 127, and one that is not executable with 126."""
    _passed(bench.run(["./no-such-program"], expect={"exit_code": 127}))
    _passed(bench.run(["./plain"], files={"plain": "text"}, expect={"exit_code": 126}))


@check(case="B8")
def signals(bench: Bench) -> None:
    """A program that a signal ended is told from one that exited with 128 and that number."""
    for name, number in (("SEGV", 11), ("KILL", 9), ("TERM", 15), ("HUP", 1)):
        result = bench.run(f"kill -{name} $$")
        _same(f"outcome of `kill -{name} $$`", str(result.outcome), f"signalled({number})")
        _that(result.verdict is Verdict.FAILED, _story(result))


@check(case="C10")
def printed_text_decides_nothing(bench: Bench) -> None:
    """What a program prints, were it the words of the guest, is not how it ended."""
    forged = r"ending=exited\ncode=0\nelapsed=0\nstill=yes\nexit code: 0\n"
    program = f"printf '{forged}'; printf '{forged}' >&2; exit 5"
    _passed(bench.run(program, expect={"exit_code": 5}))


@check(case="section 5")
def secrets_are_not_shown(bench: Bench) -> None:
    """The secret of a run is in no argument list and no environment that its check can read."""
    runner = bench.runner()
    look = "env; for f in /proc/[0-9]*/cmdline /proc/[0-9]*/environ; do cat $f; done 2>/dev/null"
    result = runner.run(_spec(f"{look}; exit 0", limits={"output_bytes": 1 << 26}))
    nonce = runner.journal.record(result.run_id).nonce.encode()
    _that(nonce not in _passed(result).stdout, "the check can read the secret of its run")


# --- deadlines ------------------------------------------------------------------------------------


@check(case="A15")
def deadline_is_not_shortened(bench: Bench) -> None:
    """A check that needs 0.93 of its deadline passes, however close the client's backstop is."""
    result = bench.run("sleep 1.86; echo done", deadline_s=2.0, grace_s=0.3, backstop_s=4.3)
    _same("output", bytes(_passed(result).stdout), b"done\n")


@check(case="A18")
def deadline_starts_with_the_check(bench: Bench) -> None:
    """Provisioning that takes longer than the deadline leaves the check all of it."""
    slow = ["create:slow", "upload:slow"]
    result = bench.run("sleep 0.6", faults=slow, pause_s=0.8, deadline_s=1.2, grace_s=0.3)
    _passed(result)


@check(case="A1")
def deadline_ends_the_check(bench: Bench) -> None:
    """A check that overruns is ended and known to be within deadline, grace and two seconds."""
    result = bench.run("echo begun; sleep 6; echo over", deadline_s=1.0, grace_s=0.5)
    _, evidence = _late(result)
    _same("output before the deadline", bytes(evidence.stdout), b"begun\n")


def _late(result: RunResult, grace_s: float = 0.5) -> tuple[Outcome, Evidence]:
    """Make sure that a deadline of a second ended a check, in time, and that it was scored."""
    outcome, evidence, deadline_s = result.outcome, result.evidence, 1.0
    late = outcome is not None and outcome.kind is OutcomeKind.DEADLINE_EXCEEDED
    _that(late and result.state is State.SCORED, f"it should be late and scored: {_story(result)}")
    assert outcome is not None  # said for the type checker
    assert evidence is not None
    limit_s = deadline_s + grace_s + TOLERANCE_S
    for who, elapsed_s in (("sandbox", outcome.elapsed_s), ("client", result.timings["check"])):
        on_time = deadline_s * 0.99 <= elapsed_s <= limit_s
        _that(on_time, f"it ended after {elapsed_s:.2f} s by the {who}'s clock, not {limit_s:g} s")
    return outcome, evidence


@check(case="A10")
def deadline_escalates_to_kill(bench: Bench) -> None:
    """A program that ignores SIGTERM has its grace, is killed then, and the outcome says so."""
    stubborn = "trap '' TERM INT; i=0; while [ $i -lt 60 ]; do sleep 0.1; i=$((i+1)); done"
    result = bench.run(stubborn, deadline_s=1.0, grace_s=0.5)
    outcome, _ = _late(result)
    _that(outcome.escalated, "it was killed, and the outcome does not say so")
    _that(outcome.elapsed_s >= 1.4, "it was killed before its grace was over")  # noqa: PLR2004


@check(case="E11")
def deadline_lets_it_save(bench: Bench) -> None:
    """What a program wrote before its deadline, and what it saves on SIGTERM, is evidence."""
    program = "trap 'echo saved > saved; exit 0' TERM; echo 1 > reward; sleep 6 & wait"
    result = bench.run(program, deadline_s=1.0, grace_s=1.0)
    outcome, evidence = _late(result, grace_s=1.0)
    wrote = {name: evidence.exists(name) for name in ("reward", "saved")}
    _same("files that it wrote", wrote, {"reward": True, "saved": True})
    _that(not outcome.escalated, "it ended on SIGTERM, and the outcome says that it was killed")


@check(case="A6")
def deadline_waits_for_no_pipe(bench: Bench) -> None:
    """A grandchild that holds the output open does not hold up the end of a check that is late."""
    program = "echo begun; (trap '' TERM; sleep 6; echo late) & sleep 6; echo over"
    result = bench.run(program, deadline_s=1.0, grace_s=0.5)
    _, evidence = _late(result)
    _same("output before the deadline", bytes(evidence.stdout), b"begun\n")


# --- what a check leaves running ------------------------------------------------------------------


def _escapes(bench: Bench, start: str, *, names: Iterable[str], ending: Ending) -> None:
    """Have a check leave processes behind; make sure that it is over at once, and they are too."""
    names = list(names)
    wait = "".join(f"until [ -s {name} ]; do sleep 0.02; done; " for name in names)
    end = "exit 0" if ending is Ending.EXITED else "sleep 6"
    order = bench.order(f"{start} {wait} {end}")
    if ending is Ending.DEADLINE:
        order = evolve(order, deadline_s=1.0)
    sandbox = bench.sandbox(files={"leave": _ticks('"$1"')})
    with _within(order.grace_s + 1.0 + TOLERANCE_S, "a check that leaves processes behind"):
        record = sandbox.execute(order)
    _ended(record, ending, 0 if ending is Ending.EXITED else None)
    manifest = _holds_still(sandbox)
    _that(all(name in manifest.entries for name in names), "what it started never ran")
    if ending is Ending.EXITED:
        _that(record.descendants >= len(names), f"{record.descendants} were counted")


@check(case="A7")
def daemons_end_with_the_check(bench: Bench) -> None:
    """A check that leaves a daemon ends when it exits; the daemon is counted, and then gone."""
    _escapes(bench, "sh ./leave ticks &", names=["ticks"], ending=Ending.EXITED)


@check(case="A9")
def sessions_do_not_escape(bench: Bench) -> None:
    """Four children in sessions of their own are gone when the check is, which exits at once."""
    names = ["ticks1", "ticks2", "ticks3", "ticks4"]
    start = "for i in 1 2 3 4; do setsid sh -c 'sh ./leave ticks'$i' &'; done;"
    _escapes(bench, _needing("setsid", bench) + start, names=names, ending=Ending.EXITED)


@check(case="A9")
def sessions_do_not_escape_a_deadline(bench: Bench) -> None:
    """A child in a session of its own is gone when the deadline ended the check."""
    start = _needing("setsid", bench) + "setsid sh ./leave ticks & "
    _escapes(bench, start, names=["ticks"], ending=Ending.DEADLINE)


@check(case="A5")
def daemons_without_a_trace_do_not_escape(bench: Bench) -> None:
    """A daemon that forked twice, with no environment and another session, is gone all the same."""
    start = "env -i /bin/sh -c '(setsid /bin/sh ./leave ticks >/dev/null 2>&1 &) &' &"
    _escapes(bench, _needing("setsid", bench) + start, names=["ticks"], ending=Ending.EXITED)


def _needing(tool: str, bench: Bench) -> str:
    """Make sure that the sandbox has a tool, before a program is written that uses it."""
    result = bench.run(f"command -v {tool} >/dev/null || exit 77", expect={"exit_code": 0})
    if result.outcome is not None and str(result.outcome) == "exited(77)":
        raise NotApplicableError(f"there is no {tool} in the sandbox")
    _passed(result)
    return ""


# --- output and input -----------------------------------------------------------------------------


@check(case="F2")
def output_is_bytes(bench: Bench) -> None:
    """Output arrives byte for byte, each stream on its own, whatever the bytes are."""
    result = bench.run(r"printf '\377\000\033[2J\r\n'; printf '\200no text' >&2")
    evidence = _passed(result)
    _same("stdout", bytes(evidence.stdout), b"\xff\x00\x1b[2J\r\n")
    _same("stderr", bytes(evidence.stderr), b"\x80no text")


@check(case="F3")
def floods_are_cut_and_counted(bench: Bench) -> None:
    """Of 20 MB on both streams at once, head and tail are kept and every byte is counted."""
    flood = "{ echo HEAD; head -c 20000000 /dev/zero | tr '\\0' x; echo TAIL; }"
    result = bench.run(f"{flood} & {flood} >&2; wait", limits={"output_bytes": 100_000})
    evidence = _passed(result)
    for name, output in (("stdout", evidence.stdout), ("stderr", evidence.stderr)):
        _same(f"bytes of {name}", output.total, 20_000_010)
        kept = len(output.head) + len(output.tail)
        _that(output.truncated and 0 < kept <= 100_000, f"{kept} bytes of {name} were kept")  # noqa: PLR2004
        _same(f"first of {name}", output.head[:8], b"HEAD\nxxx")
        _same(f"last of {name}", output.tail[-8:], b"xxxTAIL\n")


@check(case="F3")
def truncated_output_answers_nothing(bench: Bench) -> None:
    """A question that output which was not kept could answer is not answered for the rest."""
    program = "head -c 500000 /dev/zero | tr '\\0' x; echo TAIL"
    limits = {"output_bytes": 1000}
    result = bench.run(program, limits=limits, expect={"stdout_contains": "never printed"})
    unanswered = result.verdict is Verdict.UNRESOLVED and result.reason is Reason.OUTPUT_TRUNCATED
    _that(unanswered, f"it should be output_truncated, and is {_story(result)}")


@check(case="A8")
def last_output_is_kept(bench: Bench) -> None:
    """The last of five megabytes arrives, though a child holds the stream open after the exit."""
    program = "head -c 5000000 /dev/zero | tr '\\0' x; echo END; sleep 6 & exit 3"
    result = bench.run(program, expect={"exit_code": 3})
    output = bytes(_passed(result).stdout)
    _same("bytes of output", len(output), 5_000_004)
    _same("end of the output", output[-5:], b"xEND\n")
    check_s = result.timings["check"]
    _that(check_s <= 1.0 + TOLERANCE_S, f"it was waited for {check_s:.1f} s")


@check(case="E1")
def silence_is_evidence(bench: Bench) -> None:
    """A check that prints nothing has two whole, empty streams, and not two lost ones."""
    evidence = _passed(bench.run("exit 0"))
    _same("output", (bytes(evidence.stdout), bytes(evidence.stderr)), (b"", b""))


@check(case="section 5")
def input_is_empty(bench: Bench) -> None:
    """Standard input is at its end, and no terminal, so a program that asks does not wait."""
    result = bench.run("[ ! -t 0 ] || exit 8; cat; if read -r x; then exit 9; fi", deadline_s=4.0)
    _same("output", bytes(_passed(result).stdout), b"")


# --- what a check is given ------------------------------------------------------------------------

WORDS: Final = ("a b", "", "'", '"', "$HOME `id` \\", "*", "line\nline\n", "-n", "ünï→", "a=b\t;")


@check(case="section 8")
def environment_arrives(bench: Bench) -> None:
    """Variables arrive as they were given: quotes, line ends, dollars, nothing, any letter."""
    env = {f"GIVEN_{number}": word for number, word in enumerate(WORDS)}
    show = "; ".join(f'printf %s "${name}" > {name}; [ "${{{name}+set}}" ]' for name in env)
    evidence = _passed(bench.run(f"set -e; {show}", env=env))
    arrived = {name: evidence.read(name).decode("utf-8", "replace") for name in env}
    _same("environment", arrived, env)


@check(case="section 8")
def arguments_arrive(bench: Bench) -> None:
    """A list of words is the program's arguments, and no shell reads them on their way."""
    show = 'for word do printf "%s|" "$word"; done'
    result = bench.run(["/bin/sh", "-c", show, "sh", *WORDS])
    _same("arguments", _passed(result).stdout.decode(), "".join(f"{word}|" for word in WORDS))


@check(case="section 5")
def environment_does_not_leak(bench: Bench) -> None:
    """Nothing of the runner's own environment reaches check or setup."""
    name, secret = f"CONFORMANCE_{os.getpid()}", "a secret of the runner"
    os.environ[name] = secret
    try:
        result = bench.run("env; cat setup.env", setup="env > setup.env; echo $HOME >> home")
    finally:
        del os.environ[name]
    shown = _passed(result).stdout.decode()
    _that(name not in shown and secret not in shown, "a variable of the runner is in the check's")
    _that("PATH=" in shown and "HOME=" in shown, "it has no PATH, or no HOME")


@check(case="section 1")
def check_runs_in_the_workspace(bench: Bench) -> None:
    """The check starts in its workspace, in which there is what was sent and nothing else."""
    files = {"given": "1", "below/given": "2"}
    evidence = _passed(bench.run('seen=$(ls -A); echo "$seen"; pwd > here', files=files))
    _same("what the check sees", evidence.stdout.decode().split(), ["below", "given"])
    expected = ["below", "below/given", "given", "here"]
    _same("entries of the evidence", sorted(evidence.manifest.entries), expected)


# --- upload ---------------------------------------------------------------------------------------


def _see(bench: Bench, workspace: Path, program: str, **spec: Any) -> str:
    """Have a check look at an uploaded directory, which must arrive unchanged; give its words."""
    sent = tree.scan(workspace)
    evidence = _passed(bench.run(program, workspace=str(workspace), **spec))
    changed = sent.differences(evidence.manifest)
    _that(not changed, f"it arrived otherwise than it was sent: {'; '.join(changed[:3])}")
    return evidence.stdout.decode("utf-8", "surrogateescape")


@check(case="D3")
def modes_arrive(bench: Bench) -> None:
    """Permissions arrive: of programs, of secrets, of directories that are read-only."""
    workspace = bench.fresh("workspace")
    for name, mode in (("run.sh", 0o755), ("secret", 0o600), ("plain", 0o644), ("kept", 0o440)):
        (workspace / name).write_text("#!/bin/sh\necho ran\n")
        (workspace / name).chmod(mode)
    (workspace / "readonly").mkdir()
    (workspace / "readonly" / "file").write_text("in it")
    (workspace / "readonly").chmod(0o555)
    seen = _see(bench, workspace, "./run.sh && stat -c %a secret plain kept readonly")
    _same("what the check sees", seen.split(), ["ran", "600", "644", "440", "555"])


@check(case="D2, D4")
def links_arrive_as_links(bench: Bench) -> None:
    """Symlinks stay symlinks: to directories, to nowhere, to elsewhere, to each other."""
    workspace = bench.fresh("workspace")
    (workspace / "real").mkdir()
    (workspace / "real" / "file").write_text("one")
    outside = bench.directory / "outside"
    outside.write_text("never copied")
    targets = {
        "to-directory": "real",
        "dangling": "no where",
        "absolute": str(outside),
        "loop-a": "loop-b",
        "loop-b": "loop-a",
        "up": "../../..",
    }
    for name, target in targets.items():
        (workspace / name).symlink_to(target)
    look = 'for l in {}; do [ -L "$l" ] || exit 9; readlink "$l"; done; cat to-directory/file'
    seen = _see(bench, workspace, look.format(" ".join(targets)))
    _same("what the check sees", seen.splitlines(), [*targets.values(), "one"])


@check(case="D1")
def hidden_and_ignored_files_arrive(bench: Bench) -> None:
    """Hidden files, files that git ignores, and directories with nothing in them arrive."""
    workspace = bench.fresh("workspace")
    files = (".hidden", ".gitignore", "a.log", "node_modules/x/index.js", ".git/config", "core~")
    for name in files:
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text("*.log\nnode_modules\n")
    for name in ("empty", ".empty/below", "__pycache__"):
        (workspace / name).mkdir(parents=True)
    look = f"for f in {' '.join(files)}; do [ -f $f ] || echo $f; done; [ -d .empty/below ]"
    _same("files that the check misses", _see(bench, workspace, f"{look} && [ -d empty ]"), "")


@check(case="D2")
def repositories_arrive_clean(bench: Bench) -> None:
    """A git repository arrives with nothing changed, as `git status` in the sandbox sees it."""
    git = shutil.which("git")
    if git is None:
        raise NotApplicableError("there is no git on this machine")
    workspace = bench.fresh("workspace")
    (workspace / "run").write_text("#!/bin/sh\n")
    (workspace / "run").chmod(0o755)
    (workspace / "link").symlink_to("run")
    (workspace / ".gitignore").write_text("*.log\n")
    (workspace / "a.log").write_text("ignored")
    who = ["-c", "user.name=conformance", "-c", "user.email=conformance@localhost"]
    quiet = ["-c", "init.defaultBranch=main", "-c", "core.hooksPath=", "-c", "commit.gpgSign=no"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        env = {"PATH": os.environ["PATH"], "HOME": str(bench.directory)}
        subprocess.run([git, *who, *quiet, *words], cwd=workspace, env=env, check=True)
    trust = {"COUNT": "1", "KEY_0": "safe.directory", "VALUE_0": "*"}
    look = "command -v git >/dev/null || exit 77; git status --porcelain; git log --format=%s"
    env = {f"GIT_CONFIG_{name}": value for name, value in trust.items()}
    result = bench.run(look, workspace=str(workspace), env=env)
    if str(result.outcome) == "exited(77)":
        raise NotApplicableError("there is no git in the sandbox")
    _same("status and log", _passed(result).stdout.decode(), "first\n")


@check(case="section 6")
def times_arrive(bench: Bench) -> None:
    """Times of last change arrive to the second: of files, of directories, of symlinks."""
    workspace = bench.fresh("workspace")
    (workspace / "directory").mkdir()
    (workspace / "directory" / "file").write_text("old")
    (workspace / "link").symlink_to("directory")
    times = {"directory/file": 1_000_000_000, "directory": 1_100_000_000, "link": 1_200_000_000}
    for name, moment_s in times.items():
        os.utime(workspace / name, (moment_s, moment_s), follow_symlinks=False)
    seen = _see(bench, workspace, f"stat -c %Y {' '.join(times)}").split()
    apart = [abs(int(mine) - theirs) for mine, theirs in zip(seen, times.values(), strict=True)]
    _that(max(apart) <= 1, f"times are {apart} s apart, of {list(times)}")


@check(case="section 6")
def names_arrive(bench: Bench) -> None:
    """Names of any bytes arrive, long ones and deep ones too, as far as this machine has them."""
    workspace = os.fsencode(bench.fresh("workspace"))
    names = [
        b"a b",
        b"line\nend",
        b"'\"`$HOME",
        b"-rf",
        b"*",
        b"\xff\xfe",
        b"\x01\x7f",
        b"\xc3\xbc",
    ]
    names += [b"n" * 255, b"back\\slash", b" ", b"C:", b"...", b"a\xcc\x88", b"A", b"a"]
    taken = 0
    for name in names:
        with suppress(OSError):
            Path(os.fsdecode(workspace + b"/" + name)).write_text("x")
            taken += 1
    deep = Path(os.fsdecode(workspace), *["d" * 100] * 12)
    deep.mkdir(parents=True)
    (deep / "file").write_text("deep")
    look = 'c=0; for f in ./* ./...; do [ -f "$f" ] && c=$((c + $(wc -c < "$f"))); done; echo $c'
    looked = _see(bench, Path(os.fsdecode(workspace)), look)
    _same("files that the check can read", int(looked), taken)


@check(case="D5")
def large_files_arrive(bench: Bench) -> None:
    """A file of many megabytes with a hole in it arrives whole, and comes back whole."""
    workspace = bench.fresh("workspace")
    with (workspace / "large").open("wb") as file:
        file.write(b"begin" * 100_000)
        file.seek(12_000_000)
        file.write(b"end")
    evidence = _passed(bench.run("cp large copy; wc -c < copy", workspace=str(workspace)))
    _same("bytes that the check sees", int(evidence.stdout.decode()), 12_000_003)
    same = evidence.read("copy") == (workspace / "large").read_bytes()
    _that(same, "its copy is another file than the one that was sent")


@check(case="ports")
def upload_replaces_what_was_there(bench: Bench) -> None:
    """An upload makes the workspace equal to what is sent, after one that was cut short as well."""
    sandbox = bench.sandbox(files={"left/over": "1", "changed": "1", "extra": "1"})
    wanted = _tree(_spec("true", files={"changed": "2", "left": "a file now"}))
    _that(sandbox.upload(wanted) is True, "it was refused, though nothing was started")
    wrong = wanted.manifest().differences(sandbox.manifest())
    _that(not wrong, f"the workspace is not what was sent: {'; '.join(wrong[:3])}")


@check(case="ports")
def upload_spares_what_was_started(bench: Bench) -> None:
    """After a command of the run was started, an upload touches nothing, and says so."""
    sandbox = bench.sandbox(files={"input": "1"})
    sandbox.execute(bench.order("echo result > output"))
    before = sandbox.manifest()
    refused = sandbox.upload(_tree(_spec("true", files={"input": "2"})))
    _that(refused is False, "an upload over a check that ran was accepted")
    _that(not before.differences(sandbox.manifest()), "an upload changed what a check had left")


@check(case="D5")
def short_uploads_are_refused(bench: Bench) -> None:
    """A workspace that arrives otherwise than it was sent is found out before the check starts."""
    files = {"a": "first content", "b": "second content"}
    for way in (Way.TRUNCATED, Way.CORRUPTED, Way.LEFT_OUT, Way.REORDERED):
        result = bench.run("echo ran > ran", faults=[Injection("upload", way)], files=files)
        _unresolved(result, Reason.UPLOAD_FAILED)
        ran = result.evidence is not None and result.evidence.exists("ran")
        _that(not ran and result.outcome is None, f"the check ran after an upload was {way}")


# --- download -------------------------------------------------------------------------------------


@check(case="E10")
def provenance_is_known(bench: Bench) -> None:
    """What the check made, changed, deleted or left is told apart, by content and not by time."""
    names = ("kept", "touched", "stale.json", "changed", "same-size", "mode", "deleted")
    program = (
        "echo new > made; echo longer > changed; touch touched; chmod 600 mode; rm deleted;"
        "printf NEW > same-size; touch -r kept same-size"
    )
    result = bench.run(program, files=dict.fromkeys(names, "old"))
    evidence = _passed(result)
    wanted = {
        Provenance.CREATED: ["made"],
        Provenance.MODIFIED: ["changed", "mode", "same-size"],
        Provenance.DELETED: ["deleted"],
        Provenance.UNCHANGED: ["kept", "stale.json", "touched"],
    }
    _same("provenance", {kind: evidence.paths(kind) for kind in wanted}, wanted)
    _same("content", evidence.read("same-size"), b"NEW")


@check(case="section 6")
def what_a_check_makes_comes_back(bench: Bench) -> None:
    """Content, modes, links, times and empty directories that a check makes are in its evidence."""
    program = (
        "mkdir -p deep/er empty; printf 'data\\377' > deep/er/file; chmod 750 deep/er/file;"
        "ln -s 'no where' dangling; ln -s /etc/hostname absolute; : > nothing; echo h > .hidden;"
        "TZ=UTC0 touch -t 200102030405.06 deep/er/file; chmod 1777 empty"
    )
    evidence = _passed(bench.run(program))
    _same("content", evidence.read("deep/er/file"), b"data\xff")
    _same("an empty file", evidence.read("nothing"), b"")
    found = {path: evidence.entry(path) for path in ("deep/er/file", "empty", "dangling")}
    modes = {path: oct(entry.mode) if entry else None for path, entry in found.items()}
    _same("modes", modes, {"deep/er/file": "0o750", "empty": "0o1777", "dangling": "0o777"})
    links = [getattr(evidence.entry(path), "target", None) for path in ("dangling", "absolute")]
    _same("links", links, ["no where", "/etc/hostname"])
    _that(evidence.exists(".hidden"), "a hidden file did not come back")
    file = found["deep/er/file"]
    apart_s = abs(file.mtime_ns / 1e9 - 981_173_106) if file else None
    _that(apart_s is not None and apart_s <= 1, f"a time came back {apart_s} s off")


@check(case="E4")
def special_files_are_listed(bench: Bench) -> None:
    """A FIFO or a socket that a check leaves is listed as one, and nobody waits at it."""
    socket = "perl -e 'use Socket; socket S, PF_UNIX, SOCK_STREAM, 0; bind S, sockaddr_un(q(s))'"
    python = "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'"
    program = f"mkfifo p; echo x > after; {socket} 2>/dev/null || {python} 2>/dev/null || :"
    result = bench.run(program, bounds=Bounds(download_s=20.0))
    evidence = _passed(result)
    kinds = {path: entry.kind for path, entry in evidence.manifest.entries.items()}
    wanted = {"p": EntryKind.FIFO, "after": EntryKind.FILE}
    _same("kinds", kinds, wanted | ({"s": EntryKind.SOCKET} if "s" in kinds else {}))


@check(case="E12")
def locked_files_come_back(bench: Bench) -> None:
    """What a check took its own permissions from comes back, with the permissions it has."""
    program = (
        "echo 1 > locked; mkdir -p closed/deeper; echo 2 > closed/in; echo 3 > closed/deeper/in;"
        "chmod 0 locked closed/in closed/deeper closed"
    )
    evidence = _passed(bench.run(program))
    files = {"locked": b"1\n", "closed/in": b"2\n", "closed/deeper/in": b"3\n"}
    _same("content", {path: evidence.read(path) for path in files}, files)
    modes = {path: getattr(evidence.entry(path), "mode", None) for path in ("locked", "closed")}
    _same("modes", modes, {"locked": 0, "closed": 0})


@check(case="E2, E3")
def missing_is_not_absent(bench: Bench) -> None:
    """A file that a check did not write is absent from sealed evidence, which is then scored."""
    expect = {"files": [{"path": "wanted", "exists": True}]}
    result = bench.run("rm given", files={"given": "1"}, expect=expect)
    scored = result.verdict is Verdict.FAILED and result.evidence and result.evidence.sealed
    _that(scored, f"it should be FAILED on sealed evidence, and is {_story(result)}")


@check(case="E1, E2")
def short_downloads_are_never_scored(bench: Bench) -> None:
    """Evidence that arrives otherwise than the sandbox has it, three times, is never scored."""
    program = "echo the result of the check > result"
    for way in (Way.TRUNCATED, Way.CORRUPTED, Way.LEFT_OUT):
        plan = [Injection("fetch", way, call) for call in (1, 2, 3)]
        result = bench.run(program, faults=plan)
        _unresolved(result, Reason.DOWNLOAD_FAILED)
        sealed = result.evidence is not None and result.evidence.sealed
        _that(not sealed, f"evidence that was {way} is sealed")


# --- permits, and the end of a sandbox ------------------------------------------------------------


@check(case="section 2")
def destroy_wants_its_own_permit(bench: Bench) -> None:
    """A permit for another sandbox or another run is refused, and the sandbox is still there."""
    sandbox = bench.sandbox(files={"evidence": "1"})
    run_id, ref = sandbox.ref.sandbox_id, sandbox.ref
    for what, wrong in (
        ("sandbox", permit(run_id, SandboxRef("another", "one"))),
        ("run", permit("another", ref)),
    ):
        try:
            sandbox.destroy(wrong)
        except PermitError:
            pass
        else:
            raise AssertionError(f"it was destroyed with a permit for another {what}")
    _that(bench.backend.open(run_id) is not None, "it is gone, though the permits were refused")
    _that("evidence" in sandbox.manifest().entries, "it is empty, though the permits were refused")


@check(case="G4")
def destroy_is_confirmed_and_repeatable(bench: Bench) -> None:
    """After destroy there is no such sandbox; destroying it again is as good."""
    sandbox = bench.sandbox(files={"evidence": "1"})
    run_id = sandbox.ref.sandbox_id
    for _ in range(2):
        sandbox.destroy(permit(run_id, sandbox.ref))
        _that(bench.backend.open(run_id) is None, "destroy came back, and it is still there")
    _that(bench.another_backend().open(run_id) is None, "for another backend it is still there")


@check(case="section 2")
def destroy_takes_what_was_never_seen(bench: Bench) -> None:
    """A run that never saw its sandbox may have whatever bears its name destroyed."""
    run_id = bench.sandbox().ref.sandbox_id
    found = bench.another_backend().open(run_id)
    _that(found is not None, "another backend does not find it")
    if found is not None:
        found.destroy(permit(run_id, None))
    _that(bench.backend.open(run_id) is None, "destroy came back, and it is still there")


@check(case="G3")
def finished_runs_leave_no_sandbox(bench: Bench) -> None:
    """After a run that passed, one that failed and one that was late, no sandbox is left."""
    for program in ("true", "exit 1", "sleep 6"):
        result = bench.run(program, deadline_s=0.5)
        _that(result.retained_sandbox is None, _story(result))
        _that(bench.backend.open(result.run_id) is None, f"the sandbox of `{program}` is left")


@check(case="G1, G4")
def kept_sandboxes_can_be_destroyed(bench: Bench) -> None:
    """A sandbox that is kept, on purpose or because deleting it failed, is found by its id."""
    kept = bench.run("true", setup="exit 1", retain="unresolved")
    left = bench.run("true", faults=["destroy:error-before"])
    _that(left.verdict is Verdict.PASSED, f"deleting failed, the check did not: {_story(left)}")
    for result in (kept, left):
        name = result.retained_sandbox
        _that(name is not None, f"the id of the sandbox is lost: {_story(result)}")
        sandbox = bench.another_backend().open(name or "")
        _that(sandbox is not None, "a sandbox that was kept is not found by its id")
        if sandbox is not None:
            sandbox.destroy(permit(result.run_id, sandbox.ref))
        _that(bench.backend.open(result.run_id) is None, "it is still there")


# --- one sandbox for one run ----------------------------------------------------------------------


@check(case="ports")
def create_is_idempotent(bench: Bench) -> None:
    """Asked again for a run's sandbox, the backend gives the one that there is."""
    sandbox = bench.sandbox(files={"evidence": "1"})
    again = bench.another_backend().create(sandbox.ref.sandbox_id, _spec("true"))
    _same("identity", again.ref, sandbox.ref)
    _that("evidence" in again.manifest().entries, "creating it again emptied it")


@check(case="ports")
def open_finds_what_was_created(bench: Bench) -> None:
    """A sandbox is found by its run, under the same identity every time; where none is, None."""
    _that(bench.backend.open(bench.new_run_id()) is None, "it finds what was never created")
    sandbox = bench.sandbox(files={"evidence": "1"})
    for backend in (bench.backend, bench.another_backend()):
        found = backend.open(sandbox.ref.sandbox_id)
        _same("what is found", found and found.ref, sandbox.ref)
        _that(found and "evidence" in found.manifest().entries, "what is found is empty")


@check(case="C2")
def identities_differ(bench: Bench) -> None:
    """Two runs have sandboxes of two identities, and so has one run before and after a destroy."""
    first, second = bench.sandbox(), bench.sandbox()
    run_id = first.ref.sandbox_id
    bench.kill(run_id)
    again = bench.backend.create(run_id, _spec("true"))
    identities = [sandbox.ref.identity for sandbox in (first, second, again)]
    _that(len(set(identities)) == len(identities), f"one identity for two sandboxes: {identities}")


def _meanwhile(bench: Bench, act: Callable[[str], object]) -> None:
    """Do something to a sandbox after its check; make sure that the run is not scored."""

    def observe(progress: Progress) -> None:
        if progress.run.state is State.CHECKED:
            act(progress.run.run_id)

    result = bench.runner(observer=observe).run(_spec("true"))
    _unresolved(result, Reason.DOWNLOAD_FAILED)


@check(case="C2")
def destroyed_sandboxes_are_never_scored(bench: Bench) -> None:
    """A sandbox that is gone after its check leaves an unresolved run, not an empty workspace."""
    _meanwhile(bench, bench.kill)


@check(case="C2")
def recreated_sandboxes_are_never_scored(bench: Bench) -> None:
    """Another sandbox that took the place of the one that was checked is found out."""

    def recreate(run_id: str) -> None:
        bench.kill(run_id)
        another = bench.backend.create(run_id, _spec("true"))
        another.upload(_tree(_spec("true")))
        another.execute(bench.order("true"))

    _meanwhile(bench, recreate)


@check(case="C2")
def vanished_sandboxes_are_never_scored(bench: Bench) -> None:
    """A sandbox that vanishes, or is exchanged, in the very call that fetches is found out."""
    probe = bench.sandbox()
    if not (callable(getattr(probe, "tamper", None)) or hasattr(probe, "home")):
        raise NotApplicableError(
            "its sandboxes have no `tamper`, by which a test makes them vanish"
        )
    for fault in ("manifest#2:vanished", "fetch:vanished", "fetch:replaced"):
        result = bench.run("echo result > result", faults=[fault])
        _unresolved(result, Reason.DOWNLOAD_FAILED)
        if isinstance(home := getattr(probe, "home", None), Path):
            tree.remove(home.with_name(f".{result.run_id}.vanished"))


@check(case="H, A4")
def runs_keep_apart(bench: Bench) -> None:
    """Eight runs at once see their own files and variables only, and none is held up."""
    runner = bench.runner()

    def one(number: int) -> None:
        program = 'ls -A; [ "$(cat me)" = "$ME" ] || exit 9; sleep 0.3; echo "$ME" > out; ls -A'
        spec = _spec(program, files={"me": str(number)}, env={"ME": str(number)})
        evidence = _passed(runner.run(spec))
        _same("files in the workspace", evidence.stdout.decode().split(), ["me", "me", "out"])
        _same("result", evidence.text("out").strip(), str(number))

    _at_once(partial(one, number) for number in range(8))


def _at_once(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls on threads of their own; raise what the first of them raised."""
    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    for future in futures:
        future.result()


# --- at most once ---------------------------------------------------------------------------------


@check(case="C9")
def orders_are_executed_once(bench: Bench) -> None:
    """An order that is executed again runs nothing again, and has the record it had."""
    sandbox = bench.sandbox()
    order = bench.order("echo x >> runs.log; exit 7")
    first = sandbox.execute(order)
    _ended(first, Ending.EXITED, 7)
    found = bench.another_backend().open(sandbox.ref.sandbox_id)
    for again in (sandbox, found):
        if again is not None:
            _ended(again.execute(order), Ending.EXITED, 7)
    _ran_once(bench, sandbox)


@check(case="C9")
def orders_that_come_twice_are_one(bench: Bench) -> None:
    """An order that comes a second time while it runs joins the first, from another backend too."""
    sandbox = bench.sandbox()
    order = bench.order("echo x >> runs.log; sleep 1; exit 7")
    other = bench.another_backend().open(sandbox.ref.sandbox_id)
    _that(other is not None, "another backend does not find the sandbox")
    assert other is not None  # said for the type checker

    def once_begun(place: Sandbox) -> None:
        _wait_for(sandbox, "runs.log")
        _exits_with_seven(place, order)

    _at_once(
        [
            partial(_exits_with_seven, sandbox, order),
            partial(_exits_with_seven, other, order),
            partial(once_begun, sandbox),
            partial(once_begun, other),
        ]
    )
    _ran_once(bench, sandbox)


def _wait_for(sandbox: Sandbox, *names: str) -> None:
    """Wait until a program has made files, but not for longer than it would take a slow one."""
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        with suppress(EvidenceIncompleteError):  # it moves while it is read, as it should
            if set(names) <= set(sandbox.manifest().entries):
                return
        time.sleep(0.02)


def _exits_with_seven(sandbox: Sandbox, order: Order) -> None:
    _ended(sandbox.execute(order), Ending.EXITED, 7)


def _ran_once(bench: Bench, sandbox: Sandbox) -> None:
    """Make sure that a check which leaves a line in a file for each time it ran left one."""
    manifest = sandbox.manifest()
    intake = Vault(bench.fresh("vault")).intake(sandbox.ref.sandbox_id, Manifest({}))
    sandbox.fetch(intake.missing(manifest), "check", intake)
    entry = intake.arrived.get("runs.log")
    lines = (entry.size if entry else 0) // len("x\n")
    _that(lines == 1, f"it ran {lines} times")


@check(case="section 4")
def settled_orders_never_start(bench: Bench) -> None:
    """An order that is settled before it comes is never started, however late it comes."""
    sandbox = bench.sandbox()
    order = bench.order("echo x > ran")
    _ended(sandbox.settle(order), Ending.NOT_STARTED)
    _ended(sandbox.execute(order), Ending.NOT_STARTED)
    _that("ran" not in _holds_still(sandbox).entries, "it ran after it was settled")


@check(case="section 4")
def late_orders_never_start(bench: Bench) -> None:
    """An order that arrives after its latest start is not started: nobody waits for it any more."""
    sandbox = bench.sandbox()
    _ended(sandbox.execute(bench.order("echo x > ran", late_s=5.0)), Ending.NOT_STARTED)
    _that("ran" not in _holds_still(sandbox).entries, "it was started though it was late")


@check(case="A2")
def settling_stops_what_runs(bench: Bench) -> None:
    """Settling a command that runs stops it, with its children, and says that it was stopped."""
    sandbox = bench.sandbox(files={"leave": _ticks('"$1"')})
    order = bench.order("sh ./leave child & sh ./leave ticks")
    with ThreadPoolExecutor(1) as pool:
        executing = pool.submit(sandbox.execute, order)
        _wait_for(sandbox, "child", "ticks")
        _ended(sandbox.settle(order), Ending.STOPPED)
        manifest = _holds_still(sandbox)
        _ended(executing.result(), Ending.STOPPED)
    _that({"child", "ticks"} <= set(manifest.entries), "it never ran")


@check(case="A15")
def settling_tells_how_it_ended(bench: Bench) -> None:
    """Settling a command that has ended gives the record that executing it gave."""
    sandbox = bench.sandbox()
    order = bench.order("echo x >> runs.log; exit 9")
    _ended(sandbox.execute(order), Ending.EXITED, 9)
    _ended(sandbox.settle(order), Ending.EXITED, 9)
    _ran_once(bench, sandbox)


# --- setup ----------------------------------------------------------------------------------------


@check(case="section 8")
def setup_is_not_counted(bench: Bench) -> None:
    """Setup runs first, in the same place; what it changes and prints is not the check's."""
    result = bench.run(
        "cat given prepared; echo 1 > made",
        setup='echo noise; echo "$WORD" > prepared; echo 2 > given',
        files={"given": "1"},
        env={"WORD": "ready"},
    )
    evidence = _passed(result)
    _same("output of the check", bytes(evidence.stdout), b"2\nready\n")
    _same("entries that the check made", evidence.paths(Provenance.CREATED), ["made"])
    _same("entries that it changed", evidence.paths(Provenance.MODIFIED), [])


@check(case="section 8")
def setup_failures_are_unresolved(bench: Bench) -> None:
    """A setup that fails, or is late, is no failure of the check, which is then never started."""
    for setup in ("echo why >&2; exit 1", "kill -9 $$", "sleep 6"):
        result = bench.run("echo x > ran", setup=setup, setup_deadline_s=0.5)
        _unresolved(result, Reason.SETUP_FAILED)
        ran = result.evidence is not None and result.evidence.exists("ran")
        _that(not ran, "the check ran after its setup had failed")


# --- when the client stops waiting, or is gone ----------------------------------------------------


@check(case="A13, A15")
def client_timeouts_are_settled(bench: Bench) -> None:
    """When no answer comes, the sandbox still says how the check ended, or that it never began."""
    limits: dict[str, Any] = {"deadline_s": 1.0, "grace_s": 0.3, "backstop_s": 3.0}
    program = "echo x >> runs.log; exit 3"

    def unheard() -> None:
        result = bench.run(
            program, faults=["execute:hang-after"], expect={"exit_code": 3}, **limits
        )
        _same("runs", _passed(result).read("runs.log"), b"x\n")
        late = result.outcome is not None and result.outcome.settled_after_client_timeout
        _that(late, "the outcome does not say that it was settled after the client gave up")

    def unsent() -> None:
        result = bench.run(program, faults=["execute:hang-before"], **limits)
        _unresolved(result, Reason.CLIENT_TIMED_OUT)
        kinds = [fault.kind for fault in result.faults]
        _that(FaultKind.NOT_STARTED in kinds, f"it is not known that it never began: {kinds}")

    _at_once([unheard, unsent])


@check(case="C8")
def lost_answers_are_settled(bench: Bench) -> None:
    """An error after the check began does not run it twice, and does not lose how it ended."""
    result = bench.run("echo x >> runs.log; echo said", faults=["execute:error-after"])
    evidence = _passed(result)
    _same("runs", evidence.read("runs.log"), b"x\n")
    _same("output", bytes(evidence.stdout), b"said\n")


@check(case="A14, A19")
def every_phase_is_bounded(bench: Bench) -> None:
    """A backend that goes silent, in whichever call, holds a run up no longer than its bounds."""
    bounds = Bounds(upload_s=1.0, settle_s=1.0, download_s=1.0, destroy_s=1.0, score_s=1.0)
    spec: dict[str, Any] = {"deadline_s": 0.5, "grace_s": 0.2, "backstop_s": 1.0}
    limit_s = 1.0 * 6 + TOLERANCE_S
    plans = [[f"{verb}:hang-before"] for verb in ("create", "upload", "manifest", "execute")]
    plans += [[f"{verb}:hang-before"] for verb in ("open", "fetch", "destroy")]
    plans += [["execute:hang-after", "settle:hang-before"]]

    def silent(plan: list[str]) -> None:
        with _within(limit_s, f"a run with {' and '.join(plan)}"):
            result = bench.run("true", faults=plan, bounds=bounds, **spec)
        _that(result.verdict is not Verdict.FAILED, f"a silence failed it: {_story(result)}")
        _that(result.faults, "the silence is not among the faults of the run")

    _at_once(partial(silent, plan) for plan in plans)


class _InterruptedError(Exception):
    """Stops a runner, as an interrupt would."""


@check(case="G1, H2")
def interrupted_runs_are_resumed(bench: Bench) -> None:
    """A runner that is gone, after any fact, is followed by another that finishes, once only."""
    for state in (State.UPLOADED, State.CHECKED, State.DOWNLOADED):
        place = bench.fresh("state")

        def stop(progress: Progress, state: State = state) -> None:
            if progress.run.state is state:
                raise _InterruptedError

        spec = _spec("echo x >> runs.log", files={"given": "1"})
        with bench.runner(None, place, observer=stop) as first, suppress(_InterruptedError):
            first.run(spec)
        with bench.runner(bench.another_backend(), place) as second:
            [run_id] = second.unfinished()
            evidence = _passed(second.resume(run_id))
        _same(f"runs of the check, stopped in {state}", evidence.read("runs.log"), b"x\n")
        _that(bench.backend.open(run_id) is None, "its sandbox is left")


# --- what a backend says of itself ----------------------------------------------------------------


@check(case="section 8")
def backend_says_what_it_is(bench: Bench) -> None:
    """A backend has a short name, says what it keeps a check away from, and takes a plain spec."""
    backend = bench.backend
    named = backend.name == backend.name.strip().lower() and 0 < len(backend.name) <= 20  # noqa: PLR2004
    _that(named and " " not in backend.name, f"not a short name: {backend.name!r}")
    _that(backend.isolation.strip(), "it does not say what a check is kept away from")
    backend.refuse(_spec("true"))
    result = bench.run("true")
    said = (result.backend, result.isolation)
    _same("what results say", said, (backend.name, backend.isolation))


@check(case="B5")
def limits_are_kept_or_refused(bench: Bench) -> None:
    """A limit that is set is enforced, or its spec is refused by the name of the limit."""
    limits: Mapping[str, float] = {
        "memory_bytes": 1 << 26,
        "cpus": 1.0,
        "pids": 64,
        "disk_bytes": 1 << 26,
    }
    accepted = set()
    for name, value in limits.items():
        try:
            bench.backend.refuse(_spec("true", limits={name: value}))
            accepted.add(name)
        except SpecError as error:
            _same("key of the refusal", error.key, f"limits.{name}")
    if "memory_bytes" in accepted:
        hog = "head -c 200000000 /dev/zero | tail > /dev/null"  # one line, which tail keeps
        result = bench.run(hog, limits={"memory_bytes": 1 << 26})
        _that(result.verdict is not Verdict.PASSED, "it used three times its limit of memory")
