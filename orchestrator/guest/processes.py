"""Supervisors as processes of this machine: starting them, finding them again, waiting for them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

from attrs import define

LAUNCHER: Final = Path(__file__).with_name("launcher.py")
_POLL_S: Final = 0.02
_PATIENCE_S: Final = 1.0
SMALL_BYTES: Final = 64 * 1024
"""More than any record of the guest is long."""


@define
class Claim:
    """Which process claimed an order: its pid, and its start time in clock ticks since boot."""

    pid: int
    born: str

    def alive(self) -> bool:
        """Tell whether that very process is still there."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return False
        return _born(self.pid) == self.born and not _zombie(self.pid)


def open_kept(path: Path) -> BinaryIO:
    """Open a file that the guest keeps, which its command may have put something else in place of.

    Raises:
        OSError: it is not there, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(descriptor, "rb")


def read_small(path: Path) -> str | None:
    """Read a small file that the guest keeps; None if there is none, or it is not a small file."""
    try:
        with open_kept(path) as file:
            data = file.read(SMALL_BYTES + 1)
    except OSError:
        return None
    return data.decode("utf-8", "surrogateescape") if len(data) <= SMALL_BYTES else None


def read_claim(record: Path) -> Claim | None:
    """Read who claimed the order in `record`; None if nobody did, or settle did."""
    end = time.monotonic() + _PATIENCE_S
    while not (text := read_small(record / "claim")):
        if text is None or time.monotonic() > end:
            return None
        time.sleep(_POLL_S)  # created, and not written yet
    words = text.split()
    return Claim(int(words[0]), words[1]) if len(words) == 2 and words[0].isdigit() else None  # noqa: PLR2004


def _born(pid: int) -> str:
    """Give a process's start time as the guest writes it; "0" where the system does not tell."""
    if not Path("/proc/self/stat").exists():
        return "0"
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def _zombie(pid: int) -> bool:
    """Tell whether a process has ended and only waits to be reaped, which nobody may ever do."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in {b"Z", b"X"}
    except OSError:
        return False


def inhabitants(directory: Path) -> list[int]:
    """Give the living processes whose working directory is in a directory, or was."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            place = str(link.readlink()).removesuffix(" (deleted)")
        except OSError:
            continue  # it ended (a zombie has no directory), or is somebody else's
        if place == str(directory) or place.startswith(f"{directory}/"):
            found.append(int(link.parent.name))
    return found


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[1])
    except (OSError, IndexError):
        return None


def wait(pid: int, born: str | None = None) -> None:
    """Wait for the end of a process, whose child it need not be."""
    if born is not None and not Claim(pid, born).alive():
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        while _born(pid) not in {"", "0"} or _exists(pid):
            time.sleep(_POLL_S)
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if born is None or _born(pid) == born:
            poll.poll()
    finally:
        os.close(descriptor)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Launcher:
    """The helper process that forks supervisors (`guest/launcher.py`), started when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: Any = None
        self._started: dict[Path, int] = {}

    def warm(self) -> None:
        """Start the process, without waiting for it to be ready."""
        with self._lock:
            self._ensure()

    def _ensure(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._started.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LAUNCHER)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        with ours:
            self._stream = ours.makefile("rwb")

    def start(self, argv: list[str], env: dict[str, str], cwd: str) -> int:
        """Start a supervisor; give its pid.

        Raises:
            OSError: it could not be started.
        """
        return int(self._ask({"argv": argv, "env": env, "cwd": cwd})["pid"])

    def run(self, record: Path, argv: list[str], env: dict[str, str], cwd: str) -> int:
        """Start the supervisor of the order in `record`; give its pid."""
        pid = self.start(argv, env, cwd)
        self._started[record] = pid
        return pid

    def runs(self, record: Path) -> bool:
        """Tell whether the supervisor of the order in `record` runs on; with no claim it ends."""
        pid = self._started.get(record)
        end = time.monotonic() + _PATIENCE_S
        while pid is not None and self._process is not None and _parent(pid) == self._process.pid:
            if time.monotonic() > end:
                return True
            time.sleep(_POLL_S)
        return False

    def purge(self, record: Path) -> bool:
        """Kill what is left of the order in `record`, and its supervisor; tell if all is gone.

        False where this helper did not start it: then its orphans are somebody else's children.
        """
        self.warm()  # a new one knows of nothing
        pid = self._started.get(record)
        return pid is not None and bool(self._ask({"purge": pid})["still"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._ensure()
            try:
                self._stream.write(json.dumps(question).encode() + b"\n")
                self._stream.flush()
                answer: dict[str, Any] = json.loads(self._stream.readline() or b"{}")
            except (OSError, ValueError) as error:
                raise OSError(f"the launcher of supervisors ended: {error}") from error
        if not answer or "error" in answer:
            raise OSError(answer.get("error", "the launcher of supervisors ended"))
        return answer

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(OSError):
                    self._stream.close()
                self._process.wait()
                self._process = None

    def __del__(self) -> None:
        """Do not leave the process behind with the object."""
        with contextlib.suppress(Exception):
            self.close()
