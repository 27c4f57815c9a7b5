"""A gateway as a test holds it: started, killed, restarted, told what to do wrong, and asked."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import evolve, fields, frozen

from .container import processes, refuses_group_kills, stop_stale
from .options import Options

if TYPE_CHECKING:
    from .faults import Fault

END_S: Final = 30.0


@frozen
class Executed:
    """What became of one ExecSandbox that was admitted.

    Attributes:
        sandbox: name of its sandbox.
        number: which exec of that sandbox it was, counted from 1.
        command: what was asked for.
        history: its states in their order: `admitted`, `held`, `running`, and one of `ended`,
            `lost`, `refused`.
        code: its true exit code, where it ended; 128 + n for signal n.
    """

    sandbox: str
    number: int
    command: tuple[str, ...]
    history: tuple[str, ...]
    code: int | None


class OpenShellGateway:
    """A simulated gateway, in a process of its own that can be killed.

    With `root` its sandboxes are below that directory, and a later gateway there finds them;
    without, they are in a temporary one. The other options are those of `Options`.
    """

    def __init__(self, root: str | Path | None = None, **options: Any) -> None:
        self._temporary = None if root is not None else tempfile.mkdtemp(prefix="gateway-")
        self._options = Options(root=Path(root or self._temporary or ""), **options)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._stream: Any = None
        self._lock = threading.Lock()
        self._lifeline, self._theirs = socket.socketpair()
        self.endpoint = ""

    def __enter__(self) -> Self:
        """Start it."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End it, with everything in its sandboxes."""
        self.close()

    def start(self) -> None:
        """Start it, and return when it answers; a second time it has the same endpoint."""
        if self._process is not None:
            raise RuntimeError("the gateway runs already")
        self._channel, theirs = socket.socketpair()
        flags: list[str] = []
        for each in fields(Options):
            value = getattr(self._options, each.name)
            if value is not False:
                flags += ["--" + each.name.replace("_", "-")]
                flags += [] if value is True else [str(value)]
        lines = (theirs.fileno(), self._theirs.fileno())
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", __package__ or "", *flags),
                    *("--control", str(lines[0]), "--lifeline", str(lines[1])),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=lines,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        with self._process.stdout as output:
            self.endpoint = output.readline().decode().strip()
        if not self.endpoint:
            code = self._process.wait()
            self._forget()
            raise RuntimeError(f"the gateway did not start: exit code {code}")
        self._options = evolve(self._options, port=int(self.endpoint.rpartition(":")[2]))
        self._stream = self._channel.makefile("rwb")

    def _forget(self) -> None:
        self._process = None
        if self._stream is not None:
            self._stream.close()
        if self._channel is not None:
            self._channel.close()
        self._stream = self._channel = None

    def kill(self) -> None:
        """Kill its process; what runs in the sandboxes goes on, as containers do."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def wait(self, timeout_s: float = 10.0) -> None:
        """Wait until its process has ended by itself, as after `Fault.KILLED_GATEWAY`."""
        if self._process is not None:
            self._process.wait(timeout_s)
            self._forget()

    def restart(self) -> None:
        """Kill it, if it runs, and start it again: the Docker driver then restarts the sandboxes.

        So what ran in them is killed, their files are kept, and they become ready again. Faults
        that were injected are forgotten.
        """
        self.kill()
        self.start()

    def close(self) -> None:
        """End it, and return when nothing runs in any of its sandboxes."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()
            else:
                self._forget()
        self._theirs.close()
        self._lifeline.shutdown(socket.SHUT_WR)
        self._lifeline.recv(1)  # ends when the last supervisor has
        self._lifeline.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary)

    def inject(
        self,
        fault: Fault | str,
        *,
        sandbox: str = "",
        number: int = 0,
        matching: str = "",
        times: int = 0,
    ) -> None:
        """Have something go wrong, where all that is given holds.

        Args:
            fault: what.
            sandbox: name of the sandbox; any if empty.
            number: which exec of the sandbox, counted from 1; any if 0.
            matching: what its command line or its input contains; anything if empty.
            times: how often at most; 0 for always.
        """
        self._ask(
            "inject",
            fault=str(fault),
            sandbox=sandbox,
            number=number,
            matching=matching,
            times=times,
        )

    def clear(self) -> None:
        """Have nothing go wrong any more, but what sandboxes are labelled with."""
        self._ask("clear")

    def release(self) -> None:
        """Dispatch what `Fault.LATE_DISPATCH` holds, and hold nothing any more."""
        self._ask("release")

    def executions(self, sandbox: str = "") -> list[Executed]:
        """Give what was executed, in a sandbox or in all, in the order of admission."""
        return [_executed(each) for each in self._ask("executions", sandbox=sandbox)]

    def wait_for(
        self, sandbox: str, number: int, state: str, *, timeout_s: float = 10.0
    ) -> Executed:
        """Wait until an exec has been in a state.

        Raises:
            TimeoutError: it was not, in time.
        """
        found = self._ask("wait", sandbox=sandbox, number=number, state=state, timeout_s=timeout_s)
        if found is None:
            raise TimeoutError(f"exec {number} of {sandbox} was not {state} in {timeout_s} s")
        return _executed(found)

    def place(self, sandbox: str) -> Path:
        """Give the directory of all that is a sandbox's own; it is gone when the sandbox is."""
        return self._options.root / "sandboxes" / sandbox

    def workspace(self, sandbox: str) -> Path:
        """Give the directory in which a sandbox's commands start, their HOME."""
        return self.place(sandbox) / "workspace"

    def processes(self, sandbox: str) -> list[int]:
        """Give what runs in a sandbox, also while the gateway does not."""
        return processes(self.place(sandbox))

    def refuses_group_kills(self, sandbox: str) -> bool:
        """Tell whether `kill` of whole process groups fails there, which not every system can."""
        return refuses_group_kills(self.place(sandbox))

    def kill_sandbox(self, sandbox: str) -> None:
        """Kill a sandbox's container, as for want of memory: its phase becomes ERROR."""
        stop_stale(self.place(sandbox))

    def _ask(self, question: str, **given: Any) -> Any:
        with self._lock:
            if self._stream is None:
                raise RuntimeError("the gateway does not run")
            self._stream.write(json.dumps({"do": question, **given}).encode() + b"\n")
            self._stream.flush()
            answer = json.loads(self._stream.readline() or b"{}")
        if "answer" not in answer:
            raise RuntimeError(answer.get("error", "the gateway has ended"))
        return answer["answer"]


def _executed(found: dict[str, Any]) -> Executed:
    return Executed(
        found["sandbox"],
        found["number"],
        tuple(found["command"]),
        tuple(found["history"]),
        found["code"],
    )
