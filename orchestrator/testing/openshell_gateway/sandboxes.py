"""The sandboxes of a gateway: their records, which outlive it, and their phases."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field
from openshell._proto import openshell_pb2, sandbox_pb2

from ... import tree
from . import limits
from .container import Container, LostError, stop_stale
from .faults import Fault, check_label
from .limits import RefusedError, not_found

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .faults import Faults
    from .options import Options

LOG_LINES: Final = 1000
PROVISIONING: Final[int] = openshell_pb2.SANDBOX_PHASE_PROVISIONING
READY: Final[int] = openshell_pb2.SANDBOX_PHASE_READY
ERROR: Final[int] = openshell_pb2.SANDBOX_PHASE_ERROR
DELETING: Final[int] = openshell_pb2.SANDBOX_PHASE_DELETING
STOPPED: Final[int] = openshell_pb2.SANDBOX_PHASE_STOPPED
STARTING: Final[int] = openshell_pb2.SANDBOX_PHASE_STARTING
COMPLETED: Final[int] = openshell_pb2.SANDBOX_PHASE_COMPLETED
CONDITIONS: Final = {
    PROVISIONING: ("False", "Starting", "Container created"),
    READY: ("True", "BackendReady", "Container is running"),
    ERROR: ("False", "ContainerExited", "Container exited"),
    DELETING: ("False", "Deleting", "Container is being removed"),
    STOPPED: ("False", "ContainerStopped", "Container is stopped"),
    STARTING: ("False", "Starting", "Container is starting"),
    COMPLETED: ("False", "MainProcessExited", "Main process exited with code 0"),
}
"""Of each phase the condition Ready: its status, reason and message."""


def default_policy() -> Any:
    """Give the policy of a sandbox that brings none: restrictive, and no network."""
    return sandbox_pb2.SandboxPolicy(
        version=1,
        filesystem=sandbox_pb2.FilesystemPolicy(
            include_workdir=True,
            read_only=["/bin", "/usr", "/lib", "/proc", "/dev/urandom", "/etc", "/var/log"],
            read_write=["/tmp", "/dev/null"],  # noqa: S108 - a rule about it
        ),
        landlock=sandbox_pb2.LandlockPolicy(compatibility="best_effort"),
    )


@define(eq=False)
class Sandbox:
    """A sandbox as the gateway knows it.

    Attributes:
        message: its record.
        place: directory of all that is its own.
        container: its processes, while it has any.
        logs: what was said about it.
        moving: held by who starts or stops its container.
    """

    message: Any
    place: Path
    container: Container | None = None
    logs: deque[Any] = field(factory=lambda: deque(maxlen=LOG_LINES))
    moving: threading.Lock = field(factory=threading.Lock)

    @property
    def name(self) -> str:
        """Its name, which nobody else has while it lives."""
        return str(self.message.metadata.name)

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return dict(self.message.metadata.labels)

    @property
    def phase(self) -> int:
        """How far it is."""
        return int(self.message.status.phase)

    @property
    def workspace(self) -> Path:
        """The directory in which its commands start, and their HOME."""
        return self.place / "workspace"

    def log(self, text: str, level: str = "INFO") -> None:
        """Say something about it."""
        line = openshell_pb2.SandboxLogLine(
            sandbox_id=self.message.metadata.id,
            level=level,
            target="gateway",
            message=text,
            source="gateway",
        )
        line.event_time.GetCurrentTime()
        self.logs.append(line)


class Sandboxes:
    """All sandboxes of a gateway."""

    def __init__(self, options: Options, faults: Faults, lifeline: int) -> None:
        """Find those that an earlier gateway had here, and restart them as its driver does."""
        self._options = options
        self._faults = faults
        self._lifeline = lifeline
        self._closing = threading.Event()
        self._all: dict[str, Sandbox] = {}
        self.changed = threading.Condition()
        """Held to look at sandboxes, and notified when one has changed."""
        self.root = options.root / "sandboxes"
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in sorted(self.root.iterdir()):
            self._load(place)

    def _load(self, place: Path) -> None:
        stop_stale(place)
        try:
            record = (place / "record").read_bytes()
        except FileNotFoundError:
            tree.remove(place)  # its creation was not finished
            return
        sandbox = Sandbox(openshell_pb2.Sandbox.FromString(record), place)
        self._all[sandbox.name] = sandbox
        if sandbox.phase == DELETING:
            self._begin(self._delete, sandbox)
        elif sandbox.phase in {PROVISIONING, READY, STARTING}:
            self._move(sandbox, STARTING)
            self._begin(self._provision, sandbox)

    def _begin(self, task: Any, sandbox: Sandbox) -> None:
        threading.Thread(target=task, args=(sandbox,), daemon=True).start()

    def find(self, name: str) -> Sandbox:
        """Find a sandbox by its name."""
        if not name:
            raise limits.invalid("name is required")
        with self.changed:
            if name not in self._all:
                raise not_found()
            return self._all[name]

    def snapshot(self, sandbox: Sandbox) -> Any:
        """Give the record of a sandbox as it is now."""
        with self.changed:
            copied = openshell_pb2.Sandbox()
            copied.CopyFrom(sandbox.message)
            return copied

    def listed(self, wanted: dict[str, str], after: str) -> Iterator[Any]:
        """Give the records of sandboxes with all of these labels, by name, after a name."""
        with self.changed:
            everyone = sorted(self._all.items())
        for name, sandbox in everyone:
            if name > after and wanted.items() <= sandbox.labels.items():
                yield self.snapshot(sandbox)

    def hit(self, fault: Fault, sandbox: Sandbox, **where: Any) -> bool:
        """Tell whether a fault is to happen to a sandbox now."""
        return self._faults.hit(fault, sandbox.name, sandbox.labels, **where)

    def _move(self, sandbox: Sandbox, phase: int, message: str = "") -> bool:
        """Change the phase of a sandbox that is not about to go; tell whether it was."""
        with self.changed:
            if self._all.get(sandbox.name) is not sandbox or sandbox.phase == DELETING:
                return False
            record = sandbox.message
            record.metadata.resource_version += 1
            record.status.phase = phase
            status, reason, usual = CONDITIONS[phase]
            del record.status.conditions[:]
            condition = record.status.conditions.add(
                type="Ready", status=status, reason=reason, message=message or usual
            )
            condition.transition_time.GetCurrentTime()
            if phase == DELETING:
                record.metadata.deletion_time.GetCurrentTime()
            draft = sandbox.place / "record.new"
            draft.write_bytes(record.SerializeToString())
            draft.rename(sandbox.place / "record")
            sandbox.log(f"{reason}: {condition.message}")
            self.changed.notify_all()
            return True

    def create(self, request: Any) -> Any:
        """Make a sandbox, which becomes ready later; give its record."""
        limits.check_create(request)
        check_label(request.labels)
        identity = str(uuid.uuid4())
        name = request.name or f"sandbox-{identity[:8]}"
        message = openshell_pb2.Sandbox(spec=request.spec)
        if not message.spec.HasField("policy"):
            message.spec.policy.CopyFrom(default_policy())
        message.metadata.id, message.metadata.name = identity, name
        message.metadata.workspace = limits.WORKSPACE
        message.metadata.labels.update(request.labels)
        message.metadata.annotations.update(request.annotations)
        message.metadata.created_time.GetCurrentTime()
        message.status.current_policy_version = 1
        sandbox = Sandbox(message, self.root / name)
        with self.changed:
            if name in self._all:
                raise RefusedError("ALREADY_EXISTS", f"sandbox '{name}' already exists")
            sandbox.workspace.mkdir(parents=True)
            self._all[name] = sandbox
            self._move(sandbox, PROVISIONING)
        self._begin(self._provision, sandbox)
        if self.hit(Fault.CREATE_LOST, sandbox):
            raise RefusedError("UNAVAILABLE", "the answer was lost")
        return self.snapshot(sandbox)

    def _provision(self, sandbox: Sandbox) -> None:
        if self._closing.wait(self._options.ready_latency_s):
            return
        if self.hit(Fault.STUCK_PROVISIONING, sandbox):
            return
        if self.hit(Fault.ERROR_PHASE, sandbox):
            self._move(sandbox, ERROR)
        elif self.hit(Fault.COMPLETED_PHASE, sandbox):
            self._move(sandbox, COMPLETED)
        else:
            self._boot(sandbox)

    def _boot(self, sandbox: Sandbox) -> None:
        """Start the container, unless the sandbox or the gateway is about to go."""
        with sandbox.moving:
            if self._closing.is_set() or sandbox.phase == DELETING:
                return
            try:
                container = Container(
                    sandbox.place,
                    self._lifeline,
                    group_kills=self._options.group_kills,
                    on_end=lambda ended: self._ended(sandbox, ended),
                )
            except LostError as error:
                self._move(sandbox, ERROR, str(error))
                return
            with self.changed:
                sandbox.container = container
                sandbox.message.status.main_process_instance_id = str(uuid.uuid4())
                self._move(sandbox, READY)
            if container.gone:
                self._ended(sandbox, container)
        if sandbox.message.spec.command:
            self._begin(self._run_main, sandbox)

    def _run_main(self, sandbox: Sandbox) -> None:
        """Run the main process, with which the sandbox ends."""
        try:
            command = list(sandbox.message.spec.command)
            process = self.container(sandbox).run(
                ["/usr/bin/env", *command], self.environment(sandbox), sandbox.workspace
            )
            process.discard()
            code = process.ended.result()
        except (LostError, RefusedError):
            return
        self._halt(sandbox)
        with self.changed:
            sandbox.message.status.exit_code = code
        said = f"Main process exited with code {code}"
        self._move(sandbox, ERROR if code else COMPLETED, said)

    def _halt(self, sandbox: Sandbox) -> None:
        """Stop the container, and return when nothing of it is left."""
        with sandbox.moving:
            with self.changed:
                container, sandbox.container = sandbox.container, None
            if container is not None:
                container.stop()

    def _ended(self, sandbox: Sandbox, container: Container) -> None:
        """Take note that a container ended; if nobody stopped it, the sandbox is in error."""
        with self.changed:
            if sandbox.container is not container:
                return
            sandbox.container = None
        self._move(sandbox, ERROR)

    def container(self, sandbox: Sandbox) -> Container:
        """Give the container of a sandbox that has one."""
        with self.changed:
            if sandbox.container is None:
                raise RefusedError("UNAVAILABLE", "supervisor relay failed: no supervisor session")
            return sandbox.container

    def environment(self, sandbox: Sandbox) -> dict[str, str]:
        """Give the environment of its commands, beside what a login shell reads."""
        return {
            "OPENSHELL_SANDBOX": "1",
            "HOME": str(sandbox.workspace),
            "USER": "sandbox",
            "SHELL": "/bin/bash",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "TERM": "dumb",
            **sandbox.message.spec.environment,
        }

    def restart_blank(self, sandbox: Sandbox) -> None:
        """Restart a sandbox without anything that was in it."""
        self._halt(sandbox)
        tree.remove(sandbox.workspace)
        sandbox.workspace.mkdir()
        self._boot(sandbox)

    def stop(self, name: str) -> Any:
        """Stop all that runs in a sandbox, and keep its files."""
        sandbox = self.find(name)
        if sandbox.phase != READY:
            raise RefusedError("FAILED_PRECONDITION", "sandbox is not ready")
        self._halt(sandbox)
        self._move(sandbox, STOPPED)
        return self.snapshot(sandbox)

    def start(self, name: str) -> Any:
        """Start a stopped sandbox again."""
        sandbox = self.find(name)
        if sandbox.phase != STOPPED:
            raise RefusedError("FAILED_PRECONDITION", "sandbox is not stopped")
        self._move(sandbox, STARTING)
        self._begin(self._provision, sandbox)
        return self.snapshot(sandbox)

    def delete(self, name: str) -> str:
        """Accept the deletion of a sandbox, which happens later; give its id."""
        sandbox = self.find(name)
        if self.hit(Fault.DELETE_FAILS, sandbox):
            raise RefusedError("INTERNAL", "delete sandbox failed: driver error")
        if self._move(sandbox, DELETING):
            self._begin(self._delete, sandbox)
        return str(sandbox.message.metadata.id)

    def _delete(self, sandbox: Sandbox) -> None:
        slow = self.hit(Fault.SLOW_DELETE, sandbox)
        latency_s = self._options.slow_delete_s if slow else self._options.delete_latency_s
        if self.hit(Fault.DELETE_STUCK, sandbox) or self._closing.wait(latency_s):
            return
        self._halt(sandbox)
        tree.remove(sandbox.place)
        with self.changed:
            del self._all[sandbox.name]
            self.changed.notify_all()

    def config(self, name: str) -> Any:
        """Give the policy of a sandbox, and where it is from."""
        sandbox = self.find(name)
        record = self.snapshot(sandbox)
        overridden = self.hit(Fault.GLOBAL_POLICY, sandbox)
        policy = default_policy() if overridden else record.spec.policy
        admitted = not self.hit(Fault.NOT_ADMITTED, sandbox)
        return sandbox_pb2.GetSandboxConfigResponse(
            policy=policy,
            version=1,
            policy_hash=hashlib.sha256(policy.SerializeToString(deterministic=True)).hexdigest(),
            policy_source=(
                sandbox_pb2.POLICY_SOURCE_GLOBAL
                if overridden
                else sandbox_pb2.POLICY_SOURCE_SANDBOX
            ),
            global_policy_version=int(overridden),
            workspace=limits.WORKSPACE,
            configuration_admitted=admitted,
            configuration_error="" if admitted else "policy was not admitted",
            configuration_instance_id=record.status.main_process_instance_id,
        )

    def close(self) -> None:
        """Stop everything; the records and the files stay."""
        self._closing.set()
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._halt, list(self._all.values())))
