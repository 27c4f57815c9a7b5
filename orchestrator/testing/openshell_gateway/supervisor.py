"""The supervisor of one simulated sandbox: parent of all that is executed there, and its reaper.

A program of its own, one for each sandbox, as the real gateway has one in each container. It is a
*subreaper* (prctl(2)): whatever a command leaves behind, in whatever session or group, falls to it
and to nobody else, so "nothing of this sandbox runs" can be proven: it has no child left.

Spoken on a socket at descriptor 0, a packet a message, JSON: `{"start": number}` comes with
descriptors (the order, stdin, stdout, stderr, and the other ends of the last two) and is answered
by `{"started"}` or `{"failed"}`, and later by `{"ended", "status"}`. `{"stop": true}` kills
everything and ends it; so do SIGTERM, and the end of whoever holds the other side of the
*lifeline*. The end of the gateway does not: then it reads what the commands write, so that they go
on, and waits.

Like the sandboxes of gateways 0.1.x it refuses `kill` of whole process groups (pid <= 0), and of
itself, which really is another user's process.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import select
import signal
import socket
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
KILL = {"x86_64": (0xC000003E, 62), "aarch64": (0xC00000B7, 129)}
"""Of each machine: its name for the filter, and its number of the system call `kill`."""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # the latter with EPERM


def prctl(*arguments: int) -> bool:
    """Ask something of the kernel about this process; tell whether it was done."""
    wide = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[1:5]]
    return bool(ctypes.CDLL(None).prctl(arguments[0], *wide) == 0)


def refuse_kills() -> bool:
    """Have `kill` of groups and of this process fail with EPERM, here and in all descendants."""
    machine, call = KILL.get(platform.machine(), (0, 0))
    if not call or sys.platform != "linux":
        return False
    code = [
        (LOAD, 0, 0, 4),  # the machine
        (EQUAL, 0, 6, machine),
        (LOAD, 0, 0, 0),  # the number of the call
        (EQUAL, 0, 4, call),
        (LOAD, 0, 0, 16),  # the first argument, of which a pid is the lower half
        (EQUAL, 3, 0, 0),
        (EQUAL, 2, 0, os.getpid()),
        (AT_LEAST, 1, 0, 0x80000000),  # negative
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    words = b"".join(
        operation.to_bytes(2, sys.byteorder) + bytes((yes, no)) + operand.to_bytes(4, sys.byteorder)
        for operation, yes, no, operand in code
    )
    text = ctypes.create_string_buffer(words, len(words))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("text", ctypes.c_void_p))

    program = Program(len(code), ctypes.addressof(text))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if not prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program)):
        return False
    try:
        os.kill(0, 0)
    except PermissionError:
        return True
    return False


def families() -> dict[int, list[int]]:
    """Give the living children of every process that has any."""
    below: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as stat:  # noqa: PTH123 - imports little
                state, parent = stat.read().rpartition(b") ")[2].split()[:2]
        except OSError:
            continue
        if state not in {b"Z", b"X"}:
            below.setdefault(int(parent), []).append(int(entry.name))
    return below


def children(parent: int) -> list[int]:
    """Give the living children of a process."""
    return families().get(parent, [])


def descendants(ancestor: int) -> list[int]:
    """Give the living processes below a process, children before grandchildren."""
    below = families()
    found = [ancestor]
    for pid in found:
        found += below.get(pid, [])
    return found[1:]


def kill_all(pids: list[int]) -> None:
    """Kill processes, of which some may have ended."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def end_all() -> None:
    """Kill every descendant, and return when there is none; what forks meanwhile is found next."""
    while True:
        kill_all(descendants(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def become(order: dict[str, object], streams: list[int], told: int, *, session: bool) -> None:
    """Turn this fork into the command; tell why where that fails."""
    try:
        signal.set_wakeup_fd(-1)
        if session:
            os.setsid()
        for number in range(1, signal.NSIG):
            if number not in {signal.SIGKILL, signal.SIGSTOP, 32, 33}:  # 32, 33: glibc's own
                signal.signal(number, signal.SIG_DFL)
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
        os.umask(0o022)
        os.chdir(str(order["cwd"]))
        argv: list[str] = order["argv"]  # type: ignore[assignment]
        env: dict[str, str] = order["env"]  # type: ignore[assignment]
        os.execve(  # noqa: S606 - there is a shell where the order has one
            argv[0],
            [each.encode() for each in argv],
            {name.encode(): value.encode() for name, value in env.items()},
        )
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        os.write(told, str(error).encode() or b"?")
    os._exit(127)


class Supervisor:
    """What runs in the sandbox, and the line to the gateway."""

    def __init__(self, channel: socket.socket, lifeline: int, *, refused: bool) -> None:
        self.channel = channel
        self.lifeline = lifeline
        self.refused = refused
        self.jobs: dict[int, tuple[int, list[int]]] = {}
        """Of each pid its number, and the ends of its output that the gateway reads."""
        self.woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self.poll = select.poll()
        for descriptor in (channel.fileno(), lifeline, self.woken):
            self.poll.register(descriptor, select.POLLIN)

    def tell(self, **message: object) -> None:
        """Tell the gateway, where there is one."""
        try:
            self.channel.send(json.dumps(message).encode())
        except OSError:
            return

    def serve(self) -> None:
        """Do what the gateway asks until it is time to end."""
        self.tell(ready=os.getpid(), refused=self.refused)
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.lifeline:
                    return
                if descriptor == self.woken:
                    if signal.SIGTERM in os.read(self.woken, 4096):
                        return
                    self.reap()
                elif descriptor != self.channel.fileno():
                    self.drain(descriptor)
                elif not self.take():
                    return

    def take(self) -> bool:
        """Take a message; False where it is the last."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.channel, 4096, 8)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            self.poll.unregister(self.channel)
            for _, outputs in self.jobs.values():
                for descriptor in outputs:
                    self.poll.register(descriptor, select.POLLIN)
            return True
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # noqa: FBT003 - as it is
        message = json.loads(data)
        if "start" in message:
            self.start(message["start"], descriptors)
        return "stop" not in message

    def start(self, number: int, descriptors: list[int]) -> None:
        """Start the command of an order."""
        with os.fdopen(descriptors[0], "rb") as file:
            order = json.load(file)
        streams, outputs = descriptors[1:4], descriptors[4:]
        ready, told = os.pipe()
        pid = os.fork()
        if not pid:
            # Where a group cannot be protected from its members, it had better be their own.
            become(order, streams, told, session=not self.refused)
        for descriptor in (told, *streams):
            os.close(descriptor)
        with os.fdopen(ready, "rb") as answer:
            problem = answer.read().decode(errors="replace")
        if problem:
            for descriptor in outputs:
                os.close(descriptor)
            self.tell(failed=number, error=problem)
        else:
            self.jobs[pid] = number, outputs
            self.tell(started=number, pid=pid)

    def reap(self) -> None:
        """Bury who has ended, and tell of those that were asked for."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self.jobs:
                number, outputs = self.jobs.pop(pid)
                for descriptor in outputs:
                    self.forget(descriptor)
                    os.close(descriptor)
                self.tell(ended=number, status=status)

    def drain(self, descriptor: int) -> None:
        """Read what nobody reads any more, or its writer would stop."""
        if not os.read(descriptor, 65536):
            self.forget(descriptor)

    def forget(self, descriptor: int) -> None:
        """Listen no more to a descriptor, if it was listened to."""
        try:
            self.poll.unregister(descriptor)
        except KeyError:
            return


def main() -> None:
    """Serve on descriptor 0 until told to end; then leave nothing running."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    lifeline = int(sys.argv[1])
    os.set_inheritable(lifeline, False)  # noqa: FBT003 - as it is
    if not prctl(PR_SET_CHILD_SUBREAPER, 1):
        raise SystemExit("orphans cannot be adopted here")
    refused = sys.argv[2] == "refuse" and refuse_kills()
    Supervisor(socket.socket(fileno=0), lifeline, refused=refused).serve()
    end_all()
    os._exit(0)


if __name__ == "__main__":
    main()
