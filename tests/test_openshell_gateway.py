"""The simulated OpenShell gateway does what is known of the real one, unpleasant parts included."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from orchestrator.testing.openshell_gateway import FAULT_LABEL, Fault, OpenShellGateway
from orchestrator.testing.openshell_gateway.supervisor import descendants

grpc = pytest.importorskip("grpc")
openshell = pytest.importorskip("openshell")
pb = pytest.importorskip("openshell._proto.openshell_pb2")
policies = pytest.importorskip("openshell._proto.sandbox_pb2")
stubs = pytest.importorskip("openshell._proto.openshell_pb2_grpc")
common = pytest.importorskip("openshell._proto.datamodel_pb2")

SCOPE = common.WorkspaceSelector(workspace="default")
LATE_S = 1.0


class Client:
    """The calls of a gateway, and what tests do with them."""

    numbers = count(1)

    def __init__(self, gateway):
        self.gateway = gateway
        self.connect()

    def connect(self):
        # Its own connection: one that failed a moment ago would not be tried again for a second.
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(self.gateway.endpoint, options)
        self.stub = stubs.OpenShellStub(self.channel)
        self.sdk = openshell.SandboxClient(self.gateway.endpoint)

    def close(self):
        self.channel.close()
        self.sdk.close()

    def create(self, fault="", *, ready=True, name=None, **given):
        name = name or f"sandbox-{next(self.numbers)}"
        spec = pb.SandboxSpec(**given.pop("spec", {}))
        labels = {**given.pop("labels", {}), **({FAULT_LABEL: fault} if fault else {})}
        request = pb.CreateSandboxRequest(
            workspace_scope=SCOPE, name=name, spec=spec, labels=labels, **given
        )
        self.stub.CreateSandbox(request, timeout=10)
        if ready:
            self.ready(name)
        return name

    def ready(self, name):
        return self.phase(name, pb.SANDBOX_PHASE_READY)

    def phase(self, name, wanted):
        """Wait for a phase; give the record."""
        request = pb.WatchSandboxRequest(workspace_scope=SCOPE, sandbox=name, follow_status=True)
        for event in self.stub.WatchSandbox(request, timeout=10):
            if event.sandbox.status.phase == wanted:
                return event.sandbox
        raise AssertionError(name)

    def get(self, name):
        request = pb.GetSandboxRequest(workspace_scope=SCOPE, name=name)
        return self.stub.GetSandbox(request, timeout=10).sandbox

    def delete(self, name, **given):
        request = pb.DeleteSandboxRequest(workspace_scope=SCOPE, name=name, **given)
        return self.stub.DeleteSandbox(request, timeout=10)

    def gone(self, name):
        until(lambda: code_of(self.get, name) == "NOT_FOUND")

    def events(self, name, *command, timeout=20.0, seconds=0.0, **given):
        request = pb.ExecSandboxRequest(
            workspace_scope=SCOPE, sandbox=name, command=command, no_login_shell=True
        )
        if seconds:
            request.execution_timeout.FromNanoseconds(int(seconds * 1e9))
        request.MergeFrom(pb.ExecSandboxRequest(**given))
        if given.get("no_login_shell") is False:
            request.no_login_shell = False
        return self.stub.ExecSandbox(request, timeout=timeout)

    def sh(self, name, script, **given):
        return self.execute(name, "/bin/sh", "-c", script, **given)

    def execute(self, name, *command, **given):
        """Give stdout, stderr and exit code."""
        return collected(self.events(name, *command, **given))


def collected(events):
    out, err, code = b"", b"", None
    for event in events:
        out += event.stdout.data
        err += event.stderr.data
        if event.WhichOneof("payload") == "exit":
            code = event.exit.exit_code
    return out, err, code


def until(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def code_of(call, *arguments, **given):
    """Give the name of a call's status, and "" where it succeeds."""
    try:
        call(*arguments, **given)
    except grpc.RpcError as error:
        return error.code().name
    return ""


def refusal(call, *arguments, **given):
    """Give status, message and reason of a call that has to fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **given)
    error = openshell.GatewayError(caught.value)
    return error.code().name, error.details(), error.error_info and error.error_info.reason


def alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False
    return stat.rpartition(b") ")[2][:1] not in {b"Z", b"X"}


@pytest.fixture(scope="module")
def shared():
    with OpenShellGateway(dispatch_delay_s=LATE_S, slow_delete_s=0.5) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(shared):
    made = Client(shared)
    yield made
    made.close()


@pytest.fixture(scope="module")
def box(client):
    """A sandbox for commands that leave nothing behind."""
    return client.create(name="box", spec={"environment": {"GIVEN": "by the spec"}})


@contextlib.contextmanager
def own(**options):
    """A gateway that a test may kill."""
    with OpenShellGateway(**options) as gateway:
        client = Client(gateway)
        try:
            yield gateway, client
        finally:
            client.close()


@pytest.fixture
def held():
    """A gateway that dispatches late only when it is told to."""
    with own(dispatch_delay_s=600) as both:
        yield both


# --- the gateway ----------------------------------------------------------------------------------


def test_it_says_which_version_it_is(client):
    health = client.sdk.health()
    assert (health.version, health.status) == ("0.1.5", pb.SERVICE_STATUS_HEALTHY)


def test_the_handle_loads_no_grpc():
    program = """
import sys
import orchestrator.testing.openshell_gateway
assert not {"grpc", "openshell", "google"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_it_listens_on_the_loopback_alone(shared):
    port = int(shared.endpoint.rpartition(":")[2])
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening
    assert all(each.endswith(f"0100007F:{port:04X}") for each in listening)  # or mapped to v6


def test_what_is_not_simulated_says_so(client):
    assert code_of(client.stub.ListWorkspaces, pb.ListWorkspacesRequest()) == "UNIMPLEMENTED"


# --- sandboxes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "a" * 20}, "name exceeds maximum length (20 > 19)"),
        ({"name": "Upper"}, "name must contain only lowercase"),
        ({"name": "-a"}, "name must not start or end with a hyphen"),
        ({"name": "a--b"}, "name must not contain consecutive hyphens"),
        ({"labels": {"a": "x" * 64}}, "label value exceeds 63 characters"),
        ({"labels": {"a": "b c"}}, "label value contains invalid characters"),
        ({"labels": {"a b": "c"}}, "label key name segment contains invalid characters"),
        ({"labels": {"Up/a": "c"}}, "label key prefix must be a DNS subdomain"),
        ({"fault": "no_such_thing"}, "there is no fault 'no_such_thing'"),
        ({"spec": {"environment": {f"K{n}": "" for n in range(129)}}}, "(129 > 128)"),
        ({"spec": {"environment": {"K" * 257: ""}}}, "key exceeds maximum length (257 > 256)"),
        ({"spec": {"environment": {"K": "v" * 8193}}}, "(8193 > 8192)"),
        ({"spec": {"environment": {"OPENSHELL_X": ""}}}, "are reserved; got 'OPENSHELL_X'"),
        ({"spec": {"environment": {"a-b": ""}}}, "keys must match"),
        (
            {
                "spec": {
                    "policy": policies.SandboxPolicy(
                        filesystem=policies.FilesystemPolicy(read_only=["/" + "a" * 1024] * 256)
                    )
                }
            },
            "policy serialized size exceeds maximum",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_created_is_refused(client, given, message):
    code, details, _ = refusal(client.create, **given)
    assert code == "INVALID_ARGUMENT"
    assert message in details


def test_a_spec_and_a_workspace_are_needed(client):
    create = client.stub.CreateSandbox
    no_spec = pb.CreateSandboxRequest(workspace_scope=SCOPE)
    assert refusal(create, no_spec)[:2] == ("INVALID_ARGUMENT", "spec is required")
    no_scope = pb.CreateSandboxRequest(spec=pb.SandboxSpec())
    assert code_of(create, no_scope) == "INVALID_ARGUMENT"
    other = common.WorkspaceSelector(workspace="other")
    elsewhere = pb.CreateSandboxRequest(workspace_scope=other, spec=pb.SandboxSpec())
    assert refusal(create, elsewhere)[:2] == ("NOT_FOUND", "workspace 'other' not found")


def test_names_of_19_and_of_nobody_are_taken(client):
    client.create(name="n" * 19, ready=False)
    made = client.stub.CreateSandbox(
        pb.CreateSandboxRequest(workspace_scope=SCOPE, spec=pb.SandboxSpec())
    ).sandbox
    assert 0 < len(made.metadata.name) <= 19


def test_a_name_is_taken_once(client, box):
    assert refusal(client.create, name=box)[:2] == (
        "ALREADY_EXISTS",
        "sandbox 'box' already exists",
    )


def test_sandboxes_are_provisioned_and_then_ready(client):
    name = client.create("stuck_provisioning", ready=False)
    assert client.get(name).status.phase == pb.SANDBOX_PHASE_PROVISIONING
    record = client.get(client.create())
    [ready] = record.status.conditions
    assert (ready.type, ready.status, ready.reason) == ("Ready", "True", "BackendReady")


def test_who_is_unknown_is_not_found(client):
    missing = ("NOT_FOUND", "sandbox not found")
    assert refusal(client.get, "nobody")[:2] == missing
    assert refusal(client.delete, "nobody")[:2] == missing
    assert refusal(client.execute, "nobody", "true")[:2] == missing


def test_sandboxes_are_found_by_their_labels_page_by_page(client):
    names = [client.create(labels={"of": "pages", "n": str(n)}, ready=False) for n in range(5)]
    found = client.sdk.list_all(workspace="default", label_selector="of=pages", page_size=2)
    assert sorted(each.name for each in found) == sorted(names)
    [third] = client.sdk.list_all(workspace="default", label_selector="of=pages,n=3")
    assert third.name == names[3]
    everywhere = client.sdk.list_all_for_all_workspaces(label_selector="of=pages")
    assert len(everywhere) == 5
    listed = pb.ListSandboxesRequest(workspace_scope=SCOPE, label_selector="of")
    assert code_of(client.stub.ListSandboxes, listed) == "INVALID_ARGUMENT"


def test_a_policy_is_echoed_with_its_source(client):
    policy = policies.SandboxPolicy(
        version=1, landlock=policies.LandlockPolicy(compatibility="hard_requirement")
    )

    def config(name):
        request = policies.GetSandboxConfigRequest(workspace_scope=SCOPE, name=name)
        return client.stub.GetSandboxConfig(request)

    found = config(client.create(spec={"policy": policy}))
    assert found.policy == policy
    assert (found.policy_source, found.configuration_admitted) == (
        policies.POLICY_SOURCE_SANDBOX,
        True,
    )
    found = config(client.create("global_policy", spec={"policy": policy}))
    assert found.policy != policy
    assert found.policy_source == policies.POLICY_SOURCE_GLOBAL
    assert not config(client.create("not_admitted")).configuration_admitted


def test_the_log_says_what_happened(client):
    name = client.create()
    client.execute(name, "true")
    request = pb.GetSandboxLogsRequest(workspace_scope=SCOPE, sandbox=name)
    logs = client.stub.GetSandboxLogs(request).logs
    assert any("command started" in line.message for line in logs)


def test_an_error_phase_has_its_reason_in_a_condition(client):
    name = client.create("error_phase", ready=False)
    record = client.phase(name, pb.SANDBOX_PHASE_ERROR)
    [ready] = record.status.conditions
    assert (ready.status, ready.reason, ready.message) == (
        "False",
        "ContainerExited",
        "Container exited",
    )
    with pytest.raises(openshell.SandboxError, match="entered error phase"):
        client.sdk.wait_ready(name, workspace="default")


def test_a_completed_sandbox_is_taken_for_ready_by_the_sdk(client):
    name = client.create("completed_phase", ready=False)
    client.phase(name, pb.SANDBOX_PHASE_COMPLETED)
    found = client.sdk.wait_ready(name, workspace="default")
    assert found.status.phase == pb.SANDBOX_PHASE_COMPLETED
    assert code_of(client.execute, name, "true") == "FAILED_PRECONDITION"


@pytest.mark.parametrize(
    ("code", "phase"), [(0, pb.SANDBOX_PHASE_COMPLETED), (3, pb.SANDBOX_PHASE_ERROR)]
)
def test_a_sandbox_ends_with_its_main_process(client, code, phase):
    name = client.create(
        ready=False, spec={"command": ["sh", "-c", f"setsid sleep 60 & exit {code}"]}
    )
    assert client.phase(name, phase).status.exit_code == code
    assert not client.gateway.processes(name)


def test_a_lost_answer_leaves_a_sandbox(client):
    name = "lost-answer"
    assert code_of(client.create, "create_lost", name=name) == "UNAVAILABLE"
    client.ready(name)


def test_stopping_keeps_the_files_and_nothing_else(client):
    name = client.create()
    client.sh(name, "echo kept > file; setsid sleep 60 > /dev/null 2>&1 &")
    before = client.get(name).status.main_process_instance_id
    assert client.sdk.stop(name, workspace="default").status.phase == pb.SANDBOX_PHASE_STOPPED
    assert not client.gateway.processes(name)
    client.sdk.start(name, workspace="default")
    assert client.ready(name).status.main_process_instance_id != before
    assert client.execute(name, "cat", "file")[0] == b"kept\n"


# --- deletion -------------------------------------------------------------------------------------


def test_deletion_is_accepted_first_and_happens_later(client):
    name = client.create("slow_delete")
    identity = client.get(name).metadata.id
    answer = client.delete(name)
    assert (answer.outcome, answer.sandbox_id) == (pb.DELETION_OUTCOME_ACCEPTED, identity)
    assert client.get(name).status.phase == pb.SANDBOX_PHASE_DELETING
    assert client.get(name).metadata.HasField("deletion_time")
    assert code_of(client.execute, name, "true") == "FAILED_PRECONDITION"
    assert code_of(client.create, name=name) == "ALREADY_EXISTS"
    assert client.delete(name).outcome == pb.DELETION_OUTCOME_ACCEPTED
    client.sdk.wait_deleted(name, workspace="default", expected_sandbox_id=identity)
    assert not client.gateway.place(name).exists()
    again = client.get(client.create(name=name)).metadata.id
    assert again != identity
    client.sdk.wait_deleted(name, workspace="default", expected_sandbox_id=identity)


def test_what_is_absent_can_be_deleted_on_request(client):
    answer = client.sdk.delete("nobody", workspace="default", allow_missing=True)
    assert answer.outcome == openshell.DeletionOutcome.ALREADY_ABSENT


def test_deletion_may_fail_or_never_happen(client):
    name = client.create("delete_fails")
    assert code_of(client.delete, name) == "INTERNAL"
    assert client.get(name).status.phase == pb.SANDBOX_PHASE_READY
    name = client.create("delete_stuck")
    client.delete(name)
    assert client.phase(name, pb.SANDBOX_PHASE_DELETING)


ESCAPE = """
setsid sh -c 'setsid sleep 61 & sleep 62 &' &
nohup setsid sleep 63 > /dev/null 2>&1 &
sleep 64 > /dev/null 2>&1 &
echo started; exec sleep 65
"""


def test_deletion_kills_whatever_runs_and_loses_its_relay(client):
    name = client.create()
    events = client.events(name, "/bin/sh", "-c", ESCAPE)
    assert next(events).stdout.data == b"started\n"
    until(lambda: len(client.gateway.processes(name)) >= 5)
    pids = client.gateway.processes(name)
    client.delete(name)
    code, details, _ = refusal(collected, events)
    assert (code, details) == (
        "UNAVAILABLE",
        "exec relay closed before the command reported an exit status",
    )
    client.gone(name)
    assert not [pid for pid in pids if alive(pid)]


def test_orphans_fall_to_the_supervisor(client, box):
    out, _, _ = client.sh(box, "(setsid sh -c 'sleep 0.2; ps -o ppid= -p $$' &)")
    supervisor = (client.gateway.place(box) / "supervisor").read_text().split()[0]
    assert out.decode().strip() == supervisor


# --- commands -------------------------------------------------------------------------------------


def test_output_exit_code_and_streams_are_apart(client, box):
    assert client.sh(box, "echo out; echo err >&2; exit 7") == (b"out\n", b"err\n", 7)
    assert client.sh(box, "exit 300")[2] == 44


def test_programs_and_directories_that_are_not_there(client, box):
    out, err, code = client.execute(box, "no-such-program")
    assert (out, code) == (b"", 127)
    assert b"command not found" in err
    _, err, code = client.execute(box, "true", workdir="/no/such/place")
    assert code == 1
    assert b"cd: /no/such/place" in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_is_128_more(client, box, number):
    assert client.sh(box, f"kill -{int(number)} $$")[2] == 128 + number


def test_the_environment_is_cleared_and_then_given(client, box):
    out, _, _ = client.execute(box, "env", "-0", environment={"ALSO": "it's $HOME"})
    found = dict(line.split("=", 1) for line in out.decode().split("\0") if line)
    home = str(client.gateway.workspace(box))
    assert {name: found.pop(name, None) for name in ("_", "SHLVL", "PATH")}["PATH"]
    assert found == {
        "OPENSHELL_SANDBOX": "1",
        "HOME": home,
        "PWD": home,
        "USER": "sandbox",
        "SHELL": "/bin/bash",
        "TERM": "dumb",
        "GIVEN": "by the spec",
        "ALSO": "it's $HOME",
    }


def test_arguments_arrive_as_they_are(client, box):
    words = ["", "a b", "it's", '"$HOME"', "`x`", "two\nlines", "ü", "*", "a=b", "\\"]
    out, _, _ = client.execute(box, "printf", "%s\\0", *words)
    assert out.decode().split("\0")[:-1] == words


def test_a_login_shell_reads_the_profile_of_home(client):
    name = client.create()
    (client.gateway.workspace(name) / ".bash_profile").write_text("echo profile\n")
    assert client.sh(name, "echo command", no_login_shell=False)[0] == b"profile\ncommand\n"
    assert client.sh(name, "echo command")[0] == b"command\n"
    assert client.sdk.exec(name, ["echo", "sdk"], workspace="default").stdout == "profile\nsdk\n"


def test_input_is_the_payload_and_then_its_end(client, box):
    payload = bytes(range(256)) * 1000
    assert client.execute(box, "cat", stdin=payload)[0] == payload
    assert client.execute(box, "cat") == (b"", b"", 0)
    assert client.execute(box, "true", stdin=payload)[2] == 0


def test_events_are_small(client, box):
    sizes = [
        len(event.stdout.data) for event in client.events(box, "head", "-c", "1000000", "/dev/zero")
    ]
    assert sum(sizes) == 1_000_000
    assert max(sizes) == 4096


def test_a_request_of_a_megabyte_is_not_decoded(client, box):
    assert client.execute(box, "wc", "-c", stdin=bytes(900 * 1024))[0].strip() == b"921600"
    code, details, _ = refusal(client.execute, box, "cat", stdin=bytes(1024 * 1024))
    assert code == "OUT_OF_RANGE"
    assert details.startswith("Error, decoded message length too large: found 1048")
    assert details.endswith("bytes, the limit is: 1048576 bytes")


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ([], {}, "command is required"),
        (["x"] * 1025, {}, "command array exceeds 1024 argument limit"),
        (["x" * 32769], {}, "command argument 0 exceeds 32768 byte limit"),
        (["a\0b"], {}, "command argument 0 contains null bytes"),
        (["x" * 32000] * 9, {}, "assembled command string exceeds 262144 byte limit"),
        (["true"], {"workdir": "w" * 4097}, "workdir exceeds 4096 byte limit"),
        (["true"], {"workdir": "a\nb"}, "workdir contains newline"),
        (["true"], {"environment": {"K": "v" * 32769}}, "exceeds 32768 byte limit"),
        (["true"], {"environment": {"K": "a\nb"}}, "contains newline"),
        (["true"], {"environment": {"1K": ""}}, "environment keys must match"),
        (["true"], {"environment": {"OPENSHELL_SANDBOX": ""}}, "are reserved"),
        (["true"], {"request_id": "not-a-uuid"}, "request_id must be a UUID"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_executed_is_refused(client, box, command, given, message):
    code, details, _ = refusal(client.execute, box, *command, **given)
    assert code == "INVALID_ARGUMENT"
    assert message in details


def test_nothing_is_executed_before_it_is_ready(client):
    name = client.create("stuck_provisioning", ready=False)
    assert refusal(client.execute, name, "true")[:2] == (
        "FAILED_PRECONDITION",
        "sandbox is not ready",
    )


def test_commands_run_side_by_side(client, box):
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda n: client.sh(box, f"sleep 0.3; echo {n}; exit {n}"), range(8))
        assert list(found) == [(f"{n}\n".encode(), b"", n) for n in range(8)]


def test_the_exit_event_waits_for_who_holds_the_output(client, box):
    assert client.sh(box, "(sleep 0.3; echo late) & exit 5") == (b"late\n", b"", 5)


def test_output_that_stays_open_makes_delivery_unknown():
    with own(output_patience_s=0.2) as (_, client):
        assert client.sh(client.create(), "echo early; sleep 60 & exit 5") == (b"early\n", b"", 74)


# --- what does not end with the client ------------------------------------------------------------

MARKED = "echo started; until [ -e go ]; do sleep 0.02; done; touch marker; exit 9"
"""Runs until it is let go."""


def ran_on(client, name, number=1):
    """Let a command go, and wait for its end; tell whether it was its own."""
    workspace = client.gateway.workspace(name)
    assert not (workspace / "marker").exists()
    (workspace / "go").touch()
    executed = client.gateway.wait_for(name, number, "ended")
    return (workspace / "marker").exists() and executed.code == 9


def test_a_gateway_timeout_kills_nothing(client):
    name = client.create()
    assert client.sh(name, MARKED, seconds=0.2) == (b"started\n", b"", 124)
    assert ran_on(client, name)


def test_a_cancelled_command_runs_on(client):
    name = client.create()
    events = client.events(name, "/bin/sh", "-c", MARKED)
    assert next(events).stdout.data == b"started\n"
    events.cancel()
    assert ran_on(client, name)


def test_a_command_outlives_the_deadline_of_its_client(client):
    name = client.create()
    assert code_of(client.sh, name, MARKED, timeout=1.0) == "DEADLINE_EXCEEDED"
    assert ran_on(client, name)


def test_a_command_outlives_a_client_that_reads_no_more(client):
    name = client.create()
    script = "head -c 30000000 /dev/zero; touch marker; exit 9"
    events = client.events(name, "/bin/sh", "-c", script)
    next(events)
    events.cancel()
    assert client.gateway.wait_for(name, 1, "ended").code == 9
    assert (client.gateway.workspace(name) / "marker").exists()


def test_a_command_may_be_late(client):
    name = client.create("late_dispatch-1")
    began = time.monotonic()
    assert client.sh(name, "exit 9")[2] == 9
    assert time.monotonic() - began >= LATE_S
    assert client.gateway.executions(name)[0].history == ("admitted", "held", "running", "ended")


def test_a_late_command_starts_when_nobody_waits_any_more(held):
    gateway, client = held
    name, other = client.create("late_dispatch"), client.create("late_dispatch")
    assert code_of(client.sh, name, MARKED, timeout=1.0) == "DEADLINE_EXCEEDED"
    events = client.events(other, "true")
    gateway.wait_for(other, 1, "held")
    client.delete(other)
    client.gone(other)
    assert gateway.executions(name)[0].history == ("admitted", "held")
    gateway.release()
    assert ran_on(client, name)
    assert refusal(collected, events)[0] == "UNAVAILABLE"
    assert gateway.executions(other)[0].history == ("admitted", "held", "refused")


# --- request ids ----------------------------------------------------------------------------------


def test_a_request_is_admitted_once(client):
    name = client.create()
    given = {"request_id": str(uuid.uuid4())}
    assert client.sh(name, "echo x >> log", **given)[2] == 0
    code, _, reason = refusal(client.sh, name, "echo x >> log", **given)
    assert (code, reason) == ("FAILED_PRECONDITION", "REQUEST_STREAM_UNAVAILABLE")
    code, _, reason = refusal(client.sh, name, "echo y >> log", **given)
    assert (code, reason) == ("FAILED_PRECONDITION", "REQUEST_ID_PAYLOAD_MISMATCH")
    assert client.execute(name, "cat", "log")[0] == b"x\n"


def test_a_running_request_is_uncertain(client):
    name = client.create()
    given = {"request_id": str(uuid.uuid4())}
    events = client.events(name, "/bin/sh", "-c", MARKED, **given)
    next(events)
    code, _, reason = refusal(client.sh, name, MARKED, **given)
    assert (code, reason) == ("FAILED_PRECONDITION", "REQUEST_OUTCOME_UNCERTAIN")
    assert ran_on(client, name)
    assert collected(events)[2] == 9
    assert refusal(client.sh, name, MARKED, **given)[2] == "REQUEST_STREAM_UNAVAILABLE"


def test_a_request_that_timed_out_is_uncertain_for_ever(client):
    name = client.create()
    given = {"request_id": str(uuid.uuid4()), "seconds": 0.2}
    assert client.sh(name, MARKED, **given)[2] == 124
    assert ran_on(client, name)
    assert refusal(client.sh, name, MARKED, **given)[2] == "REQUEST_OUTCOME_UNCERTAIN"


# --- kills ----------------------------------------------------------------------------------------


@pytest.fixture
def refusing(client, box):
    if not client.gateway.refuses_group_kills(box):
        pytest.skip("this system cannot refuse the kill of groups")


def test_groups_and_the_supervisor_cannot_be_killed(client, box, refusing):
    refused = "kill -9 %s 2>&1; echo survived"
    for target in ("0", "-1", "-$$", "$PPID"):
        out, _, code = client.execute(box, "/bin/bash", "-c", "exec 2>&1; " + refused % target)
        assert b"Operation not permitted" in out, target
        assert out.endswith(b"survived\n"), target
        assert code == 0
    assert client.sh(box, "sleep 60 & kill $!; wait $!")[2] == 128 + signal.SIGTERM


def test_a_timeout_inside_reaches_the_direct_child_only(client, refusing):
    name = client.create()
    script = "timeout 0.2 sh -c 'sleep 66 > /dev/null 2>&1 & wait'"
    assert client.sh(name, script)[2] == 124
    [left] = client.gateway.processes(name)
    assert b"sleep\x0066" in Path(f"/proc/{left}/cmdline").read_bytes()
    client.delete(name)
    client.gone(name)
    assert not alive(left)


def test_groups_can_be_killed_where_that_is_wanted():
    with own(group_kills=True) as (gateway, client):
        name = client.create()
        assert not gateway.refuses_group_kills(name)
        script = "timeout 0.2 sh -c 'sleep 66 > /dev/null 2>&1 & wait'"
        assert client.sh(name, script)[2] == 124
        until(lambda: not gateway.processes(name))
        assert client.sh(name, "kill -9 0")[2] == 137
        assert client.sh(name, "echo there")[0] == b"there\n"


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code", "details"),
    [
        (Fault.NO_SESSION, "UNAVAILABLE", "supervisor relay failed"),
        (Fault.RELAY_TIMEOUT, "DEADLINE_EXCEEDED", "relay open timed out"),
        (Fault.RELAY_LIMIT, "RESOURCE_EXHAUSTED", "supervisor relay failed"),
    ],
)
def test_a_command_may_not_start(client, fault, code, details):
    name = client.create(fault)
    found = refusal(client.sh, name, "touch marker")
    assert found[0] == code
    assert details in found[1]
    assert not (client.gateway.workspace(name) / "marker").exists()
    assert client.gateway.executions(name)[0].history == ("admitted", "refused")


def test_a_relay_may_be_lost_while_the_command_runs(client):
    name = client.create("relay_lost")
    given = {"request_id": str(uuid.uuid4())}
    code, details, _ = refusal(client.sh, name, MARKED, **given)
    assert code == "UNAVAILABLE"
    assert details == "exec relay closed before the command reported an exit status"
    assert ran_on(client, name)
    assert refusal(client.sh, name, MARKED, **given)[2] == "REQUEST_OUTCOME_UNCERTAIN"


def test_a_stream_may_have_no_exit(client):
    name = client.create("no_exit")
    assert client.sh(name, "echo all") == (b"all\n", b"", None)
    with pytest.raises(openshell.SandboxError, match="without an exit event"):
        client.sdk.exec(name, ["true"], workspace="default")


def test_an_event_may_be_too_big_for_the_client(client):
    name = client.create("big_event")
    code, details, _ = refusal(client.sh, name, "true")
    assert code == "RESOURCE_EXHAUSTED"
    assert "Received message larger than max" in details


def test_a_124_may_come_early(client):
    name = client.create("exit_124_early")
    assert client.sh(name, MARKED)[2] == 124
    assert ran_on(client, name)


def test_output_may_be_short_though_all_seems_well(client):
    name = client.create("short_output")
    out, _, code = client.execute(name, "head", "-c", "100000", "/dev/zero")
    assert code == 0
    assert 0 < len(out) < 100_000


def test_delivery_may_be_unknown(client):
    assert client.sh(client.create("delivery_unknown"), "exit 3")[2] == 74


def test_a_sandbox_may_be_restarted_blank(client):
    name = client.create("restarted_blank-2")
    before = client.get(name)
    client.sh(name, "touch file; setsid sleep 67 > /dev/null 2>&1 &")
    assert client.execute(name, "ls", "-A") == (b"", b"", 0)
    assert not client.gateway.processes(name)
    after = client.get(name)
    assert after.metadata.id == before.metadata.id
    assert after.status.main_process_instance_id != before.status.main_process_instance_id


def test_a_fault_hits_the_exec_that_the_label_counts(client):
    name = client.create("no_exit-2.delivery_unknown-3")
    assert [client.sh(name, "exit 1")[2] for _ in range(4)] == [1, None, 74, 1]


def test_a_fault_hits_where_it_was_injected(client):
    name, other = client.create(), client.create()
    client.gateway.inject(Fault.NO_EXIT, sandbox=name, matching="--check", times=1)
    client.gateway.inject(Fault.DELIVERY_UNKNOWN, sandbox=name, number=4)
    scripts = ["exit 1", "exit 1 --check", "exit 1 --check", "exit 1", "exit 1"]
    assert [client.sh(other, script)[2] for script in scripts] == [1] * 5
    assert [client.sh(name, script)[2] for script in scripts] == [1, None, 1, 74, 1]
    client.gateway.inject(Fault.NO_EXIT, sandbox=name, matching="of the input")
    assert client.execute(name, "true", stdin=b"part of the input")[2] is None
    client.gateway.clear()
    assert client.execute(name, "true", stdin=b"part of the input")[2] == 0
    with pytest.raises(RuntimeError, match="no_such_thing"):
        client.gateway.inject("no_such_thing")


def test_a_sandbox_may_be_killed(client):
    name = client.create()
    events = client.events(name, "sleep", "68")
    client.gateway.wait_for(name, 1, "running")
    pids = client.gateway.processes(name)
    client.gateway.kill_sandbox(name)
    assert refusal(collected, events)[0] == "UNAVAILABLE"
    record = client.phase(name, pb.SANDBOX_PHASE_ERROR)
    assert record.status.conditions[0].reason == "ContainerExited"
    assert pids
    assert not [pid for pid in pids if alive(pid)]


def test_what_a_killed_supervisor_leaves_is_killed(client):
    name = client.create()
    client.sh(name, "setsid sleep 69 > /dev/null 2>&1 &")
    [left] = client.gateway.processes(name)
    os.kill(int((client.gateway.place(name) / "supervisor").read_text().split()[0]), signal.SIGKILL)
    client.phase(name, pb.SANDBOX_PHASE_ERROR)
    until(lambda: not alive(left))


# --- the life of a gateway ------------------------------------------------------------------------


def test_a_killed_gateway_leaves_the_commands_running(tmp_path):
    script = (
        "echo go; until [ -e go ]; do sleep 0.01; done; head -c 1000000 /dev/zero; touch marker"
    )
    with own(root=tmp_path) as (gateway, client):
        name = client.create()
        events = client.events(name, "/bin/sh", "-c", f"{script}; sleep 70")
        assert next(events).stdout.data == b"go\n"
        gateway.kill()
        assert refusal(collected, events)[0] == "UNAVAILABLE"
        assert code_of(client.get, name) == "UNAVAILABLE"
        (gateway.workspace(name) / "go").touch()
        until((gateway.workspace(name) / "marker").exists)
        pids = gateway.processes(name)
        assert pids
        endpoint = gateway.endpoint
        gateway.restart()
        assert gateway.endpoint == endpoint
        client.close()
        client.connect()
        client.ready(name)
        assert not [pid for pid in pids if alive(pid)]
        assert client.execute(name, "ls") == (b"go\nmarker\n", b"", 0)


def test_what_was_admitted_is_remembered_by_the_next_gateway():
    with own() as (gateway, client):
        name = client.create("no_exit-4")
        lost, ended = ({"request_id": str(uuid.uuid4())} for _ in range(2))
        client.sh(name, "exit 2", **ended)
        events = client.events(name, "sleep", "71", **lost)
        gateway.wait_for(name, 2, "running")
        gateway.restart()
        client.close()
        client.connect()
        client.ready(name)
        assert refusal(client.sh, name, "exit 2", **ended)[2] == "REQUEST_STREAM_UNAVAILABLE"
        assert (
            refusal(client.execute, name, "sleep", "71", **lost)[2] == "REQUEST_OUTCOME_UNCERTAIN"
        )
        assert [client.sh(name, "exit 1")[2] for _ in range(2)] == [1, None]
        del events


def test_a_gateway_may_be_killed_in_the_middle():
    with own() as (gateway, client):
        name = client.create("killed_gateway-1")
        assert code_of(client.sh, name, MARKED) == "UNAVAILABLE"
        gateway.wait()
        (gateway.workspace(name) / "go").touch()
        until((gateway.workspace(name) / "marker").exists)
        gateway.start()
        client.close()
        client.connect()
        client.ready(name)
        assert client.execute(name, "ls")[0] == b"go\nmarker\n"


def test_a_deletion_is_finished_by_the_next_gateway():
    with own(delete_latency_s=0.5) as (gateway, client):
        name = client.create()
        client.delete(name)
        gateway.restart()
        client.close()
        client.connect()
        client.gone(name)
        assert not gateway.place(name).exists()


def test_two_gateways_do_not_share_a_directory(tmp_path):
    with (
        OpenShellGateway(tmp_path),
        pytest.raises(RuntimeError, match="did not start"),
        OpenShellGateway(tmp_path),
    ):
        pass


@pytest.fixture
def program(tmp_path):
    """A gateway from the command line, with a busy sandbox."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "orchestrator.testing.openshell_gateway"),
            *("--port", "0", "--root", str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process.stdout as output:
        endpoint = output.readline().strip()
    try:
        busy(endpoint)
        yield process
    finally:
        process.kill()
        process.wait()


def busy(endpoint):
    """Have something run in a sandbox."""
    with contextlib.closing(openshell.SandboxClient(endpoint)) as sdk:
        sdk.create(name="busy", workspace="default")
        sdk.wait_ready("busy", workspace="default")
        sdk.exec("busy", ["sh", "-c", "setsid sleep 72 >&- 2>&- &"], workspace="default")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_program_leaves_nothing_running(program, number):
    pids = descendants(program.pid)
    assert len(pids) >= 2
    program.send_signal(number)
    assert program.wait(10) == (-number if number == signal.SIGKILL else 0)
    until(lambda: not [pid for pid in pids if alive(pid)])


def test_nothing_outlives_the_owner_of_a_gateway(tmp_path):
    owner = """
import sys, time
import openshell
from orchestrator.testing.openshell_gateway import OpenShellGateway
gateway = OpenShellGateway(sys.argv[1])
gateway.start()
sdk = openshell.SandboxClient(gateway.endpoint)
sdk.create(name="busy", workspace="default")
sdk.wait_ready("busy", workspace="default")
sdk.exec("busy", ["sh", "-c", "setsid sleep 73 >&- 2>&- &"], workspace="default")
print(gateway._process.pid, *gateway.processes("busy"), flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", owner, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process.stdout as output:
        pids = [int(word) for word in output.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.wait()
    until(lambda: not [pid for pid in pids if alive(pid)])
