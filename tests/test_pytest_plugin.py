"""The pytest plugin, as a user's test suite meets it: installed, in a session of its own."""

from __future__ import annotations

import json

import pytest

pytest_plugins = ["pytester"]

IMPORTS = """
import pytest
from orchestrator import EvalSpec, Verdict
from orchestrator.testing.backend import Program
"""


def test_the_fixture_runs_evals_on_a_real_backend(pytester):
    pytester.makepyfile(
        IMPORTS
        + """
def test_it(eval_runner):
    result = eval_runner.run(EvalSpec(name="x", check="echo hi > made"))
    assert result.verdict is Verdict.PASSED
    assert result.evidence.read("made") == b"hi\\n"
"""
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_a_marker_chooses_the_simulated_backend_its_program_and_faults(pytester):
    pytester.makepyfile(
        IMPORTS
        + """
@pytest.mark.eval_backend("simulated", program=Program(code=3, duration_s=3600.0))
def test_simulated(eval_runner):
    result = eval_runner.run(EvalSpec(name="x", check="whatever", deadline_s=7200.0))
    assert result.verdict is Verdict.FAILED
    assert result.outcome.exit_code == 3
    assert result.outcome.elapsed_s == 3600.0

@pytest.mark.eval_backend("local", faults=["execute:vanished"])
def test_faulty(eval_runner):
    assert eval_runner.run(EvalSpec(name="x", check="true")).verdict is Verdict.UNRESOLVED
"""
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=2)


def test_a_failed_test_reports_the_story_of_its_runs(pytester):
    pytester.makepyfile(
        IMPORTS
        + """
def test_it(eval_runner):
    result = eval_runner.run(EvalSpec(name="greets", check="echo oops; exit 3"))
    assert result.verdict is Verdict.PASSED
"""
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*orchestrator runs*", "*greets: FAILED*", "*exited(3)*", "*stdout: 'oops*"]
    )


def test_a_wrong_marker_says_what_was_expected(pytester):
    pytester.makepyfile(
        IMPORTS
        + """
@pytest.mark.eval_backend("moon")
def test_it(eval_runner):
    pass
"""
    )
    result = pytester.runpytest_subprocess()
    assert "expected 'local' or 'simulated'" in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize(("scenarios", "status"), [("explore(faults=2)", 0), ("tell_one()", 1)])
def test_an_edge_that_no_test_walked_fails_the_session_if_that_is_asked_for(
    pytester, scenarios, status
):
    pytester.makepyfile(
        f"""
from orchestrator.testing.explore import SCENARIOS, explore, tell

def tell_one():
    tell(SCENARIOS[0])

def test_it():
    {scenarios.replace("faults=2", "faults=1")}
"""
    )
    result = pytester.runpytest_subprocess("--lifecycle-edges", "--lifecycle-heat", "heat.json")
    heat = json.loads((pytester.path / "heat.json").read_text())
    unwalked = [edge for edge, count in heat.items() if count == 0]
    assert result.ret == (1 if unwalked else 0)
    if status:
        assert "NEW UploadFailed" in unwalked
        result.stdout.fnmatch_lines(["*NEW --UploadFailed--> BROKEN*"])
