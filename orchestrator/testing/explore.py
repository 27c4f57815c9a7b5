"""Every story of the real runner under every fault, and under every pair of them.

A story is a scenario and a set of faults. The explorer tells the one without faults, takes note of
every call and write that was made in it, and tells a story for each way of the fault contract at
each of them; then, for pairs, the same again after the first fault. Fewer faults come first and
earlier ones before later ones, so the first story that breaks a property is a shortest one. Nothing
is sampled: the counts of stories and of states of the world are numbers that a test can pin, and a
changed number is a changed protocol.

Properties that must `always` hold are checked in every story; those that must hold `sometimes`
guard against a search that finds nothing because it searches nothing.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Final

from attrs import define, field, frozen

from ..core.evidence import Manifest
from ..core.spec import BACKSTOP_SLACK_S
from ..core.states import State
from ..core.table import edges, violations
from ..core.verdict import OutcomeKind, Verdict
from ..ports import Ending
from .backend import Program
from .clock import Hang
from .faults import CONTRACT, Injection, Way
from .simulate import BOUNDS, FILES, LIVES, Scenario, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ..core.facts import Fact
    from ..core.machine import Run

    Property = Callable[[World, Run], str]


def _raises(_: object) -> bool:
    raise LookupError("a broken expectation")


SCENARIOS: Final = (
    Scenario(
        name="passes",
        program=Program(needs=FILES, writes={"output": b"done"}, stdout=b"done"),
    ),
    Scenario(
        name="fails",
        faults=1,
        program=Program(
            needs=FILES, code=124, writes={"input": b"changed", "other": None, "junk": b"left"}
        ),
        expected=Verdict.FAILED,
    ),
    Scenario(
        name="overruns",
        program=Program(
            needs=FILES, duration_s=60.0, halfway={"output": b"half"}, ignores_term=True
        ),
        spec={"expect": {"timed_out": True, "files": [{"path": "output", "exists": False}]}},
    ),
    Scenario(
        name="sets up",
        setup=Program(needs=FILES, writes={"prepared": b"by setup"}),
        program=Program(needs={**FILES, "prepared": b"by setup"}, writes={"output": b"done"}),
        spec={
            "retain": "unresolved",
            "expect": {
                "exit_code": 0,
                "files": [
                    {"path": "prepared", "unchanged": True},
                    {"path": "output", "equals": "done"},
                    {"path": "junk", "exists": False},
                ],
            },
        },
    ),
    Scenario(
        name="cannot be scored",
        faults=1,
        program=Program(writes={"output": b"done"}),
        spec={"expect": {"exit_code": 0, "broken": _raises}},
        expected=Verdict.UNRESOLVED,
    ),
)
"""One that passes, one with a timeout's code, one that is late, one set up, one unscorable."""

_OUTCOMES: Final = {
    Ending.EXITED: OutcomeKind.EXITED,
    Ending.SIGNALLED: OutcomeKind.SIGNALLED,
    Ending.DEADLINE: OutcomeKind.DEADLINE_EXCEEDED,
}


@frozen
class CounterExample:
    """A story that breaks a property.

    Attributes:
        broken: the property.
        what: what happened.
        scenario: what was run.
        plan: the faults.
        log: the story, a line an event.
    """

    broken: str
    what: str
    scenario: str
    plan: tuple[Injection, ...]
    log: tuple[str, ...]

    @property
    def replay(self) -> str:
        """The one line that tells it again."""
        if self.scenario.startswith("seed "):
            return f"orchestrator verify --{self.scenario}"
        story = ",".join([self.scenario, *map(str, self.plan)])
        return f"orchestrator verify --story '{story}'"

    def __str__(self) -> str:
        """Tell it as a numbered sequence."""
        faults = ", ".join(map(str, self.plan)) or "no fault"
        lines = [f"{self.broken}: {self.what}", f"scenario {self.scenario!r}, {faults}"]
        lines += [f"{number:3}. {line}" for number, line in enumerate(self.log, 1)]
        return "\n".join([*lines, f"again: {self.replay}"])

    def mermaid(self) -> str:
        """Tell it as a Mermaid sequence diagram."""
        lines = ["sequenceDiagram", "    participant R as runner", "    participant J as journal"]
        lines.append("    participant S as sandbox")
        for line in self.log:
            text = line.strip().replace(";", ",").replace("#", "no. ")
            if "journal:" in line:
                lines.append(f"    R->>J: {text}")
            elif "sandbox" in line or " of run-" in line:
                lines.append(f"    R->>S: {text}")
            else:
                lines.append(f"    Note over R,S: {text}")
        return "\n".join([*lines, ""])


@define
class Report:
    """What an exploration found.

    Attributes:
        stories: that were told.
        steps: facts that were recorded in them.
        states: distinct states of the world.
        walked: how often each edge of the lifecycle was walked.
        verdicts: how often each was reached, by number of faults.
        ways: how often each fault happened.
        counter_examples: a shortest one for each property that was broken.
    """

    stories: int = 0
    steps: int = 0
    states: set[tuple[object, ...]] = field(factory=set, repr=False)
    walked: Counter[tuple[State, type[Fact]]] = field(factory=Counter, repr=False)
    verdicts: Counter[Verdict] = field(factory=Counter)
    ways: Counter[tuple[str, Way]] = field(factory=Counter, repr=False)
    counter_examples: dict[str, CounterExample] = field(factory=dict)

    def missed(self) -> list[str]:
        """List what must sometimes happen and never did."""
        found = [
            f"edge {state} --{fact.__name__}--> {target} was never walked"
            for state, fact, target in edges()
            if not self.walked[state, fact]
        ]
        found += [
            f"no run was {verdict.value}" for verdict in Verdict if not self.verdicts[verdict]
        ]
        found += [
            f"fault {verb}:{way} never happened"
            for verb, ways in CONTRACT.items()
            for way in ways
            if not self.ways[verb, way]
        ]
        return found


def tell(scenario: Scenario, plan: Iterable[Injection] = ()) -> World:
    """Tell one story, and check it."""
    world = World(plan)
    try:
        world.begin(scenario)
        if not world.journal.run_ids():
            world.begin(scenario)  # the first runner was killed before it had begun
        world.play()
    except (Exception, Hang) as error:  # noqa: BLE001 - a defect of the runner is looked for
        world.problem("P4 every run comes to an end", f"{type(error).__name__}: {error}")
    check(world)
    return world


def explore(
    scenarios: Iterable[Scenario] = SCENARIOS,
    *,
    faults: int = 2,
    until: str | None = None,
    seen: Callable[[World], None] | None = None,
) -> Report:
    """Tell every story with up to `faults` faults, fewest first.

    Args:
        scenarios: what to run.
        faults: 0, 1 or 2 (or more, for who has the time).
        until: end with the first story that breaks a property whose name begins so.
        seen: called with every world after its story.
    """
    report = Report()
    for broken in violations():
        log = (f"the table breaks {broken}",)
        report.counter_examples[broken] = CounterExample(broken[:2], broken, "the table", (), log)
    frontier: list[tuple[Scenario, tuple[Injection, ...]]] = [(each, ()) for each in scenarios]
    for depth in range(faults + 1):
        following = []
        for scenario, plan in frontier:
            if until is not None and any(
                broken.startswith(until) for broken in report.counter_examples
            ):
                return report
            world = tell(scenario, plan)
            _take(report, world, scenario, plan)
            if seen is not None:
                seen(world)
            if depth < min(faults, scenario.faults):
                following += [(scenario, (*plan, more)) for more in _further(world, plan)]
        frontier = following
    return report


def _take(report: Report, world: World, scenario: Scenario, plan: tuple[Injection, ...]) -> None:
    report.stories += 1
    report.steps += len(world.edges)
    report.states |= world.states
    report.walked.update(world.edges)
    report.ways.update((met.verb, met.way) for met in world.backend.happened)
    for run in _runs(world):
        if run.verdict is not None:
            report.verdicts[run.verdict] += 1
    for broken, what in world.problems:
        if broken not in report.counter_examples:
            report.counter_examples[broken] = CounterExample(
                broken, what, scenario.name, plan, tuple(world.log)
            )


def _further(world: World, plan: tuple[Injection, ...]) -> Iterator[Injection]:
    """Give every fault that can come after the last one of a story."""
    points = world.points
    if plan:
        points = points[points.index((plan[-1].verb, plan[-1].call)) + 1 :]
    for verb, call in points:
        for way in CONTRACT[verb]:
            yield Injection(verb, way, call)


# --- the properties that always hold --------------------------------------------------------------


def check(world: World, properties: Mapping[str, Property] | None = None) -> None:
    """Check properties of every run of a world; all of them if none are given."""
    for run in _runs(world):
        for broken, test in (properties or ALWAYS).items():
            what = test(world, run)
            if what:
                world.problem(broken, f"{run.run_id}: {what}")


def _runs(world: World) -> list[Run]:
    return [world.journal.step(run_id).run for run_id in world.journal.run_ids()]


def _ends(world: World, run: Run) -> str:
    if not run.finished:
        return f"it is still {run.state} after {world.lives} runners"
    spec = world.scenario(run.run_id).eval_spec
    each = (
        3 * BOUNDS.upload_s
        + spec.setup_deadline_s
        + spec.grace_s
        + BACKSTOP_SLACK_S
        + spec.backstop
        + 3 * BOUNDS.settle_s
        + BOUNDS.download_s
        + BOUNDS.destroy_s
        + BOUNDS.score_s
    )
    taken = sum(run.timings.values())
    return f"it took {taken:.0f} s" if taken > each * world.lives else ""


def _one_verdict(world: World, run: Run) -> str:
    del world
    if run.finished and run.verdict is None:
        return "it has no verdict"
    if (run.reason is None) is (run.verdict is Verdict.UNRESOLVED):
        return f"its verdict is {run.verdict} and its reason {run.reason}"
    return ""


def _faults_listed(world: World, run: Run) -> str:
    if run.verdict is Verdict.UNRESOLVED and not run.faults:
        return "it is unresolved and lists no fault"
    loud = {Way.ERROR_BEFORE, Way.ERROR_AFTER, Way.HANG_BEFORE, Way.HANG_AFTER, Way.ABRUPT}
    met = [each for each in world.backend.happened if each.way in loud and each.verb != "open"]
    killed = world.lives > 1  # what a runner met and did not record before it died is gone with it
    if met and not killed and len(run.faults) < len({each.verb for each in met}):
        return f"{', '.join(map(str, met))} happened and {len(run.faults)} faults are listed"
    return ""


def _true_outcome(world: World, run: Run) -> str:
    if run.outcome is None:
        return ""
    if (run.run_id, "check") not in world.ends:
        return f"its outcome is {run.outcome}, and its check never ended"
    record, _ = world.ends[run.run_id, "check"]
    code = run.outcome.exit_code if run.outcome.kind is OutcomeKind.EXITED else run.outcome.signal
    if _OUTCOMES.get(record.ending) is not run.outcome.kind or code != record.code:
        return f"its outcome is {run.outcome}, and its check ended {record.ending} {record.code}"
    return ""


def _true_evidence(world: World, run: Run) -> str:
    if run.state is not State.SCORED or run.receipt is None:
        return ""
    _, tree = world.ends.get((run.run_id, "check"), (None, Manifest({})))
    if not run.receipt.sealed:
        return "it was scored on evidence that is not sealed"
    evidence = world.vault.evidence(run.receipt, run.outcome)
    differences = tree.differences(evidence.manifest)
    return f"it was scored on another tree: {differences[0]}" if differences else ""


def _true_verdict(world: World, run: Run) -> str:
    if run.verdict in {None, Verdict.UNRESOLVED, world.scenario(run.run_id).expected}:
        return ""
    return f"it is {run.verdict}, and the program deserves {world.scenario(run.run_id).expected}"


def _path(world: World, run: Run) -> str:
    names = [type(fact).__name__ for fact in world.journal.facts[run.run_id]]
    if run.state is State.SCORED:
        if "Checked" not in names or "Downloaded" not in names[names.index("Checked") :]:
            return f"it was scored after {names}"
        if {"DownloadFailed", "CheckLost", "UploadFailed"} & set(names):
            return f"it was scored after {names}"
    return ""


def _once(world: World, run: Run) -> str:
    mine = [(slot, sandbox) for run_id, slot, sandbox in world.starts if run_id == run.run_id]
    # A runner that died with a vanished sandbox sets up another one. It never checks twice.
    times = Counter(("check", "any sandbox") if slot == "check" else (slot, s) for slot, s in mine)
    return "".join(f"its {slot} was started {n} times" for (slot, _), n in times.items() if n > 1)


def _owned(world: World, run: Run) -> str:
    exists = run.run_id in world.sandboxes
    if exists and run.finished and run.retained_sandbox != run.run_id:
        return "its sandbox exists, and its id is not kept"
    return ""


def _undisturbed(world: World, run: Run) -> str:
    harmless = {Way.SLOW, Way.TWICE, Way.CRASH_BEFORE, Way.CRASH_AFTER, Way.DISK_FULL}
    remote = {"create", "upload"}
    if [e.way for e in world.backend.happened].count(Way.SLOW) > 1:
        return ""  # together they can be later than the check may start
    if any(e.way not in harmless or e.verb in remote for e in world.backend.happened):
        return ""
    if run.finished and run.verdict is not world.scenario(run.run_id).expected:
        return f"it is {run.verdict} ({run.reason}), though nothing was lost"
    return ""


def _apart(world: World, run: Run) -> str:
    """The two timeouts: who noticed is part of the result."""
    late = run.outcome is not None and run.outcome.kind is OutcomeKind.DEADLINE_EXCEEDED
    record, _ = world.ends.get((run.run_id, "check"), (None, None))
    if late and (record is None or record.ending is not Ending.DEADLINE):
        return "its outcome is a deadline that the guest did not enforce"
    return ""


ALWAYS: Final[dict[str, Property]] = {
    "P2 a score has a check and a download before it": _path,
    "P2 an outcome is how the check ended": _true_outcome,
    "P2 a score is of the tree that the check left": _true_evidence,
    "P2 a verdict is the one that the program deserves": _true_verdict,
    "P4 every run comes to an end": _ends,
    "P5 a run has one verdict": _one_verdict,
    "P5 every fault stays listed": _faults_listed,
    "a command is started at most once": _once,
    "a sandbox that exists has its id kept": _owned,
    "a client timeout is not a deadline": _apart,
    "what loses nothing changes no verdict": _undisturbed,
}
"""Properties of every story, beside P1 and P3, which the world checks as it goes."""

TOGETHER: Final = {
    name: test for name, test in ALWAYS.items() if test not in {_faults_listed, _undisturbed, _ends}
}
"""Those that do not say which of several runs met a fault, or how long one had to wait."""


# --- at random ------------------------------------------------------------------------------------


def wander(seed: int, *, runs: int = 3, odds: float = 0.05) -> World:
    """Tell a story of several runs, interleaved, with faults and crashes at random.

    Args:
        seed: the same one tells the same story.
        runs: that are begun.
        odds: of a fault at any call, and of a crash between two.
    """
    dice = Random(seed)  # noqa: S311 - a seed for a story, and not for a secret

    def choose(verb: str, _: int) -> Way | None:
        if world.lives < LIVES and dice.random() < odds:
            return dice.choice(CONTRACT[verb])
        return None

    world = World(choose=choose)
    try:
        for _ in range(runs):
            world.begin(dice.choice(SCENARIOS))
        while world.driven or (world.lives < LIVES and world.runner.unfinished()):
            if not world.driven or dice.random() < odds:
                world.resume()
            elif world.lives < LIVES and dice.random() < odds:
                world.crash()
            elif dice.random() < odds:
                world.sweep()
            else:
                world.step(dice.choice(list(world.driven)))
        world.play()
    except (Exception, Hang) as error:  # noqa: BLE001 - a defect of the runner is looked for
        world.problem("P4 every run comes to an end", f"{type(error).__name__}: {error}")
    check(world, TOGETHER)
    return world
