"""One sandbox of a gateway, for one run: commands through the gateway, all else by the guest.

Every answer of the guest ends with a word that was drawn for it, so that output of which the end
was lost is not taken for all of it, whatever the exit event says. An order to the supervisor bears
a `request_id` that follows from the sandbox and the order, so the gateway knows it again, were it
sent by another runner after a crash. Only orders do: it remembers a thousand requests of a caller.
"""

from __future__ import annotations

import io
import secrets
import tarfile
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import grpc
import openshell
from attrs import define, frozen
from openshell._proto import openshell_pb2

from ...core.errors import SandboxGoneError
from ...guest import lost, scripts
from ...guest.answers import GuestError
from ...guest.shells import ASK_S, SLACK_S, ShellSandbox
from ...ports import Ending, demand
from .gateway import OpenShellError, code_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ...core.evidence import Entry, Manifest
    from ...core.facts import SandboxRef
    from ...core.machine import CleanupPermit
    from ...ports import Intake, Order, Record, Slot, Workspace
    from . import OpenShellBackend
    from .gateway import Gateway

NET_S: Final = 60.0
"""Seconds after our own bounds at which a gateway ends a request, for nobody to read."""
POLL_S: Final = 0.1
_COMPLAINT: Final = 2000
_WHOLE: Final = 'end=$1; shift; "$@"; status=$?; printf %s "$end"; exit $status'
_INSTALL: Final = """umask 077; home=$(pwd -P); place=$home/.orchestrator; new=$place/new.$$
mkdir -p "$place/records" "$place/home" "$new" && tar -xf - -C "$new" || exit 1
for name; do mv "$new/$name" "$place/$name" || exit 1; done
rmdir "$new"; printf %s "$home" """
_ADMITTED: Final = {
    "REQUEST_OUTCOME_UNCERTAIN": False,
    "REQUEST_ID_PAYLOAD_MISMATCH": False,
    "REQUEST_STREAM_UNAVAILABLE": True,
    "REQUEST_REPLAY_UNAVAILABLE": True,
}
"""Reasons by which a gateway says that it had a request before, and whether it saw its end."""


class AdmittedError(GuestError):
    """The gateway has had this request before. `ended`: it saw the end of what it started."""

    def __init__(self, message: str, *, ended: bool) -> None:
        """Say so."""
        self.ended = ended
        super().__init__(message)


@frozen
class GatewayShell:
    """Runs programs in a sandbox. See `guest.shells.Shell`.

    Attributes:
        gateway: that has the sandbox.
        name: of the sandbox, at the gateway.
    """

    gateway: Gateway
    name: str

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", bound_s: float = ASK_S
    ) -> Iterator[bytes]:
        """Run a program that may be run twice; give all that it writes, or raise."""
        end = secrets.token_hex(8)
        request = self._request(["/bin/sh", "-c", _WHOLE, "sh", end, *argv], bound_s)
        request.stdin = stdin
        held = b""
        for data in self._send(request, bound_s):
            held += data
            if len(held) > len(end):
                yield held[: -len(end)]
                held = held[-len(end) :]
        if held != end.encode():
            raise GuestError(f"sandbox {self.name}: the end of an answer of {argv[1:3]} was lost")

    def order(self, argv: Sequence[str], *, request_id: str, net_s: float, bound_s: float) -> None:
        """Run a program that must not be run twice.

        Args:
            argv: the program and its arguments.
            request_id: by which the gateway knows it again; what it is told has to be the same.
            net_s: seconds in which the program has ended by itself.
            bound_s: seconds after which nothing is waited for any more.

        Raises:
            AdmittedError: the gateway has had the request before.
            GuestError: it did not end with status 0, or that is not known.
        """
        request = self._request(argv, net_s)
        request.request_id = request_id
        try:
            for _ in self._send(request, bound_s):
                pass
        except ExhaustedError:
            # Perhaps it remembers no more of them. The guest claims an order once in any case.
            request.ClearField("request_id")
            for _ in self._send(request, bound_s):
                pass

    def _request(self, argv: Sequence[str], bound_s: float) -> Any:
        request = openshell_pb2.ExecSandboxRequest(
            sandbox=self.name, command=argv, no_login_shell=True
        )
        request.workspace_scope.workspace = self.gateway.workspace
        request.execution_timeout.FromMilliseconds(int((bound_s + NET_S) * 1000))
        return request

    def _send(self, request: Any, bound_s: float) -> Iterator[bytes]:
        """Have the gateway carry out a request; a sandbox that is not ready has done nothing."""
        try:
            yield from self._events(request, bound_s)
        except NotReadyError:
            self.gateway.ready(self.name, self.gateway.call_s)
            yield from self._events(request, bound_s)

    def _events(self, request: Any, bound_s: float) -> Iterator[bytes]:
        complaint, status = b"", None
        call = self.gateway.stub.ExecSandbox(request, timeout=bound_s)
        try:
            for event in call:
                kind = event.WhichOneof("payload")
                if kind == "stdout" and event.stdout.data:
                    yield event.stdout.data
                elif kind == "stderr":
                    complaint = (complaint + event.stderr.data)[-_COMPLAINT:]
                elif kind == "exit":
                    status = event.exit.exit_code
        except grpc.RpcError as error:
            raise _failure(f"sandbox {self.name}", error) from error
        finally:
            call.cancel()  # of what is not listened to any more; it runs on
        said = complaint.decode("utf-8", "replace").strip()
        if status is None:
            raise GuestError(f"sandbox {self.name}: the stream ended without an exit event; {said}")
        if status != 0:
            raise GuestError(f"sandbox {self.name}: exit event {status}, expected 0; {said}")


class NotReadyError(GuestError):
    """The sandbox is not ready, and nothing was started."""


class ExhaustedError(GuestError):
    """The gateway had no room for the request, and nothing was started."""


def _failure(what: str, error: grpc.RpcError) -> Exception:
    """Say what the end of a stream with an error establishes: nothing, but for a few."""
    code, details = code_of(error), str(error.details())
    info = openshell.GatewayError(error).error_info
    reason = info.reason if info is not None else ""
    text = f"{what}: {code} {reason}: {details}".replace(" : ", ": ")
    if reason in _ADMITTED:
        return AdmittedError(text, ended=_ADMITTED[reason])
    if code == "NOT_FOUND" and "workspace" not in details:
        return SandboxGoneError(text)
    if code == "FAILED_PRECONDITION":
        return NotReadyError(text)
    if code == "RESOURCE_EXHAUSTED" and "message larger than max" not in details:
        return ExhaustedError(text)
    return GuestError(text)


def install(shell: GatewayShell) -> str:
    """Bring the guest into a sandbox, as often as wanted; give the directory that it is in."""
    bundle = io.BytesIO()
    with tarfile.open(fileobj=bundle, mode="w") as archive:
        for name, path in scripts().items():
            data = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    argv = ["/bin/sh", "-c", _INSTALL, "sh", *scripts()]
    return _home(shell.run(argv, stdin=bundle.getvalue()))


def home_of(shell: GatewayShell) -> str:
    """Give the directory in which a sandbox's commands start."""
    return _home(shell.run(["/bin/sh", "-c", 'printf %s "$(pwd -P)"']))


def _home(answer: Iterable[bytes]) -> str:
    home = b"".join(answer).decode("utf-8", "surrogateescape")
    if not home.startswith("/") or home == "/":
        raise GuestError(f"commands start in {home!r}; expected an absolute path below /")
    return home


@define(eq=False, kw_only=True)
class Guest(ShellSandbox):
    """The guest in a sandbox, to which the gateway's memory of requests is added."""

    shell: GatewayShell

    def _order(self, verb: str, order: Order, bound_s: float) -> None:
        program, text = self._placing(verb, order)
        argv = ["/bin/sh", "-c", program, "sh", self._record(order.slot)]
        self._do(argv, text)
        self._supervise(verb, order, bound_s)

    def _supervise(self, verb: str, order: Order, bound_s: float) -> None:
        """Start a supervisor: to run an order, by the same request whenever it is made."""
        argv = ["/bin/sh", f"{self.base}/supervisor.sh", verb, self._record(order.slot), "shared"]
        said = f"{self.ref.identity} {order.slot} {order.nonce}"
        request_id = str(uuid.uuid5(uuid.NAMESPACE_URL, said)) if verb == "run" else ""
        net_s = order.deadline_s + order.grace_s + SLACK_S if verb == "run" else bound_s
        self.shell.order(argv, request_id=request_id, net_s=net_s, bound_s=bound_s)

    def execute(self, order: Order) -> Record:
        """Have a supervisor run the order, unless the gateway or the guest has had it before."""
        try:
            return super().execute(order)
        except AdmittedError as error:
            # Somebody sent it before. It may be on its way still, until it would be too late.
            end = time.monotonic() + order.latest_start_s
            while not self._recorded(order.slot).claimed:
                if error.ended or time.monotonic() > end:
                    raise
                time.sleep(POLL_S)
        return super().execute(order)

    def settle(self, order: Order) -> Record:
        """Settle with the guest; where it knows of no start, hear what the gateway knows."""
        known = self._recorded(order.slot).finished(order)
        if known is not None:
            return known
        record = super().settle(order)
        if record.ending is Ending.NOT_STARTED and self._has_run(order):
            message = "the gateway saw it start and end, and the guest has no record of it"
            return lost(message, still=True)
        return record

    def _has_run(self, order: Order) -> bool:
        """Ask for an order again of which nothing can come any more: settle has claimed it."""
        try:
            self._supervise("run", order, SLACK_S)
        except AdmittedError as error:
            return error.ended
        except (GuestError, OpenShellError, SandboxGoneError):
            return False
        return False


@frozen
class OpenShellSandbox:
    """The sandbox of a run. See `ports.Sandbox`.

    Attributes:
        ref: which one it is.
        conditions: what it was made with and what is enforced, where this process made it.
    """

    ref: SandboxRef
    conditions: Mapping[str, str]
    _backend: OpenShellBackend

    @property
    def _guest(self) -> Guest:
        return self._backend.guest(self.ref)

    def upload(self, workspace: Workspace) -> bool:
        """Send the workspace in pieces."""
        return self._guest.upload(workspace)

    def manifest(self) -> Manifest:
        """Have the guest account for the workspace."""
        return self._guest.manifest()

    def execute(self, order: Order) -> Record:
        """Have the guest run the order."""
        return self._guest.execute(order)

    def settle(self, order: Order) -> Record:
        """Have the guest settle the order."""
        return self._guest.settle(order)

    def fetch(self, entries: Iterable[Entry], slot: Slot, intake: Intake) -> None:
        """Have the guest send files and output."""
        self._guest.fetch(entries, slot, intake)

    def destroy(self, permit: CleanupPermit) -> None:
        """Delete the sandbox; return when the gateway has none of this identity any more."""
        run_id = self.ref.sandbox_id
        demand(permit, run_id)
        self._backend.delete(self.ref)
