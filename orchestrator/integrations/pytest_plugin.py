"""The pytest plugin: a runner for tests, the story of a run that failed, and evals as test items.

    def test_my_agent_writes_its_answer(eval_runner):
        result = eval_runner.run(EvalSpec(name="answer", workspace="task", check="./check.sh"))
        assert result.verdict is Verdict.PASSED

    @pytest.mark.eval_backend("local", faults=["fetch:truncated", "fetch#2:truncated"])
    @pytest.mark.eval_backend("simulated", program=Program(code=3))

With `--evals` (or `evals = true`, or a file that is named), each `[[eval]]` of a `*.eval.toml` file
is an item. It is run in the item's setup, because what goes wrong there is an error to pytest: a
run that is UNRESOLVED says nothing about the program, so it is an error, and only FAILED a failure.

`--lifecycle-heat FILE` writes how often the tests walked each edge of the lifecycle, to be drawn by
`orchestrator diagram --heat FILE`; `--lifecycle-edges` fails the session if one was never walked.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from ..core.facts import Fact
    from ..core.machine import Run, Step
    from ..core.spec import EvalSpec
    from ..core.states import State
    from ..ports import Backend
    from ..result import RunResult
    from ..runner import Runner

_SUFFIX = ".eval.toml"
_SHOWN_LINES = 20
_LEFT = "sandbox not confirmed gone"
_RUNNER, _OPEN = pytest.StashKey["Runner"](), pytest.StashKey[ExitStack]()
_HEAT = pytest.StashKey[Counter["tuple[State, type[Fact]]"]]()


def _backend(name: str, config: pytest.Config, sandboxes: Path | None, stack: ExitStack) -> Backend:
    from ..catalogue import Options, make  # noqa: PLC0415 - loaded only where it is used
    from ..core.errors import SpecError  # noqa: PLC0415

    options = Options(sandboxes=sandboxes, image=config.getoption("--eval-image"))
    try:
        backend = make(name, options)
    except SpecError as error:
        raise pytest.UsageError(str(error)) from None
    stack.callback(getattr(backend, "close", lambda: None))
    return backend


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    from ..catalogue import BackendName  # noqa: PLC0415 - loaded only where it is used

    group = parser.getgroup("orchestrator")
    group.addoption("--evals", action="store_true", help=f"run the evals of *{_SUFFIX} files")
    names = [name.value for name in BackendName]
    group.addoption("--eval-backend", choices=names, default="local", help="for them")
    group.addoption("--eval-image", help="of sandboxes whose spec names none")
    group.addoption("--eval-state-dir", metavar="DIR", help="keep their journal and evidence here")
    parser.addini("evals", f"run the evals of *{_SUFFIX} files", type="bool", default=False)
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
    """Let go of the evals' runner; write the counts, and fail if edges are missing."""
    from ..testing import heat as heat_file  # noqa: PLC0415

    if _OPEN in session.config.stash:
        session.config.stash[_OPEN].close()  # later, a distributed session would cut it short
    heat = session.config.stash.get(_HEAT, None)
    if heat is None:
        return
    if file := session.config.getoption("--lifecycle-heat"):
        heat_file.write(file, heat)
    if session.config.getoption("--lifecycle-edges") and heat_file.unwalked(heat):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which sandboxes evals left, and which edges were never walked."""
    from ..testing import heat as heat_file  # noqa: PLC0415

    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if getattr(report, "when", "") == "teardown":
            for text in (text for name, text in report.user_properties if name == _LEFT):
                terminalreporter.line(f"{_LEFT}: {text}")
    heat = config.stash.get(_HEAT, None)
    if heat is None:
        return
    missing = heat_file.unwalked(heat)
    terminalreporter.section("lifecycle")
    terminalreporter.line(f"{sum(heat.values())} facts; {len(missing)} edges never walked")
    for edge in missing:
        terminalreporter.line(f"  {edge}")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> EvalFile | None:
    """Collect evals, where that is asked for."""
    if not file_path.name.endswith(_SUFFIX):
        return None
    wanted = parent.config.getoption("--evals") or parent.config.getini("evals")
    if not wanted and not parent.session.isinitpath(file_path):
        return None
    return EvalFile.from_parent(parent, path=file_path)


class EvalFile(pytest.File):
    """A spec file: an item for each of its evals."""

    def collect(self) -> Iterator[EvalItem]:
        """Read the file; a second eval of one name is `name#2`."""
        from ..core.errors import SpecError  # noqa: PLC0415 - loaded only where it is used
        from ..parity import numbered  # noqa: PLC0415
        from ..specfile import load  # noqa: PLC0415

        try:
            specs = load(self.path)
        except SpecError as error:
            raise self.CollectError(str(error)) from None
        shown = ((it.name if it.name.isprintable() else ascii(it.name), it) for it in specs)
        for name, spec in numbered(shown).items():
            yield EvalItem.from_parent(self, name=name, spec=spec)


class EvalItem(pytest.Item):
    """One eval. Its tags are keywords, for `-k`."""

    def __init__(self, *, spec: EvalSpec, **options: Any) -> None:
        """Be the item of a spec."""
        super().__init__(**options)
        self.spec = spec
        self.failure = ""
        self.extra_keyword_matches.update(spec.tags)

    def setup(self) -> None:
        """Run the eval; if that tells nothing about the program, it is an error."""
        from ..core.errors import OrchestratorError  # noqa: PLC0415 - loaded only where it is used
        from ..core.verdict import Verdict  # noqa: PLC0415

        runner = _runner_of(self.config)
        try:
            result = runner.run(self.spec)
        except OrchestratorError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        verdict = getattr(result.verdict, "value", None)
        self.user_properties += [("run_id", result.run_id), ("verdict", verdict)]
        where = f"run {result.run_id} in {runner.state_dir}"
        if result.retained_sandbox:
            self.user_properties.append((_LEFT, f"{result.retained_sandbox}, {where}"))
        elif not self.config.getoption("--eval-state-dir"):
            where += " (removed at the end; --eval-state-dir keeps it)"
        self.failure = "" if result.passed else f"{_told(result)}\n{where}"
        if result.verdict is Verdict.UNRESOLVED:
            pytest.fail(self.failure, pytrace=False)

    def runtest(self) -> None:
        """Fail if the eval failed."""
        if self.failure:
            pytest.fail(self.failure, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Say where it is from."""
        return self.path, None, self.name


def _runner_of(config: pytest.Config) -> Runner:
    """Give the runner of this session's evals; each process of a distributed one has its own."""
    from ..runner import Runner  # noqa: PLC0415 - loaded only where it is used

    if _RUNNER not in config.stash:
        given = config.getoption("--eval-state-dir")
        place = given or tempfile.mkdtemp(prefix="orchestrator-evals-")
        stack = config.stash[_OPEN] = ExitStack()
        backend = _backend(config.getoption("--eval-backend"), config, None, stack)
        runner = config.stash[_RUNNER] = Runner(backend, config.invocation_params.dir / place)
        stack.callback(_close, runner, temporary=not given)
    return config.stash[_RUNNER]


def _close(runner: Runner, *, temporary: bool) -> None:
    """Let go of a state; remove it if nobody asked for it and nothing is left that it knows of."""
    runs = [runner.journal.step(run_id).run for run_id in runner.journal.run_ids()]
    runner.close()
    if temporary and all(run.finished and run.retained_sandbox is None for run in runs):
        shutil.rmtree(runner.state_dir)


def _told(result: RunResult) -> str:
    """Tell a run that did not pass: what was not as expected, and the end of its output."""
    from ..report import complaints, printable, verdict_text  # noqa: PLC0415

    text = "; ".join(complaints(result)[:1]).removeprefix("failed: ")
    lines = [f"{verdict_text(result).plain}: {text}", *complaints(result)[1:]]
    lines.append(f"the check: {result.outcome or 'outcome unknown'}")
    for stream in ("stdout", "stderr"):
        output = result.evidence.output(stream) if result.evidence else None
        if output is not None and output.total:
            end = printable(output.text).splitlines()[-_SHOWN_LINES:]
            lines += [f"end of {stream}, {output.total} bytes:", *(f"  {line}" for line in end)]
    return "\n".join(lines)


@pytest.fixture
def eval_runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    """Give a runner with a state of its own, on the backend that the test is marked with."""
    marker = request.node.get_closest_marker("eval_backend")
    arguments, options = (marker.args, dict(marker.kwargs)) if marker else ((), {})
    with ExitStack() as stack:
        name = (*arguments, "local")[0]
        yield _make_runner(name, options, request.config, tmp_path, stack)


def _make_runner(
    name: str, options: dict[str, Any], config: pytest.Config, place: Path, stack: ExitStack
) -> Runner:
    from ..catalogue import BackendName  # noqa: PLC0415 - loaded only where it is used
    from ..runner import Runner  # noqa: PLC0415
    from ..testing.backend import Program  # noqa: PLC0415
    from ..testing.faults import FaultyBackend, Injection  # noqa: PLC0415
    from ..testing.simulate import Scenario, World  # noqa: PLC0415

    faults = tuple(options.pop("faults", ()))
    program = options.pop("program", None)
    known = [*BackendName, "simulated"]
    if options or name not in known:
        expected = " or ".join(map(repr, map(str, known)))
        raise pytest.UsageError(
            f"eval_backend({name!r}, {options}): expected {expected}, faults, program"
        )
    if name == "simulated":
        world = World(map(Injection.parse, map(str, faults)))
        world.run_here(Scenario(name="simulated", program=program or Program()))
        return world.runner
    backend = _backend(name, config, place / "sandboxes", stack)
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
