"""A whole world in memory: the real runner and core, on a clock that is only a number.

Nothing is mocked of what is under test. The runner, the machine, scoring, the vault's proofs and
the evidence are the library's own; what is simulated is what they touch: a backend whose guest,
program and storage are a few values, a journal and a vault in dictionaries, and a clock on which
waiting is an addition. There are no threads and no randomness, so a story is a function of its
scenario and its faults, and thousands can be told in a second.

The world keeps what a run cannot know: what the program really did, when, and when the sandbox was
really destroyed. The properties of `explore.py` compare the one with the other.
"""

from __future__ import annotations

import hashlib
import heapq
import io
from contextlib import suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from attrs import define, field, frozen

from ..clock import AbruptEndError, BoundExceededError, CancelledError
from ..core.clocks import Bounds
from ..core.errors import (
    EvidenceIncompleteError,
    JournalConflictError,
    JournalError,
    PermitError,
    SandboxGoneError,
    StorageError,
    VaultError,
)
from ..core.evidence import Changes, Entry, EntryKind, Manifest, Receipt
from ..core.facts import Downloaded, DownloadFailed, Fact, SandboxRef
from ..core.machine import Run, Step, advance, begin
from ..core.spec import EvalSpec
from ..core.states import State
from ..core.verdict import Verdict
from ..guest import lost
from ..ports import Ending, Order, Record, RunRecord
from ..runner import Progress, Runner
from ..vault import Evidence, Vault, VaultIntake
from ..workspace import INLINE_MTIME_NS
from .faults import FaultyBackend, Injection, Way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..clock import Cancellation
    from ..core.machine import CleanupPermit, Command
    from ..core.verdict import Outcome
    from ..ports import Intake, Slot, Workspace

LATENCY_S: Final = 0.01
"""Seconds that an undisturbed call of the simulated backend takes."""


@frozen(kw_only=True)
class Program:
    """What a simulated check does.

    Attributes:
        duration_s: seconds that it runs, if it is let.
        ending: how it ends then.
        code: with which exit code or signal.
        writes: content that it has written by its end, by path; None deletes.
        halfway: content that it has written when it is half done, and changes or removes later.
        stdout: what it has printed by its end.
        ignores_term: it runs on after SIGTERM.
    """

    duration_s: float = 1.0
    ending: Ending = Ending.EXITED
    code: int = 0
    writes: Mapping[str, bytes | None] = field(factory=dict)
    halfway: Mapping[str, bytes] = field(factory=dict)
    stdout: bytes = b""
    ignores_term: bool = False


class Crash(BaseException):
    """The runner is killed here. Not an `Exception`: nothing of it may catch it."""


class _Hang(BaseException):
    """A call does not come back while somebody waits for it."""


class SimulatedClock:
    """A clock that is a number, and the events that happen as it grows. See `ports.Clock`."""

    def __init__(self) -> None:
        """Begin at 0, with nothing to come."""
        self.time = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._bounds: list[float] = []

    def now(self) -> float:
        """Give the time."""
        return self.time

    def at(self, moment: float, event: Callable[[], object]) -> None:
        """Have something happen at a time."""
        heapq.heappush(self._events, (moment, next(self._order), event))

    def advance(self, moment: float) -> None:
        """Let time pass up to a moment, and happen what happens until then."""
        while self._events and self._events[0][0] <= moment:
            at, _, event = heapq.heappop(self._events)
            self.time = max(self.time, at)
            event()
        self.time = max(self.time, moment)

    def sleep(self, seconds: float) -> None:
        """Let time pass inside a call; the caller stops waiting at its bound."""
        moment = self.time + seconds
        if self._bounds and moment > min(self._bounds):
            raise _Hang
        self.advance(moment)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait inside a call until something is so, or the caller stops waiting."""
        while not condition():
            if not self._events or (self._bounds and self._events[0][0] > min(self._bounds)):
                raise _Hang
            self.advance(self._events[0][0])

    def call(
        self,
        function: Callable[[], Any],
        bound_s: float,
        cancellation: Cancellation | None = None,
    ) -> Any:
        """Call a function; what would not come back in time ends at the bound."""
        if cancellation is not None and cancellation.cancelled:
            raise CancelledError("the client was told to stop waiting")
        bound = self.time + bound_s
        self._bounds.append(bound)
        try:
            return function()
        except _Hang:
            self.advance(bound)
            raise BoundExceededError(f"no answer within {bound_s:g} s") from None
        except (Exception, Crash):
            raise
        except BaseException as error:
            raise AbruptEndError(f"{type(error).__name__}: {error}") from error
        finally:
            self._bounds.remove(bound)

    # How injected faults let time pass: `faults.Waiting`.

    def hang(self) -> None:
        """Never come back."""
        raise _Hang

    def later(self, act: Callable[[], object]) -> None:
        """Act a second after the client has given up."""

        def event() -> None:
            with suppress(Exception, _Hang):  # nobody waits for it any more
                act()

        self.at((min(self._bounds) if self._bounds else self.time) + 1.0, event)
        raise _Hang

    def pause(self) -> None:
        """Take half of what is left until the bound."""
        left = min(self._bounds) - self.time if self._bounds else 1.0
        self.sleep(min(left / 2, 5.0))


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
        program = self.world.program(order.slot)
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
        self.world.clock.sleep(LATENCY_S)
        if run_id not in self.world.sandboxes:
            self.world.created.append(run_id)
            ref = SandboxRef(run_id, f"sandbox {len(self.world.created)}")
            self.world.sandboxes[run_id] = SimulatedSandbox(ref, self.world)
        return self.world.sandboxes[run_id]

    def open(self, run_id: str) -> SimulatedSandbox | None:
        """Find a sandbox."""
        return self.world.sandboxes.get(run_id)


class SimulatedJournal:
    """A journal in a dictionary, under which the runner can be killed. See `ports.Journal`."""

    def __init__(self, world: World) -> None:
        """Begin empty."""
        self._world = world
        self._records: dict[str, RunRecord] = {}
        self._begun: dict[str, Step] = {}
        self._folds: dict[str, tuple[int, Step]] = {}
        self.facts: dict[str, list[Fact]] = {}
        self.owners: dict[str, int] = {}
        self.writes = 0

    def _write(self, what: str, write: Callable[[], None]) -> None:
        way = self._world.disturbance("journal")
        if way is Way.CRASH_BEFORE:
            raise Crash
        if way is Way.DISK_FULL:
            raise JournalError("journal: database or disk is full")
        write()
        self.writes += 1
        self._world.tell(f"journal: {what}")
        if way is Way.CRASH_AFTER:
            raise Crash

    def begin(
        self,
        run_id: str,
        spec: EvalSpec,
        *,
        backend: str,
        isolation: str,
        retry_of: str | None = None,
    ) -> tuple[RunRecord, Step]:
        """Begin a run."""
        record = RunRecord(
            run_id=run_id,
            spec=spec,
            backend=backend,
            isolation=isolation,
            nonce="nonce",
            retry_of=retry_of,
            created_at=0.0,
        )
        step = begin(run_id, spec.retain)

        def write() -> None:
            self._records[run_id] = record
            self._begun[run_id] = step
            self.facts[run_id] = []
            self.owners[run_id] = self._world.lives

        self._write(f"{run_id} begins, intent Upload", write)
        return record, step

    def append(self, run_id: str, fact: Fact, command: Command | None) -> None:
        """Record a fact and the next intent."""
        if self.owners[run_id] != self._world.lives:
            raise JournalConflictError(f"another runner drives {run_id}")
        intent = f", intent {type(command).__name__}" if command else ""
        fault = getattr(fact, "fault", None)
        why = f" ({fault.phase} {fault.kind}: {fault.message})" if fault else ""
        self._write(
            f"{run_id} {type(fact).__name__}{why}{intent}",
            lambda: self.facts[run_id].append(fact),
        )

    def take_over(self, run_id: str) -> None:
        """Become the owner."""

        def write() -> None:
            self.owners[run_id] = self._world.lives

        self._write(f"{run_id} is taken over", write)

    def record(self, run_id: str) -> RunRecord:
        """Give a run as it was begun."""
        return self._records[run_id]

    def step(self, run_id: str) -> Step:
        """Fold the facts, from where they were folded before."""
        folded, step = self._folds.get(run_id) or (0, self._begun[run_id])
        for fact in self.facts[run_id][folded:]:
            step = advance(step.run, fact)
        self._folds[run_id] = (len(self.facts[run_id]), step)
        return step

    def run_ids(self) -> list[str]:
        """Give every run."""
        return list(self._records)

    def driven(self, run_id: str) -> bool:
        """Tell whether the runner that lives drives it."""
        return self.owners[run_id] == self._world.lives

    def close(self) -> None:
        """Do nothing."""


class SimulatedVault(Vault):
    """The vault with its proofs, over dictionaries in place of directories."""

    def __init__(self, world: World) -> None:
        """Begin empty."""
        self.path = Path("simulated")
        self._world = world
        self._contents: dict[str, bytes] = {}
        self._manifests: dict[str, Manifest] = {}
        self.records: dict[str, dict[str, Evidence]] = {}

    def _check_disk(self) -> None:
        if self._world.disturbance("vault") is Way.DISK_FULL:
            raise VaultError("vault: No space left on device")

    def has(self, digest: str) -> bool:
        """Tell whether content is here."""
        return digest in self._contents

    def content(self, digest: str) -> bytes:
        """Give content."""
        if digest not in self._contents:
            raise EvidenceIncompleteError(f"{digest} was not kept")
        return self._contents[digest]

    def keep(self, stream: BinaryIO, entry: Entry, *, share: bool) -> tuple[int, str]:
        """Keep content."""
        del entry, share
        self._check_disk()
        data = stream.read()
        digest = hashlib.sha256(data).hexdigest()
        self._contents[digest] = data
        return len(data), digest

    def keep_manifest(self, manifest: Manifest) -> str:
        """Keep a manifest."""
        digest = manifest.digest
        self._manifests[digest] = manifest
        return digest

    def manifest(self, digest: str) -> Manifest:
        """Give a manifest."""
        return self._manifests[digest]

    def _record(self, intake: VaultIntake, manifest: Manifest, *, sealed: bool) -> Receipt:
        self._check_disk()
        changes = Changes.between(intake.baseline, manifest)
        record = f"record of {intake.run_id}, sealed={sealed}"
        self.records.setdefault(intake.run_id, {})[record] = Evidence(
            run_id=intake.run_id,
            sealed=sealed,
            outcome=None,
            manifest=manifest,
            baseline=intake.baseline,
            path=self.path,
            outputs=dict(intake.outputs),
            vault=self,
        )
        return Receipt.for_tree(
            intake.run_id, intake.baseline, manifest, changes, sealed=sealed, record=record
        )

    def evidence(self, receipt: Receipt, outcome: Outcome | None) -> Evidence:
        """Give evidence."""
        kept = self.records[receipt.run_id][receipt.record]
        return Evidence(
            run_id=kept.run_id,
            sealed=kept.sealed,
            outcome=outcome,
            manifest=kept.manifest,
            baseline=kept.baseline,
            path=kept.path,
            outputs=dict(kept._outputs),  # noqa: SLF001 - the twin of what reads a record back
            vault=self,
        )


LIVES: Final = 6
"""Runners that a world has at most, more than there are faults that can end one."""
AFTERLIFE_S: Final = 100.0
"""Seconds that a world goes on after its last runner, for what comes late."""
BOUNDS: Final = Bounds(upload_s=30.0, settle_s=10.0, download_s=30.0, destroy_s=10.0, score_s=10.0)


@frozen(kw_only=True)
class Scenario:
    """What is run in a world.

    Attributes:
        name: of the scenario.
        program: what the check does.
        setup: what setup does, None for none.
        spec: changes to the spec, by field.
        expected: the verdict that an undisturbed run comes to.
    """

    name: str
    program: Program
    setup: Program | None = None
    spec: Mapping[str, Any] = field(factory=dict)
    expected: Verdict = Verdict.PASSED

    def eval_spec(self) -> EvalSpec:
        """Give the spec."""
        return EvalSpec(
            **{
                "name": self.name,
                "check": "check",
                "setup": "setup" if self.setup else None,
                "files": _FILES,
                "deadline_s": 10.0,
                "grace_s": 2.0,
                "backstop_s": 20.0,
                **self.spec,
            }
        )


_FILES: Final = {"input": b"a workspace with an input", "other": b"and another"}


class World:
    """Everything that exists: a clock, a backend, a journal, a vault, and whoever drives the runs.

    Attributes:
        log: the story so far, a line an event.
        problems: properties that were broken, as (property, what happened).
        points: calls and writes that were made, as (verb, which call of it): where faults can be.
        states: every state of the world that was seen when a fact had been recorded.
        edges: edges of the lifecycle that were walked.
        sandboxes: those that exist, by run.
        created: runs for which a sandbox was created, in order.
        starts: programs that were started, as (run, slot, identity of the sandbox).
        ends: how they really ended, and what their tree was then.
        lives: runners that there have been.
    """

    def __init__(self, scenario: Scenario, plan: Iterable[Injection] = ()) -> None:
        """Make a world in which a scenario is about to be run, under a plan of faults."""
        self.scenario = scenario
        self.log: list[str] = []
        self.problems: list[tuple[str, str]] = []
        self.points: list[tuple[str, int]] = []
        self.states: set[tuple[object, ...]] = set()
        self.edges: list[tuple[State, type[Fact]]] = []
        self.sandboxes: dict[str, SimulatedSandbox] = {}
        self.created: list[str] = []
        self.starts: list[tuple[str, str, str]] = []
        self.ends: dict[tuple[str, str], tuple[Record, Manifest]] = {}
        self.lives = 0
        self.clock = SimulatedClock()
        self.backend = FaultyBackend(
            SimulatedBackend(self), tuple(plan), waiting=self.clock, observe=self._observe_call
        )
        self.journal = SimulatedJournal(self)
        self.vault = SimulatedVault(self)
        self._numbers = count(1)
        self._before = State.NEW

    # --- driving ----------------------------------------------------------------------------------

    def runner(self) -> Runner:
        """Make a new runner, in place of the last one, which is dead."""
        self.lives += 1
        return Runner(
            self.backend,
            "simulated",
            bounds=BOUNDS,
            observer=self._observe_progress,
            clock=self.clock,
            journal=self.journal,
            vault=self.vault,
            new_run_id=lambda: f"run-{next(self._numbers)}",
        )

    def play(self) -> None:
        """Run the scenario to its end, with a new runner for each one that is killed or stopped."""
        begun = False
        for _ in range(LIVES):
            runner = self.runner()
            try:
                if not begun and not self.journal.run_ids():
                    record, step = runner.begin(self.scenario.eval_spec())
                    self._drive(runner, record, step)
                begun = True
                for run_id in runner.unfinished():
                    runner.journal.take_over(run_id)
                    step = runner.journal.step(run_id)
                    self._drive(runner, runner.journal.record(run_id), step)
            except Crash:
                self.tell("the runner is killed")
            except StorageError as error:
                self.tell(f"the runner stops: {error}")
            else:
                break
        self.clock.advance(self.clock.time + AFTERLIFE_S)

    def _drive(self, runner: Runner, record: RunRecord, step: Step) -> None:
        for _ in runner.steps(record, step):
            pass

    # --- what the simulated parts tell ------------------------------------------------------------

    def tell(self, line: str) -> None:
        """Add a line to the story."""
        self.log.append(f"{self.clock.time:9.2f} s  {line}")

    def disturbance(self, verb: str) -> Way | None:
        """Give the way in which a write goes wrong, None if it does not."""
        return self.backend.next_way(verb)

    def program(self, slot: str) -> Program:
        """Give what a command does."""
        if slot == "setup" and self.scenario.setup is not None:
            return self.scenario.setup
        return self.scenario.program

    def fetched(self, sandbox: SimulatedSandbox) -> None:
        """Take note of a download, which must not be of a moving tree that may be scored."""
        state = self.journal.step(sandbox.run_id).run.state
        if state is State.CHECKED and not sandbox.still:
            self.problem("P3 nothing is downloaded while the check may run", sandbox.run_id)

    def destroyed(self, sandbox: SimulatedSandbox) -> None:
        """Destroy a sandbox, whose download must have been attempted and recorded."""
        facts = self.journal.facts[sandbox.run_id]
        if not any(isinstance(fact, Downloaded | DownloadFailed) for fact in facts):
            self.problem("P1 cleanup follows a recorded download attempt", sandbox.run_id)
        for command in sandbox.commands.values():
            command.running = False
        self.sandboxes.pop(sandbox.run_id, None)
        self.tell(f"the sandbox of {sandbox.run_id} is destroyed")

    def problem(self, broken: str, what: str) -> None:
        """Take note of a property that is broken."""
        self.problems.append((broken, what))
        self.tell(f"BROKEN: {broken}: {what}")

    def _observe_call(self, verb: str, call: int, way: Way | None) -> None:
        self.points.append((verb, call))
        if way is not None:
            self.tell(f"fault: {Injection(verb, way, call)}")

    def _observe_progress(self, progress: Progress) -> None:
        if progress.fact is not None:
            self.edges.append((self._before, type(progress.fact)))
        self._before = progress.run.state
        self.states.add(self._fingerprint(progress.run))

    def _fingerprint(self, run: Run) -> tuple[object, ...]:
        sandbox = self.sandboxes.get(run.run_id)
        commands: tuple[object, ...] = ()
        if sandbox is not None:
            commands = tuple(
                (slot, command.running, command.ended.ending if command.ended else None)
                for slot, command in sorted(sandbox.commands.items())
            )
        faults = tuple((fault.phase, fault.kind) for fault in run.faults)
        return (self.scenario.name, run.state, faults, sandbox is not None, commands)
