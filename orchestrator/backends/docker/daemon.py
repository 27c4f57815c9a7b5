"""What is asked of a Docker daemon, beside what its SDK has verbs for."""

from __future__ import annotations

import io
import socket
import struct
import tarfile
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import docker
from docker.context import ContextAPI
from docker.errors import DockerException, NotFound
from docker.utils import kwargs_from_env

from ...core.errors import OrchestratorError
from ...guest.answers import GuestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CALL_S: Final = 60.0
"""Seconds of silence after which a call to the daemon is given up, whatever its phase allows."""
_COMPLAINT: Final = 2000


class DaemonError(OrchestratorError):
    """No daemon can be asked."""


def connect() -> docker.APIClient:
    """Make a client of the daemon that DOCKER_HOST names, or else the current context.

    Raises:
        DaemonError: it names none, or none answers there.
    """
    options: dict[str, Any] = dict(kwargs_from_env())
    if "base_url" not in options and (context := ContextAPI.get_current_context()) is not None:
        found = {"base_url": context.Host, "tls": context.TLSConfig}
        options |= {name: value for name, value in found.items() if value is not None}
    try:
        return docker.APIClient(version="auto", timeout=int(CALL_S), **options)
    except DockerException as error:
        where = options.get("base_url", "its usual socket")
        raise DaemonError(
            f"no Docker daemon answers at {where}: {error}; "
            "start one, or name another in DOCKER_HOST"
        ) from error


class Attached:
    """The hijacked connection to the standard streams of a container or of an exec.

    Frames are as the API's `ContainerAttach` gives them without a terminal: a byte that tells the
    stream, three of padding, four of size in network order.
    """

    def __init__(self, hijacked: Any) -> None:
        """Take over what the SDK gives for a socket."""
        response = getattr(hijacked, "_response", None)
        # What came with the headers is in a buffer above the socket, and would be lost below it.
        buffered = getattr(getattr(getattr(response, "raw", None), "_fp", None), "fp", None)
        self._keep = (hijacked, response)
        self._buffered = buffered
        self._socket = getattr(hijacked, "_sock", hijacked)
        self._socket.settimeout(None)
        self._read = buffered.read1 if buffered is not None else self._socket.recv
        self._held = b""
        self._complaint = b""
        self._timer: threading.Timer | None = None

    def send(self, data: bytes) -> None:
        """Write to the standard input."""
        self._socket.sendall(data)

    def end_input(self) -> None:
        """End the standard input."""
        self._socket.shutdown(socket.SHUT_WR)

    def receive(self) -> bytes:
        """Give what comes next from standard output, nothing at its end."""
        while True:
            head = self._exactly(8)
            if not head:
                return b""
            stream, size = struct.unpack(">BxxxL", head)
            data = self._exactly(size)
            if stream == 1 and data:
                return data
            self._complaint = (self._complaint + data)[-_COMPLAINT:]

    def _exactly(self, size: int) -> bytes:
        while len(self._held) < size:
            try:
                chunk = self._read(1 << 18)
            except (OSError, ValueError) as error:
                raise GuestError(f"the connection to the container broke: {error}") from error
            if not chunk:
                self._held = b""
                return b""
            self._held = self._held + chunk if self._held else chunk
        piece, self._held = self._held[:size], self._held[size:]
        return piece

    def limit(self, seconds: float) -> None:
        """Have it end by itself after a time, for whoever waits for something to come."""
        self._timer = threading.Timer(seconds, self.close)
        self._timer.daemon = True
        self._timer.start()

    def complaint(self) -> str:
        """Give the end of what came from standard error."""
        return self._complaint.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Let go; whoever waits for something to come gets nothing."""
        if self._timer is not None:
            self._timer.cancel()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._buffered is not None:  # which holds the descriptor open
            with suppress(OSError, ValueError):
                self._buffered.close()
        self._socket.close()


class ExecShell:
    """Runs programs in a running container, each an exec of its own. See `guest.shells.Shell`."""

    def __init__(self, client: docker.APIClient, container: str, user: str = "") -> None:
        """Use a container.

        Args:
            client: of its daemon.
            container: its id.
            user: to run as; "" for the container's own.
        """
        self._client = client
        self._container = container
        self._user = user

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", bound_s: float = CALL_S
    ) -> Iterator[bytes]:
        """Run a program; give what it writes."""
        made = self._client.exec_create(
            self._container, list(argv), stdin=True, user=self._user, workdir="/"
        )
        attached = Attached(self._client.exec_start(made["Id"], socket=True))
        attached.limit(bound_s)
        try:
            attached.send(stdin)
            attached.end_input()
            while piece := attached.receive():
                yield piece
        finally:
            attached.close()
        state = self._client.exec_inspect(made["Id"])
        if state["Running"] or state["ExitCode"] != 0:
            status = "nobody knows what" if state["Running"] else state["ExitCode"]
            raise GuestError(f"{argv[0]} ... ended with {status}: {attached.complaint()}")


def read_file(client: docker.APIClient, container: str, path: str) -> bytes:
    """Read a small file of a container, running or not.

    Raises:
        APIError: there is none.
    """
    stream, _ = client.get_archive(container, path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as bundle:
        file = bundle.extractfile(bundle.getmembers()[0])
        return file.read() if file is not None else b""


def look_at(client: docker.APIClient, container: str, path: str) -> tarfile.TarInfo | None:
    """Give what a container has at a path, but for its content; None if there is nothing."""
    try:
        stream, _ = client.get_archive(container, path)
    except NotFound:
        return None
    head = bytearray()
    for piece in stream:
        head += piece
        with suppress(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(head), mode="r:") as file:
            if found := file.next():
                return found
    return None
