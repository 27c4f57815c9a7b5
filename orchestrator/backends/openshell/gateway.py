"""A connection to an OpenShell gateway, and what is asked of it beside running commands."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

try:
    import grpc
    import openshell
    from openshell._proto import openshell_pb2, openshell_pb2_grpc
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the OpenShell backend needs the package openshell: "
        "pip install 'eval-orchestrator[openshell]'"
    ) from error
from attrs import define, field

from ...core.errors import OrchestratorError, SandboxGoneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DELETE_S: Final = 300.0
"""Seconds after which a deletion that was accepted counts as one that does not happen."""
WAITING: Final = {
    openshell_pb2.SANDBOX_PHASE_UNSPECIFIED,
    openshell_pb2.SANDBOX_PHASE_PROVISIONING,
    openshell_pb2.SANDBOX_PHASE_UNKNOWN,
    openshell_pb2.SANDBOX_PHASE_STOPPING,
    openshell_pb2.SANDBOX_PHASE_STARTING,
}
"""Phases that a sandbox may become ready from by itself."""
REFUSALS: Final = {
    *("INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS"),
}
"""Statuses of a call of which nothing comes, now or later."""


class OpenShellError(OrchestratorError):
    """The gateway did not do what it was asked, or is not one that can be trusted with a run."""


class CallError(OpenShellError):
    """A call failed. `code` is the name of its gRPC status."""

    def __init__(self, what: str, error: grpc.RpcError) -> None:
        """Say which call it was."""
        self.code = code_of(error)
        super().__init__(f"{what}: {self.code}: {error.details()}")


def code_of(error: grpc.RpcError) -> str:
    """Give the name of a gRPC status."""
    return str(getattr(error.code(), "name", error.code()))


def _target(endpoint: str) -> tuple[str, bool]:
    """Give an endpoint as gRPC takes it, and whether it is to be spoken to by TLS."""
    if endpoint.startswith("unix:"):
        return endpoint, False
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    if parts.scheme not in {"", "http", "https"} or not parts.hostname or port is None:
        raise ValueError(f"endpoint: got {endpoint!r}; expected http://HOST:PORT, or HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}", parts.scheme == "https"


def _is_local(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    try:
        return target.startswith("unix:") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _registration(name: str | None) -> tuple[str, Path]:
    """Find the gateway of a name, or the active one, where the `openshell` command keeps them."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "openshell"
    if name is None:
        active = config / "active_gateway"
        name = active.read_text("utf-8").strip() if active.exists() else ""
    if not name:
        raise OpenShellError(
            "no gateway: expected an endpoint, OPENSHELL_GATEWAY_ENDPOINT, or an active gateway in "
            f"{config}"
        )
    return name, config / "gateways" / name


def _credentials(place: Path | None) -> Any:
    """Give what a registered gateway is spoken to with; without any, what the system trusts."""
    kept = [place / "mtls" / name if place else None for name in ("ca.crt", "tls.key", "tls.crt")]
    ca, key, cert = (each.read_bytes() if each and each.exists() else None for each in kept)
    return grpc.ssl_channel_credentials(ca, key if cert else None, cert if key else None)


@define(eq=False)
class Gateway:
    """A connection to a gateway.

    Attributes:
        target: its address.
        channel: to it.
        stub: its calls.
        workspace: of the gateway, that sandboxes are in.
        call_s: seconds that a call may take which is not a command; a gateway that restarts is
            waited for that long.
        version: as it says, once it was asked.
    """

    target: str
    channel: Any
    workspace: str
    call_s: float
    close: Callable[[], None]
    version: str = ""
    stub: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Make the calls."""
        self.stub = openshell_pb2_grpc.OpenShellStub(self.channel)

    @classmethod
    def connect(
        cls, endpoint: str | None, gateway: str | None, workspace: str, call_s: float
    ) -> Gateway:
        """Connect, when it is first used: to an endpoint, or to a registered gateway."""
        endpoint = endpoint or os.environ.get("OPENSHELL_GATEWAY_ENDPOINT")
        gateway = gateway or os.environ.get("OPENSHELL_GATEWAY")
        place = None
        if endpoint is None or gateway is not None:
            gateway, place = _registration(gateway)
        if endpoint is None and place is not None:
            try:
                known = json.loads((place / "metadata.json").read_text("utf-8"))
                endpoint = str(known["gateway_endpoint"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise OpenShellError(f"gateway {gateway}: not registered: {error!r}") from error
            if known.get("auth_mode") == "oidc":  # the SDK keeps the token fresh
                client = openshell.SandboxClient.from_active_cluster(cluster=gateway)
                return cls(endpoint, client._channel, workspace, call_s, client.close)  # noqa: SLF001
        target, secure = _target(endpoint or "")
        options = [
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # A proxy of the environment would be asked for this machine's own gateway, too.
            ("grpc.enable_http_proxy", 0 if _is_local(target) else 1),
        ]
        channel = (
            grpc.secure_channel(target, _credentials(place), options)
            if secure
            else grpc.insecure_channel(target, options)
        )
        return cls(target, channel, workspace, call_s, channel.close)

    def call(self, method: str, request: Any, *, patient: bool = True) -> Any:
        """Make a call, in the workspace.

        Raises:
            CallError: it failed.
        """
        if hasattr(request, "workspace_scope"):
            request.workspace_scope.workspace = self.workspace
        try:
            send = getattr(self.stub, method)
            return send(request, timeout=self.call_s, wait_for_ready=patient)
        except grpc.RpcError as error:
            about = getattr(request, "name", "")
            raise CallError(f"gateway {self.target}: {method} {about}".rstrip(), error) from error

    def check(self, *, patient: bool = True) -> None:
        """Make sure that this gateway and the stubs mean the same by what they say.

        Raises:
            OpenShellError: they do not.
        """
        if not self.version:
            version = self.call("Health", openshell_pb2.HealthRequest(), patient=patient).version
            if not re.match(r"v?0\.1\.\d", version):
                raise OpenShellError(
                    f"gateway {self.target}: its version is {version or 'unknown'}; expected 0.1.x,"
                    " for other versions take the fields of a request for different ones"
                )
            self.version = version

    def find(self, name: str) -> Any:
        """Give the record of a sandbox; None where the gateway says that there is none."""
        try:
            return self.call("GetSandbox", openshell_pb2.GetSandboxRequest(name=name)).sandbox
        except CallError as error:
            if error.code != "NOT_FOUND" or "workspace" in str(error):
                raise
            return None

    def listed(self, selector: str) -> Iterator[Any]:
        """Give the records of all sandboxes with these labels."""
        token, last = "", None
        while token != last:
            request = openshell_pb2.ListSandboxesRequest(page_token=token, label_selector=selector)
            answer = self.call("ListSandboxes", request)
            yield from answer.sandboxes
            last, token = token, answer.next_page_token
            if not token:
                return

    def ready(self, name: str, within_s: float) -> Any:
        """Wait until a sandbox is ready; give its record.

        Raises:
            SandboxGoneError: it is gone.
            OpenShellError: it is not ready in time, or never will be.
        """
        for left_s in _pauses(within_s):
            found = self.find(name)
            if found is None:
                raise SandboxGoneError(f"sandbox {name}: gone")
            phase = found.status.phase
            if phase == openshell_pb2.SANDBOX_PHASE_READY:
                return found
            if phase not in WAITING or not left_s:
                break
        said = "; ".join(
            f"{each.type}={each.status}, {each.reason}: {each.message}"
            for each in found.status.conditions
        )
        waited = "" if phase not in WAITING else f" after {within_s:g} s"
        raise OpenShellError(
            f"sandbox {name}: its phase is {openshell_pb2.SandboxPhase.Name(phase)}{waited}; "
            f"expected SANDBOX_PHASE_READY; {said or 'no condition says why'}"
        )

    def delete(self, name: str, identity: str) -> None:
        """Delete a sandbox; return when it is gone.

        Raises:
            OpenShellError: it is not known to be gone.
        """
        request = openshell_pb2.DeleteSandboxRequest(name=name, allow_missing=True)
        asked = False
        for left_s in _pauses(DELETE_S):
            found = self.find(name)
            if found is None or found.metadata.id != identity:
                return
            phase = found.status.phase
            if not asked and phase != openshell_pb2.SANDBOX_PHASE_DELETING:
                self.call("DeleteSandbox", request)
                asked = True
            if not left_s:
                raise OpenShellError(
                    f"sandbox {name}: its deletion was accepted {DELETE_S:g} s ago, and its phase "
                    f"is {openshell_pb2.SandboxPhase.Name(phase)}; expected that it is gone"
                )


def _pauses(within_s: float) -> Iterator[float]:
    """Give the seconds that are left, after longer and longer pauses; 0 the last time."""
    end, pause_s = time.monotonic() + within_s, 0.01
    while (left_s := end - time.monotonic()) > 0:
        yield left_s
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, 1.0)
    yield 0.0
