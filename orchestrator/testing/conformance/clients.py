"""Setup, clients that stop waiting or are gone, and what a backend says of itself."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ...core.clocks import Bounds
from ...core.errors import SpecError
from ...core.evidence import Provenance
from ...core.facts import FaultKind
from ...core.states import State
from ...core.verdict import Reason, Verdict
from . import check
from .bench import (
    TOLERANCE_S,
    Bench,
    _passed,
    _same,
    _spec,
    _story,
    _that,
    _unresolved,
    _within,
)
from .orders import _at_once

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...runner import Progress


SLOW_S: Final = 5.0
"""Seconds that no phase of a tiny run takes on a backend that is not known to be silent."""


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
    start = time.monotonic()
    bench.run("true", bounds=_bounds(SLOW_S), deadline_s=0.5, grace_s=0.2, backstop_s=SLOW_S)
    # Several at once must still be within it; one that is slower still has a bound to be held to.
    unit_s = min(max(1.0, 8 * (time.monotonic() - start)), SLOW_S)
    bounds = _bounds(unit_s)
    spec: dict[str, Any] = {"deadline_s": 0.5, "grace_s": 0.2, "backstop_s": unit_s}
    limit_s = unit_s * 6 + TOLERANCE_S
    plans = [[f"{verb}:hang-before"] for verb in ("create", "upload", "manifest", "execute")]
    plans += [[f"{verb}:hang-before"] for verb in ("open", "fetch", "destroy")]
    plans += [["execute:hang-after", "settle:hang-before"]]

    def silent(plan: list[str]) -> None:
        with _within(limit_s, f"a run with {' and '.join(plan)}"):
            result = bench.run("true", faults=plan, bounds=bounds, **spec)
        _that(result.verdict is not Verdict.FAILED, f"a silence failed it: {_story(result)}")
        _that(result.faults, "the silence is not among the faults of the run")

    _at_once(partial(silent, plan) for plan in plans)


def _bounds(seconds: float) -> Bounds:
    """Give every phase the same bound."""
    phases = ("upload_s", "settle_s", "download_s", "destroy_s", "score_s")
    return Bounds(**dict.fromkeys(phases, seconds))


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
