"""The pytest plugin, as a user's test suite meets it: installed, in a session of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from xml.etree import ElementTree as ET

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
    assert "or 'openshell' or 'simulated', faults" in result.stdout.str() + result.stderr.str()


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


# --- evals as items -------------------------------------------------------------------------------

PASSES = '[[eval]]\nname = "passes"\ncheck = "echo hi > made"\ntags = ["smoke", "slow-ish"]\n'
FAILS = '[[eval]]\nname = "fails"\ncheck = "echo one; echo two >&2; exit 7"\n'
UNRESOLVED = '[[eval]]\nname = "unresolved"\nsetup = "echo no; exit 1"\ncheck = "true"\n'


@pytest.fixture
def evals(pytester, monkeypatch):
    """Write a spec file, and have everything temporary below `tmp`."""
    (pytester.path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(pytester.path / "tmp"))

    def write(text, name="a"):
        (pytester.path / f"{name}.eval.toml").write_text(text)

    def run(*arguments):
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    run.write, run.tmp = write, pytester.path / "tmp"
    return run


def left(evals):
    """Give what is left of sandboxes and states."""
    return [path.name for path in evals.tmp.glob("orchestrator-*/*")]


def test_a_verdict_is_an_outcome_and_only_a_failed_eval_is_a_failed_test(pytester, evals):
    evals.write(PASSES + FAILS + UNRESOLVED)
    result = evals("--evals", "-v", "--junit-xml=junit.xml")
    result.assert_outcomes(passed=1, failed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "a.eval.toml::passes PASSED*",
            "a.eval.toml::fails FAILED*",
            "a.eval.toml::unresolved ERROR*",
            "*ERROR at setup of unresolved*",
            "UNRESOLVED (setup_failed): fault: setup setup_failed: setup ended: exited(1)",
            "the check: outcome unknown",
            "*_ fails _*",
            "FAILED: exit_code: expected exited(0), exited(7)",
            "the check: exited(7)",
            "end of stdout, 4 bytes:",
            "  one",
            "end of stderr, 4 bytes:",
            "  two",
            "run r* in *(removed at the end; --eval-state-dir keeps it)",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert "pytest_plugin.py" not in result.stdout.str(), "a traceback of ours helps nobody"
    suite = ET.parse(pytester.path / "junit.xml").getroot()[0]
    assert (suite.get("errors"), suite.get("failures"), suite.get("tests")) == ("1", "1", "3")
    cases = {case.get("name"): case for case in suite}
    assert cases["fails"].find("failure") is not None
    assert cases["unresolved"].find("error") is not None
    assert cases["unresolved"].find("failure") is None
    for name, case in cases.items():
        said = {each.get("name"): each.get("value") for each in case.iter("property")}
        assert said["verdict"] == {"passes": "PASSED", "fails": "FAILED"}.get(name, "UNRESOLVED")
        assert said["run_id"].startswith("r")
    assert left(evals) == []


def test_evals_are_collected_only_where_that_is_asked_for(pytester, evals):
    evals.write(PASSES)
    evals.write(PASSES, "b")
    pytester.makepyfile("def test_it(): pass")
    evals().assert_outcomes(passed=1)
    evals("--evals").assert_outcomes(passed=3)
    evals("b.eval.toml").assert_outcomes(passed=1)
    evals("b.eval.toml::passes", "a.eval.toml::passes").assert_outcomes(passed=2)
    assert "not found" in evals("b.eval.toml::other").stderr.str()
    pytester.makeini("[pytest]\nevals = true")
    evals().assert_outcomes(passed=3)


def test_evals_are_found_by_their_names_and_tags(evals):
    evals.write(PASSES + PASSES + FAILS + '[[eval]]\nname = "a\\u001b[2J"\ncheck = "true"\n')
    listed = evals("--evals", "--collect-only", "-q").stdout
    listed.fnmatch_lines(
        [
            "a.eval.toml::passes",
            "a.eval.toml::passes#2",
            "a.eval.toml::fails",
            r"a.eval.toml::'a\x1b[[]2J'",
        ]
    )
    for words, outcomes in {
        "smoke": {"passed": 2, "deselected": 2},
        "not smoke and not fails": {"passed": 1, "deselected": 3},
        "slow-ish": {"passed": 2, "deselected": 2},
    }.items():
        evals("--evals", "-k", words).assert_outcomes(**outcomes)


def test_a_spec_that_is_wrong_or_refused_is_an_error_that_says_so(evals):
    evals.write(PASSES.replace("check", "chek"))
    evals.write('[[eval]]\nname = "x"\ncheck = "true"\nlimits = { pids = 1 }\n', "b")
    result = evals("--evals", "--continue-on-collection-errors")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*a.eval.toml: *(passes): chek: unknown key; expected 'check'*"])
    result.stdout.fnmatch_lines(["limits.pids: the local backend cannot enforce it; expected *"])
    assert "During handling" not in result.stdout.str()
    assert "pytest_plugin.py" not in result.stdout.str()
    result = evals("--evals", "--eval-backend", "moon")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "invalid choice: 'moon'" in result.stderr.str()


def test_what_an_eval_printed_cannot_drive_the_terminal(evals):
    evals.write('[[eval]]\nname = "x"\ncheck = \'printf "\\033[2J"; exit 1\'\n')
    shown = evals("--evals").stdout.str()
    assert "\x1b" not in shown
    assert "\\x1b[2J" in shown


def cli(*arguments):
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_processes_of_a_distributed_session_share_a_state_directory(evals, pytester):
    pytest.importorskip("xdist")
    names = [f"number {number}" for number in range(8)]
    evals.write("".join(PASSES.replace("passes", name) for name in names) + FAILS + UNRESOLVED)
    result = evals("--evals", "-n2", "--eval-state-dir", "state")
    result.assert_outcomes(passed=8, failed=1, errors=1)
    listed = cli("runs", "--json", "--state-dir", str(pytester.path / "state")).stdout
    runs = list(map(json.loads, listed.splitlines()))
    assert sorted(run["name"] for run in runs) == sorted([*names, "fails", "unresolved"])
    assert all(run["verdict"] for run in runs)
    assert left(evals) == []
    evals("--evals", "-n2").assert_outcomes(passed=8, failed=1, errors=1)
    assert left(evals) == [], "a state that nobody asked for is gone"


def test_a_state_that_nobody_asked_for_is_gone_before_the_session_is_over(evals, pytester):
    """A process of a distributed session that still has work to do then is cut short in it."""
    pytester.makeconftest(
        """
import os
from pathlib import Path

def states():
    return [path.name[:19] for path in Path(os.environ["TMPDIR"]).glob("orchestrator-evals-*")]

def pytest_runtest_teardown():
    Path("during").write_text(str(states()))

import pytest
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    Path("after").write_text(str(states()))
"""
    )
    evals.write(PASSES)
    evals("--evals").assert_outcomes(passed=1)
    assert (pytester.path / "during").read_text() == "['orchestrator-evals-']"
    assert (pytester.path / "after").read_text() == "[]"


@pytest.mark.parametrize("processes", [[], ["-n2"]])
def test_a_sandbox_that_is_left_is_told_and_so_is_the_state_that_knows_of_it(evals, processes):
    if processes:
        pytest.importorskip("xdist")
    evals.write(UNRESOLVED + 'retain = "unresolved"\n' + PASSES)
    result = evals("--evals", *processes)
    result.assert_outcomes(passed=1, errors=1)
    (told,) = [
        line
        for line in result.stdout.str().splitlines()
        if line.startswith("sandbox not confirmed gone") and "in" in line.split()
    ]
    swept = cli("sweep", "--kept", "--state-dir", told.split()[-1])
    assert swept.stdout.endswith(": gone\n"), swept.stderr


def test_an_interrupted_eval_is_resumed_by_the_command_line(evals, pytester):
    started, go = pytester.path / "started", pytester.path / "go"
    os.mkfifo(started)
    os.mkfifo(go)
    evals.write(
        f'[[eval]]\nname = "x"\ncheck = "echo x > {started}; cat {go}"\n'
        '[eval.expect]\nstdout_equals = "went"\n'
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--evals"]
    session = subprocess.Popen([*command, "--eval-state-dir=state"], stdout=subprocess.PIPE)
    assert started.read_text() == "x\n"
    session.send_signal(signal.SIGINT)
    output, _ = session.communicate(timeout=60)
    assert session.returncode == pytest.ExitCode.INTERRUPTED, output
    resumed = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "resume", "--json", "--state-dir=state"],
        stdout=subprocess.PIPE,
    )
    go.write_text("went")
    output, _ = resumed.communicate(timeout=60)
    assert json.loads(output)["verdict"] == "PASSED"
    assert left(evals) == []


def test_edges_that_evals_walk_are_counted(evals, pytester):
    evals.write(PASSES)
    evals("--evals", "--lifecycle-heat", "heat.json").assert_outcomes(passed=1)
    heat = json.loads((pytester.path / "heat.json").read_text())
    assert heat["CLEANED_UP Scored"] == 1


def test_a_session_without_evals_loads_nothing_heavy():
    program = "import sys, orchestrator.integrations.pytest_plugin; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {"rich", "typer", "hypothesis", "docker", "orchestrator.parity"} & set(loaded)
