"""The loop, on real processes: every fault of the contract that a real backend can show."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from orchestrator import (
    Bounds,
    Cancellation,
    EvalSpec,
    Reason,
    Runner,
    SpecError,
    State,
    StorageError,
    Verdict,
)
from orchestrator.backends import local
from orchestrator.batch import run_batch
from orchestrator.core.errors import JournalConflictError, JournalError, VaultError
from orchestrator.core.facts import FaultKind, Phase
from orchestrator.core.machine import CleanupPermit
from orchestrator.core.verdict import OutcomeKind
from orchestrator.ports import Ending, Record
from orchestrator.scoring import ExpectationsMissingError
from orchestrator.testing.faults import CONTRACT, FaultyBackend, Injection, Way
from orchestrator.vault import Vault
from orchestrator.workspace import SpecWorkspace

if TYPE_CHECKING:
    from orchestrator.backends.local import LocalBackend

QUICK = Bounds(upload_s=1.5, settle_s=3.0, download_s=1.5, destroy_s=1.5, score_s=5.0)
SPEC = EvalSpec(
    name="writes",
    files={"input": "given", "other": "too"},
    check="echo x >> runs.log; echo done > output; echo printed",
    deadline_s=2.0,
    grace_s=0.2,
    backstop_s=3.0,
    expect={
        "exit_code": 0,
        "stdout_equals": "printed\n",
        "files": [
            {"path": "output", "equals": "done\n"},
            {"path": "runs.log", "equals": "x\n"},
            {"path": "input", "unchanged": True},
            {"path": "junk", "exists": False},
        ],
    },
)
INJECTIONS = [
    Injection(verb, way)
    for verb, ways in CONTRACT.items()
    for way in ways
    if verb not in {"journal", "vault", "settle"} and way is not Way.CLOCK_JUMP
]
LOSES_NOTHING = {Way.SLOW, Way.TWICE}


def leftovers(backend: LocalBackend) -> list[str]:
    return sorted(each.name for each in backend.root.iterdir() if not each.name.startswith("."))


def test_a_run_passes_with_its_evidence_sealed_and_its_sandbox_gone(runner, backend):
    result = runner.run(SPEC)
    assert result.verdict is Verdict.PASSED
    assert result.state is State.SCORED
    assert result.reason is None
    assert result.outcome.exit_code == 0
    assert result.evidence.sealed
    assert result.evidence.stdout == b"printed\n"
    assert result.evidence.text("output") == "done\n"
    assert result.receipt.created == 2
    assert result.faults == ()
    assert result.retained_sandbox is None
    assert leftovers(backend) == []
    assert set(result.timings) == {"upload", "check", "download", "destroy", "score"}


@pytest.mark.parametrize("injection", INJECTIONS, ids=str)
def test_a_real_backend_that_goes_wrong_never_makes_a_wrong_verdict(tmp_path, backend, injection):
    """Every fault at every verb: passed, or unresolved with the fault; nothing is lost."""
    with (
        FaultyBackend(backend, [injection]) as faulty,
        Runner(faulty, tmp_path / "state", bounds=QUICK) as runner,
    ):
        result = runner.run(SPEC)
    assert faulty.happened == [injection]
    assert result.verdict in {Verdict.PASSED, Verdict.UNRESOLVED}
    if result.verdict is Verdict.UNRESOLVED:
        assert result.reason is not None
        assert result.faults
    elif injection.way not in {*LOSES_NOTHING, Way.VANISHED} and injection.verb != "open":
        assert result.faults, "the run passed, and the fault it met is not listed"
    if injection.way in LOSES_NOTHING:
        assert result.verdict is Verdict.PASSED
    if result.evidence is not None and result.evidence.exists("runs.log"):
        assert result.evidence.read("runs.log") == b"x\n"
    if result.retained_sandbox is None:
        assert leftovers(backend) == []


@pytest.mark.parametrize(
    ("check", "files"),
    [("echo done > junk", [{"path": "junk", "exists": False}]), ("rm input", [])],
    ids=["a file that should be absent", "a file that should be there"],
)
@pytest.mark.parametrize("way", [Way.TRUNCATED, Way.LEFT_OUT, Way.ERROR_BEFORE, Way.HANG_BEFORE])
def test_a_failed_download_is_never_scored_in_either_direction(
    tmp_path, backend, way, check, files
):
    spec = EvalSpec(
        name="absence",
        files={"input": "given"},
        check=f"{check}; echo more > more",
        deadline_s=5.0,
        expect={"exit_code": 0, "files": [{"path": "more", "exists": True}, *files]},
    )
    plan = [Injection("fetch", way, call) for call in (1, 2, 3)]
    with (
        FaultyBackend(backend, plan) as faulty,
        Runner(faulty, tmp_path / "state", bounds=QUICK) as runner,
    ):
        result = runner.run(spec)
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason is Reason.DOWNLOAD_FAILED
    assert not result.evidence.sealed
    assert result.expectations == ()


def test_a_download_that_fails_once_is_tried_again_and_both_are_known(tmp_path, backend):
    with (
        FaultyBackend(backend, ["fetch:truncated"]) as faulty,
        Runner(faulty, tmp_path / "state") as runner,
    ):
        result = runner.run(SPEC)
    assert result.verdict is Verdict.PASSED
    assert [fault.kind for fault in result.faults] == [FaultKind.INCOMPLETE]


def test_the_two_timeouts_are_told_apart(tmp_path, backend):
    """The deadline that the guest enforces is an outcome; the client's giving up is not."""
    slow = {"check": "echo started; sleep 7301", "grace_s": 0.2}
    with Runner(backend, tmp_path / "state") as runner:
        late = runner.run(EvalSpec(name="late", deadline_s=0.5, backstop_s=5.0, **slow))
    assert late.outcome.kind is OutcomeKind.DEADLINE_EXCEEDED
    assert late.verdict is Verdict.FAILED
    assert late.faults == ()
    with (
        FaultyBackend(backend, ["execute:hang-after"]) as faulty,
        Runner(faulty, tmp_path / "state") as runner,
    ):
        given_up = runner.run(EvalSpec(name="given up", deadline_s=0.5, backstop_s=1.2, **slow))
    assert given_up.outcome.kind is OutcomeKind.DEADLINE_EXCEEDED
    assert given_up.outcome.settled_after_client_timeout
    assert [(fault.phase, fault.kind) for fault in given_up.faults] == [
        (Phase.CHECK, FaultKind.BOUND_EXCEEDED)
    ]
    with (
        FaultyBackend(backend, ["execute:hang-before"]) as faulty,
        Runner(faulty, tmp_path / "state") as runner,
    ):
        never = runner.run(EvalSpec(name="never", deadline_s=0.5, backstop_s=1.2, **slow))
    assert never.verdict is Verdict.UNRESOLVED
    assert never.reason is Reason.CLIENT_TIMED_OUT
    assert [fault.kind for fault in never.faults] == [
        FaultKind.BOUND_EXCEEDED,
        FaultKind.NOT_STARTED,
    ]


def test_a_dispatch_that_comes_after_the_client_gave_up_starts_nothing(tmp_path, backend):
    """Late dispatch: the marker outside the workspace shows that the check never ran."""
    marker = tmp_path / "marker"
    spec = EvalSpec(
        name="late dispatch",
        check=["touch", str(marker)],
        deadline_s=0.5,
        grace_s=0.1,
        backstop_s=1.0,
        retain="unresolved",
    )
    faulty = FaultyBackend(backend, ["execute:late"])
    with faulty, Runner(faulty, tmp_path / "state") as runner:
        result = runner.run(spec)
    assert result.verdict is Verdict.UNRESOLVED
    calls = [thread for thread in threading.enumerate() if thread.name == "bounded call"]
    for call in calls:  # the late call goes on now, and ends
        call.join(timeout=10)
    assert not marker.exists()


def test_a_cleanup_that_fails_keeps_the_id_and_not_the_verdict(tmp_path, backend):
    for way in (Way.ERROR_BEFORE, Way.HANG_BEFORE):
        plan = [f"destroy:{way}"]
        with (
            FaultyBackend(backend, plan) as faulty,
            Runner(faulty, tmp_path / "state", bounds=QUICK) as runner,
        ):
            result = runner.run(SPEC)
        assert result.verdict is Verdict.PASSED
        assert result.retained_sandbox in leftovers(backend)
        assert result.faults[-1].phase is Phase.DESTROY


def test_retain_keeps_the_sandbox_of_an_unresolved_run_and_of_no_other(runner, backend):
    broken = EvalSpec(name="x", setup="exit 3", check="true", retain="unresolved")
    result = runner.run(broken)
    assert result.reason is Reason.SETUP_FAILED
    assert result.retained_sandbox == result.run_id
    assert leftovers(backend) == [result.run_id]
    assert result.faults[0].message == "setup ended: exited(3)"
    assert len(result.faults) == 1, "a sandbox that is kept on purpose is no fault"
    kept = runner.run(EvalSpec(name="y", check="true", retain="unresolved"))
    assert kept.retained_sandbox is None


def test_what_setup_changes_is_not_counted_as_the_checks(runner):
    spec = EvalSpec(
        name="x",
        files={"a": "1"},
        setup="echo 2 > a; echo prepared > b",
        check="test \"$(cat a b)\" = '2\nprepared' && echo 3 > c",
        expect={
            "exit_code": 0,
            "files": [{"path": path, "unchanged": path != "c"} for path in "abc"],
        },
    )
    result = runner.run(spec)
    assert result.verdict is Verdict.PASSED, result.expectations
    assert (result.receipt.created, result.receipt.modified) == (1, 0)
    assert "setup" in result.timings


@pytest.mark.parametrize(
    ("setup", "kind"),
    [("exit 1", "setup_failed"), ("kill -9 $$", "setup_failed"), ("sleep 7302", "setup_failed")],
)
def test_a_setup_that_fails_is_never_a_failed_check(runner, setup, kind):
    spec = EvalSpec(name="x", setup=setup, setup_deadline_s=0.3, grace_s=0.1, check="true")
    result = runner.run(spec)
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason is Reason.SETUP_FAILED
    assert result.faults[0].kind == kind
    assert result.outcome is None


def test_the_output_of_a_setup_that_failed_is_evidence(runner):
    result = runner.run(EvalSpec(name="x", setup="echo why >&2; exit 1", check="true"))
    assert result.evidence.stderr == b"why\n"
    assert not result.evidence.sealed


def test_every_expectation_is_evaluated_and_a_crash_in_one_is_not_a_failure(runner):
    spec = EvalSpec(
        name="x",
        check="echo hi",
        expect={
            "raises": lambda e: e.read("nothing") == b"",
            "exits": lambda _: exec("import sys; sys.exit(3)"),
            "wrong": lambda e: e.stdout == b"",
            "right": lambda e: e.stdout == b"hi\n",
            "none": lambda _: None,
            "exit_code": 0,
        },
    )
    result = runner.run(spec)
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason is Reason.SCORER_ERROR
    found = {each.name: each.passed for each in result.expectations}
    assert found == {
        "exit_code": True,
        "raises": None,
        "exits": None,
        "wrong": False,
        "right": True,
        "none": None,
    }
    raised = next(each for each in result.expectations if each.name == "raises")
    assert "FileNotFoundError" in raised.message
    assert "Traceback" in raised.message


def test_an_expectation_that_hangs_is_left_behind(tmp_path, backend):
    held = threading.Event()
    bounds = Bounds(score_s=0.3)
    with Runner(backend, tmp_path / "state", bounds=bounds) as runner:
        result = runner.run(
            EvalSpec(name="x", check="true", expect={"hangs": lambda _: held.wait()})
        )
    held.set()
    assert result.reason is Reason.SCORER_ERROR
    assert result.faults[-1].kind is FaultKind.BOUND_EXCEEDED


def test_a_question_about_output_that_was_not_kept_is_not_answered(runner):
    spec = EvalSpec(
        name="x",
        check="yes | head -n 100000",
        limits={"output_bytes": 1000},
        expect={"stdout_contains": "never printed"},
    )
    result = runner.run(spec)
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason is Reason.OUTPUT_TRUNCATED
    assert result.evidence.stdout.total == 200_000
    assert len(result.evidence.stdout.head) == 500


def test_a_deadline_is_a_failure_unless_it_is_expected(runner):
    late = {"check": "sleep 7303", "deadline_s": 0.3, "grace_s": 0.1}
    files = {"files": [{"path": "x", "exists": False}]}
    assert runner.run(EvalSpec(name="x", expect=files, **late)).verdict is Verdict.FAILED
    asked = {**files, "timed_out": True}
    assert runner.run(EvalSpec(name="x", expect=asked, **late)).verdict is Verdict.PASSED


def test_provisioning_does_not_eat_into_the_deadline(tmp_path, backend):
    """A start that takes as long as the deadline leaves the check its whole deadline."""
    faulty = FaultyBackend(backend, ["create:slow"])
    spec = EvalSpec(name="x", check="true", deadline_s=0.2, grace_s=0.1)
    with faulty, Runner(faulty, tmp_path / "state") as runner:
        result = runner.run(spec)
    assert result.verdict is Verdict.PASSED
    assert result.timings["upload"] >= 0.2


@pytest.mark.parametrize(
    "answer", [None, -1, 0, "0", object()], ids=["nothing", "-1", "0", "text", "an object"]
)
def test_an_answer_that_is_no_record_is_no_outcome(tmp_path, backend, monkeypatch, answer):

    monkeypatch.setattr(local.LocalSandbox, "execute", lambda *_: answer)
    with Runner(backend, tmp_path / "state") as runner:
        result = runner.run(EvalSpec(name="x", check="true"))
    assert result.verdict is Verdict.UNRESOLVED
    assert result.outcome is None


@pytest.mark.parametrize("code", [None, -1, 256, 1000])
def test_an_exit_code_that_cannot_be_one_is_no_outcome(tmp_path, backend, monkeypatch, code):

    record = Record(ending=Ending.EXITED, code=code)
    monkeypatch.setattr(local.LocalSandbox, "execute", lambda *_: record)
    with Runner(backend, tmp_path / "state") as runner:
        result = runner.run(EvalSpec(name="x", check="true"))
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason is Reason.CHECK_LOST


# --- many at once, cancelled, stopped -------------------------------------------------------------


def test_cancelled_runs_leave_no_program_and_no_sandbox(tmp_path, backend):
    """Ten runs that are cancelled in mid-check settle, save, clean up, and then are cancelled."""

    async def main() -> list[object]:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        waiting = set()

        def observe(progress):
            if type(progress.command).__name__ == "Check":
                waiting.add(progress.run.run_id)
                if len(waiting) == 10:
                    loop.call_soon_threadsafe(started.set)

        with Runner(backend, tmp_path / "state", observer=observe) as runner:
            spec = EvalSpec(name="x", check="sleep 7304", deadline_s=60.0)
            tasks = [asyncio.create_task(runner.arun(spec)) for _ in range(10)]
            await started.wait()
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            results = [runner.result(run_id) for run_id in runner.journal.run_ids()]
        assert {result.reason for result in results} == {Reason.CANCELLED}
        assert all(result.retained_sandbox is None for result in results)
        return done

    done = asyncio.run(main())
    assert all(isinstance(each, asyncio.CancelledError) for each in done)
    assert leftovers(backend) == []


def test_a_run_in_an_event_loop_does_not_block_it(tmp_path, backend):
    """The check ends only when the loop, which it must not block, writes to its fifo."""
    fifo = tmp_path / "go"
    os.mkfifo(fifo)

    async def main() -> None:
        with Runner(backend, tmp_path / "state") as runner:
            spec = EvalSpec(name="x", check=["cat", str(fifo)], expect={"stdout_equals": "went"})
            task = asyncio.create_task(runner.arun(spec))
            writer = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
            os.write(writer, b"went")
            os.close(writer)
            assert (await task).verdict is Verdict.PASSED

    asyncio.run(main())


def test_a_cancellation_that_comes_first_starts_nothing(runner):
    cancellation = Cancellation()
    cancellation.cancel()
    result = runner.run(EvalSpec(name="x", check="touch marker"), cancellation=cancellation)
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason in {Reason.CANCELLED, Reason.UPLOAD_FAILED}


def test_one_bad_run_never_touches_its_siblings(tmp_path, backend):

    specs = [EvalSpec(name=f"run {n}", check=f"exit {n % 3}") for n in range(12)]
    specs[4] = EvalSpec(name="run 4", setup="exit 1", check="true")
    with Runner(backend, tmp_path / "state") as runner:
        attempts = list(run_batch(runner, specs, jobs=4))
    verdicts = {each.result.name: each.result.verdict for each in attempts}
    assert len(verdicts) == 12
    for number in range(12):
        expected = Verdict.PASSED if number % 3 == 0 else Verdict.FAILED
        assert verdicts[f"run {number}"] is (Verdict.UNRESOLVED if number == 4 else expected)


def test_an_unresolved_run_is_tried_again_in_a_new_run_and_both_keep_their_evidence(
    tmp_path, backend
):

    faulty = FaultyBackend(backend, ["execute:vanished"])
    with faulty, Runner(faulty, tmp_path / "state") as runner:
        first, second = run_batch(runner, [SPEC], attempts=3)
        kept = runner.result(first.result.run_id)
    assert first.result.verdict is Verdict.UNRESOLVED
    assert second.result.verdict is Verdict.PASSED
    assert second.result.retry_of == first.result.run_id
    assert kept.faults == first.result.faults
    assert (first.last, second.last) == (False, True)


def test_a_full_disk_stops_the_run_where_it_is_and_resume_goes_on(tmp_path, backend, monkeypatch):

    def full(*_: object, **__: object) -> None:
        raise VaultError("no space left on device")

    with Runner(backend, tmp_path / "state") as runner:
        with monkeypatch.context() as patched:
            patched.setattr(Vault, "seal", full)
            with pytest.raises(StorageError):
                runner.run(SPEC)
        (run_id,) = runner.journal.run_ids()
        assert runner.result(run_id).state is State.CHECKED
        assert leftovers(backend) == [run_id]
        assert runner.resume(run_id).verdict is Verdict.PASSED
    assert leftovers(backend) == []


def test_what_a_spec_cannot_mean_here_is_refused_before_anything_is_started(runner, tmp_path):
    with pytest.raises(SpecError, match=r"limits\.memory_bytes"):
        runner.run(EvalSpec(name="x", check="true", limits={"memory_bytes": 1}))
    with pytest.raises(SpecError, match="workspace"):
        runner.run(EvalSpec(name="x", check="true", workspace=str(tmp_path / "nowhere")))
    assert runner.journal.run_ids() == []


def test_a_workspace_that_cannot_be_copied_is_unresolved_and_named(runner, tmp_path):

    place = tmp_path / "workspace"
    place.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "agent.sock"))
        result = runner.run(EvalSpec(name="x", check="true", workspace=str(place)))
    assert result.reason is Reason.UPLOAD_FAILED
    assert "agent.sock" in result.faults[0].message


def test_a_state_directory_inside_the_workspace_is_no_part_of_it(tmp_path, backend):
    place = tmp_path / "workspace"
    place.mkdir()
    (place / "a").write_text("1")
    with Runner(backend, place / ".orchestrator") as runner:
        result = runner.run(EvalSpec(name="x", check="ls -A", workspace=str(place)))
    assert result.evidence.stdout == b"a\n"


# --- resuming -------------------------------------------------------------------------------------


def test_a_run_whose_expectations_are_functions_waits_for_them(tmp_path, backend):
    spec = EvalSpec(name="x", check="echo hi", expect={"greets": lambda e: e.stdout == b"hi\n"})

    class Interrupt(BaseException):
        pass

    def stop_before_scoring(progress):
        if type(progress.command).__name__ == "Score":
            raise Interrupt

    with (
        pytest.raises(Interrupt),
        Runner(backend, tmp_path / "state", observer=stop_before_scoring) as first,
    ):
        first.run(spec)
    with Runner(backend, tmp_path / "state") as second:
        (run_id,) = second.unfinished()
        with pytest.raises(ExpectationsMissingError, match="greets"):
            second.resume(run_id)
        with pytest.raises(JournalError, match="another spec"):
            second.resume(run_id, EvalSpec(name="x", check="echo other"))
        assert second.resume(run_id, spec).verdict is Verdict.PASSED
        assert second.resume(run_id).verdict is Verdict.PASSED, "a finished run is given as it is"


def test_a_run_that_a_live_runner_drives_is_not_resumed(tmp_path, backend):
    with Runner(backend, tmp_path / "state") as first, Runner(backend, tmp_path / "state") as other:
        first.begin(EvalSpec(name="x", check="true"))
        (run_id,) = first.journal.run_ids()
        assert other.unfinished() == []
        with pytest.raises(JournalConflictError, match="live runner"):
            other.resume(run_id)


def test_a_check_that_outlives_its_runner_is_joined_and_not_run_again(tmp_path, backend):
    """The check goes on without a runner; the one that resumes waits for the same process."""
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    spec = EvalSpec(
        name="x",
        check=f"echo x >> runs.log; read line < {fifo}; echo $line",
        deadline_s=30.0,
        expect={"stdout_equals": "went\n", "files": [{"path": "runs.log", "equals": "x\n"}]},
    )

    class Interrupt(BaseException):
        pass

    with Runner(backend, tmp_path / "state") as first:
        record, step = first.begin(spec)
        steps = first.steps(record, step)
        next(steps)
        next(steps)  # uploaded

        def go_on() -> None:
            with suppress(JournalError):  # by then the first runner has let go of its journal
                next(steps, None)

        thread = threading.Thread(target=go_on)
        thread.start()
        writer = os.open(fifo, os.O_WRONLY)  # opens when the check reads: it runs
    with Runner(backend, tmp_path / "state") as second:
        (run_id,) = second.unfinished()
        results: list[object] = []
        other = threading.Thread(target=lambda: results.append(second.resume(run_id)))
        other.start()
        os.write(writer, b"went\n")
        os.close(writer)
        other.join(timeout=30)
        thread.join(timeout=30)
    assert results[0].verdict is Verdict.PASSED, results[0].expectations


def test_elapsed_time_is_the_guests_and_phases_add_up(runner):
    before = time.monotonic()
    result = runner.run(EvalSpec(name="x", check="sleep 0.3"))
    whole = time.monotonic() - before
    assert 0.25 <= result.outcome.elapsed_s <= result.timings["check"] + 0.02
    assert sum(result.timings.values()) <= whole


def test_a_cancellation_while_the_workspace_is_read_leaves_no_sandbox(
    tmp_path, backend, monkeypatch
):
    """What is left behind was not asked for a sandbox yet, and never asks for one."""
    reading, go_on = threading.Event(), threading.Event()
    scan = SpecWorkspace.manifest

    def slow(self):
        reading.set()
        go_on.wait()
        return scan(self)

    monkeypatch.setattr(SpecWorkspace, "manifest", slow)
    cancellation = Cancellation()
    with Runner(backend, tmp_path / "state") as runner:
        results = []
        thread = threading.Thread(
            target=lambda: results.append(runner.run(SPEC, cancellation=cancellation))
        )
        thread.start()
        reading.wait()
        cancellation.cancel()
        thread.join(timeout=30)
        go_on.set()
    for call in threading.enumerate():
        if call.name == "bounded call":
            call.join(timeout=30)
    assert results[0].reason is Reason.CANCELLED
    assert results[0].retained_sandbox is None
    assert leftovers(backend) == []


def test_every_expectation_that_breaks_is_listed_as_a_fault(runner):
    broken = {"one": lambda _: 1 / 0, "two": lambda _: {}["x"]}
    result = runner.run(EvalSpec(name="x", check="true", expect=broken))
    assert len(result.faults) == 2


@pytest.mark.parametrize("options", [{"jobs": 0}, {"attempts": 0}])
def test_a_batch_of_nothing_at_a_time_is_refused(runner, options):
    with pytest.raises(ValueError, match="at least 1"):
        list(run_batch(runner, [SPEC], **options))


def test_content_that_was_damaged_on_disk_is_brought_anew_by_the_next_run(runner):
    first = runner.run(SPEC)
    entry = first.evidence.entry("output")
    place = runner.vault.path / "objects" / entry.sha256[:2] / entry.sha256
    place.chmod(0o644)
    place.write_bytes(b"DONE\n")
    assert runner.run(SPEC).verdict is Verdict.UNRESOLVED
    assert runner.run(SPEC).verdict is Verdict.PASSED


def test_a_sandbox_in_which_something_lives_is_not_removed_around_it(backend):
    """What a supervisor that was killed left behind keeps the sandbox, and its id."""
    sandbox = backend.create("r", SPEC)
    sandbox.upload(SpecWorkspace(None, {}))
    with subprocess.Popen(["sleep", "7310"], cwd=sandbox.workspace) as left:
        with pytest.raises(OSError, match=f"process {left.pid} is still running in it"):
            sandbox.destroy(CleanupPermit("r", "r"))
        assert backend.open("r") is not None
        left.kill()
    sandbox.destroy(CleanupPermit("r", "r"))
    assert backend.open("r") is None


# --- sweeping -------------------------------------------------------------------------------------


def test_a_sandbox_whose_cleanup_failed_is_swept_later_and_the_result_says_so(tmp_path, backend):
    """A failed deletion keeps the id and the verdict; sweeping finishes the job."""
    faulty = FaultyBackend(backend, ["destroy:error-before"])
    with faulty, Runner(faulty, tmp_path / "state") as runner:
        result = runner.run(SPEC)
        assert result.retained_sandbox == result.run_id
        (swept,) = runner.sweep()
        assert (swept.run_id, swept.problem) == (result.run_id, "")
        assert runner.sweep() == []
    with Runner(backend, tmp_path / "state") as another:
        after = another.result(result.run_id)
    assert after.verdict is result.verdict
    assert after.faults == result.faults
    assert after.retained_sandbox is None
    assert leftovers(backend) == []


def test_what_could_not_be_swept_keeps_its_id_and_says_why(tmp_path, backend):
    faulty = FaultyBackend(backend, ["destroy:error-before", "destroy#2:error-before"])
    with faulty, Runner(faulty, tmp_path / "state") as runner:
        result = runner.run(SPEC)
        (swept,) = runner.sweep()
        assert "destroy failed" in swept.problem
        assert runner.result(result.run_id).retained_sandbox == result.run_id


def test_a_sandbox_that_was_kept_on_purpose_is_swept_only_when_that_is_asked_for(runner, backend):
    result = runner.run(EvalSpec(name="x", setup="exit 1", check="true", retain="unresolved"))
    assert runner.sweep() == []
    assert leftovers(backend) == [result.run_id]
    (swept,) = runner.sweep(kept=True)
    assert swept.problem == ""
    assert leftovers(backend) == []


def test_sweeping_leaves_alone_what_is_not_finished(tmp_path, backend):
    with Runner(backend, tmp_path / "state") as first:
        record, step = first.begin(SPEC)
        steps = first.steps(record, step)
        next(steps)
        next(steps)  # uploaded
        with Runner(backend, tmp_path / "state") as other:
            assert other.sweep(kept=True) == []
        assert leftovers(backend) == [record.run_id]
        assert [*steps][-1].run.finished
