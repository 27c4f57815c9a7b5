"""The OpenShell backend, over real gRPC, against a gateway that does all that may go wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("grpc")
pytest.importorskip("openshell")

import grpc
import openshell
from openshell._proto import openshell_pb2, openshell_pb2_grpc, sandbox_pb2

from orchestrator import EvalSpec, Reason, Runner, SpecError, State, Verdict, guest
from orchestrator.backends.openshell import (
    OpenShellBackend,
    OpenShellError,
    examine,
    label_of,
    name_of,
)
from orchestrator.backends.openshell import sandbox as sandboxes
from orchestrator.backends.openshell.gateway import CallError, Gateway
from orchestrator.backends.openshell.sandbox import AdmittedError, GatewayShell, OpenShellSandbox
from orchestrator.core.clocks import Bounds
from orchestrator.core.errors import SandboxGoneError
from orchestrator.core.facts import FaultKind, Phase
from orchestrator.guest.answers import GuestError
from orchestrator.owner import alive
from orchestrator.ports import Ending, Order
from orchestrator.runner import time_sorted_run_id
from orchestrator.testing.conformance import CHECKS, conform
from orchestrator.testing.conformance.bench import permit
from orchestrator.testing.openshell_gateway import FAULT_LABEL, Fault, OpenShellGateway
from orchestrator.workspace import SpecWorkspace

IMAGE = "registry.example/checks:1"
MARK = "echo x >> ran"


class Tampered(OpenShellSandbox):
    """A sandbox that can be made to vanish, or be exchanged, behind its runner's back."""

    def tamper(self, act):
        if act == "jump":
            raise NotImplementedError
        self._backend.delete(self.ref)
        if act == "replace":
            spec = EvalSpec(name="another", check="true", deadline_s=1)
            self._backend.create(self.ref.sandbox_id, spec)


class Tampering(OpenShellBackend):
    def sandbox(self, ref, conditions):
        return Tampered(ref, conditions, self)


@pytest.fixture(scope="module")
def shared():
    with OpenShellGateway(slow_delete_s=1.0) as gateway:
        yield gateway


@contextmanager
def own(**options):
    """A gateway of a test's own, which it may kill."""
    with OpenShellGateway(**options) as gateway:
        yield gateway


class Lab:
    """Runs over a gateway, and what it may be told to do wrong at which moment."""

    def __init__(self, gateway, place):
        self.gateway = gateway
        self.place = place
        self.backends = []
        self.numbers = iter(range(1000))

    def backend(self, kind=OpenShellBackend, **given):
        given = {"image": IMAGE, "endpoint": self.gateway.endpoint, "call_s": 10.0, **given}
        self.backends.append(kind(given.pop("image"), **given))
        return self.backends[-1]

    def runner(self, backend=None, *, at=None, state=None, run_id=None, **given):
        """A runner; `at` says for states what to do when a run has come to them."""

        def observe(progress):
            if act := (at or {}).get(progress.run.state):
                act(progress.run.run_id)

        place = state or self.place / f"state-{next(self.numbers)}"
        named = (lambda: run_id) if run_id else None
        return Runner(backend or self.backend(), place, observer=observe, new_run_id=named, **given)

    def run(self, check, *, at=None, backend=None, bounds=None, fault=None, matching="", **spec):
        """Run a check, with a fault wherever a command of its sandbox matches."""
        run_id = time_sorted_run_id()
        if fault is not None:
            times = spec.pop("times", 0)
            self.gateway.inject(fault, sandbox=run_id, matching=matching, times=times)
        given = {"name": "openshell", "deadline_s": 5.0, "grace_s": 0.3, **spec}
        with self.runner(backend, at=at, run_id=run_id, bounds=bounds) as runner:
            return runner.run(EvalSpec(check=check, **given))

    def inject(self, fault, matching, **given):
        """Give what injects a fault into a run's sandbox."""
        return lambda run_id: self.gateway.inject(
            fault, sandbox=name_of(run_id), matching=matching, **given
        )

    def workspace(self, run_id):
        return self.gateway.workspace(name_of(run_id)) / "workspace"

    def marks(self, run_id):
        """How often a check ran that leaves a mark, in a sandbox that is still there."""
        mark = self.workspace(run_id) / "ran"
        return len(mark.read_text().split()) if mark.exists() else 0

    def close(self):
        for backend in self.backends:
            backend.close()


@pytest.fixture
def lab(shared, tmp_path):
    made = Lab(shared, tmp_path)
    yield made
    shared.clear()
    made.close()


@contextmanager
def own_lab(tmp_path, **options):
    with own(**options) as gateway:
        made = Lab(gateway, tmp_path)
        try:
            yield made
        finally:
            made.close()


def kinds(result):
    return [fault.kind for fault in result.faults]


def story(result):
    return f"{result.verdict} {result.reason} {result.outcome} {result.faults}"


def order(check, **given):
    known = {
        "slot": "check",
        "argv": ("/bin/sh", "-c", check),
        "env": {},
        "deadline_s": 5.0,
        "grace_s": 0.3,
        "start_by": time.monotonic() + 5.0,
        "now": time.monotonic,
        "output_bytes": 1 << 20,
        "nonce": "a nonce",
    }
    return Order(**{**known, **given})


def made(backend, files=None):
    """A sandbox with a workspace in it."""
    spec = EvalSpec(name="made", check="true", deadline_s=1, files=files or {})
    sandbox = backend.create(time_sorted_run_id(), spec)
    assert sandbox.upload(SpecWorkspace(None, spec.files))
    return sandbox


# --- conformance ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_it_conforms(shared, name):
    [finding] = conform(lambda: Tampering(IMAGE, endpoint=shared.endpoint), only=[name])
    if finding.ok is None and name == "repositories_arrive_clean":
        pytest.skip(finding.reason)  # without git on this machine
    assert finding.ok is True, finding.reason


def test_nothing_is_left_of_the_checks(lab):
    assert lab.backend().labelled() == []


# --- the late dispatch ----------------------------------------------------------------------------

LATE = {"deadline_s": 0.5, "grace_s": 0.2, "backstop_s": 2.0}


def executed(lab, run_id, word):
    """The executions in a run's sandbox whose command has a word."""
    return [each for each in lab.gateway.executions(name_of(run_id)) if word in each.command]


def test_a_check_that_the_gateway_starts_after_the_backstop_never_runs(tmp_path):
    with own_lab(tmp_path, dispatch_delay_s=600) as lab:
        late = {"fault": Fault.LATE_DISPATCH, "matching": "supervisor.sh run /", **LATE}
        state = tmp_path / "state"
        run_id = time_sorted_run_id()
        lab.gateway.inject(late["fault"], sandbox=run_id, matching=late["matching"])
        spec = EvalSpec(name="late", check=MARK, retain="unresolved", **LATE)
        with lab.runner(run_id=run_id, state=state) as runner:
            result = runner.run(spec)
        assert result.verdict is Verdict.UNRESOLVED, story(result)
        assert result.reason is Reason.CLIENT_TIMED_OUT
        assert FaultKind.NOT_STARTED in kinds(result)
        assert result.retained_sandbox == run_id
        [held, *_] = executed(lab, run_id, "run")
        assert held.history == ("admitted", "held")
        lab.gateway.release()
        assert lab.gateway.wait_for(run_id, held.number, "ended").code == 0
        assert lab.marks(run_id) == 0
        with lab.runner(state=state) as runner:
            [swept] = runner.sweep(kept=True)
        assert swept.problem == ""
        assert not lab.gateway.place(run_id).exists()


def test_a_check_that_could_be_neither_started_nor_settled_never_runs_later(tmp_path):
    with own_lab(tmp_path, dispatch_delay_s=600) as lab:
        run_id = time_sorted_run_id()
        lab.gateway.inject(Fault.LATE_DISPATCH, sandbox=run_id, matching="supervisor.sh run /")
        lab.gateway.inject(Fault.RELAY_TIMEOUT, sandbox=run_id, matching="supervisor.sh settle /")
        spec = EvalSpec(name="late", check=MARK, retain="unresolved", **LATE)
        with lab.runner(run_id=run_id) as runner:
            result = runner.run(spec)
        assert result.reason is Reason.CLIENT_TIMED_OUT, story(result)
        assert FaultKind.NOT_STARTED not in kinds(result)
        lab.gateway.release()
        [held, *_] = executed(lab, run_id, "run")
        assert lab.gateway.wait_for(run_id, held.number, "ended").code == 0
        assert lab.marks(run_id) == 0


def test_a_check_that_starts_too_late_for_its_deadline_is_refused_by_the_guest(tmp_path):
    with own_lab(tmp_path, dispatch_delay_s=1.5) as lab:
        late = {"deadline_s": 1.0, "grace_s": 0.2, "backstop_s": 2.3, "retain": "unresolved"}
        result = lab.run(MARK, fault=Fault.LATE_DISPATCH, matching="supervisor.sh run /", **late)
        assert result.verdict is Verdict.UNRESOLVED
        assert result.reason is Reason.CHECK_LOST, story(result)
        assert kinds(result)[0] is FaultKind.NOT_STARTED
        assert lab.marks(result.run_id) == 0


def test_a_check_that_starts_late_and_in_time_has_its_true_outcome(tmp_path):
    with own_lab(tmp_path, dispatch_delay_s=0.6) as lab:
        late = {"deadline_s": 1.0, "grace_s": 0.2, "backstop_s": 4.0}
        expect = {"files": [{"path": "ran", "equals": "x\n"}], "exit_code": 7}
        result = lab.run(
            f"{MARK}; sleep 0.8; exit 7",
            fault=Fault.LATE_DISPATCH,
            matching="supervisor.sh run /",
            expect=expect,
            **late,
        )
        assert result.verdict is Verdict.PASSED, story(result)
        assert str(result.outcome) == "exited(7)"


def test_an_unpacking_that_the_gateway_starts_late_leaves_the_check_its_tree(tmp_path):
    with own_lab(tmp_path, dispatch_delay_s=600) as lab:
        backend = lab.backend()
        spec = EvalSpec(name="late", check="true", deadline_s=1, files={"given": "1"})
        run_id = time_sorted_run_id()
        sandbox = backend.create(run_id, spec)
        matching = {"sandbox": run_id, "matching": "account.sh unpack /", "times": 1}
        lab.gateway.inject(Fault.LATE_DISPATCH, **matching)
        workspace = SpecWorkspace(None, spec.files)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(sandbox.upload, workspace)
            number = 6  # install, record, record, take, take, unpack
            lab.gateway.wait_for(run_id, number, "held")
            assert lab.backend().open(run_id).upload(workspace)
            done = sandbox.execute(order("cp given taken"))
            before = sandbox.manifest()
            lab.gateway.release()
            with pytest.raises(GuestError, match="exit event 1"):
                first.result()
        assert (done.ending, done.code) == (Ending.EXITED, 0)
        assert not before.differences(sandbox.manifest())
        assert {"given", "taken"} <= set(before.entries)


# --- the two clocks -------------------------------------------------------------------------------


def test_a_check_within_its_deadline_passes_however_close(lab):
    result = lab.run("sleep 2.8; echo done", deadline_s=3.0, grace_s=0.3, backstop_s=5.0)
    assert result.verdict is Verdict.PASSED, story(result)
    assert 2.8 <= result.outcome.elapsed_s < 3.0


def test_the_gateway_is_asked_to_end_nothing_that_the_guest_has_not_ended_long_before(lab):
    given = []

    class Listening(GatewayShell):
        def _request(self, argv, bound_s):
            given.append((argv, super()._request(argv, bound_s)))
            return given[-1][1]

    backend = lab.backend()
    sandbox = made(backend)
    guest = backend.guest(sandbox.ref)
    guest.shell = Listening(guest.shell.gateway, guest.shell.name)
    sandbox.execute(order("true", deadline_s=30.0, grace_s=2.0))
    [run] = [sent for argv, sent in given if "run" in argv]
    assert run.execution_timeout.ToSeconds() >= 30 + 2 + 60
    assert run.no_login_shell
    assert len(run.request_id) == 36
    assert all(sent.no_login_shell for _, sent in given)
    backend.delete(sandbox.ref)


def test_a_deadline_and_a_client_timeout_stay_apart(lab):
    late = lab.run("sleep 9", deadline_s=0.5, expect={"timed_out": True})
    assert (late.verdict, str(late.outcome.kind)) == (Verdict.PASSED, "deadline_exceeded")
    assert not late.outcome.settled_after_client_timeout
    assert late.faults == ()


def test_a_client_timeout_is_followed_by_a_download_and_a_score(tmp_path):
    """The answer about the end of the check is held: the client gives up, and settles."""
    with own_lab(tmp_path, dispatch_delay_s=600) as lab:
        known = lab.run("echo result > result")
        [run] = executed(lab, known.run_id, "run")
        held = lab.inject(Fault.LATE_DISPATCH, "account.sh record /", number=run.number + 1)
        result = lab.run(
            "echo result > result; exit 3",
            at={State.UPLOADED: held},
            deadline_s=0.5,
            grace_s=0.2,
            backstop_s=2.0,
            expect={"exit_code": 3, "files": [{"path": "result", "equals": "result\n"}]},
        )
        assert result.verdict is Verdict.PASSED, story(result)
        assert result.outcome.settled_after_client_timeout
        assert kinds(result) == [FaultKind.BOUND_EXCEEDED]


# --- what may go wrong with the check's own request -----------------------------------------------

NOTHING_STARTED = (Fault.NO_SESSION, Fault.RELAY_TIMEOUT, Fault.RELAY_LIMIT)
GOES_ON = (Fault.RELAY_LOST, Fault.EXIT_124_EARLY, Fault.BIG_EVENT)
ENDED = (Fault.NO_EXIT, Fault.DELIVERY_UNKNOWN)


@pytest.mark.parametrize("fault", NOTHING_STARTED)
def test_a_request_that_started_nothing_is_unresolved_and_known_not_to_have_started(lab, fault):
    result = lab.run(MARK, fault=fault, matching="supervisor.sh run /", retain="unresolved")
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason is Reason.CHECK_LOST, story(result)
    assert FaultKind.NOT_STARTED in kinds(result)
    assert lab.marks(result.run_id) == 0
    lab.backend().open(result.run_id).destroy(permit(result.run_id, None))


def test_a_gateway_that_remembers_no_more_requests_is_asked_without_an_id(lab):
    result = lab.run(MARK, fault=Fault.RELAY_LIMIT, matching="supervisor.sh run /", times=1)
    assert result.verdict is Verdict.PASSED, story(result)
    assert result.evidence.read("ran") == b"x\n"


@pytest.mark.parametrize("fault", GOES_ON)
def test_a_check_that_goes_on_without_its_stream_is_stopped_or_has_its_outcome(lab, fault):
    check = f"{MARK}; sleep 9; echo x >> over"
    result = lab.run(check, fault=fault, matching="supervisor.sh run /", retain="unresolved")
    assert result.verdict is Verdict.UNRESOLVED, story(result)
    assert result.reason is Reason.CHECK_LOST
    assert {FaultKind.STOPPED, FaultKind.NOT_STARTED} & set(kinds(result)), story(result)
    assert lab.marks(result.run_id) <= 1
    [run] = executed(lab, result.run_id, "run")
    lab.gateway.wait_for(result.run_id, run.number, "ended")
    assert not (lab.workspace(result.run_id) / "over").exists()
    lab.backend().open(result.run_id).destroy(permit(result.run_id, None))


@pytest.mark.parametrize("fault", ENDED)
def test_a_check_whose_end_was_not_told_has_its_true_outcome(lab, fault):
    expect = {"exit_code": 3, "files": [{"path": "ran", "equals": "x\n"}]}
    given = {"fault": fault, "matching": "supervisor.sh run /", "expect": expect}
    result = lab.run(f"{MARK}; exit 3", **given)
    assert result.verdict is Verdict.PASSED, story(result)
    assert str(result.outcome) == "exited(3)"
    [told] = result.faults
    assert told.phase is Phase.CHECK


@pytest.mark.parametrize("code", [74, 124, 137])
def test_exit_codes_that_a_gateway_uses_itself_are_the_checks_own(lab, code):
    result = lab.run(f"exit {code}", expect={"exit_code": code})
    assert (result.verdict, str(result.outcome)) == (Verdict.PASSED, f"exited({code})")


def test_a_check_whose_sandbox_came_up_again_blank_is_unresolved(lab):
    result = lab.run(MARK, fault=Fault.RESTARTED_BLANK, matching="supervisor.sh run /")
    assert result.verdict is Verdict.UNRESOLVED
    assert result.outcome is None
    assert not result.evidence.sealed
    assert FaultKind.NOT_STARTED not in kinds(result), story(result)


# --- what may go wrong with the evidence ----------------------------------------------------------

TRANSFERS = (
    *(Fault.RELAY_LOST, Fault.EXIT_124_EARLY, Fault.BIG_EVENT, Fault.NO_EXIT, Fault.SHORT_OUTPUT),
    *(Fault.DELIVERY_UNKNOWN, Fault.NO_SESSION, Fault.RELAY_TIMEOUT, Fault.RESTARTED_BLANK),
)
BOTH_WAYS = {"files": [{"path": "present", "exists": True}, {"path": "absent", "exists": False}]}


CONTENT = (Fault.RELAY_LOST, Fault.BIG_EVENT, Fault.NO_EXIT, Fault.SHORT_OUTPUT)


@pytest.mark.parametrize(
    ("verb", "fault"),
    [*(("list", fault) for fault in TRANSFERS), *(("send", fault) for fault in CONTENT)],
)
def test_a_failed_download_is_scored_in_neither_direction(lab, fault, verb):
    wrong = lab.inject(fault, f"account.sh {verb} /")
    result = lab.run("echo 1 > present", at={State.CHECKED: wrong}, expect=BOTH_WAYS)
    if verb == "send" and fault is Fault.NO_EXIT:  # all has come, and is known by its digest
        assert result.verdict is Verdict.PASSED, story(result)
        assert [each.phase for each in result.faults] == [Phase.DOWNLOAD]
        return
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason is Reason.DOWNLOAD_FAILED, story(result)
    assert result.expectations == ()
    assert str(result.outcome) == "exited(0)"
    assert result.retained_sandbox is None


def test_a_download_that_failed_once_is_made_again(lab):
    wrong = lab.inject(Fault.SHORT_OUTPUT, "account.sh send /", times=1)
    result = lab.run("echo 1 > present", at={State.CHECKED: wrong}, expect=BOTH_WAYS)
    assert result.verdict is Verdict.PASSED, story(result)
    assert [fault.phase for fault in result.faults] == [Phase.DOWNLOAD]


@pytest.mark.parametrize("fault", CONTENT)
def test_a_failed_upload_starts_no_check(lab, fault):
    result = lab.run(MARK, fault=fault, matching="account.sh hash /", files={"given": "1"})
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason is Reason.UPLOAD_FAILED, story(result)
    assert executed(lab, result.run_id, "run") == []
    assert result.retained_sandbox is None


@pytest.mark.parametrize("fault", [Fault.RELAY_LOST, Fault.NO_EXIT, Fault.NO_SESSION])
def test_a_piece_whose_answer_was_lost_is_not_sent_into_the_tree_twice(lab, fault):
    files = {"large": os.urandom(2_000_000)}
    given = {"fault": fault, "matching": "account.sh take /", "files": files}
    result = lab.run("wc -c < large", times=2, **given)
    assert result.verdict is Verdict.PASSED, story(result)
    assert result.evidence.stdout.decode().strip() == "2000000"


def test_a_resumed_upload_sends_what_is_not_there(lab):
    files = {"large": os.urandom(3_000_000)}
    backend = lab.backend()
    spec = EvalSpec(name="resumed", check="true", deadline_s=1, files=files)
    run_id = time_sorted_run_id()
    sandbox = backend.create(run_id, spec)
    workspace = SpecWorkspace(None, spec.files)
    # install, record, record, take to ask, and then pieces: the third one is lost for good
    for number in (7, 8, 9):
        lab.gateway.inject(Fault.NO_SESSION, sandbox=run_id, number=number)
    with pytest.raises(GuestError, match="no supervisor session"):
        sandbox.upload(workspace)
    before = len(executed(lab, run_id, "take"))
    again = lab.backend().open(run_id)
    assert again.upload(workspace)
    assert not workspace.manifest().differences(again.manifest())
    sent = len(executed(lab, run_id, "take")) - before
    assert sent == 1 + 3  # of five pieces, two were there
    backend.delete(sandbox.ref)


# --- sandboxes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault.ERROR_PHASE, "SANDBOX_PHASE_ERROR.*ContainerExited: Container exited"),
        (Fault.COMPLETED_PHASE, "SANDBOX_PHASE_COMPLETED.*MainProcessExited"),
        (Fault.STUCK_PROVISIONING, r"SANDBOX_PHASE_PROVISIONING after 0\.5 s"),
        (Fault.GLOBAL_POLICY, "policy_source is POLICY_SOURCE_GLOBAL"),
        (Fault.NOT_ADMITTED, "not admitted: policy was not admitted"),
    ],
)
def test_a_sandbox_that_is_not_as_it_should_be_is_no_failure_of_the_check(lab, fault, said):
    backend = lab.backend(labels={FAULT_LABEL: fault}, ready_s=0.5, call_s=2.0)
    result = lab.run(MARK, backend=backend)
    assert result.verdict is Verdict.UNRESOLVED
    assert result.reason is Reason.UPLOAD_FAILED
    assert result.retained_sandbox is None, story(result)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(story(result))
    assert lab.backend().open(result.run_id) is None


def test_a_creation_whose_answer_was_lost_is_found(lab):
    result = lab.run("true", backend=lab.backend(labels={FAULT_LABEL: Fault.CREATE_LOST}))
    assert result.verdict is Verdict.PASSED, story(result)


def test_no_sandbox_is_said_to_be_absent_while_its_creation_is_in_doubt(tmp_path):
    with own_lab(tmp_path) as lab:
        backend = lab.backend(call_s=1.5)
        backend.connect()
        lab.gateway.kill()
        with pytest.raises(OpenShellError, match=r"CreateSandbox|GetSandbox"):
            backend.create("in-doubt", EvalSpec(name="doubt", check="true", deadline_s=1))
        lab.gateway.start()
        with pytest.raises(OpenShellError, match="it may come yet"):
            backend.open("in-doubt")
        assert lab.backend().open("in-doubt") is None


def test_a_name_that_somebody_else_has_is_not_used_and_not_deleted(lab):
    run_id = time_sorted_run_id()
    gateway = lab.backend().connect()
    request = openshell_pb2.CreateSandboxRequest(name=run_id, spec=openshell_pb2.SandboxSpec())
    gateway.call("CreateSandbox", request)
    gateway.ready(run_id, 10.0)
    with lab.runner(run_id=run_id) as runner:
        result = runner.run(EvalSpec(name="taken", check=MARK, deadline_s=1))
    assert result.reason is Reason.UPLOAD_FAILED
    assert "one of somebody else has this name" in story(result)
    found = gateway.find(run_id)
    assert found.status.phase == openshell_pb2.SANDBOX_PHASE_READY
    gateway.delete(run_id, found.metadata.id)


def test_a_name_whose_sandbox_is_about_to_go_is_waited_for(lab):
    backend = lab.backend(labels={FAULT_LABEL: Fault.SLOW_DELETE})
    sandbox = made(backend)
    run_id = sandbox.ref.sandbox_id
    request = openshell_pb2.DeleteSandboxRequest(name=run_id)
    backend.connect().call("DeleteSandbox", request)
    assert backend.open(run_id).ref == sandbox.ref  # accepted is not gone
    again = lab.backend().create(run_id, EvalSpec(name="again", check="true", deadline_s=1))
    assert again.ref.identity != sandbox.ref.identity
    backend.delete(sandbox.ref)  # which is gone, and another one is not
    assert backend.open(run_id).ref == again.ref
    backend.delete(again.ref)


@pytest.mark.parametrize("fault", [Fault.DELETE_FAILS, Fault.SLOW_DELETE])
def test_a_failed_deletion_keeps_the_id_and_sweep_finishes_the_job(lab, fault):
    state, run_id = lab.place / "swept", time_sorted_run_id()
    lab.gateway.inject(fault, sandbox=run_id, times=1)
    bounds = Bounds(destroy_s=0.4)
    with lab.runner(state=state, run_id=run_id, bounds=bounds) as runner:
        result = runner.run(EvalSpec(name="kept", check="true", deadline_s=2))
    assert result.verdict is Verdict.PASSED, story(result)
    assert result.retained_sandbox == run_id
    assert kinds(result) in ([FaultKind.ERROR], [FaultKind.BOUND_EXCEEDED])
    with lab.runner(state=state) as runner:
        [swept] = runner.sweep()
        assert (swept.sandbox_id, swept.problem) == (run_id, "")
        assert runner.result(run_id).retained_sandbox is None
    assert not lab.gateway.place(run_id).exists()


def test_a_deletion_that_never_happens_is_never_said_to_have_happened(tmp_path):
    with own_lab(tmp_path) as lab:
        backend = lab.backend(labels={FAULT_LABEL: Fault.DELETE_STUCK})
        result = lab.run("true", backend=backend, bounds=Bounds(destroy_s=0.5))
        assert result.verdict is Verdict.PASSED
        assert result.retained_sandbox == result.run_id
        assert lab.backend().open(result.run_id) is not None


def test_sandboxes_are_named_and_labelled_after_their_runs(lab):
    backend = lab.backend()
    backend.state_dir = "/somewhere/.orchestrator"
    for run_id in ("r1", "a-run-with-a-name-that-is-long", "Runs/of somebody:" + "x" * 70):
        spec = EvalSpec(name="named", check="true", deadline_s=1)
        sandbox = backend.create(run_id, spec)
        assert len(name_of(run_id)) <= 19
        assert lab.backend().open(run_id).ref == sandbox.ref
        [label] = [each for each in lab.backend().labelled() if each.run_id == run_id]
        assert label.state_dir == "/somewhere/.orchestrator"
        assert alive(label.owner)
        backend.delete(sandbox.ref)
    assert name_of(time_sorted_run_id()) != name_of(time_sorted_run_id())
    run_id = time_sorted_run_id()
    assert (name_of(run_id), label_of(run_id)) == (run_id, run_id)


def test_all_sandboxes_are_listed_page_by_page(lab):
    class Paging(Gateway):
        def call(self, method, request, *, patient=True):
            if method == "ListSandboxes":
                request.page_size = 2
            return super().call(method, request, patient=patient)

    backend = lab.backend()
    sandboxes = [made(backend) for _ in range(3)]
    gateway = backend.connect()
    paging = Paging(gateway.target, gateway.channel, gateway.workspace, 5.0, gateway.close)
    found = [each.metadata.name for each in paging.listed("made-by=eval-orchestrator")]
    assert {each.ref.sandbox_id for each in sandboxes} <= set(found)
    assert len(found) == len(set(found))
    for sandbox in sandboxes:
        backend.delete(sandbox.ref)


def test_results_say_what_the_sandbox_was(lab):
    conditions = lab.run("true").conditions
    assert conditions["image"] == IMAGE
    assert conditions["landlock"] == "hard_requirement"
    assert conditions["network"] == "none"
    assert len(conditions["policy"]) == 64
    assert conditions["gateway"] == f"{lab.gateway.endpoint} 0.1.5"


def test_a_policy_of_ones_own_is_sent_and_verified(lab):
    policy = sandbox_pb2.SandboxPolicy(
        version=1, landlock=sandbox_pb2.LandlockPolicy(compatibility="best_effort")
    )
    policy.network_policies["pypi"].endpoints.add(host="pypi.org", ports=[443])
    backend = lab.backend(policy=policy)
    assert "policy" in backend.isolation
    result = lab.run("true", backend=backend)
    assert result.conditions["network"] == "pypi"
    assert result.conditions["landlock"] == "best_effort"


def test_everything_of_a_run_is_in_the_sandboxs_own_directory(lab):
    backend = lab.backend()
    sandbox = made(backend)
    sandbox.execute(order("pwd; echo $HOME"))
    home = lab.gateway.workspace(sandbox.ref.sandbox_id)
    assert sorted(each.name for each in home.iterdir()) == [".orchestrator", "workspace"]
    said = (home / ".orchestrator" / "records" / "check" / "stdout.head").read_text()
    assert said.split() == [f"{home}/workspace", f"{home}/.orchestrator/home"]
    backend.delete(sandbox.ref)


# --- the gateway ----------------------------------------------------------------------------------


def test_nothing_is_begun_with_a_gateway_that_is_not_there(tmp_path):
    backend = OpenShellBackend(IMAGE, endpoint="127.0.0.1:1")
    with Runner(backend, tmp_path / "state") as runner:
        with pytest.raises(OpenShellError, match=r"gateway 127\.0\.0\.1:1: Health: UNAVAILABLE"):
            runner.run(EvalSpec(name="down", check="true", deadline_s=1))
        assert runner.journal.run_ids() == []
    backend.close()


@pytest.mark.parametrize("version", ["0.0.111", "0.0.0-dev", "0.2.0", "unknown"])
def test_nothing_is_begun_with_a_gateway_of_another_version(tmp_path, version):
    with own_lab(tmp_path, version=version) as lab, lab.runner() as runner:
        with pytest.raises(OpenShellError, match=rf"its version is {version}; expected 0\.1\.x"):
            runner.run(EvalSpec(name="old", check="true", deadline_s=1))
        assert runner.journal.run_ids() == []
        assert lab.gateway.executions() == []


def restarting(gateway):
    """A thread that restarts a gateway when it has been killed."""

    def work():
        gateway.wait(30.0)
        gateway.start()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_gateway_that_is_killed_and_restarted_in_a_check_leaves_it_unresolved(tmp_path):
    with own_lab(tmp_path) as lab:
        thread = restarting(lab.gateway)
        backend = lab.backend()
        killed = {"fault": Fault.KILLED_GATEWAY, "matching": "supervisor.sh run /"}
        result = lab.run(f"{MARK}; sleep 9", backend=backend, retain="unresolved", **killed)
        thread.join()
        assert result.verdict is Verdict.UNRESOLVED, story(result)
        assert result.reason is Reason.CHECK_LOST
        assert lab.marks(result.run_id) <= 1
        backend.open(result.run_id).destroy(permit(result.run_id, None))


def test_a_gateway_that_is_gone_keeps_the_id_and_sweep_finishes_the_job(tmp_path):
    with own_lab(tmp_path) as lab:
        backend = lab.backend(call_s=0.5)
        state, run_id = tmp_path / "state", time_sorted_run_id()
        lab.gateway.inject(Fault.KILLED_GATEWAY, sandbox=run_id, matching="supervisor.sh run /")
        with lab.runner(backend, state=state, run_id=run_id) as runner:
            result = runner.run(EvalSpec(name="gone", check=f"{MARK}; sleep 9", deadline_s=20))
        assert result.verdict is Verdict.UNRESOLVED
        assert result.retained_sandbox == run_id, story(result)
        lab.gateway.wait()
        lab.gateway.start()
        with lab.runner(state=state) as runner:
            [swept] = runner.sweep()
        assert swept.problem == ""
        assert not lab.gateway.place(run_id).exists()


def test_a_gateway_that_is_restarted_after_a_check_loses_nothing_of_it(tmp_path):
    with own_lab(tmp_path) as lab:
        at = {State.CHECKED: lambda _: lab.gateway.restart()}
        result = lab.run("echo 1 > present", at=at, expect=BOTH_WAYS)
        assert result.verdict is Verdict.PASSED, story(result)


def test_a_sandbox_whose_container_was_killed_is_unresolved_and_says_why(lab):
    at = {State.CHECKED: lambda run_id: lab.gateway.kill_sandbox(name_of(run_id))}
    result = lab.run("echo 1 > present", at=at, expect=BOTH_WAYS)
    assert result.reason is Reason.DOWNLOAD_FAILED
    assert "SANDBOX_PHASE_ERROR" in story(result) or "exec relay closed" in story(result)
    assert result.retained_sandbox is None


# --- requests -------------------------------------------------------------------------------------


def test_an_order_is_known_again_though_the_guest_has_forgotten_it(lab):
    backend = lab.backend()
    sandbox = made(backend)
    once = order(MARK, start_by=time.monotonic() + 1)
    assert sandbox.execute(once).ending is Ending.EXITED
    home = lab.gateway.workspace(sandbox.ref.sandbox_id)
    shutil.rmtree(home / ".orchestrator" / "records" / "check")
    with pytest.raises(AdmittedError, match="REQUEST_"):
        lab.backend().open(sandbox.ref.sandbox_id).execute(once)
    assert lab.marks(sandbox.ref.sandbox_id) == 1
    settled = sandbox.settle(once)
    assert settled.ending is Ending.LOST, settled
    assert "the gateway saw it start and end" in settled.message
    backend.delete(sandbox.ref)


def test_settling_an_order_that_the_gateway_never_had_is_certain(lab):
    backend = lab.backend()
    sandbox = made(backend)
    never = order(MARK)
    for _ in range(2):
        assert sandbox.settle(never).ending is Ending.NOT_STARTED
    assert sandbox.execute(never).ending is Ending.NOT_STARTED
    assert lab.marks(sandbox.ref.sandbox_id) == 0
    backend.delete(sandbox.ref)


def test_requests_that_are_too_large_are_refused_and_orders_are_never(lab):
    backend = lab.backend()
    sandbox = made(backend)
    shell = backend.guest(sandbox.ref).shell
    with pytest.raises(GuestError, match=r"OUT_OF_RANGE.*1048576"):
        list(shell.run(["cat"], stdin=bytes(2 << 20)))
    env = {f"LARGE_{number}": "v" * 120_000 for number in range(7)}
    large = order("echo ${#LARGE_0} > size; exit 5", env=env)
    assert (sandbox.execute(large).ending, large.slot) == (Ending.EXITED, "check")
    assert (lab.workspace(sandbox.ref.sandbox_id) / "size").read_text() == "120000\n"
    backend.delete(sandbox.ref)


def test_a_program_whose_answer_has_no_end_has_given_none(lab):
    backend = lab.backend()
    sandbox = made(backend)
    shell = backend.guest(sandbox.ref).shell
    assert b"".join(shell.run(["printf", "%s", "whole"])) == b"whole"
    lab.gateway.inject(Fault.SHORT_OUTPUT, sandbox=sandbox.ref.sandbox_id, times=1)
    with pytest.raises(GuestError, match="the end of an answer"):
        list(shell.run(["printf", "%s", "short"]))
    with pytest.raises(GuestError, match="exit event 3, expected 0; why"):
        list(shell.run(["/bin/sh", "-c", "echo why >&2; exit 3"]))
    with pytest.raises(GuestError, match="DEADLINE_EXCEEDED"):
        list(shell.run(["sleep", "9"], bound_s=0.3))
    backend.delete(sandbox.ref)
    with pytest.raises(SandboxGoneError, match="NOT_FOUND"):
        list(shell.run(["true"]))


# --- stopping -------------------------------------------------------------------------------------

LOGGED = """#!/bin/sh
kill() {
    echo "$*" >>"${0%/*}/kills"
    command kill "$@"
}
"""


def test_no_process_group_is_ever_signalled(lab, monkeypatch, tmp_path):
    real = guest.scripts()
    logged = tmp_path / "supervisor.sh"
    logged.write_text(LOGGED + real["supervisor.sh"].read_text())
    monkeypatch.setattr(sandboxes, "scripts", lambda: {**real, "supervisor.sh": logged})
    backend = lab.backend()
    checks = {
        "check": "setsid sh -c 'sleep 61 & sleep 62' & trap '' TERM; sleep 63; sleep 64",
        "setup": "(setsid sleep 65 &) & exit 0",
    }
    sandbox = made(backend)
    name = sandbox.ref.sandbox_id
    late = sandbox.execute(order(checks["check"], deadline_s=0.5))
    assert (late.ending, late.escalated, late.still) == (Ending.DEADLINE, True, True)
    assert lab.gateway.processes(name) == []
    left = sandbox.execute(order(checks["setup"], slot="setup"))
    assert (left.ending, left.still) == (Ending.EXITED, True)
    assert lab.gateway.processes(name) == []
    lines = (lab.gateway.workspace(name) / ".orchestrator" / "kills").read_text().splitlines()
    signals = {line.split()[0] for line in lines}
    assert {"-STOP", "-KILL", "-TERM"} <= signals
    for line in lines:
        pids = line.split()[1:] if line.startswith("-") else line.split()
        assert all(int(pid) > 0 for pid in pids), line
    backend.delete(sandbox.ref)


def test_the_gateway_of_these_tests_refuses_to_signal_groups(lab):
    sandbox = made(lab.backend())
    if not lab.gateway.refuses_group_kills(sandbox.ref.sandbox_id):
        pytest.skip("this system cannot refuse the kill of groups")
    lab.backend().delete(sandbox.ref)


# --- where the gateway is -------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """An environment that names no gateway."""
    for name in ("OPENSHELL_GATEWAY_ENDPOINT", "OPENSHELL_GATEWAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "openshell"


def register(config, name, endpoint, **metadata):
    place = config / "gateways" / name
    (place / "mtls").mkdir(parents=True)
    (place / "metadata.json").write_text(json.dumps({"gateway_endpoint": endpoint, **metadata}))
    (config / "active_gateway").write_text(f"{name}\n")
    return place


@pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/"])
def test_an_endpoint_has_several_forms(elsewhere, shared, form):
    backend = OpenShellBackend(IMAGE, endpoint=form.format(shared.endpoint))
    assert backend.connect().target == shared.endpoint
    backend.close()


@pytest.mark.parametrize("endpoint", ["localhost", "ftp://localhost:1", "http://", ":80"])
def test_what_is_no_endpoint_is_refused(elsewhere, endpoint):
    with pytest.raises(ValueError, match=r"endpoint: got .*; expected http://HOST:PORT"):
        OpenShellBackend(IMAGE, endpoint=endpoint).connect()


def test_the_environment_names_an_endpoint(elsewhere, monkeypatch, shared):
    monkeypatch.setenv("OPENSHELL_GATEWAY_ENDPOINT", f"http://{shared.endpoint}")
    backend = OpenShellBackend(IMAGE)
    assert backend.connect().target == shared.endpoint
    backend.close()


def test_the_active_gateway_is_found_where_the_command_keeps_it(elsewhere, monkeypatch, shared):
    register(elsewhere, "here", f"http://{shared.endpoint}")
    register(elsewhere, "there", "http://127.0.0.1:1")
    (elsewhere / "active_gateway").write_text("here\n")
    for backend in (OpenShellBackend(IMAGE), OpenShellBackend(IMAGE, gateway="here")):
        assert backend.connect().target == shared.endpoint
        backend.close()
    monkeypatch.setenv("OPENSHELL_GATEWAY", "there")
    with pytest.raises(OpenShellError, match=r"127\.0\.0\.1:1"):
        OpenShellBackend(IMAGE, call_s=0.5).connect()


def test_no_gateway_at_all_is_said(elsewhere):
    with pytest.raises(OpenShellError, match="no gateway: expected an endpoint"):
        OpenShellBackend(IMAGE).connect()
    with pytest.raises(OpenShellError, match="gateway nobody: not registered"):
        OpenShellBackend(IMAGE, gateway="nobody").connect()


PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def test_proxies_of_the_environment_do_not_take_a_gateway_of_this_machine(lab, monkeypatch):
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert lab.run("true").verdict is Verdict.PASSED


class Healthy(openshell_pb2_grpc.OpenShellServicer):
    def Health(self, request, context):  # noqa: N802
        return openshell_pb2.HealthResponse(version="0.1.5")


def certificates(place):
    """Have openssl make an authority, and what it has signed for both ends."""
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("there is no openssl to make certificates with")
    new = [tool, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", place / "tls.key", "-out", place / "tls.crt"]
    subprocess.run([*new, *names, *files], check=True, capture_output=True)
    shutil.copy(place / "tls.crt", place / "ca.crt")


def test_a_registered_gateway_is_spoken_to_by_tls_with_the_certificates_that_it_gave(elsewhere):
    place = register(elsewhere, "secure", "https://localhost:1") / "mtls"
    certificates(place)
    pair = (place / "tls.key").read_bytes(), (place / "tls.crt").read_bytes()
    trusted = grpc.ssl_server_credentials([pair], pair[1], require_client_auth=True)
    server = grpc.server(ThreadPoolExecutor(2))
    openshell_pb2_grpc.add_OpenShellServicer_to_server(Healthy(), server)
    port = server.add_secure_port("127.0.0.1:0", trusted)
    server.start()
    try:
        endpoint = f"https://localhost:{port}"
        (place.parent / "metadata.json").write_text(json.dumps({"gateway_endpoint": endpoint}))
        backend = OpenShellBackend(IMAGE)
        assert backend.connect().version == "0.1.5"
        backend.close()
        plain = OpenShellBackend(IMAGE, endpoint=f"http://localhost:{port}", call_s=0.5)
        with pytest.raises(CallError):
            plain.connect(patient=False)
        plain.close()
    finally:
        server.stop(None)


def test_a_gateway_that_wants_a_token_is_spoken_to_by_the_sdk(elsewhere, monkeypatch, shared):
    register(elsewhere, "tokens", "https://gateway.example", auth_mode="oidc")
    asked = []

    class Client:
        def __init__(self):
            self._channel = grpc.insecure_channel(shared.endpoint, [("grpc.enable_http_proxy", 0)])
            self.close = self._channel.close

        @classmethod
        def from_active_cluster(cls, *, cluster):
            asked.append(cluster)
            return cls()

    monkeypatch.setattr(openshell, "SandboxClient", Client)
    backend = OpenShellBackend(IMAGE)
    assert backend.connect().version == "0.1.5"
    assert asked == ["tokens"]
    backend.close()


def test_the_gateway_is_examined_without_starting_anything(elsewhere, shared):
    before = len(shared.executions())
    found = {subject: (ok, said) for subject, ok, said in examine(shared.endpoint)}
    assert found["gateway"] == (True, f"0.1.5 at {shared.endpoint}")
    assert found["sandboxes"][1].startswith("0 ")
    assert len(shared.executions()) == before
    with pytest.raises(OpenShellError, match="UNAVAILABLE"):
        list(examine("127.0.0.1:1"))


# --- what it needs, and what it costs -------------------------------------------------------------


@pytest.mark.parametrize("limit", ["memory_bytes", "cpus", "pids", "disk_bytes"])
def test_limits_are_refused_by_their_keys(lab, limit):
    spec = EvalSpec(name="limited", check="true", deadline_s=1, limits={limit: 64})
    with pytest.raises(SpecError, match=rf"limits\.{limit}"):
        lab.backend().refuse(spec)


def test_an_image_is_needed(lab):
    with pytest.raises(SpecError, match="image: there is none"):
        lab.backend(image=None).refuse(EvalSpec(name="bare", check="true", deadline_s=1))
    lab.backend(image=None).refuse(EvalSpec(name="i", check="true", deadline_s=1, image=IMAGE))


def test_a_missing_package_says_what_to_install():
    program = "import sys; sys.modules['grpc'] = None; import orchestrator.backends.openshell"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "pip install 'eval-orchestrator[openshell]'" in done.stderr


COST = """
import resource, sys
from pathlib import Path
from orchestrator import EvalSpec
from orchestrator.backends.openshell import OpenShellBackend
from orchestrator.core.evidence import Manifest
from orchestrator.vault import Vault
from orchestrator.workspace import SpecWorkspace

endpoint, place = sys.argv[1], Path(sys.argv[2])

def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

backend = OpenShellBackend("image:1", endpoint=endpoint)
spec = EvalSpec(name="cost", check="true", deadline_s=1, workspace=str(place / "tree"))
sandbox = backend.create("cost", spec)
before = resident()
workspace = SpecWorkspace(spec.workspace, {})
sandbox.upload(workspace)
found = sandbox.manifest()
assert not workspace.manifest().differences(found)
up = resident() - before
intake = Vault(place / "vault").intake("cost", Manifest({}))
backend.guest(sandbox.ref).account.send(backend.guest(sandbox.ref).channel, found, intake)
down = resident() - before
backend.delete(sandbox.ref)
backend.close()
print(up, down)
"""


def test_fifty_megabytes_go_up_and_come_down_in_bounded_memory(lab, tmp_path):
    (tmp_path / "tree").mkdir()
    with (tmp_path / "tree" / "large").open("wb") as file:
        for _ in range(50):
            file.write(os.urandom(1 << 20))
    done = subprocess.run(
        [sys.executable, "-c", COST, lab.gateway.endpoint, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    up_mib, down_mib = map(float, done.stdout.split())
    assert up_mib < 25, done.stdout
    assert down_mib < 25, done.stdout
    stored = sum(each.stat().st_size for each in (tmp_path / "vault").rglob("*") if each.is_file())
    assert stored >= 50 << 20
