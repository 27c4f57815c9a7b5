"""The fault contract: what may go wrong between a runner and a backend, and how to make it happen.

The list is written down once. `FaultyBackend` injects from it into any real backend, on real
threads; the simulated world injects the same faults on its own clock; the explorer walks all of
them. What is not in the list is not promised to be survived: a sandbox's storage that lies about
its own content, and somebody who forges values of `core` on purpose.

What is promised, under every fault of the list, is P1 to P5 of `core/table.py` and `explore.py`: no
cleanup before a recorded download attempt, no score without whole evidence of a known outcome, no
download of a moving tree that is then scored, an end within the bounds, one verdict, nothing lost.
"""

from __future__ import annotations

import io
import re
import threading
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol, Self

from attrs import define, field, frozen

from ..core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..core.evidence import Entry, Manifest
    from ..core.facts import SandboxRef
    from ..core.machine import CleanupPermit
    from ..core.spec import EvalSpec
    from ..ports import Backend, Intake, Order, Record, Sandbox, Slot, Stream, Workspace


class Way(StrEnum):
    """A way for one call to go wrong."""

    ERROR_BEFORE = "error-before"
    """It fails, and nothing happened."""

    ERROR_AFTER = "error-after"
    """It happened, and the answer was lost to an error."""

    HANG_BEFORE = "hang-before"
    """It never answers, and nothing happens."""

    HANG_AFTER = "hang-after"
    """It happened, and never answers."""

    LATE = "late"
    """It happens only after the client has given up waiting for it.

    But for a creation that a runner gave up on and died, or stopped, before it could record that: a
    sandbox that comes of it is known to nobody's journal, and can only be found by its label.
    """

    SLOW = "slow"
    """It takes long, but less than its bound."""

    TWICE = "twice"
    """It is delivered twice, as by a proxy that repeats what it believes lost."""

    ABRUPT = "abrupt"
    """It raises something that is not an `Exception`."""

    NO_ANSWER = "no-answer"
    """It answers with nothing in place of an answer."""

    TRUNCATED = "truncated"
    """What is transferred is cut short, and success is reported."""

    CORRUPTED = "corrupted"
    """What is transferred has a wrong byte, and success is reported."""

    REORDERED = "reordered"
    """Content of two files is exchanged, and success is reported."""

    LEFT_OUT = "left-out"
    """One file is not transferred, and success is reported."""

    VANISHED = "vanished"
    """The sandbox is gone when the call comes."""

    REPLACED = "replaced"
    """Another sandbox answers under the same name when the call comes."""

    DISK_FULL = "disk-full"
    """The disk at the other end, or under the journal or the vault, is full."""

    CLOCK_JUMP = "clock-jump"
    """The sandbox's clock jumps by a day when the call comes."""

    CRASH_BEFORE = "crash-before"
    """The runner is killed before the journal is written."""

    CRASH_AFTER = "crash-after"
    """The runner is killed after the journal was written."""


_CALL: Final = (
    Way.ERROR_BEFORE,
    Way.ERROR_AFTER,
    Way.HANG_BEFORE,
    Way.HANG_AFTER,
    Way.LATE,
    Way.SLOW,
    Way.ABRUPT,
)
_TRANSFER: Final = (Way.TRUNCATED, Way.CORRUPTED, Way.LEFT_OUT)

CONTRACT: Final[Mapping[str, tuple[Way, ...]]] = {
    "create": (*_CALL, Way.TWICE, Way.DISK_FULL),
    "open": (Way.ERROR_BEFORE, Way.HANG_BEFORE, Way.SLOW, Way.ABRUPT),
    "upload": (*_CALL, *_TRANSFER, Way.REORDERED, Way.TWICE, Way.DISK_FULL, Way.VANISHED),
    "manifest": (Way.ERROR_BEFORE, Way.HANG_BEFORE, Way.SLOW, Way.ABRUPT, Way.VANISHED),
    "execute": (
        *_CALL,
        Way.TWICE,
        Way.NO_ANSWER,
        Way.VANISHED,
        Way.REPLACED,
        Way.CLOCK_JUMP,
    ),
    "settle": (*_CALL, Way.TWICE, Way.NO_ANSWER, Way.VANISHED, Way.REPLACED),
    "fetch": (*_CALL, *_TRANSFER, Way.REORDERED, Way.TWICE, Way.VANISHED, Way.REPLACED),
    "destroy": (*_CALL, Way.TWICE, Way.VANISHED),
    "journal": (Way.CRASH_BEFORE, Way.CRASH_AFTER, Way.DISK_FULL),
    "vault": (Way.DISK_FULL,),
}
"""Which ways each verb of a backend, each write to the journal and each write to the vault can
go."""


@frozen(order=True)
class Injection:
    """One fault: the `call`-th call of a verb, counted from 1, goes wrong in a way.

    Written `verb:way`, or `verb#call:way` for another call than the first.
    """

    verb: str
    way: Way
    call: int = 1

    @classmethod
    def parse(cls, text: str) -> Injection:
        """Read the written form.

        Raises:
            SpecError: it is not in the fault contract.
        """
        match = re.fullmatch(r"([a-z]+)(?:#([1-9][0-9]*))?:([a-z-]+)", text)
        if match is None or match[1] not in CONTRACT or match[3] not in CONTRACT[match[1]]:
            known = "; ".join(f"{verb}: {', '.join(ways)}" for verb, ways in CONTRACT.items())
            raise SpecError("fault", f"got {text!r}", f"verb#call:way out of {known}")
        return cls(match[1], Way(match[3]), int(match[2] or 1))

    def __str__(self) -> str:
        """Give the written form."""
        number = f"#{self.call}" if self.call > 1 else ""
        return f"{self.verb}{number}:{self.way}"


class InjectedError(Exception):
    """The error that an injected fault raises."""


class AbruptError(BaseException):
    """What an injected fault raises that is not an `Exception`."""


class Waiting(Protocol):
    """How an injected fault lets time pass."""

    def hang(self) -> None:
        """Do not come back while the client could be waiting; then raise."""

    def later(self, act: Callable[[], object]) -> None:
        """Act after the client has given up waiting; then raise as `hang` does."""

    def pause(self) -> None:
        """Come back late, but not too late."""


class Release:
    """Waiting on real threads: what hangs does so until it is released, as a test's last act."""

    def __init__(self, pause_s: float = 0.2) -> None:
        """Hold everything that hangs, until `release`."""
        self._released = threading.Event()
        self._pause_s = pause_s

    def release(self) -> None:
        """Let everything that hangs go on."""
        self._released.set()

    def hang(self) -> None:
        """Hang until released."""
        self._released.wait()
        raise InjectedError("hung until it was released")

    def later(self, act: Callable[[], object]) -> None:
        """Act when released."""
        self._released.wait()
        act()
        raise InjectedError("acted late")

    def pause(self) -> None:
        """Take a fraction of a second."""
        threading.Event().wait(self._pause_s)


def _parsed(plan: Iterable[Injection | str]) -> tuple[Injection, ...]:
    return tuple(Injection.parse(each) if isinstance(each, str) else each for each in plan)


@define(eq=False)
class FaultyBackend:
    """A backend under which chosen calls go wrong. Everything else is the backend's own.

    Use `with FaultyBackend(backend, ["fetch:truncated"]) as faulty:`, so that what hangs is let go.

    Attributes:
        backend: the backend that does the work.
        plan: what goes wrong; text is parsed.
        waiting: how time passes.
        happened: the injections that were met, in order.
        choose: asked for the way of every call that the plan does not name.
        observe: called with every call that is made and the way it goes wrong, before it is made.
    """

    backend: Backend
    plan: tuple[Injection, ...] = field(default=(), converter=_parsed)
    waiting: Waiting = field(factory=Release)
    happened: list[Injection] = field(factory=list)
    choose: Callable[[str, int], Way | None] = field(default=lambda _verb, _call: None)
    observe: Callable[[str, int, Way | None], None] = field(default=lambda _verb, _call, _way: None)
    _calls: dict[str, int] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __enter__(self) -> Self:
        """Give the backend."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go what hangs."""
        if isinstance(self.waiting, Release):
            self.waiting.release()

    @property
    def name(self) -> str:
        """The backend's own name."""
        return self.backend.name

    @property
    def isolation(self) -> str:
        """The backend's own isolation."""
        return self.backend.isolation

    @property
    def shell(self) -> str:
        """The backend's own shell."""
        return getattr(self.backend, "shell", "/bin/sh")

    @property
    def adopts(self) -> bool:
        """Whether the backend's sandboxes come with a tree."""
        return getattr(self.backend, "adopts", False)

    def refuse(self, spec: EvalSpec) -> None:
        """Refuse what the backend refuses."""
        self.backend.refuse(spec)

    def create(self, run_id: str, spec: EvalSpec) -> Sandbox:
        """Create a sandbox, or fail to."""
        made = self.disturb("create", lambda: self.backend.create(run_id, spec))
        return FaultySandbox(made, self)

    def open(self, run_id: str) -> Sandbox | None:
        """Find a sandbox, or fail to."""
        found = self.disturb("open", lambda: self.backend.open(run_id))
        return None if found is None else FaultySandbox(found, self)

    def next_way(self, verb: str) -> Way | None:
        """Count a call of a verb; give the way that it goes wrong, None if it does not."""
        with self._lock:
            call = self._calls[verb] = self._calls.get(verb, 0) + 1
            met = next((each for each in self.plan if (each.verb, each.call) == (verb, call)), None)
            way = met.way if met is not None else self.choose(verb, call)
            if way is not None:
                self.happened.append(Injection(verb, way, call))
            self.observe(verb, call, way)
        return way

    def disturb(self, verb: str, act: Callable[[], Any], sandbox: Sandbox | None = None) -> Any:
        """Act, in the way that is planned for this call."""
        return self.go(self.next_way(verb), verb, act, sandbox)

    def go(  # noqa: C901, PLR0912 - a case for each way
        self, way: Way | None, verb: str, act: Callable[[], Any], sandbox: Sandbox | None
    ) -> Any:
        """Act in a way."""
        match way:
            case Way.ERROR_BEFORE:
                raise InjectedError(f"{verb} failed")
            case Way.DISK_FULL:
                raise OSError(28, "No space left on device")
            case Way.ABRUPT:
                raise AbruptError(f"{verb} ended abruptly")
            case Way.HANG_BEFORE:
                self.waiting.hang()
            case Way.LATE:
                self.waiting.later(act)
            case Way.SLOW:
                self.waiting.pause()
            case Way.TWICE:
                act()
            case Way.VANISHED if sandbox is not None:
                _tamper(sandbox, "vanish")
            case Way.REPLACED if sandbox is not None:
                _tamper(sandbox, "replace")
            case Way.CLOCK_JUMP if sandbox is not None:
                with suppress(NotImplementedError):
                    _tamper(sandbox, "jump")
        answer = act()
        match way:
            case Way.ERROR_AFTER:
                raise InjectedError(f"{verb} happened, and its answer was lost")
            case Way.HANG_AFTER:
                self.waiting.hang()
            case Way.NO_ANSWER:
                return None
        return answer


def _tamper(sandbox: Sandbox, act: str) -> None:
    """Have a sandbox vanish, be replaced, or its clock jump, behind the runner's back.

    A backend's sandboxes support it by a method `tamper(act)`; those of the local backend are
    directories, and are tampered with here.
    """
    tamper = getattr(sandbox, "tamper", None)
    if tamper is not None:
        tamper(act)
        return
    home = getattr(sandbox, "home", None)
    if home is None or act == "jump":
        raise NotImplementedError(f"{type(sandbox).__name__} cannot be made to {act}")
    if act == "vanish":
        home.rename(home.with_name(f".{home.name}.vanished"))
    else:
        (home / "identity").write_text("another sandbox\n")


@define(eq=False)
class FaultySandbox:
    """A sandbox of a `FaultyBackend`."""

    sandbox: Sandbox
    _faulty: FaultyBackend = field(alias="faulty")

    @property
    def ref(self) -> SandboxRef:
        """The sandbox's own."""
        return self.sandbox.ref

    def _disturb(self, verb: str, act: Callable[[], Any]) -> Any:
        return self._faulty.disturb(verb, act, self.sandbox)

    def upload(self, workspace: Workspace) -> bool:
        """Upload, or fail to; or upload another tree than was asked for."""
        way = self._faulty.next_way("upload")
        sent = _DamagedWorkspace(workspace, way) if way in _DAMAGE else workspace
        answer = self._faulty.go(way, "upload", lambda: self.sandbox.upload(sent), self.sandbox)
        return bool(answer)

    def manifest(self) -> Manifest:
        """Account for the workspace, or fail to."""
        manifest: Manifest = self._disturb("manifest", self.sandbox.manifest)
        return manifest

    def execute(self, order: Order) -> Record:
        """Execute, or fail to."""
        record: Record = self._disturb("execute", lambda: self.sandbox.execute(order))
        return record

    def settle(self, order: Order) -> Record:
        """Settle, or fail to."""
        record: Record = self._disturb("settle", lambda: self.sandbox.settle(order))
        return record

    def fetch(self, entries: Iterable[Entry], slot: Slot, intake: Intake) -> None:
        """Deliver, or fail to; or deliver something else."""
        way = self._faulty.next_way("fetch")
        wanted = list(entries)
        taker = _DamagingIntake(intake, way, wanted) if way in _DAMAGE else intake
        if way is Way.LEFT_OUT and wanted:
            wanted = wanted[1:]
        self._faulty.go(way, "fetch", lambda: self.sandbox.fetch(wanted, slot, taker), self.sandbox)

    def destroy(self, permit: CleanupPermit) -> None:
        """Destroy, or fail to."""
        self._disturb("destroy", lambda: self.sandbox.destroy(permit))


_DAMAGE: Final = frozenset({Way.TRUNCATED, Way.CORRUPTED, Way.REORDERED, Way.LEFT_OUT})


def _damaged(data: bytes, way: Way) -> bytes:
    if way is Way.TRUNCATED:
        return data[: len(data) * 9 // 10]
    if way is Way.CORRUPTED and data:
        return bytes([data[0] ^ 1]) + data[1:]
    return data


@define
class _DamagedWorkspace:
    """A workspace that arrives otherwise than it is, though its account is right."""

    workspace: Workspace
    way: Way

    def manifest(self) -> Manifest:
        manifest = self.workspace.manifest()
        files = [entry for entry in manifest if entry.sha256]
        if self.way is Way.LEFT_OUT and files:
            left = (entry for entry in manifest if entry is not files[0])
            return type(manifest).of(left)
        return manifest

    def open(self, entry: Entry) -> BinaryIO:
        files = [each for each in self.workspace.manifest() if each.sha256]
        if self.way is Way.REORDERED and len(files) > 1 and entry in files[:2]:
            entry = files[1] if entry == files[0] else files[0]
        with self.workspace.open(entry) as stream:
            return io.BytesIO(_damaged(stream.read(), self.way))


@define
class _DamagingIntake:
    """An intake to which content arrives otherwise than it was sent."""

    intake: Intake
    way: Way
    wanted: list[Entry]
    held: list[tuple[Entry, bytes]] = field(factory=list)

    def missing(self, manifest: Manifest) -> list[Entry]:
        return self.intake.missing(manifest)

    def receive(self, entry: Entry, stream: BinaryIO) -> None:
        data = _damaged(stream.read(), self.way)
        if self.way is not Way.REORDERED or len(self.wanted) == 1:
            self.intake.receive(entry, io.BytesIO(data))
            return
        self.held.append((entry, data))
        if len(self.held) == len(self.wanted):
            contents = [data for _, data in self.held]
            for (each, _), other in zip(self.held, contents[1:] + contents[:1], strict=True):
                self.intake.receive(each, io.BytesIO(other))

    def output(
        self, stream: Stream, head: Iterable[bytes], tail: Iterable[bytes], total: int
    ) -> None:
        data = b"".join(head)
        if self.way is Way.LEFT_OUT and stream == "stdout" and not self.wanted:
            return
        if not self.wanted and self.way is Way.TRUNCATED:  # nothing else could be
            data = _damaged(data, self.way)
        self.intake.output(stream, [data], tail, total)
