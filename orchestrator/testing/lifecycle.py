"""Lifecycles under Hypothesis: simulated runs interleaved, real backends under random faults.

`LifecycleMachine` is for who changes the runner or the core: a rule-based state machine over a
simulated world. `run_lifecycle_suite` is for who writes a backend: it needs no test class, and no
pytest.
"""

from __future__ import annotations

import tempfile
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ..core.clocks import Bounds
from ..core.errors import IllegalFactError
from ..core.facts import Fact
from ..core.machine import advance, legal_facts
from ..core.spec import EvalSpec
from ..core.verdict import Verdict
from ..runner import Runner
from . import strategies
from .explore import TOGETHER, check
from .faults import CONTRACT, FaultyBackend, Injection, Way
from .simulate import LIVES, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..ports import Backend
    from ..result import RunResult
    from .simulate import Scenario

_FACTS: Final = sorted(Fact.__subclasses__(), key=lambda kind: kind.__name__)


class LifecycleMachine(RuleBasedStateMachine):
    """Runs that are begun, go on, meet faults, crash and are resumed, in any order.

    Subclass it to add rules of your own. `walked` counts the edges that all its examples walked.
    """

    def __init__(self) -> None:
        """Begin with an empty world."""
        super().__init__()
        self._planned: dict[str, Way] = {}
        self.world = World(choose=lambda verb, _: self._planned.pop(verb, None))

    @rule(scenario=strategies.scenarios())
    def begin(self, scenario: Scenario) -> None:
        """Begin a run."""
        if len(self.world.journal.run_ids()) < 6:  # noqa: PLR2004 - enough to be interleaved
            self.world.begin(scenario)

    @precondition(lambda self: self.world.driven)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """Have a run do its next command."""
        self.world.step(data.draw(st.sampled_from(list(self.world.driven))))

    @rule(injection=strategies.injections(calls=1))
    def plan(self, injection: Injection) -> None:
        """Have the next call of a verb go wrong."""
        if self.world.lives < LIVES or injection.verb not in {"journal", "vault"}:
            self._planned[injection.verb] = injection.way

    @precondition(lambda self: self.world.lives < LIVES)
    @rule()
    def crash(self) -> None:
        """Kill the runner."""
        self.world.crash()

    @rule()
    def resume(self) -> None:
        """Have the runner that lives take over what nobody drives."""
        self.world.resume()

    @rule()
    def sweep(self) -> None:
        """Have the runner destroy what finished runs left."""
        self.world.sweep()

    @rule(seconds=st.floats(0, 50))
    def wait(self, seconds: float) -> None:
        """Let time pass. Always possible, so that there always is a next rule."""
        self.world.clock.advance(self.world.clock.time + seconds)

    @precondition(lambda self: self.world.journal.run_ids())
    @rule(data=st.data(), kind=st.sampled_from(_FACTS))
    def stray_fact(self, data: st.DataObject, kind: type[Fact]) -> None:
        """Say a fact that is not legal now: it is refused by name, and changes nothing."""
        run_id = data.draw(st.sampled_from(self.world.journal.run_ids()))
        run = self.world.journal.step(run_id).run
        if kind in legal_facts(run.state):
            return
        before = run
        try:
            advance(run, data.draw(strategies.facts(run, kind)))
        except IllegalFactError as error:
            words = str(error)
        else:
            raise AssertionError(f"{kind.__name__} was accepted in {run.state}")
        assert run_id in words, words
        assert run.state.value in words, words
        assert kind.__name__ in words, words
        assert self.world.journal.step(run_id).run == before, "a refused fact changed the run"

    @invariant()
    def nothing_is_broken(self) -> None:
        """No property is broken as the world goes."""
        assert self.world.problems == [], "\n".join(self.world.log)

    def teardown(self) -> None:
        """Let every run come to its end without further faults, and check the rest."""
        self._planned.clear()
        self.world.play()
        check(self.world, TOGETHER)
        assert self.world.problems == [], "\n".join(self.world.log)
        for run_id in self.world.journal.run_ids():
            assert self.world.journal.step(run_id).run.finished, f"{run_id} has no end"


SPEC: Final = EvalSpec(
    name="lifecycle suite",
    files={"input": "given", "other": "too"},
    check="echo x >> runs; cat input > output; echo printed",
    deadline_s=5.0,
    grace_s=0.5,
    backstop_s=8.0,
    expect={
        "exit_code": 0,
        "stdout_equals": "printed\n",
        "files": [
            {"path": "runs", "equals": "x\n"},
            {"path": "output", "equals": "given"},
            {"path": "input", "unchanged": True},
            {"path": "junk", "exists": False},
        ],
    },
)
"""What `run_lifecycle_suite` runs: a check that always passes if it is measured rightly."""

_REMOTE: Final = ("create", "upload", "manifest", "execute", "fetch", "destroy")
_WAITED_FOR: Final = frozenset({Way.HANG_BEFORE, Way.HANG_AFTER, Way.LATE, Way.CLOCK_JUMP})


def run_lifecycle_suite(
    make_backend: Callable[[], Backend],
    *,
    spec: EvalSpec = SPEC,
    examples: int = 50,
    bounds: Bounds | None = None,
    hangs: bool = False,
) -> None:
    """Run a spec that must pass over a real backend, under random faults of the contract.

    Whatever the faults, the verdict is PASSED or UNRESOLVED, the check ran at most once, every
    fault is listed, and a sandbox that is left has its id kept. A failure is shrunk by Hypothesis
    to the fewest faults, and names them in the form that `FaultyBackend` takes.

    Args:
        make_backend: makes the backend, once for each example.
        spec: what to run; without faults it must pass.
        examples: how many plans of faults to try.
        bounds: of the phases; short ones if none are given.
        hangs: also plan faults that are waited for until a bound.

    Raises:
        AssertionError: a promise was broken.
    """
    verbs = {verb: CONTRACT[verb] for verb in _REMOTE}
    ways = [
        Injection(verb, way, call)
        for verb, contract in verbs.items()
        for way in contract
        for call in (1, 2)
        if hangs or way not in _WAITED_FOR
    ]
    quick = bounds or Bounds(upload_s=5, settle_s=5, download_s=5, destroy_s=5, score_s=5)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.sampled_from(ways), max_size=3, unique_by=lambda e: (e.verb, e.call)))
    def suite(plan: list[Injection]) -> None:
        note(f"again: FaultyBackend(backend, {[str(each) for each in plan]})")
        backend = make_backend()
        close: Any = closing(backend) if hasattr(backend, "close") else nullcontext()
        with (
            tempfile.TemporaryDirectory(prefix="lifecycle-") as state,
            close,
            FaultyBackend(backend, plan) as faulty,
            Runner(faulty, Path(state), bounds=quick) as runner,
        ):
            result = runner.run(spec)
            _judge(result, faulty, backend)

    suite()


def _judge(result: RunResult, faulty: FaultyBackend, backend: Backend) -> None:
    """Hold a result against what is promised of every one."""
    story = ", ".join(map(str, faulty.happened)) or "no fault"
    said = f"{story}: {result.verdict}, {result.reason}, {result.faults}"
    assert result.verdict in {Verdict.PASSED, Verdict.UNRESOLVED}, f"a wrong verdict after {said}"
    quiet = {Way.SLOW, Way.TWICE, Way.CLOCK_JUMP}
    if all(each.way in quiet and each.verb != "upload" for each in faulty.happened):
        assert result.verdict is Verdict.PASSED, f"a verdict lost to nothing after {said}"
    if result.verdict is Verdict.UNRESOLVED:
        assert result.reason is not None, f"no reason after {said}"
        assert result.faults, f"no fault listed after {said}"
    if result.evidence is not None and result.evidence.exists("runs"):
        runs = result.evidence.read("runs")
        assert runs == b"x\n", f"the check ran {runs.count(b'x')} times after {said}"
    if backend.open(result.run_id) is not None:
        assert result.retained_sandbox, f"a sandbox is left and its id is not kept after {said}"
