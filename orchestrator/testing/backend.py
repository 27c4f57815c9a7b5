"""The twin of a backend: sandboxes, guest and program that are a few values."""

from __future__ import annotations

import hashlib
import io
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from attrs import define, field, frozen

from ..core.errors import (
    PermitError,
    SandboxGoneError,
)
from ..core.evidence import Entry, EntryKind, Manifest
from ..core.facts import SandboxRef
from ..guest import lost
from ..ports import Ending, Order, Record
from ..workspace import INLINE_MTIME_NS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..core.machine import CleanupPermit
    from ..core.spec import EvalSpec
    from ..ports import Intake, Slot, Workspace
    from .simulate import World


LATENCY_S: Final = 0.01
"""Seconds that an undisturbed call of the simulated backend takes."""


@frozen(kw_only=True)
class Program:
    """What a simulated check does.

    Attributes:
        needs: content that it looks for when it starts; without it, it exits with 66 at once.
        duration_s: seconds that it runs, if it is let.
        ending: how it ends then.
        code: with which exit code or signal.
        writes: content that it has written by its end, by path; None deletes.
        halfway: content that it has written when it is half done, and changes or removes later.
        stdout: what it has printed by its end.
        ignores_term: it runs on after SIGTERM.
    """

    needs: Mapping[str, bytes] = field(factory=dict)
    duration_s: float = 1.0
    ending: Ending = Ending.EXITED
    code: int = 0
    writes: Mapping[str, bytes | None] = field(factory=dict)
    halfway: Mapping[str, bytes] = field(factory=dict)
    stdout: bytes = b""
    ignores_term: bool = False


@define(eq=False)
class _Command:
    """A command that the guest runs, or ran: its claim, its process, its record."""

    order: Order
    program: Program
    ended: Record | None = None
    running: bool = False
    started_at: float = 0.0


@define(eq=False)
class SimulatedSandbox:
    """A sandbox that is a few values. See `ports.Sandbox`."""

    ref: SandboxRef
    world: World = field(repr=False)
    tree: dict[str, bytes] = field(factory=dict)
    commands: dict[str, _Command] = field(factory=dict)
    output: dict[str, bytes] = field(factory=dict)
    clock_jump_s: float = 0.0

    @property
    def run_id(self) -> str:
        """The run that it is named after."""
        return self.ref.sandbox_id

    @property
    def still(self) -> bool:
        """Whether nothing runs in it."""
        return not any(command.running for command in self.commands.values())

    def _verify(self) -> None:
        if self.world.sandboxes.get(self.run_id) is not self:
            raise SandboxGoneError(f"run {self.run_id}: its sandbox is gone, or another one")

    def upload(self, workspace: Workspace) -> bool:
        """Take the workspace."""
        self._verify()
        self.world.clock.sleep(LATENCY_S)
        if self.commands:
            return False
        self.tree = {entry.path: workspace.open(entry).read() for entry in workspace.manifest()}
        return True

    def manifest(self) -> Manifest:
        """Account for the workspace."""
        self._verify()
        self.world.clock.sleep(LATENCY_S)
        return _manifest(self.tree)

    def execute(self, order: Order) -> Record:
        """Run a command, or join the one that was started before."""
        self._verify()
        clock = self.world.clock
        if order.slot not in self.commands:
            self._start(order, clock.time + order.latest_start_s)
        command = self.commands[order.slot]
        clock.until(lambda: command.ended is not None or self._dead())
        self._verify()
        return command.ended or lost("its supervisor is gone", still=True)

    def _dead(self) -> bool:
        return self.world.sandboxes.get(self.run_id) is not self

    def _start(self, order: Order, latest: float) -> None:
        """Claim the order, and start its program unless it is too late."""
        program = self.world.program(self.run_id, order.slot)
        if any(self.tree.get(path) != data for path, data in program.needs.items()):
            program = Program(duration_s=0.0, code=66)
        command = self.commands[order.slot] = _Command(order, program)
        if self.world.clock.time + self.clock_jump_s > latest:
            command.ended = Record(ending=Ending.NOT_STARTED, message="dispatched too late")
            return
        self.world.tell(f"the {order.slot} of {self.run_id} starts")
        self.world.starts.append((self.run_id, order.slot, self.ref.identity))
        command.running = True
        command.started_at = self.world.clock.time
        start, length = self.world.clock.time, program.duration_s
        self.world.clock.at(start + length / 2, lambda: self._write(command, program.halfway))
        if length <= order.deadline_s:
            self.world.clock.at(start + length, lambda: self._end(command))
        else:
            late_s = order.deadline_s + (order.grace_s if program.ignores_term else 0.0)
            self.world.clock.at(start + late_s, lambda: self._expire(command))

    def _write(self, command: _Command, content: Mapping[str, bytes | None]) -> None:
        if command.running:
            for path, data in content.items():
                if data is None:
                    self.tree.pop(path, None)
                else:
                    self.tree[path] = data

    def _end(self, command: _Command) -> None:
        if command.running:
            program = command.program
            self._write(command, program.writes)
            self.output[command.order.slot] = program.stdout
            self._stop(command, program.ending, program.code)

    def _expire(self, command: _Command) -> None:
        if command.running:
            self._stop(command, Ending.DEADLINE, None)

    def _stop(self, command: _Command, ending: Ending, code: int | None) -> None:
        command.running = False
        elapsed_s = self.world.clock.time - command.started_at
        command.ended = Record(ending=ending, code=code, elapsed_s=elapsed_s)
        self.world.ends[self.run_id, command.order.slot] = (command.ended, _manifest(self.tree))
        self.world.tell(f"the {command.order.slot} of {self.run_id} ends: {ending} {code}")

    def settle(self, order: Order) -> Record:
        """Say how a command ended; stop it if it runs; see that it never starts."""
        self._verify()
        self.world.clock.sleep(LATENCY_S)
        command = self.commands.get(order.slot)
        if command is None:
            command = self.commands[order.slot] = _Command(order, Program())
            command.ended = Record(ending=Ending.NOT_STARTED, message="settled before it started")
        elif command.running:
            self._stop(command, Ending.STOPPED, None)
        return command.ended or lost("its supervisor is gone", still=True)

    def fetch(self, entries: Iterable[Entry], slot: Slot, intake: Intake) -> None:
        """Deliver content and output."""
        self._verify()
        self.world.clock.sleep(LATENCY_S)
        self.world.fetched(self)
        for entry in entries:
            intake.receive(entry, io.BytesIO(self.tree[entry.path]))
        if slot in self.commands:
            output = self.output.get(slot, b"")
            intake.output("stdout", [output], [], len(output))
            intake.output("stderr", [], [], 0)

    def destroy(self, permit: CleanupPermit) -> None:
        """Be gone."""
        if permit.run_id != self.run_id or permit.sandbox_id not in {None, self.run_id}:
            raise PermitError(f"sandbox {self.run_id}: the permit is for {permit.sandbox_id}")
        self.world.clock.sleep(LATENCY_S)
        self.world.destroyed(self)

    def tamper(self, act: str) -> None:
        """Vanish, be replaced by a blank one, or have the clock jump."""
        self.world.tell(f"the sandbox of {self.run_id} is made to {act}")
        if act == "jump":
            self.clock_jump_s += 86_400.0
            return
        for command in self.commands.values():
            command.running = False
        if self.world.sandboxes.pop(self.run_id, None) is not None and act == "replace":
            ref = SandboxRef(self.run_id, f"{self.ref.identity}, replaced")
            self.world.sandboxes[self.run_id] = SimulatedSandbox(ref, self.world)


@lru_cache(maxsize=4096)
def _entry(path: str, data: bytes) -> Entry:
    mtime = INLINE_MTIME_NS
    return Entry(path, EntryKind.FILE, 0o644, mtime, len(data), hashlib.sha256(data).hexdigest())


def _manifest(tree: Mapping[str, bytes]) -> Manifest:
    return Manifest.of(_entry(path, data) for path, data in tree.items())


@define(eq=False)
class SimulatedBackend:
    """Makes sandboxes that are a few values. See `ports.Backend`."""

    world: World = field(repr=False)
    name: str = "simulated"
    isolation: str = "everything"

    def refuse(self, spec: EvalSpec) -> None:
        """Refuse nothing."""

    def create(self, run_id: str, spec: EvalSpec) -> SimulatedSandbox:
        """Create a sandbox, or find it."""
        del spec
        if self.world.clock.late_from not in {None, self.world.lives}:
            raise SandboxGoneError("who asked for it is gone: beyond the fault contract")
        self.world.clock.sleep(LATENCY_S)
        if run_id not in self.world.sandboxes:
            self.world.created.append(run_id)
            ref = SandboxRef(run_id, f"sandbox {len(self.world.created)}")
            self.world.sandboxes[run_id] = SimulatedSandbox(ref, self.world)
        return self.world.sandboxes[run_id]

    def open(self, run_id: str) -> SimulatedSandbox | None:
        """Find a sandbox."""
        return self.world.sandboxes.get(run_id)
