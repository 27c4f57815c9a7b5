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

from contextlib import contextmanager
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from ..core.clocks import Bounds
from ..core.errors import (
    StorageError,
)
from ..core.facts import Downloaded, DownloadFailed, Fact
from ..core.spec import EvalSpec
from ..core.states import State
from ..core.verdict import Verdict
from ..runner import Progress, Runner
from .backend import Program, SimulatedBackend, SimulatedSandbox
from .clock import Crash, SimulatedClock
from .faults import FaultyBackend, Injection, Way
from .journal import SimulatedJournal
from .vault import SimulatedVault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ..core.evidence import Manifest
    from ..core.machine import Run, Step
    from ..ports import Record


CLEANED_EARLY: Final = "P1 cleanup follows a recorded download attempt"
MOVING: Final = "P3 nothing is downloaded while the check may run"
LIVES: Final = 6
"""Runners that a world has at most, more than there are faults that can end one."""
AFTERLIFE_S: Final = 100.0
"""Seconds that a world goes on after its last runner, for what comes late."""
BOUNDS: Final = Bounds(upload_s=30.0, settle_s=10.0, download_s=30.0, destroy_s=10.0, score_s=10.0)


@frozen(kw_only=True, slots=False)
class Scenario:
    """What is run in a world.

    Attributes:
        name: of the scenario.
        program: what the check does.
        setup: what setup does, None for none.
        spec: changes to the spec, by field.
        expected: the verdict that an undisturbed run comes to.
        faults: in one story at most; the ends of a few scenarios differ only after the last one.
    """

    name: str
    program: Program
    setup: Program | None = None
    spec: Mapping[str, Any] = field(factory=dict)
    expected: Verdict = Verdict.PASSED
    faults: int = 3

    @cached_property
    def eval_spec(self) -> EvalSpec:
        """The spec."""
        return EvalSpec(
            **{
                "name": self.name,
                "check": "check",
                "setup": "setup" if self.setup else None,
                "files": FILES,
                "deadline_s": 10.0,
                "grace_s": 2.0,
                "backstop_s": 20.0,
                **self.spec,
            }
        )


FILES: Final = {"input": b"a workspace with an input", "other": b"and another"}
"""The workspace of every scenario."""


class World:
    """Everything that exists: a clock, a backend, a journal, a vault, and whoever drives the runs.

    Attributes:
        log: the story so far, a line an event.
        problems: properties that were broken, as (property, what happened).
        points: calls and writes that were made, as (verb, which call of it): where faults can be.
        states: every state of the world that was seen when a fact had been recorded.
        edges: edges of the lifecycle that were walked.
        driven: runs that the runner drives, by id.
        sandboxes: those that exist, by run.
        created: runs for which a sandbox was created, in order.
        starts: programs that were started, as (run, slot, identity of the sandbox).
        ends: how they really ended, and what their tree was then.
        lives: runners that there have been.
    """

    def __init__(
        self,
        plan: Iterable[Injection] = (),
        choose: Callable[[str, int], Way | None] = lambda _verb, _call: None,
    ) -> None:
        """Make a world in which nothing has happened.

        Args:
            plan: faults that will happen.
            choose: asked for the way of every call that the plan does not name.
        """
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
        self.clock.life = lambda: self.lives
        self.backend = FaultyBackend(
            SimulatedBackend(self),
            tuple(plan),
            waiting=self.clock,
            choose=choose,
            observe=self._observe_call,
        )
        self.journal = SimulatedJournal(self)
        self.vault = SimulatedVault(self)
        self._numbers = count(1)
        self._states: dict[str, State] = {}
        self._scenarios: dict[str, Scenario] = {}
        self.driven: dict[str, Iterator[Step]] = {}
        self.runner = self._new_runner()

    # --- driving ----------------------------------------------------------------------------------

    def _new_runner(self) -> Runner:
        """Make a new runner, in place of the last one, which is dead."""
        self.lives += 1
        self.driven = {}
        return Runner(
            self.backend,
            "simulated",
            bounds=BOUNDS,
            observer=self._observe_progress,
            clock=self.clock,
            journal=self.journal,
            vault=self.vault,
            new_run_id=self._new_run_id,
        )

    def _new_run_id(self) -> str:
        run_id = f"run-{next(self._numbers)}"
        self._scenarios[run_id] = self._beginning
        return run_id

    def scenario(self, run_id: str) -> Scenario:
        """Give what a run runs."""
        return self._scenarios[run_id]

    def run_here(self, scenario: Scenario) -> None:
        """Have runs that are begun from now on run a scenario, whatever their spec says."""
        self._beginning = scenario

    def begin(self, scenario: Scenario) -> None:
        """Begin a run; it goes on by `step`."""
        self.run_here(scenario)
        with self._survived():
            record, step = self.runner.begin(scenario.eval_spec)
            self.driven[record.run_id] = self.runner.steps(record, step)

    def step(self, run_id: str) -> None:
        """Have a driven run do its next command; one that is finished is driven no more."""
        with self._survived():
            if next(self.driven[run_id], None) is None:
                del self.driven[run_id]

    def crash(self) -> None:
        """Kill the runner; another one is there at once, and drives nothing yet."""
        self.tell("the runner is killed")
        self.runner = self._new_runner()

    def resume(self) -> None:
        """Have the runner take over what it does not drive and is not finished."""
        for run_id in self.runner.unfinished():
            with self._survived():
                self.journal.take_over(run_id)
                record, step = self.journal.record(run_id), self.journal.step(run_id)
                self.driven[run_id] = self.runner.steps(record, step)

    def sweep(self) -> None:
        """Have the runner destroy what finished runs left, also what they kept on purpose."""
        with self._survived():
            self.runner.sweep(kept=True)

    @contextmanager
    def _survived(self) -> Iterator[None]:
        """Let the world outlive its runner."""
        try:
            yield
        except Crash:
            self.crash()
        except StorageError as error:
            self.tell(f"the runner stops: {error}")
            self.runner = self._new_runner()

    def play(self) -> None:
        """Let every run that was begun come to its end, whatever becomes of the runner."""
        for _ in range(LIVES):
            self.resume()
            while self.driven:
                self.step(next(iter(self.driven)))
            if not self.runner.unfinished():
                break
        self.clock.advance(self.clock.time + AFTERLIFE_S)

    # --- what the simulated parts tell ------------------------------------------------------------

    def tell(self, line: str) -> None:
        """Add a line to the story."""
        self.log.append(f"{self.clock.time:9.2f} s  {line}")

    def disturbance(self, verb: str) -> Way | None:
        """Give the way in which a write goes wrong, None if it does not."""
        return self.backend.next_way(verb)

    def program(self, run_id: str, slot: str) -> Program:
        """Give what a command does."""
        scenario = self.scenario(run_id)
        return scenario.setup if slot == "setup" and scenario.setup else scenario.program

    def fetched(self, sandbox: SimulatedSandbox) -> None:
        """Take note of a download, which must not be of a moving tree that may be scored."""
        state = self.journal.step(sandbox.run_id).run.state
        if state is State.CHECKED and not sandbox.still:
            self.problem(MOVING, sandbox.run_id)

    def destroyed(self, sandbox: SimulatedSandbox) -> None:
        """Destroy a sandbox, whose download must have been attempted and recorded."""
        facts = self.journal.facts[sandbox.run_id]
        if not any(isinstance(fact, Downloaded | DownloadFailed) for fact in facts):
            self.problem(CLEANED_EARLY, sandbox.run_id)
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
        run_id = progress.run.run_id
        if progress.fact is not None:
            self.edges.append((self._states[run_id], type(progress.fact)))
        self._states[run_id] = progress.run.state
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
        return (self.scenario(run.run_id).name, run.state, faults, sandbox is not None, commands)
