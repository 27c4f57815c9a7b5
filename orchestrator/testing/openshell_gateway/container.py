"""A sandbox's processes, seen from the gateway: its supervisor, and the commands that it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from ...guest.processes import Claim, wait
from . import supervisor
from .supervisor import children, descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
READY_S: Final = 30.0
REFUSES: Final = "refuses-group-kills"
_SIGNALLED: Final = 128


class LostError(Exception):
    """The container ended, and what it knew with it."""


@define(eq=False)
class Process:
    """A command in a container.

    Attributes:
        stdin: descriptor by which it is written to.
        stdout: descriptor by which it is read from.
        stderr: the same for its other output.
        started: its pid, when it has one.
        ended: its exit code, 128 + n for signal n, when it has ended.
    """

    stdin: int
    stdout: int
    stderr: int
    started: Future[int] = field(factory=Future)
    ended: Future[int] = field(factory=Future)

    def discard(self) -> None:
        """Give it no input, and read its output for nobody."""
        os.close(self.stdin)
        for descriptor in (self.stdout, self.stderr):
            threading.Thread(target=_discard, args=(descriptor,), daemon=True).start()


def _discard(descriptor: int) -> None:
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        while stream.read(65536):
            pass


class Container:
    """One life of a sandbox: a supervisor, from its start until it has been stopped."""

    _supervisors: Final[set[int]] = set()
    _spawning: Final = threading.Lock()

    def __init__(
        self,
        place: Path,
        lifeline: int,
        *,
        group_kills: bool,
        on_end: Callable[[Container], None],
    ) -> None:
        """Start the supervisor, and keep in `place` which process it is.

        Raises:
            LostError: it did not start.
        """
        self._numbers = count(1)
        self._jobs: dict[int, Process] = {}
        self._lock = threading.Lock()
        self.gone = False
        self._on_end = on_end
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._spawning:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", supervisor.__file__),
                    *(str(lifeline), "allow" if group_kills else "refuse"),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=[lifeline],
                cwd="/",
                env={"PATH": PATH},
                start_new_session=True,
            )
            self._supervisors.add(self._process.pid)
        known = f"{self._process.pid} {_born(self._process.pid)}"
        (place / "supervisor").write_text(known)
        self._channel.settimeout(READY_S)
        try:
            ready = json.loads(self._channel.recv(4096))
        except (OSError, ValueError) as error:
            self._process.kill()
            self._process.wait()
            raise LostError(f"the supervisor did not start: {error}") from error
        self._channel.settimeout(None)
        if ready["refused"]:
            (place / "supervisor").write_text(f"{known} {REFUSES}")
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def run(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> Process:
        """Run a command; return when it has started.

        Raises:
            LostError: it has not, or nobody knows.
        """
        (stdin, to), (of, stdout), (other, stderr) = os.pipe(), os.pipe(), os.pipe()
        order = os.memfd_create("order")
        process = Process(to, of, other)
        number = next(self._numbers)
        try:
            with os.fdopen(os.dup(order), "w") as file:
                json.dump({"argv": list(argv), "env": dict(env), "cwd": str(cwd)}, file)
            os.lseek(order, 0, os.SEEK_SET)
            self._send(number, process, [order, stdin, stdout, stderr, of, other])
            process.started.result()
        except BaseException:
            for descriptor in (to, of, other):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (order, stdin, stdout, stderr):
                os.close(descriptor)
        return process

    def _send(self, number: int, process: Process, descriptors: list[int]) -> None:
        with self._lock:
            if self.gone:
                raise LostError("the container has ended")
            self._jobs[number] = process
            message = json.dumps({"start": number}).encode()
            with contextlib.suppress(OSError):  # its end is noticed by who listens
                socket.send_fds(self._channel, [message], descriptors)

    def _listen(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := self._channel.recv(65536):
                self._hear(json.loads(data))
        self._process.wait()
        with self._lock:
            self.gone = True
            lost = list(self._jobs.values())
            self._jobs.clear()
        with self._spawning:
            self._supervisors.discard(self._process.pid)
        _purge(self._spawning, self._supervisors)
        for process in lost:
            for future in (process.started, process.ended):
                if not future.done():
                    future.set_exception(LostError("the container has ended"))
        self._channel.close()
        self._on_end(self)

    def _hear(self, message: dict[str, Any]) -> None:
        with self._lock:
            if "started" in message:
                self._jobs[message["started"]].started.set_result(message["pid"])
            elif "failed" in message:
                failed = self._jobs.pop(message["failed"])
                failed.started.set_exception(LostError(message["error"]))
            elif "ended" in message:
                code = os.waitstatus_to_exitcode(message["status"])
                ended = self._jobs.pop(message["ended"])
                ended.ended.set_result(code if code >= 0 else _SIGNALLED - code)

    def stop(self) -> None:
        """Kill everything in it, and return when nothing is left."""
        with self._lock, contextlib.suppress(OSError):
            if not self.gone:
                self._channel.send(json.dumps({"stop": True}).encode())
        self._listener.join()


def _born(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[19].decode()


def _supervisor(place: Path) -> Claim | None:
    """Find the supervisor of a sandbox that another process may have started."""
    try:
        pid, born, *_ = (place / "supervisor").read_text().split()
    except (OSError, ValueError):
        return None
    claim = Claim(int(pid), born)
    return claim if claim.alive() else None


def processes(place: Path) -> list[int]:
    """Give what runs in the sandbox whose place this is, beside its supervisor."""
    claim = _supervisor(place)
    return descendants(claim.pid) if claim else []


def refuses_group_kills(place: Path) -> bool:
    """Tell whether `kill` of whole process groups fails in the sandbox whose place this is."""
    return (place / "supervisor").read_text().endswith(REFUSES)


def stop_stale(place: Path) -> None:
    """Stop a container that a gateway left behind which was killed."""
    claim = _supervisor(place)
    if claim is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(claim.pid, signal.SIGTERM)
        wait(claim.pid, claim.born)


def _purge(spawning: threading.Lock, supervisors: set[int]) -> None:
    """Kill what fell to this process from a supervisor that was killed."""
    while True:
        with spawning:
            # By its parent, and not for want of one: what has just been forked elsewhere has both.
            fallen = [pid for pid in children(os.getpid()) if pid not in supervisors]
            orphans = [pid for each in fallen for pid in [each, *descendants(each)]]
            if not orphans:
                return
            supervisor.kill_all(orphans)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
