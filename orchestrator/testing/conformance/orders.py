"""One sandbox for one run, and every order at most once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ... import tree
from ...core.errors import EvidenceIncompleteError
from ...core.evidence import Manifest
from ...core.states import State
from ...core.verdict import Reason
from ...ports import Ending, Order
from ...vault import Vault
from . import check
from .bench import (
    Bench,
    NotApplicableError,
    _ended,
    _holds_still,
    _passed,
    _same,
    _spec,
    _that,
    _ticks,
    _tree,
    _unresolved,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ...ports import Sandbox
    from ...runner import Progress


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
