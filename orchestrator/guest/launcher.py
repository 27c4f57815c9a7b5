"""Starts supervisors on this machine, as children of a process that adopts their orphans.

A program of its own, so that a host with many threads and much memory need not fork: one small
process, started once by the local backend, forks each supervisor. It imports little, on purpose.

Every supervisor is made a *subreaper* (prctl(2), Linux): a descendant of the check whose parent
ends is adopted by the supervisor and not by process 1, and so is found whatever it did to its
session, its group or its environment. Should a check kill its supervisor, its orphans fall to this
process, which is a subreaper too and starts nothing but supervisors: a child that it did not start
is such an orphan.

Spoken on a socket at descriptor 0, one JSON object a message: `{"argv", "env", "cwd"}` starts a
supervisor and answers `{"pid"}` or `{"error"}`; `{"purge": pid}` kills that supervisor, where it
runs, and all orphans, and answers `{"still"}`. It ends when the socket closes; the supervisors do
not.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
PURGE_S = 5.0


def become_subreaper() -> bool:
    """Adopt orphaned descendants from now on; False where the system has no such thing."""
    if sys.platform != "linux":
        return False
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return bool(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def start(argv: list[str], env: dict[str, str], cwd: str) -> int:
    """Fork and exec a supervisor as if a shell had started it: own session, default signals."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        with os.fdopen(ready, "rb") as answer:
            problem = answer.read()
        if problem:
            raise OSError(problem.decode())
        return pid
    try:
        os.setsid()
        os.chdir(cwd)
        os.umask(0o022)
        become_subreaper()
        for number in range(1, signal.NSIG):
            if number not in {signal.SIGKILL, signal.SIGSTOP, 32, 33}:  # 32, 33: glibc's own
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.execve(argv[0], argv, env)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        os.write(told, str(error).encode() or b"?")
    os._exit(127)


def purge(started: set[int]) -> bool:
    """Kill every descendant that no living supervisor owns; tell whether none is left."""
    end = time.monotonic() + PURGE_S
    while time.monotonic() < end:
        orphans = [pid for pid in children(os.getpid()) if pid not in started]
        if not orphans:
            return True
        for pid in orphans:
            for kin in (pid, *children(pid)):
                try:
                    os.kill(kin, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.005)
    return False


def children(parent: int) -> list[int]:
    """Give the living children of a process."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b") ")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] not in {b"Z", b"X"}:
            found.append(int(name))
    return found


def main() -> None:
    """Serve until the other side closes."""
    channel = socket.socket(fileno=0)
    adopts = become_subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner
    started: set[int] = set()
    with channel.makefile("rwb") as stream:
        for line in stream:
            message = json.loads(line)
            try:
                if "purge" in message:
                    started.intersection_update(children(os.getpid()))
                    started.discard(message["purge"])
                    answer: dict[str, object] = {"still": adopts and purge(started)}
                else:
                    pid = start(message["argv"], message["env"], message["cwd"])
                    started.add(pid)
                    answer = {"pid": pid}
            except OSError as error:
                answer = {"error": str(error)}
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
