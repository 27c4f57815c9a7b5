"""Commands executed in sandboxes, each by a task that does not end with who asked for it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, define, field

from . import limits
from .container import LostError
from .faults import Fault
from .limits import RefusedError
from .sandboxes import READY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .container import Process
    from .options import Options
    from .sandboxes import Sandbox, Sandboxes

EVENT_BYTES: Final = 4096
EVENTS_AHEAD: Final = 256
BIG_EVENT_BYTES: Final = 5 * 1024 * 1024
ADMISSIONS: Final = 1000
TIMED_OUT: Final = 124
UNKNOWN: Final = 74

RELAY_LOST: Final = RefusedError(
    "UNAVAILABLE", "exec relay closed before the command reported an exit status"
)
NOT_STARTED: Final = {
    Fault.NO_SESSION: ("UNAVAILABLE", "supervisor relay failed: no supervisor session"),
    Fault.RELAY_TIMEOUT: ("DEADLINE_EXCEEDED", "relay open timed out"),
    Fault.RELAY_LIMIT: ("RESOURCE_EXHAUSTED", "supervisor relay failed: too many pending relays"),
}
"""Faults of which a command never starts, with what is said of them."""


@define(eq=False)
class Execution:
    """What the gateway knows of one command.

    Attributes:
        sandbox: name of its sandbox.
        sandbox_id: id of its sandbox.
        number: which exec of that sandbox it is, counted from 1.
        command: what was asked for.
        history: what became of it: admitted, held, running, and ended, lost or refused.
        code: its exit code, where it ended.
        request_id: by which the client may ask for it again.
        digest: of the request.
        confirmed: the gateway saw its exit.
    """

    sandbox: str
    sandbox_id: str
    number: int
    command: list[str]
    history: list[str] = field(factory=list)
    code: int | None = None
    request_id: str = ""
    digest: str = ""
    confirmed: bool = False


class Stream:
    """Events on their way to a client who may leave: then they are dropped."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, Any]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._left = False
        self._error: RefusedError | None = None

    def put(self, kind: str, value: Any) -> None:
        """Send an event; wait where the client is slow."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._events) < EVENTS_AHEAD or self._left or self._closed
            )
            if not self._left and not self._closed:
                self._events.append((kind, value))
                self._changed.notify_all()

    def close(self, error: RefusedError | None = None) -> None:
        """End the stream, after what was sent."""
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, error
                self._changed.notify_all()

    def leave(self) -> None:
        """Listen no more."""
        with self._changed:
            self._left = True
            self._events.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Give the events until the stream ends; then raise its error, if there is one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._closed or self._left)
                if not self._events:
                    if self._error is not None and not self._left:
                        raise self._error
                    return
                event = self._events.popleft()
                self._changed.notify_all()
            yield event


@define(eq=False)
class Task:
    """A command on its way: where, what is known of it, what was asked, and what goes wrong."""

    sandbox: Sandbox
    execution: Execution
    request: Any
    line: str
    stream: Stream = field(factory=Stream)
    faults: set[Fault] = field(factory=set)


class Executions:
    """All commands of a gateway, and what is remembered of them for its next life."""

    def __init__(self, options: Options, sandboxes: Sandboxes) -> None:
        self._options = options
        self._sandboxes = sandboxes
        self._all: list[Execution] = []
        self._changed = threading.Condition()
        self._dispatch = threading.Event()
        for journal in sorted(sandboxes.root.glob("*/execs")):
            self._load(journal.read_text().splitlines())

    def _load(self, lines: list[str]) -> None:
        found: dict[int, Execution] = {}
        for line in lines:
            execution = Execution(**json.loads(line))
            found[execution.number] = execution
        for execution in found.values():
            if not {"ended", "lost", "refused"} & set(execution.history):
                execution.history.append("lost")
        self._all += found.values()

    def _record(self, sandbox: Sandbox, execution: Execution, state: str) -> None:
        with self._changed:
            execution.history.append(state)
            with (
                contextlib.suppress(FileNotFoundError),
                (sandbox.place / "execs").open("a") as file,
            ):
                file.write(json.dumps(asdict(execution)) + "\n")
            self._changed.notify_all()

    def known(self, name: str = "") -> list[Execution]:
        """Give what is known of the commands of a sandbox, or of all, in their order."""
        with self._changed:
            return [each for each in self._all if name in {"", each.sandbox}]

    def wait(self, name: str, number: int, state: str, timeout_s: float) -> Execution | None:
        """Wait until a command was once in a state; None if it never was."""

        def reached() -> Execution | None:
            for each in reversed(self._all):  # a name may have been used before
                if (each.sandbox, each.number) == (name, number) and state in each.history:
                    return each
            return None

        with self._changed:
            return self._changed.wait_for(reached, timeout_s)

    def release(self) -> None:
        """Dispatch now what is held back, and hold nothing any more."""
        self._dispatch.set()

    def start(self, request: Any) -> Stream:
        """Admit a command, and have it executed whoever listens."""
        limits.check_exec(request)
        line = limits.command_line(request)
        sandbox = self._sandboxes.find(request.sandbox)
        if sandbox.phase != READY:
            raise RefusedError("FAILED_PRECONDITION", "sandbox is not ready")
        execution = self._admit(sandbox, request)
        sandbox.log(f"ExecSandbox (relay): command started: {line[:120]!r}")
        task = Task(sandbox, execution, request, line)
        threading.Thread(target=self._attend, args=(task,), daemon=True).start()
        return task.stream

    def _admit(self, sandbox: Sandbox, request: Any) -> Execution:
        identity = sandbox.message.metadata.id
        digest = _digest(request) if request.request_id else ""
        with self._changed:
            if request.request_id:
                self._refuse_again(request.request_id, digest)
            execution = Execution(
                sandbox.name,
                identity,
                1 + sum(each.sandbox_id == identity for each in self._all),
                list(request.command),
                request_id=request.request_id,
                digest=digest,
            )
            self._all.append(execution)
            self._record(sandbox, execution, "admitted")
        return execution

    def _refuse_again(self, request_id: str, digest: str) -> None:
        """Refuse a request that was admitted before, and say what can be known of it."""
        admitted = [each for each in self._all if each.request_id]
        for each in admitted:
            if each.request_id != request_id:
                continue
            if each.digest != digest:
                reason, said = "REQUEST_ID_PAYLOAD_MISMATCH", "request_id had another payload"
            elif each.confirmed:
                reason, said = "REQUEST_STREAM_UNAVAILABLE", "the command has exited"
            else:
                reason, said = "REQUEST_OUTCOME_UNCERTAIN", "the command may have run, or may run"
            raise RefusedError("FAILED_PRECONDITION", said, reason)
        if len(admitted) >= ADMISSIONS:
            raise RefusedError("RESOURCE_EXHAUSTED", "too many request admissions")

    def _attend(self, task: Task) -> None:
        text = task.line + "\n" + task.request.stdin.decode(errors="replace")
        where = {"number": task.execution.number, "text": text}
        task.faults |= {
            fault for fault in EXEC_FAULTS if self._sandboxes.hit(fault, task.sandbox, **where)
        }
        try:
            process = self._launch(task)
        except RefusedError as error:
            self._record(task.sandbox, task.execution, "refused")
            task.stream.close(error)
            return
        if Fault.KILLED_GATEWAY in task.faults:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            self._finish(task, process)
        except LostError:
            self._record(task.sandbox, task.execution, "lost")
            task.stream.close(RELAY_LOST)

    def _launch(self, task: Task) -> Process:
        for fault in task.faults & NOT_STARTED.keys():
            raise RefusedError(*NOT_STARTED[fault])
        if Fault.LATE_DISPATCH in task.faults:
            self._record(task.sandbox, task.execution, "held")
            self._dispatch.wait(self._options.dispatch_delay_s)
        if Fault.RESTARTED_BLANK in task.faults:
            self._sandboxes.restart_blank(task.sandbox)
        try:
            process = self._sandboxes.container(task.sandbox).run(
                ["/bin/bash", "-c" if task.request.no_login_shell else "-lc", task.line],
                self._sandboxes.environment(task.sandbox),
                task.sandbox.workspace,
            )
        except (LostError, OSError) as error:
            raise RefusedError("UNAVAILABLE", f"supervisor relay failed: {error}") from error
        self._record(task.sandbox, task.execution, "running")
        return process

    def _finish(self, task: Task, process: Process) -> None:
        """See a command to its end; what the client is told may end before."""
        faults, stream, execution = task.faults, task.stream, task.execution
        certain = not faults & {Fault.RELAY_LOST, Fault.EXIT_124_EARLY, Fault.DELIVERY_UNKNOWN}
        if Fault.RELAY_LOST in faults:
            stream.close(RELAY_LOST)
        if Fault.EXIT_124_EARLY in faults:
            stream.put("exit", TIMED_OUT)
            stream.close()
        if Fault.BIG_EVENT in faults:
            stream.put("stdout", bytes(BIG_EVENT_BYTES))
        readers = _connect(process, task)
        timeout_s = task.request.execution_timeout.ToNanoseconds() / 1e9
        try:
            code = process.ended.result(timeout_s or None)
        except TimeoutError:
            certain = False
            stream.put("exit", TIMED_OUT)
            stream.close()
            code = process.ended.result()
        patience = time.monotonic() + self._options.output_patience_s
        for reader in readers:
            reader.join(max(patience - time.monotonic(), 0.0))
        whole = not any(reader.is_alive() for reader in readers)
        execution.code = code
        execution.confirmed = certain and whole
        self._record(task.sandbox, execution, "ended")
        if Fault.NO_EXIT not in faults:
            known = whole and Fault.DELIVERY_UNKNOWN not in faults
            stream.put("exit", code if known else UNKNOWN)
        stream.close()


EXEC_FAULTS: Final = frozenset(NOT_STARTED) | {
    Fault.LATE_DISPATCH,
    Fault.RESTARTED_BLANK,
    Fault.KILLED_GATEWAY,
    Fault.RELAY_LOST,
    Fault.EXIT_124_EARLY,
    Fault.BIG_EVENT,
    Fault.NO_EXIT,
    Fault.SHORT_OUTPUT,
    Fault.DELIVERY_UNKNOWN,
}


def _digest(request: Any) -> str:
    """Give what a repeated request has in common with the first."""
    payload = type(request)()
    payload.CopyFrom(request)
    payload.ClearField("request_id")
    return hashlib.sha256(payload.SerializeToString(deterministic=True)).hexdigest()


def _connect(process: Process, task: Task) -> list[threading.Thread]:
    """Give a command its input, and send its output on; give who reads it."""
    short = Fault.SHORT_OUTPUT in task.faults
    readers = [
        threading.Thread(target=_read, args=(source, name, task.stream, short), daemon=True)
        for name, source in (("stdout", process.stdout), ("stderr", process.stderr))
    ]
    feeder = threading.Thread(target=_feed, args=(process.stdin, task.request.stdin), daemon=True)
    for thread in (feeder, *readers):
        thread.start()
    return readers


def _feed(target: int, data: bytes) -> None:
    """Write all of the input, as far as the command reads it, and then end it."""
    rest = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while rest:
            rest = rest[os.write(target, rest) :]
    os.close(target)


def _read(source: int, name: str, stream: Stream, short: bool) -> None:  # noqa: FBT001 - of a thread
    """Send the output on in small events, to the end, whether or not anybody listens."""
    held = b""
    while data := os.read(source, EVENT_BYTES):
        if held:
            stream.put(name, held)
        held = data if short else b""
        if not short:
            stream.put(name, data)
    os.close(source)
