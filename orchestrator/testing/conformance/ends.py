"""How a check ends: its status, its deadline, and what it leaves running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ...core.states import State
from ...core.verdict import OutcomeKind, Verdict
from ...ports import Ending
from . import check
from .bench import (
    TOLERANCE_S,
    Bench,
    NotApplicableError,
    _ended,
    _holds_still,
    _passed,
    _same,
    _spec,
    _story,
    _that,
    _ticks,
    _within,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...core.verdict import Outcome
    from ...evidence import Evidence
    from ...result import RunResult


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
