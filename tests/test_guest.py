"""Claims about the guest: real processes under the supervisor, in each shell that it has to run in.

A process of a command is recognised by a marker in its argument list, an odd number that no other
process of the machine has: that nothing is alive is read from /proc and not from what the record
says. Every wait here is for an event (a FIFO that the command writes to, the end of a process) and
has a bound, so a guest that hangs fails a test and does not stop the suite.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import select
import shlex
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator import EvalSpec, guest
from orchestrator.backends.local import LocalBackend
from orchestrator.core.machine import CleanupPermit
from orchestrator.ports import Ending, Order
from orchestrator.workspace import SpecWorkspace

SHELLS = ("dash", "bash", "ash")
SPEC = EvalSpec(name="guest", check="true")
NONCE = "5eed1e55"
BOUND_S = 30.0
EXIT_CALL = {"x86_64": 60, "aarch64": 93}  # exit(2) of one thread
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
TOOLS = ("dd", "mkfifo", "mv", "sleep", "setsid")
NORMAL = {Ending.EXITED, Ending.SIGNALLED, Ending.DEADLINE}

_numbers = itertools.count(1)


# --- what the tests run commands with -------------------------------------------------------------


def shell_path(name, directory):
    """Find a shell; `ash` is a link to busybox, which looks at the name that it is called by."""
    found = shutil.which("busybox" if name == "ash" else name)
    if found is None:
        pytest.fail(f"no {name} here: install dash, bash and busybox-static", pytrace=False)
    if name != "ash":
        return found
    link = directory / "ash"
    link.symlink_to(found)
    return str(link)


class Intake:
    """Takes output as bytes."""

    def __init__(self):
        self.head, self.tail, self.total = {}, {}, {}

    def receive(self, entry, stream):
        raise AssertionError("no file was asked for")

    def output(self, stream, head, tail, total):
        self.head[stream], self.tail[stream] = b"".join(head), b"".join(tail)
        self.total[stream] = total


@dataclass
class Run:
    """What came of one command."""

    sandbox: object
    record: object
    output: Intake
    seconds: float

    @property
    def ended(self):
        return self.record.ending, self.record.code

    @property
    def stdout(self):
        return self.output.head["stdout"] + self.output.tail["stdout"]

    @property
    def stderr(self):
        return self.output.head["stderr"] + self.output.tail["stderr"]

    def read(self, name):
        return (self.sandbox.workspace / name).read_bytes()

    def has(self, name):
        return (self.sandbox.workspace / name).exists()


class Guest:
    """A local backend under one shell."""

    def __init__(self, shell, root):
        self.backend = LocalBackend(root, shell=shell)
        self.sandboxes = []

    def sandbox(self):
        made = self.backend.create(f"run-{next(_numbers)}", SPEC)
        self.sandboxes.append(made)
        assert made.upload(SpecWorkspace(None, {}))
        return made

    def run(self, command, sandbox=None, **options):
        sandbox = sandbox or self.sandbox()
        given = order(command, **options)
        begun = time.monotonic()
        record = in_background(sandbox.execute, given).result(BOUND_S)
        seconds = time.monotonic() - begun
        output = Intake()
        if record.ending in NORMAL:
            sandbox.fetch([], "check", output)
        return Run(sandbox, record, output, seconds)

    def close(self):
        for sandbox in self.sandboxes:
            for claim in sandbox.home.glob("records/*/claim"):  # what a failed test left behind
                pid, _, born = claim.read_text().strip().partition(" ")
                if born and started_at(pid) == born:
                    os.kill(int(pid), signal.SIGKILL)
        self.backend.close()


def order(command, *, deadline=20.0, grace=1.0, env=None, keep=1 << 20, start_in=60.0):
    argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
    return Order(
        slot="check",
        argv=argv,
        env=env or {},
        deadline_s=deadline,
        grace_s=grace,
        start_by=time.monotonic() + start_in,
        now=time.monotonic,
        output_bytes=keep,
        nonce=NONCE,
    )


def in_background(function, *arguments):
    """Call in a thread that a hanging call cannot keep the interpreter alive with."""
    future = Future()

    def call():
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it belongs to who asks for the result
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


class Bell:
    """A FIFO in the workspace; the command writes a line to it to say that it got somewhere."""

    def __init__(self, sandbox):
        path = sandbox.workspace / "bell"
        os.mkfifo(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait(self):
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        assert poll.poll(BOUND_S * 1000), "the command did not ring"
        os.close(self._descriptor)


def processes():
    return [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def stat_fields(pid):
    """Fields of /proc/pid/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return []


def started_at(pid):
    fields = stat_fields(pid)
    return fields[19].decode() if fields else None


def alive(marker):
    """Processes with the marker in their arguments; one of whose threads any is alive counts."""
    found = []
    for pid in processes():
        with contextlib.suppress(OSError):
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            for task in tasks:
                if marker.encode() in (task / "cmdline").read_bytes():
                    state = (task / "stat").read_bytes().rpartition(b") ")[2][:1]
                    if state not in b"ZX":
                        found.append(int(pid))
                        break
    return found


def zombies_of(parent):
    return [
        pid
        for pid in processes()
        if (fields := stat_fields(pid)) and fields[0] == b"Z" and int(fields[1]) == parent
    ]


@pytest.fixture(scope="module", params=SHELLS)
def ward(request, tmp_path_factory):
    """The guest under one shell."""
    directory = tmp_path_factory.mktemp(request.param)
    made = Guest(shell_path(request.param, directory), directory / "sandboxes")
    yield made
    made.close()


@pytest.fixture
def mark():
    """An odd number of seconds to sleep, by which a process is known; none is left at the end."""
    number = f"71{os.getpid()}{next(_numbers)}.25"
    yield number
    for pid in alive(number):  # only where a test failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def python(program, *arguments):
    return (sys.executable, "-I", "-S", "-c", program, *arguments)


# --- how a command ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 2, 124, 125, 126, 127, 128, 129, 130, 137, 143, 255])
def test_a_code_that_the_program_exits_with_is_its_own(ward, code):
    """No exit code is taken for a timeout, a signal or a fault of the guest."""
    run = ward.run(f"exit {code}")
    assert run.ended == (Ending.EXITED, code)
    assert run.record.still
    assert run.seconds < 5


@pytest.mark.parametrize("name", ["SEGV", "KILL", "TERM", "HUP", "USR1", "ABRT", "QUIT", "ALRM"])
def test_a_signal_that_ends_the_program_is_told_from_an_exit_code(ward, name):
    """A program that a signal killed is recorded with the signal."""
    run = ward.run(f"ulimit -c 0; kill -{name} $$; exit 9")
    assert run.ended == (Ending.SIGNALLED, signal.Signals[f"SIG{name}"].value)


@pytest.mark.parametrize("name", ["INT", "PIPE"])
def test_shells_keep_quiet_about_two_signals_and_the_code_says_which(ward, name):
    """SIGINT and SIGPIPE are recorded as such, or as the exit code that shells give them."""
    number = signal.Signals[f"SIG{name}"].value
    run = ward.run(f"kill -{name} $$; exit 9")
    assert run.ended in {(Ending.SIGNALLED, number), (Ending.EXITED, 128 + number)}


def test_a_program_that_signals_its_own_group_does_not_end_its_record(ward, mark):
    """`kill 0` ends the program and nothing of the guest."""
    run = ward.run(f"sleep {mark} & kill 0; sleep {mark}")
    assert run.ended == (Ending.SIGNALLED, signal.SIGTERM)
    run = ward.run("trap '' TERM HUP INT; kill -HUP 0; kill -INT 0; kill 0; echo on; exit 6")
    assert run.ended == (Ending.EXITED, 6)
    assert run.stdout == b"on\n"
    assert not alive(mark)


@pytest.mark.parametrize("name", ["TERM", "HUP", "INT"])
def test_a_program_that_signals_its_supervisor_does_not_end_its_record(ward, name):
    """What a polite program might send its parent changes nothing."""
    run = ward.run(f"kill -{name} $PPID; kill -{name} $PPID; echo on; exit 6")
    assert run.ended == (Ending.EXITED, 6)
    assert run.stdout == b"on\n"


def test_a_program_that_is_not_there_exits_as_in_a_shell(ward):
    """A command that cannot be found is the program's failure: 127."""
    assert ward.run(("/nonexistent/program",)).ended == (Ending.EXITED, 127)


def test_no_signal_is_ignored_or_blocked_in_the_command(ward):
    """Shells make background children ignore SIGINT; the command is none."""
    run = ward.run(("/bin/grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"))
    masks = [int(line.split()[1], 16) for line in run.stdout.splitlines()]
    assert masks == [0, 0]


def test_an_interrupt_raises_in_python(ward):
    """SIGINT reaches Python's own handler."""
    program = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    print("ignored")
except KeyboardInterrupt:
    print("interrupted")
"""
    assert ward.run(python(program)).stdout == b"interrupted\n"


def test_the_command_has_three_descriptors_and_an_empty_input(ward):
    """No descriptor of the guest leaks into the command."""
    run = ward.run(
        python("import os; print([n for n in range(256) if os.path.exists(f'/proc/self/fd/{n}')])")
    )
    assert run.stdout == b"[0, 1, 2]\n"
    assert ward.run("read line; echo $?").stdout == b"1\n"


def test_the_command_has_a_session_of_its_own(ward):
    """The session is the command's, so what it does to its group touches nobody else."""
    run = ward.run(python("import os; print(os.getsid(0) == os.getpid() == os.getpgrp())"))
    assert run.stdout == b"True\n"


# --- the deadline ---------------------------------------------------------------------------------


def test_a_loop_is_stopped_at_its_deadline(ward, mark):
    """A1: what loops forever ends with the deadline, and nothing of it is alive then."""
    run = ward.run(("/bin/sh", "-c", "while :; do :; done", mark), deadline=0.5)
    assert run.record.ending is Ending.DEADLINE
    assert not run.record.escalated
    assert not alive(mark)
    assert 0.45 <= run.record.elapsed_s <= run.seconds < 5


def test_a_grandchild_that_holds_the_pipe_does_not_keep_the_deadline(ward, mark):
    """A6: partial output is kept, and the wait is for the process and not for its pipe."""
    run = ward.run(f"echo before; sleep {mark}; echo after", deadline=0.3)
    assert run.record.ending is Ending.DEADLINE
    assert run.stdout == b"before\n"
    assert run.seconds < 5
    assert not alive(mark)


def test_a_program_that_ignores_term_is_killed_after_the_grace(ward, mark):
    """A10: and the record says so."""
    run = ward.run(
        f"trap '' TERM INT; while :; do sleep 0.05; done; {mark}", deadline=0.3, grace=0.3
    )
    assert run.record.ending is Ending.DEADLINE
    assert run.record.escalated
    assert run.seconds >= 0.55
    assert not alive(mark)


def test_a_program_may_save_its_work_after_the_deadline(ward):
    """SIGTERM comes first, and what it exits with then does not make it pass."""
    run = ward.run(
        "trap 'echo work >saved; exit 0' TERM; while :; do sleep 0.02; done", deadline=0.3, grace=5
    )
    assert run.record.ending is Ending.DEADLINE
    assert not run.record.escalated
    assert run.read("saved") == b"work\n"
    assert run.seconds < 4


def test_a_daemon_that_saves_its_work_has_the_grace_too(ward, mark):
    """TERM goes to the whole tree, and the tree is waited for, not only the command's process."""
    daemon = "trap 'sleep 0.3; echo work >saved; exit 0' TERM; while :; do sleep 0.02; done"
    run = ward.run(f"sh -c {shlex.quote(daemon)} {mark} & sleep {mark}", deadline=0.3, grace=5)
    assert run.record.ending is Ending.DEADLINE
    assert run.read("saved") == b"work\n"
    assert not alive(mark)


def test_a_program_that_closed_its_output_is_stopped_at_its_deadline(ward, mark):
    """The collectors' end is not the command's."""
    run = ward.run(f"exec >&- 2>&-; sleep {mark}", deadline=0.3)
    assert run.record.ending is Ending.DEADLINE
    assert not alive(mark)


def test_a_stopped_program_is_killed_after_its_deadline(ward, mark):
    """SIGSTOP does not get around the deadline."""
    run = ward.run(f"sleep {mark} & kill -STOP $!; kill -STOP $$; exit 0", deadline=0.3, grace=0.3)
    assert run.record.ending is Ending.DEADLINE
    assert not alive(mark)


def test_most_of_the_deadline_may_be_used(ward):
    """A program that takes 0.93 of its deadline passes."""
    run = ward.run("sleep 1.86; exit 5", deadline=2)
    assert run.ended == (Ending.EXITED, 5)


def test_an_end_at_the_moment_of_the_deadline_is_one_of_the_two(ward):
    """C6: the race between exit and deadline has a winner, and never an error."""

    def race(number):
        return ward.run(f"sleep {0.25 + (number - 10) * 0.006:.3f}; exit 7", deadline=0.3)

    with ThreadPoolExecutor(5) as pool:
        runs = list(pool.map(race, range(20)))
    assert {run.ended for run in runs} <= {(Ending.EXITED, 7), (Ending.DEADLINE, None)}
    assert all(run.record.still for run in runs)


def test_an_end_by_term_at_the_deadline_is_a_deadline(ward):
    """B5: a signal that the guest sent is not one that the program died of."""
    assert ward.run("kill -STOP $$", deadline=0.2, grace=0.1).ended == (Ending.DEADLINE, None)


def test_the_documented_tools_are_enough(ward, tmp_path, monkeypatch):
    """B3: with nothing but these on the PATH, `timeout` least of all, the deadline holds."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"no {tool} here"
        (tmp_path / tool).symlink_to(found)
    monkeypatch.setattr(guest, "SANE_PATH", str(tmp_path))
    assert ward.run("echo out; exit 3").ended == (Ending.EXITED, 3)
    sleep = shutil.which("sleep")
    assert ward.run((sleep, "30"), deadline=0.3).record.ending is Ending.DEADLINE


def test_a_timeout_of_another_kind_on_the_path_does_no_harm(ward):
    """B3: a `timeout` that refuses its arguments is not asked."""
    sandbox = ward.sandbox()
    shim = sandbox.workspace / "timeout"
    shim.write_text("#!/bin/sh\necho usage >&2\nexit 1\n")
    shim.chmod(0o755)
    path = f"{sandbox.workspace}:{os.environ['PATH']}"
    assert ward.run("exit 4", sandbox, env={"PATH": path}).ended == (Ending.EXITED, 4)


# --- what a command leaves behind -----------------------------------------------------------------


def test_a_daemon_is_counted_and_stopped_and_the_exit_code_stands(ward, mark):
    """A7: the end of the process ends the check, not the end of the pipe."""
    run = ward.run(f"sleep {mark} & echo started; exit 0")
    assert run.ended == (Ending.EXITED, 0)
    assert run.record.descendants == 1
    assert run.record.still
    assert run.stdout == b"started\n"
    assert run.seconds < 5
    assert not alive(mark)


def test_other_sessions_are_no_escape(ward, mark):
    """A9: `setsid` in front changes neither the time nor the verdict."""
    run = ward.run(f"for i in 1 2 3 4; do setsid sh -c 'sleep {mark} &'; done; exit 0")
    assert run.ended == (Ending.EXITED, 0)
    assert run.record.descendants == 4
    assert run.seconds < 5
    assert not alive(mark)


def test_other_sessions_are_no_escape_from_the_deadline(ward, mark):
    """A9: nor from a deadline."""
    run = ward.run(
        f"for i in 1 2 3 4; do setsid sh -c 'sleep {mark} &'; done; sleep {mark}", deadline=0.4
    )
    assert run.record.ending is Ending.DEADLINE
    assert run.seconds < 5
    assert not alive(mark)


def test_a_daemon_without_environment_or_descriptors_is_no_escape(ward, mark):
    """A double fork, an empty environment and closed descriptors leave the parentage."""
    daemon = f"(setsid env -i /bin/sh -c 'exec sleep {mark}' <&- >&- 2>&- &)"
    run = ward.run(f"{daemon}; {daemon}; exit 5")
    assert run.ended == (Ending.EXITED, 5)
    assert run.record.descendants == 2
    assert not alive(mark)


def test_a_daemon_that_ignores_every_signal_is_no_escape(ward, mark):
    """What outlives the command is killed, not asked."""
    run = ward.run(f"trap '' TERM HUP INT; sleep {mark} & exit 0")
    assert run.ended == (Ending.EXITED, 0)
    assert run.record.still
    assert not alive(mark)


def test_a_stopped_daemon_is_no_escape(ward, mark):
    """SIGKILL takes the stopped as well."""
    run = ward.run(f"sleep {mark} & kill -STOP $!; exit 0")
    assert run.ended == (Ending.EXITED, 0)
    assert run.record.descendants == 1
    assert not alive(mark)


def test_hundreds_that_fork_again_and_again_are_stopped(ward, mark):
    """Descendants are stopped before they are killed, so that none forks away."""
    churn = "while :; do sleep 0.01; done"
    run = ward.run(
        f"i=0; while [ $i -lt 150 ]; do i=$((i + 1)); sleep {mark} & done;"
        f"while [ $i -lt 190 ]; do i=$((i + 1)); sh -c '{churn}' {mark} & done; exit 3"
    )
    assert run.ended == (Ending.EXITED, 3)
    assert run.record.descendants >= 190
    assert run.record.still
    assert not alive(mark)


def test_a_name_cannot_hide_a_process(ward, mark):
    """Blanks, brackets, line ends and odd bytes in a name do not disturb the reading of /proc."""
    program = """
import os, signal, sys
names = [b"a b", b"a\\n) S 1 ", b") S 1 (", b") Z 1 1 1", b"\\xff\\x81\\x88", b"\\\\n*"]
names += [b"\\n", b" "]
there, told = os.pipe()
for name in names:
    if os.fork() == 0:
        with open("/proc/self/comm", "wb") as comm:
            comm.write(name)
        os.setsid()
        os.write(told, b".")
        signal.pause()
os.close(told)
got = 0
while got < len(names):
    got += len(os.read(there, 64))
os._exit(0)
"""
    run = ward.run(python(program, mark))
    assert run.ended == (Ending.EXITED, 0)
    assert run.record.descendants == 8
    assert not alive(mark)


@pytest.mark.skipif(platform.machine() not in EXIT_CALL, reason="the call's number is not known")
def test_a_process_whose_first_thread_ended_is_not_taken_for_dead(ward, mark):
    """It looks like a zombie, but its other threads run on."""
    program = f"""
import ctypes, os, threading, time
there, told = os.pipe()
if os.fork() == 0:
    os.setsid()
    def stay():
        while open("/proc/%d/stat" % os.getpid()).read().rpartition(") ")[2][0] != "Z":
            time.sleep(0.001)
        os.write(told, b".")
        time.sleep(3600)
    threading.Thread(target=stay).start()
    ctypes.CDLL(None).syscall({EXIT_CALL.get(platform.machine())}, 0)
os.read(there, 1)
os._exit(0)
"""
    run = ward.run(python(program, mark))
    assert run.ended == (Ending.EXITED, 0)
    assert run.record.descendants == 1
    assert not alive(mark)


def test_one_that_forks_and_ends_over_and_over_is_stopped(ward, mark):
    """No list of processes shows all of a comet; only one with neither it nor its dead is proof."""
    program = """
import mmap, os
with open("count", "wb") as file:
    file.write(bytes(8))
with open("count", "r+b") as file:
    count = mmap.mmap(file.fileno(), 8)
if os.fork():
    os._exit(0)
os.setsid()
while True:
    count[:] = (int.from_bytes(count[:], "little") + 1).to_bytes(8, "little")
    if os.fork():
        os._exit(0)
"""
    for _ in range(5):
        run = ward.run(python(program, mark))
        assert run.ended == (Ending.EXITED, 0)
        assert run.record.still
        before = run.read("count")
        assert not any(alive(mark) for _ in range(5))
        assert run.read("count") == before


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="cannot choose a process id here")
def test_the_process_id_of_a_helper_that_ended_hides_nobody(ward, mark):
    """A collector ends when the output is closed; who gets its id is not one of the guest's."""
    program = f"""
import os, select, signal
parent = os.getppid()
with open(f"/proc/{{parent}}/task/{{parent}}/children") as file:
    wanted = next(int(pid) for pid in file.read().split() if int(pid) != os.getpid())
end = os.pidfd_open(wanted)
os.close(1)
os.close(2)
select.select([end], [], [], 20)
for _ in range(500):
    with open("{LAST_PID}", "w") as last:
        last.write(str(wanted - 1))
    child = os.fork()
    if child == 0:
        if os.getpid() != wanted:
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid()
        signal.pause()
    if child == wanted:
        open("taken", "w").close()
        os._exit(0)
    os.waitpid(child, 0)
os._exit(1)
"""
    run = ward.run(python(program, mark))
    if not run.has("taken"):
        pytest.skip("the id went to another process each time")
    assert run.ended == (Ending.EXITED, 0)
    assert run.record.descendants == 1
    assert not alive(mark)


def test_timed_out_commands_leave_no_zombies(ward):
    """B4: neither the launcher nor anybody else keeps the dead of earlier commands."""
    for _ in range(10):
        run = ward.run("setsid sleep 30 & setsid sleep 30 & sleep 30", deadline=0.05, grace=0.5)
        assert run.record.ending is Ending.DEADLINE
    assert not zombies_of(ward.backend._launcher._process.pid)


def test_commands_side_by_side_do_not_mix(ward):
    """Each of many at once has its own outcome, output and sandbox."""

    def one(number):
        return ward.run(f"sleep 0.1; echo {number}; exit {number}")

    with ThreadPoolExecutor(20) as pool:
        runs = list(pool.map(one, range(20)))
    assert [run.ended for run in runs] == [(Ending.EXITED, number) for number in range(20)]
    assert [run.stdout for run in runs] == [b"%d\n" % number for number in range(20)]


# --- output ---------------------------------------------------------------------------------------


def test_bytes_that_are_no_text_arrive_as_they_are(ward):
    """F2: every byte, in both streams."""
    run = ward.run(r"printf '\377\000\033[2J'; printf '\000\377' >&2; exit 0")
    assert run.ended == (Ending.EXITED, 0)
    assert (run.stdout, run.stderr) == (b"\xff\x00\x1b[2J", b"\x00\xff")


def test_output_that_comes_in_pieces_is_kept_whole(ward):
    """Short reads, which some `dd` warns about, lose and add nothing."""
    run = ward.run("for i in 1 2 3 4 5; do echo $i; echo -$i >&2; sleep 0.03; done; exit 3")
    assert run.ended == (Ending.EXITED, 3)
    assert run.stdout == b"1\n2\n3\n4\n5\n"
    assert run.stderr == b"-1\n-2\n-3\n-4\n-5\n"
    assert run.output.total == {"stdout": 10, "stderr": 15}


def test_silence_is_no_output_and_not_its_lack(ward):
    """Both streams are delivered, with nothing in them."""
    run = ward.run("exit 0")
    assert run.output.total == {"stdout": 0, "stderr": 0}


@pytest.mark.parametrize("size", [9, 10, 11, 12, 1000])
def test_head_and_tail_are_kept_to_the_byte(ward, size):
    """Whole up to the limit, the two ends of it beyond."""
    text = "".join(f"{number:04d}" for number in range(250))[:size]
    run = ward.run(("/usr/bin/env", "printf", "%s", text), keep=10)
    assert run.output.total["stdout"] == size
    if size <= 10:
        assert run.stdout == text.encode()
    else:
        assert run.output.head["stdout"] == text[:5].encode()
        assert run.output.tail["stdout"] == text[-5:].encode()


def test_the_last_bytes_are_there_although_a_daemon_holds_the_pipe(ward, mark):
    """A8: five megabytes, END, exit, and something left in the background."""
    run = ward.run(
        f"head -c 5000000 /dev/zero | tr '\\0' x; echo END; sleep {mark} & exit 3", keep=10 << 20
    )
    assert run.ended == (Ending.EXITED, 3)
    assert run.record.descendants == 1
    assert run.output.total["stdout"] == len(run.stdout) == 5000004
    assert run.stdout.endswith(b"xxEND\n")
    assert run.seconds < 5
    assert not alive(mark)


def test_a_flood_on_both_streams_is_counted_and_not_kept(ward):
    """F3: 200 MB to each at once: exact totals, both ends, and no more than the limit."""
    flood = "echo BEGIN; head -c 200000000 /dev/zero; echo END"
    run = ward.run(f"{{ {flood}; }} >&2 & {flood}; wait; exit 4", keep=1 << 20)
    assert run.ended == (Ending.EXITED, 4)
    for stream in ("stdout", "stderr"):
        assert run.output.total[stream] == 200000010
        assert run.output.head[stream] == b"BEGIN\n".ljust(1 << 19, b"\0")
        assert run.output.tail[stream] == b"END\n".rjust(1 << 19, b"\0")


def test_a_line_of_any_length_is_no_special_case(ward):
    """F3: 100 MB without a line end."""
    run = ward.run("head -c 100000000 /dev/zero | tr '\\0' x; exit 4", keep=1000)
    assert run.ended == (Ending.EXITED, 4)
    assert run.output.total["stdout"] == 100000000
    assert run.output.head["stdout"] == run.output.tail["stdout"] == b"x" * 500


def test_a_flood_does_not_keep_the_deadline(ward, mark):
    """F3: `yes` is stopped on time, with both ends of what it said."""
    run = ward.run(f"yes {mark}", deadline=0.5, keep=1000)
    assert run.record.ending is Ending.DEADLINE
    assert run.output.head["stdout"].startswith(f"{mark}\n{mark}\n".encode())
    assert len(run.output.tail["stdout"]) == 500
    assert run.output.total["stdout"] > 1000
    assert run.seconds < 5
    assert not alive(mark)


# --- what the command is given --------------------------------------------------------------------

ODD = {
    "quotes": 'it\'s "so" `id` $HOME \\ \\n',
    "lines": "\none\r\n\ttwo\n\n",
    "words": "  * ? [a-z] ~ -n # ; & | > < ( ) { } ! = %s ",
    "unicode": "größe \u2028 \U0001f40d",
    "bytes": os.fsdecode(bytes(range(1, 256))),
    "empty": "",
    "long": "x" * 100_000,
}


def test_every_value_arrives_in_the_arguments_as_it_was_ordered(ward):
    """Nothing is expanded, split, dropped or decoded on the way."""
    program = "cat /proc/$$/cmdline"
    run = ward.run(("/bin/sh", "-c", program, *ODD.values()))
    words = ("/bin/sh", "-c", program, *ODD.values())
    assert run.stdout == b"".join(os.fsencode(word) + b"\0" for word in words)


def environment(run):
    pairs = (item.partition(b"=") for item in run.stdout.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def assert_environment(run, ordered):
    """The environment is what was ordered, three sane ones, and what shells cannot help adding."""
    found = environment(run)
    sane = {
        "PATH": guest.SANE_PATH,
        "HOME": str(run.sandbox.home / "home"),
        "LANG": guest.SANE_LANG,
    }
    wanted = {**sane, **ordered}
    assert {name: found.get(name) for name in wanted} == wanted
    assert set(found) - set(wanted) <= {"PWD", "SHLVL", "_"}
    assert found.get("PWD") == str(run.sandbox.workspace)


def test_the_environment_is_what_was_ordered(ward, monkeypatch):
    """Nothing of the runner's own comes through, and nothing that was ordered is lost."""
    monkeypatch.setenv("RUNNERS_OWN", "secret")
    run = ward.run(("/bin/cat", "/proc/self/environ"), env=ODD)
    assert_environment(run, ODD)
    assert NONCE.encode() not in run.stdout


def test_no_name_of_a_variable_is_the_guests_own(ward):
    """What the supervisor calls its variables is nothing to the command's environment."""
    text = guest.SUPERVISOR.read_text() + guest.request(order("true"), workdir="/", env={}, now_s=0)
    names = {*re.findall(r"\b([a-z_]+)=", text), *re.findall(r"read -r ([a-z]+)", text), "IFS"}
    assert {"record", "nonce", "deadline"} <= names
    ordered = dict.fromkeys(names, "/nonexistent ' /")
    run = ward.run(("/bin/cat", "/proc/self/environ"), env=ordered)
    assert run.ended == (Ending.EXITED, 0)
    assert_environment(run, ordered)


def test_the_commands_path_is_not_the_guests(ward):
    """A PATH without anything on it is the command's business only."""
    assert ward.run("exit 5", env={"PATH": "/nonexistent"}).ended == (Ending.EXITED, 5)


def test_a_locale_that_is_not_there_adds_nothing_to_the_output(ward):
    """Some shells warn about it, where the command's output goes."""
    run = ward.run("exit 5", env={"LC_ALL": "xx_XX.UTF-8", "LANG": "yy_YY"})
    assert (run.ended, run.stderr) == ((Ending.EXITED, 5), b"")


# --- once, late, never ----------------------------------------------------------------------------


def test_a_dispatch_that_comes_too_late_starts_nothing(ward):
    """Past its latest start the order is recorded as not started, for good."""
    sandbox = ward.sandbox()
    run = ward.run("touch ran", sandbox, start_in=-5)
    assert run.record.ending is Ending.NOT_STARTED
    assert run.record.still
    assert not run.has("ran")
    again = ward.run("touch ran", sandbox)
    assert again.record.ending is Ending.NOT_STARTED
    assert not run.has("ran")


def test_an_order_that_is_executed_again_is_not_run_again(ward):
    """C9: the second time tells what the first time did."""
    sandbox = ward.sandbox()
    first = ward.run("echo x >>runs; exit 3", sandbox)
    second = ward.run("echo x >>runs; exit 3", sandbox)
    assert first.ended == (Ending.EXITED, 3)
    assert second.record == first.record
    assert first.read("runs") == b"x\n"


def test_who_executes_a_running_order_again_waits_for_it(ward):
    """Two callers, one command, one record."""
    sandbox = ward.sandbox()
    bell = Bell(sandbox)
    given = order("echo x >>runs; echo >bell; sleep 0.3; exit 3")
    first = in_background(sandbox.execute, given)
    bell.wait()
    second = in_background(sandbox.execute, given)
    assert first.result(BOUND_S) == second.result(BOUND_S)
    assert first.result().code == 3
    assert (sandbox.workspace / "runs").read_bytes() == b"x\n"


def test_an_order_that_was_settled_never_starts(ward):
    """A late dispatch finds the claim taken."""
    sandbox = ward.sandbox()
    given = order("touch ran")
    record = in_background(sandbox.settle, given).result(BOUND_S)
    assert record.ending is Ending.NOT_STARTED
    run = ward.run("touch ran", sandbox)
    assert run.record.ending is Ending.NOT_STARTED
    assert not run.has("ran")


def test_settling_stops_what_runs(ward, mark):
    """A2, A5: recorded as stopped, at once, whatever its deadline and the signals it ignores."""
    sandbox = ward.sandbox()
    bell = Bell(sandbox)
    given = order(
        f"trap '' TERM; setsid sleep {mark} & (sleep {mark}; echo LATE >out) & echo >bell;"
        f"sleep {mark}",
        deadline=600,
    )
    running = in_background(sandbox.execute, given)
    bell.wait()
    begun = time.monotonic()
    record = in_background(sandbox.settle, given).result(BOUND_S)
    assert record.ending is Ending.STOPPED
    assert record.still
    assert time.monotonic() - begun < 5
    assert not alive(mark)
    assert running.result(BOUND_S) == record
    assert not (sandbox.workspace / "out").exists()


def test_settling_what_has_ended_gives_its_record(ward):
    """The outcome stands, however late it is asked for."""
    run = ward.run("exit 9")
    assert run.sandbox.settle(order("exit 9")) == run.record


def test_settling_at_any_moment_gives_one_record(ward, mark):
    """Settling races with start and end: both callers get one account, and nothing is alive."""

    def race(number):
        sandbox = ward.sandbox()
        given = order(f"sleep 0.02; : {mark}; exit 7")
        running = in_background(sandbox.execute, given)
        threading.Event().wait(number * 0.008)  # spreads the race; nothing waits for it
        settled = in_background(sandbox.settle, given).result(BOUND_S)
        return settled, running.result(BOUND_S)

    for settled, executed in map(race, range(12)):
        assert settled.ending in {Ending.EXITED, Ending.STOPPED, Ending.NOT_STARTED}
        assert settled.still
        assert executed in {settled, guest.lost(executed.message, still=executed.still)}
        assert executed == settled or settled.ending is Ending.NOT_STARTED
        assert not alive(mark)


def test_the_secret_of_the_run_is_not_where_the_command_can_read_it(ward):
    """The request is wiped before the command starts; no argument list or environment has it."""
    run = ward.run(
        'grep -rl 5eed[1]e55 "$HOME/.." /proc/$PPID/cmdline /proc/$PPID/environ; echo done'
    )
    assert run.stdout == b"done\n"


# --- a command that fights ------------------------------------------------------------------------

RECORD = '"$HOME"/../records/check'
FORGED = (
    "ending=exited\\ncode=0\\nelapsed=1\\ndescendants=0\\nescalated=no\\nstill=yes\\nmessage=\\n"
)


def test_the_parent_of_the_command_is_its_supervisor(ward):
    """Which is what makes the tests below do what they say."""
    run = ward.run("cat /proc/$PPID/cmdline")
    assert str(guest.SUPERVISOR) in run.stdout.decode()


def test_a_command_that_kills_its_supervisor_has_no_outcome(ward, mark):
    """And its processes are stopped all the same."""
    run = ward.run(f"setsid sleep {mark} & kill -9 $PPID; sleep {mark}; exit 0")
    assert run.ended == (Ending.LOST, None)
    assert run.record.still
    assert not alive(mark)


@pytest.mark.parametrize("secret", ["", "nonce=guess\\n", f"nonce={NONCE[:-1]}\\n"])
def test_a_record_that_the_command_wrote_is_none(ward, mark, secret):
    """Without the nonce it is not the supervisor's."""
    run = ward.run(
        f"setsid sleep {mark} & printf '{FORGED}{secret}' >{RECORD}/ended;"
        f"kill -9 $PPID; sleep {mark}; exit 0"
    )
    assert run.ended == (Ending.LOST, None)
    assert not alive(mark)


def test_a_record_that_the_command_wrote_does_not_stand_for_the_real_one(ward):
    """The supervisor's replaces it."""
    run = ward.run(f"printf '{FORGED}' >{RECORD}/ended; exit 7")
    assert run.ended == (Ending.EXITED, 7)


def test_records_on_the_output_are_output(ward):
    """Nothing that a command prints is read as an account of it."""
    run = ward.run(f"printf '{FORGED}nonce={NONCE}\\n'; printf '0+1 records in\\n' >&2; exit 9")
    assert run.ended == (Ending.EXITED, 9)
    assert run.stdout.endswith(b"nonce=5eed1e55\n")


def test_a_command_that_removes_its_workspace_has_its_outcome(ward):
    """The record is elsewhere."""
    assert ward.run('rm -rf "$PWD"; exit 7').ended == (Ending.EXITED, 7)


@pytest.mark.parametrize(
    "deed",
    [
        f"rm -rf {RECORD}/*",
        f"rm -f {RECORD}/std*.fifo {RECORD}/std*.head",
        f"ln -s /dev/full {RECORD}/ended.new",
        f"echo nonsense >{RECORD}/decision",
        "kill -9 $(cat /proc/$PPID/task/$PPID/children)",
    ],
    ids=["rm-all", "rm-output", "full", "decision", "kill-helpers"],
)
def test_a_command_that_spoils_its_record_gains_nothing(ward, mark, deed):
    """It has its real outcome or none."""
    run = ward.run(f"{deed}; sleep {mark} & exit 7", deadline=0.5)
    assert run.ended in {(Ending.EXITED, 7), (Ending.SIGNALLED, 9), (Ending.LOST, None)}
    assert not alive(mark)


@pytest.mark.parametrize(
    "deed",
    [f"rm -rf {RECORD}", f"mkdir {RECORD}/ended", f"rm {RECORD}/helpers"],
    ids=["rm", "mkdir", "helpers"],
)
def test_a_command_that_spoils_its_record_is_stopped_at_its_deadline(ward, mark, deed):
    """That nothing can be recorded any more does not let it run on."""
    sandbox = ward.sandbox()
    given = order(f"{deed}; sleep {mark}", deadline=0.3, grace=0.2)
    record = in_background(sandbox.execute, given).result(BOUND_S)
    assert record.ending in {Ending.DEADLINE, Ending.LOST}
    assert not alive(mark)


def test_settling_stops_a_command_that_took_its_record_away(ward, mark):
    """An order of which nothing is left is not taken for one that never started."""
    sandbox = ward.sandbox()
    bell = Bell(sandbox)
    given = order(f"rm -rf {RECORD}; echo >bell; sleep {mark}", deadline=600)
    in_background(sandbox.execute, given)
    bell.wait()
    record = in_background(sandbox.settle, given).result(guest.SETTLE_S)
    assert record.ending is Ending.LOST
    assert record.still
    assert not alive(mark)


def test_settling_stops_a_command_that_forged_its_record(ward, mark):
    """A record without the secret is as good as none."""
    sandbox = ward.sandbox()
    bell = Bell(sandbox)
    given = order(f"printf '{FORGED}' >{RECORD}/ended; echo >bell; sleep {mark}", deadline=600)
    in_background(sandbox.execute, given)
    bell.wait()
    record = in_background(sandbox.settle, given).result(guest.SETTLE_S)
    assert record.ending in {Ending.LOST, Ending.STOPPED}
    assert record.still
    assert not alive(mark)


def test_nobody_vouches_for_the_children_of_another_launcher(ward, mark):
    """After a restart of the runner, orphans of a killed supervisor are beyond its reach."""
    other = Guest(ward.backend.shell, ward.backend.root)
    sandbox = other.sandbox()
    bell = Bell(sandbox)
    os.mkfifo(sandbox.workspace / "go")
    given = order(f"setsid sleep {mark} & echo >bell; read go <go; kill -9 $PPID")
    running = in_background(sandbox.execute, given)
    bell.wait()
    os.kill(other.backend._launcher._process.pid, signal.SIGKILL)
    (sandbox.workspace / "go").write_text("go\n")
    with contextlib.suppress(OSError):
        assert not running.result(BOUND_S).still
    found = ward.backend.open(sandbox.ref.sandbox_id)
    record = in_background(found.settle, given).result(BOUND_S)
    assert record.ending is Ending.LOST
    assert record.still == (not alive(mark))
    other.close()
    for pid in alive(str(sandbox.home)):  # its monitor, which is nobody's child any more
        os.kill(pid, signal.SIGKILL)


def test_a_command_that_stops_its_helpers_is_not_waited_for(ward):
    """SIGSTOP for the collectors and the monitor holds nobody up."""
    run = ward.run(
        "for p in $(cat /proc/$PPID/task/$PPID/children); do [ $p = $$ ] || kill -STOP $p; done;"
        "exit 4"
    )
    assert run.ended in {(Ending.EXITED, 4), (Ending.LOST, None)}
    assert run.seconds < 10


def test_a_command_that_stops_its_supervisor_can_be_settled(ward, mark):
    """And its sandbox can be destroyed then."""
    sandbox = ward.sandbox()
    bell = Bell(sandbox)
    given = order(f"kill -STOP $PPID; echo >bell; sleep {mark}", deadline=600)
    in_background(sandbox.execute, given)
    bell.wait()
    record = in_background(sandbox.settle, given).result(guest.SETTLE_S)
    assert record.ending in {Ending.STOPPED, Ending.LOST}
    assert record.still
    assert not alive(mark)
    sandbox.destroy(CleanupPermit(sandbox.ref.sandbox_id, sandbox.ref.sandbox_id))


def test_a_command_that_kills_its_monitor_can_be_settled(ward, mark):
    """Without a monitor there is no deadline, but there is a client who gives up."""
    sandbox = ward.sandbox()
    bell = Bell(sandbox)
    given = order(
        "for p in $(cat /proc/$PPID/task/$PPID/children); do"
        " [ $p = $$ ] || last=$p; done; kill -9 $last; echo >bell;"
        f"sleep {mark}",
        deadline=600,
    )
    in_background(sandbox.execute, given)
    bell.wait()
    record = in_background(sandbox.settle, given).result(guest.SETTLE_S)
    assert record.ending in {Ending.STOPPED, Ending.LOST}
    assert not alive(mark)
