"""The pytest plugin: a runner for tests, the story of a run in the report of a test that failed.

    def test_my_agent_writes_its_answer(eval_runner):
        result = eval_runner.run(EvalSpec(name="answer", workspace="task", check="./check.sh"))
        assert result.verdict is Verdict.PASSED

    @pytest.mark.eval_backend("local", faults=["fetch:truncated", "fetch#2:truncated"])
    @pytest.mark.eval_backend("simulated", program=Program(code=3))

`--lifecycle-heat FILE` writes how often the tests walked each edge of the lifecycle, to be drawn by
`orchestrator diagram --heat FILE`; `--lifecycle-edges` fails the session if one was never walked.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from ..core.facts import Fact
    from ..core.machine import Run, Step
    from ..core.states import State
    from ..runner import Runner

_HEAT = pytest.StashKey[Counter["tuple[State, type[Fact]]"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("orchestrator")
    group.addoption("--lifecycle-heat", metavar="FILE", help="write how often edges were walked")
    group.addoption(
        "--lifecycle-edges", action="store_true", help="fail if an edge was never walked"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; count the edges that are walked, if that is asked for."""
    config.addinivalue_line(
        "markers",
        "eval_backend(name, *, faults=(), program=None): what `eval_runner` runs on: `local`, or "
        "`simulated` with a program of orchestrator.testing; and faults to meet there",
    )
    if config.getoption("--lifecycle-heat") or config.getoption("--lifecycle-edges"):
        _count_edges(config)


def _count_edges(config: pytest.Config) -> None:
    from .. import runner  # noqa: PLC0415 - loaded only where it is used
    from ..core.machine import advance  # noqa: PLC0415

    heat: Counter[tuple[State, type[Fact]]] = Counter()
    config.stash[_HEAT] = heat

    def counting(run: Run, fact: Fact) -> Step:
        step = advance(run, fact)
        heat[run.state, type(fact)] += 1
        return step

    patched = pytest.MonkeyPatch()
    patched.setattr(runner, "advance", counting)
    config.add_cleanup(patched.undo)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the counts; fail the session if edges are missing and must not be."""
    from ..testing import heat as heat_file  # noqa: PLC0415

    heat = session.config.stash.get(_HEAT, None)
    if heat is None:
        return
    if file := session.config.getoption("--lifecycle-heat"):
        heat_file.write(file, heat)
    if session.config.getoption("--lifecycle-edges") and heat_file.unwalked(heat):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which edges were never walked."""
    from ..testing import heat as heat_file  # noqa: PLC0415

    heat = config.stash.get(_HEAT, None)
    if heat is None:
        return
    missing = heat_file.unwalked(heat)
    terminalreporter.section("lifecycle")
    terminalreporter.line(f"{sum(heat.values())} facts; {len(missing)} edges never walked")
    for edge in missing:
        terminalreporter.line(f"  {edge}")


@pytest.fixture
def eval_runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    """Give a runner with a state of its own, on the backend that the test is marked with."""
    marker = request.node.get_closest_marker("eval_backend")
    arguments, options = (marker.args, dict(marker.kwargs)) if marker else ((), {})
    with ExitStack() as stack:
        yield _make_runner((*arguments, "local")[0], options, tmp_path, stack)


def _make_runner(name: str, options: dict[str, Any], place: Path, stack: ExitStack) -> Runner:
    from ..backends.local import LocalBackend  # noqa: PLC0415
    from ..runner import Runner  # noqa: PLC0415
    from ..testing.backend import Program  # noqa: PLC0415
    from ..testing.faults import FaultyBackend, Injection  # noqa: PLC0415
    from ..testing.simulate import Scenario, World  # noqa: PLC0415

    faults = tuple(options.pop("faults", ()))
    program = options.pop("program", None)
    if options or name not in {"local", "simulated"}:
        raise pytest.UsageError(
            f"eval_backend({name!r}, {options}): expected 'local' or 'simulated', faults, program"
        )
    if name == "simulated":
        world = World(map(Injection.parse, map(str, faults)))
        world.run_here(Scenario(name="simulated", program=program or Program()))
        return world.runner
    backend = LocalBackend(place / "sandboxes")
    stack.callback(backend.close)
    faulty = stack.enter_context(FaultyBackend(backend, faults))
    return stack.enter_context(Runner(faulty, place / "state"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the runs of a test that failed to its report."""
    report = yield
    runner = getattr(item, "funcargs", {}).get("eval_runner")
    if report.when == "call" and report.failed and runner is not None:
        report.sections.append(("orchestrator runs", "\n\n".join(_stories(runner))))
    return report


def _stories(runner: Runner) -> Iterator[str]:
    for run_id in runner.journal.run_ids():
        result = runner.result(run_id)
        verdict = "unfinished" if result.verdict is None else result.verdict.value
        lines = [f"{run_id} {result.name}: {verdict} {result.reason or ''}".rstrip()]
        lines.append(f"  outcome: {result.outcome or 'unknown'}")
        lines += [f"  fault: {each.phase} {each.kind}: {each.message}" for each in result.faults]
        lines += [
            f"  {each.name}: {'?' if each.passed is None else each.passed}: {each.message}"
            for each in result.expectations
        ]
        for stream in ("stdout", "stderr"):
            output = result.evidence.output(stream) if result.evidence else None
            if output is not None and output.total:
                lines.append(f"  {stream}: {output.text[-2000:]!r}")
        yield "\n".join(lines)
