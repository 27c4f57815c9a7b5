"""The gateway's process: a server on the loopback interface, and a line for its owner's wishes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import grpc
from attrs import asdict
from openshell._proto import openshell_pb2_grpc

from .executions import Executions
from .faults import Fault, Faults, Rule
from .sandboxes import Sandboxes
from .service import Service
from .supervisor import PR_SET_CHILD_SUBREAPER, prctl

if TYPE_CHECKING:
    from .options import Options

WORKERS: Final = 256
BIND_S: Final = 10.0
BIND_POLL_S: Final = 0.05


class Control:
    """What the owner of the process may ask of it, beside the calls that everybody may make."""

    def __init__(self, channel: socket.socket, faults: Faults, executions: Executions) -> None:
        self._channel = channel
        self._faults = faults
        self._executions = executions

    def serve(self) -> None:
        """Answer until the owner is gone, and then end the process."""
        with contextlib.suppress(OSError), self._channel.makefile("rwb") as stream:
            for line in stream:
                question = json.loads(line)
                try:
                    answer = {"answer": getattr(self, f"do_{question.pop('do')}")(**question)}
                except (LookupError, TypeError, ValueError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                stream.write(json.dumps(answer).encode() + b"\n")
                stream.flush()
        os.kill(os.getpid(), signal.SIGTERM)

    def do_inject(self, fault: str, **where: Any) -> None:
        """Want a fault."""
        self._faults.add(Rule(Fault(fault), **where))

    def do_clear(self) -> None:
        """Want none of the faults that were injected."""
        self._faults.clear()

    def do_release(self) -> None:
        """Dispatch what is held."""
        self._executions.release()

    def do_executions(self, sandbox: str) -> list[dict[str, Any]]:
        """List commands."""
        return [asdict(each) for each in self._executions.known(sandbox)]

    def do_wait(
        self, sandbox: str, number: int, state: str, timeout_s: float
    ) -> dict[str, Any] | None:
        """Wait for a command to be in a state."""
        found = self._executions.wait(sandbox, number, state, timeout_s)
        return asdict(found) if found is not None else None


def lock(options: Options) -> Any:
    """Have the directory for this process alone, as long as the answer is kept."""
    options.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = (options.root / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"{options.root}: another gateway uses it") from None
    return file


def listen(server: Any, port: int) -> int:
    """Bind to a port of the loopback interface, which an ended gateway may still hold."""
    end = time.monotonic() + BIND_S
    while True:
        try:
            return int(server.add_insecure_port(f"127.0.0.1:{port}"))
        except RuntimeError:
            if time.monotonic() > end:
                raise SystemExit(f"127.0.0.1:{port} is in use") from None
            time.sleep(BIND_POLL_S)


def run(options: Options, control: int | None = None, lifeline: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT, or until the owner is gone; leave nothing running.

    `control` and `lifeline` are descriptors from who owns this process. Without an owner it holds
    the lifeline itself: if it is killed, so is everything in its sandboxes.
    """
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a supervisor leaves behind that was killed
    held = lock(options)
    own, theirs = socket.socketpair()
    faults = Faults()
    sandboxes = Sandboxes(options, faults, theirs.fileno() if lifeline is None else lifeline)
    executions = Executions(options, sandboxes)
    server = grpc.server(
        ThreadPoolExecutor(WORKERS),
        options=[
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ],
    )
    openshell_pb2_grpc.add_OpenShellServicer_to_server(
        Service(options, sandboxes, executions), server
    )
    port = listen(server, options.port)
    server.start()
    if control is not None:
        channel = socket.socket(fileno=control)
        owner = Control(channel, faults, executions)
        threading.Thread(target=owner.serve, daemon=True).start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    signal.sigwait(ends)
    sandboxes.close()
    executions.release()
    server.stop(0.2).wait()
    own.close()
    held.close()
