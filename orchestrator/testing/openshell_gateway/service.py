"""The gateway's calls, as the stubs of the SDK define them."""

from __future__ import annotations

import base64
import binascii
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
from google.rpc import error_details_pb2, status_pb2
from openshell._proto import openshell_pb2, openshell_pb2_grpc

from . import limits
from .limits import RefusedError
from .sandboxes import READY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .executions import Executions
    from .options import Options
    from .sandboxes import Sandboxes

ERROR_DOMAIN: Final = "openshell.nvidia.com"
WATCH_S: Final = 0.5


def refuse(context: Any, error: RefusedError) -> NoReturn:
    """End a call with an error, and with its reason for a machine where it has one."""
    code = getattr(grpc.StatusCode, error.code)
    if error.reason:
        status = status_pb2.Status(code=code.value[0], message=error.details)
        info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
        status.details.add().Pack(info)
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, error.details)
    raise AssertionError  # abort has raised


def answers(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Make a method a call: its size is checked, and a refusal becomes a status."""

    @wraps(method)
    def call(service: Any, request: Any, context: Any) -> Any:
        try:
            limits.check_size(request.ByteSize())
            return method(service, request)
        except RefusedError as error:
            refuse(context, error)

    return call


class Service(openshell_pb2_grpc.OpenShellServicer):
    """The calls that are simulated; the others say UNIMPLEMENTED."""

    def __init__(self, options: Options, sandboxes: Sandboxes, executions: Executions) -> None:
        self._options = options
        self._sandboxes = sandboxes
        self._executions = executions

    @answers
    def Health(self, _request: Any) -> Any:  # noqa: N802 - the stubs' name
        """Say who this is."""
        return openshell_pb2.HealthResponse(
            status=openshell_pb2.SERVICE_STATUS_HEALTHY, version=self._options.version
        )

    @answers
    def CreateSandbox(self, request: Any) -> Any:  # noqa: N802
        """Make a sandbox."""
        limits.check_scope(request)
        return openshell_pb2.SandboxResponse(sandbox=self._sandboxes.create(request))

    @answers
    def GetSandbox(self, request: Any) -> Any:  # noqa: N802
        """Find a sandbox."""
        limits.check_scope(request)
        sandbox = self._sandboxes.find(request.name)
        return openshell_pb2.SandboxResponse(sandbox=self._sandboxes.snapshot(sandbox))

    @answers
    def ListSandboxes(self, request: Any) -> Any:  # noqa: N802
        """List sandboxes, by pages."""
        limits.check_scope(request, all_of_them=True)
        wanted = limits.selector(request.label_selector)
        try:
            after = base64.b64decode(request.page_token, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise limits.invalid("invalid page_token") from error
        size = min(max(request.page_size, 0) or limits.PAGE_SIZE, limits.PAGE_SIZE_MOST)
        found = list(self._sandboxes.listed(wanted, after))
        page, rest = found[:size], found[size:]
        token = base64.b64encode(page[-1].metadata.name.encode()).decode() if rest else ""
        return openshell_pb2.ListSandboxesResponse(sandboxes=page, next_page_token=token)

    @answers
    def DeleteSandbox(self, request: Any) -> Any:  # noqa: N802
        """Accept that a sandbox is to be deleted; it is gone when GetSandbox says NOT_FOUND."""
        limits.check_scope(request)
        try:
            identity = self._sandboxes.delete(request.name)
        except RefusedError as error:
            if error.code != "NOT_FOUND" or not request.allow_missing:
                raise
            return openshell_pb2.DeleteSandboxResponse(
                outcome=openshell_pb2.DELETION_OUTCOME_ALREADY_ABSENT
            )
        return openshell_pb2.DeleteSandboxResponse(
            outcome=openshell_pb2.DELETION_OUTCOME_ACCEPTED, sandbox_id=identity
        )

    @answers
    def StopSandbox(self, request: Any) -> Any:  # noqa: N802
        """Stop what runs in a sandbox."""
        limits.check_scope(request)
        return openshell_pb2.SandboxResponse(sandbox=self._sandboxes.stop(request.name))

    @answers
    def StartSandbox(self, request: Any) -> Any:  # noqa: N802
        """Start a stopped sandbox."""
        limits.check_scope(request)
        return openshell_pb2.SandboxResponse(sandbox=self._sandboxes.start(request.name))

    @answers
    def GetSandboxConfig(self, request: Any) -> Any:  # noqa: N802
        """Give a sandbox's policy."""
        limits.check_scope(request)
        return self._sandboxes.config(request.name)

    @answers
    def GetSandboxLogs(self, request: Any) -> Any:  # noqa: N802
        """Give the last lines of a sandbox's log."""
        limits.check_scope(request)
        lines = list(self._sandboxes.find(request.sandbox).logs)
        last = lines[-request.lines :] if request.lines else lines
        return openshell_pb2.GetSandboxLogsResponse(logs=last, buffer_total=len(lines))

    def ExecSandbox(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Execute a command, and give its output and its exit code."""
        try:
            limits.check_size(request.ByteSize())
            limits.check_scope(request)
            stream = self._executions.start(request)
            if not context.add_callback(stream.leave):
                stream.leave()
            for kind, value in stream:
                yield event(kind, value)
        except RefusedError as error:
            refuse(context, error)

    def WatchSandbox(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Give a sandbox's record whenever it has changed, until the sandbox is gone."""
        seen = -1
        try:
            limits.check_scope(request)
            sandbox = self._sandboxes.find(request.sandbox)
            while context.is_active():
                record = self._sandboxes.snapshot(sandbox)
                if record.metadata.resource_version != seen:
                    seen = record.metadata.resource_version
                    yield openshell_pb2.SandboxStreamEvent(sandbox=record)
                    if request.stop_on_terminal and record.status.phase == READY:
                        return
                with self._sandboxes.changed:
                    if sandbox.message.metadata.resource_version == seen:
                        self._sandboxes.changed.wait(WATCH_S)
                if self._sandboxes.find(request.sandbox) is not sandbox:
                    return
        except RefusedError as error:
            if seen < 0:
                refuse(context, error)


def event(kind: str, value: Any) -> Any:
    """Make the message of an event."""
    if kind == "exit":
        return openshell_pb2.ExecSandboxEvent(exit=openshell_pb2.ExecSandboxExit(exit_code=value))
    if kind == "stdout":
        return openshell_pb2.ExecSandboxEvent(stdout=openshell_pb2.ExecSandboxStdout(data=value))
    return openshell_pb2.ExecSandboxEvent(stderr=openshell_pb2.ExecSandboxStderr(data=value))
