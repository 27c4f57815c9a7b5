"""The gptme adapter: gptme's own suites judged without a model, and where the two disagree."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("gptme", reason="gptme is not installed: pip install '.[gptme]'")

from gptme.eval import run as host
from gptme.eval.execenv import SimpleExecutionEnv
from gptme.eval.suites import suites
from gptme_workspaces import FLAWED, SUITES, good

from orchestrator import (
    EvidenceIncompleteError,
    IllegalFactError,
    OutputTruncatedError,
    Runner,
    SpecError,
    State,
    Verdict,
)
from orchestrator.core.errors import OrchestratorError
from orchestrator.integrations import gptme
from orchestrator.integrations.gptme import GptmeExecutionEnv, run_gptme_check, use_in_gptme
from orchestrator.testing.faults import FaultyBackend

TESTS = {test["name"]: test for suite in SUITES for test in suites[suite]}
LOST = [f"fetch{call}:truncated" for call in ("", "#2", "#3")]
HELLO = TESTS["hello"]
every_test = pytest.mark.parametrize("name", TESTS)


@pytest.fixture(autouse=True)
def python_with_pytest(monkeypatch):
    """The checks run `python`, and some of them pytest: this one has it."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture
def lay(tmp_path):
    """Write a workspace."""

    def write(files):
        place = tmp_path / "workspace"
        place.mkdir()
        for path, content in files.items():
            (place / path).write_text(content)
        return place

    return write


@pytest.fixture
def judge(tmp_path, backend):
    """Judge a workspace."""

    def run(test, workspace, *, faults=(), **keys):
        with FaultyBackend(backend, faults) as faulty:
            return run_gptme_check(test, workspace, faulty, tmp_path / "state", **keys)

    return run


@pytest.fixture
def make_env(tmp_path, backend):
    """Make an environment over an empty workspace, or the given one."""

    def make(workspace=None, *, faults=(), **keys):
        return GptmeExecutionEnv(
            FaultyBackend(backend, faults), workspace, tmp_path / "state", **keys
        )

    return make


def passed(result):
    return result.to_dict()["passed"]


# --- gptme's own suites, without a model ----------------------------------------------------------


def test_enough_of_gptmes_suites_are_run():
    assert "basic" in SUITES
    assert len([name for name in SUITES if name.startswith("practical")]) >= 10


@every_test
def test_a_good_workspace_passes(name, lay, judge):
    result = judge(TESTS[name], lay(good(TESTS[name])))
    failed = [case.name for case in result.results if not case.passed]
    assert result.status == "success", result.run_stderr
    assert len(result.results) == len(TESTS[name]["expect"])
    assert failed == ([] if name != "three-sum" else ["all 8 cases pass", "clean exit"])


@every_test
def test_an_empty_workspace_fails(name, lay, judge):
    result = judge(TESTS[name], lay({}))
    assert result.status == "success"
    assert not passed(result)


@every_test
def test_what_nobody_worked_on_fails(name, lay, judge):
    if name == "optimize-performance":
        pytest.skip(FLAWED[name])
    assert not passed(judge(TESTS[name], lay(TESTS[name]["files"])))


@every_test
def test_a_lost_transfer_is_an_error_and_no_case_is_judged(name, lay, judge):
    result = judge(TESTS[name], lay(good(TESTS[name])), faults=LOST)
    assert (result.status, result.results) == ("error", [])
    assert "download_failed" in result.run_stderr


# --- one check ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (["upload:truncated"], "upload_failed"),
        (["create:error-before"], "upload_failed"),
        (["execute:vanished"], "check_lost"),
        ([f"fetch{call}:left-out" for call in ("", "#2", "#3")], "download_failed"),
        ([f"fetch{call}:corrupted" for call in ("", "#2", "#3")], "download_failed"),
        (["fetch:vanished"], "download_failed"),
    ],
)
def test_what_goes_wrong_around_the_program_is_an_error(lay, judge, faults, reason):
    result = judge(HELLO | {"run": "python hello.py | tee out"}, lay(good(HELLO)), faults=faults)
    assert (result.status, result.results) == ("error", [])
    assert reason in result.run_stderr


def test_one_lost_transfer_is_tried_again(lay, judge):
    assert passed(judge(HELLO, lay(good(HELLO)), faults=LOST[:1]))


def test_a_deadline_is_a_timeout_and_no_failed_case(lay, judge):
    test = HELLO | {"run": "echo begun; sleep 8; echo x"}
    result = judge(test, lay(good(HELLO)), deadline_s=0.3)
    assert (result.status, result.results) == ("timeout", [])
    assert result.run_stdout == "begun\n"
    assert not passed(result)


@pytest.mark.parametrize("code", [0, 1, 124, 137, 255])
def test_a_code_is_the_checks_own(lay, judge, code):
    test = HELLO | {"run": f"exit {code}", "expect": {"code": lambda ctx: ctx.exit_code == code}}
    result = judge(test, lay({}))
    assert (result.status, passed(result)) == ("success", True)


def test_a_case_that_raises_says_nothing_about_the_program(lay, judge):
    test = HELLO | {"expect": {**HELLO["expect"], "broken": lambda ctx: ctx.files["no"]}}
    result = judge(test, lay(good(HELLO)))
    assert (result.status, result.results) == ("error", [])
    assert "KeyError" in result.run_stderr


def test_output_that_was_not_kept_is_not_judged_by_its_part(lay, judge):
    test = HELLO | {"run": "head -c 100000 /dev/zero", "expect": {"none": lambda _: True}}
    result = judge(test, lay({}), limits={"output_bytes": 1000})
    assert (result.status, result.results) == ("error", [])
    assert "output_truncated" in result.run_stderr


def test_a_case_may_answer_anything_that_is_true(lay, judge):
    test = HELLO | {"expect": {"truthy": lambda ctx: ctx.stdout, "falsy": lambda _: None}}
    result = judge(test, lay(good(HELLO)))
    assert [case.passed for case in result.results] == [True, False]


def test_only_files_to_restore_are_restored_and_the_workspace_stays_as_it_is(lay, judge):
    test = HELLO | {
        "files": {"kept.txt": "theirs", "lost.txt": "theirs"},
        "restore_files": ["lost.txt"],
        "run": "cat kept.txt lost.txt; rm *",
        "expect": {"both": lambda ctx: ctx.stdout == "minetheirs" and not ctx.files},
    }
    workspace = lay({"kept.txt": "mine", "lost.txt": "mine"})
    assert passed(judge(test, workspace))
    assert [path.read_text() for path in sorted(workspace.iterdir())] == ["mine", "mine"]


def test_a_test_of_a_conversation_is_refused(lay, judge):
    with pytest.raises(SpecError, match="check_log"):
        judge(HELLO | {"check_log": {"delegates": bool}}, lay({}))


# --- the environment's verbs ----------------------------------------------------------------------


def test_files_go_up_and_come_back_as_gptme_has_them(make_env, lay):
    env = make_env(lay({"there.txt": "a\n"}))
    env.upload({"new/deep.txt": "b\r\n", "bytes": b"/wA="})
    env.upload({"new/more.txt": "c"})
    stdout, stderr, code = env.run("cat there.txt; printf 'x\\r\\n' >&2; rm there.txt; exit 3")
    assert (stdout, stderr, code) == ("a\n", "x\n", 3)
    assert env.download() == {"new/deep.txt": "b\n", "new/more.txt": "c", "bytes": b"/wA="}
    assert env.download_failed is False
    env.cleanup()
    assert env.sandbox_id is None
    assert env.result.state is State.SCORED


def test_links_are_followed_inside_the_workspace_and_never_out_of_it(make_env):
    env = make_env()
    env.run(
        "mkdir d; echo hi > d/file; ln -s d/file link; ln -s ../link d/again; ln -s loop loop; "
        "ln -s /etc/passwd out; ln -s ../../../../../../../etc/passwd up; ln -s gone gone"
    )
    assert env.download() == dict.fromkeys(("d/file", "d/again", "link"), "hi\n")
    env.cleanup()


def test_nothing_comes_before_the_check(make_env):
    env = make_env()
    with pytest.raises(IllegalFactError, match=r"Downloaded is not legal in NEW .*`run`"):
        env.download()
    env.cleanup()  # nothing was begun, and gptme cleans up whatever happened
    with pytest.raises(SpecError, match="outside"):
        env.upload({"../escape": ""})


def test_a_check_is_run_once_and_nothing_is_sent_after_it(make_env):
    env = make_env()
    env.run("true")
    with pytest.raises(IllegalFactError, match="one check an environment"):
        env.run("true")
    with pytest.raises(IllegalFactError, match="its check was begun"):
        env.upload({"late": ""})
    env.cleanup()
    env.cleanup()
    with pytest.raises(IllegalFactError, match="Uploaded is not legal in SCORED"):
        env.run("true")
    assert env.download() == {}


@pytest.mark.parametrize("state", [State.UPLOADED, State.CHECKED])
def test_an_interrupted_check_is_not_cleaned_up_but_resumed(make_env, backend, monkeypatch, state):
    def interrupt(progress):
        if progress.run.state is state:
            raise KeyboardInterrupt

    monkeypatch.setattr(gptme, "Runner", partial(Runner, observer=interrupt))
    env = make_env()
    with pytest.raises(KeyboardInterrupt):
        env.run("echo precious > file")
    with pytest.raises(IllegalFactError, match=r"CleanedUp is not legal.*resume"):
        env.cleanup()
    with pytest.raises(IllegalFactError, match="Downloaded is not legal"):
        env.download()
    with Runner(backend, env.state) as runner:
        [run_id] = runner.unfinished()
        assert runner.resume(run_id).evidence.read("file") == b"precious\n"


def test_a_lost_download_is_never_taken_for_a_whole_one(make_env):
    env = make_env(faults=LOST)
    stdout, stderr, code = env.run("echo hi | tee made")
    assert (stdout, code) == ("", -1)
    assert env.result.run_id in stderr
    assert env.download_failed is True
    files = env.download()
    for question in (
        lambda: "made" in files,
        lambda: files["made"],
        lambda: files.get("made"),
        lambda: list(files),
        lambda: {**files},
        lambda: bool(files),
        lambda: files == {},
    ):
        with pytest.raises(EvidenceIncompleteError):
            question()
    env.cleanup()
    assert env.result.verdict is Verdict.UNRESOLVED


def test_a_check_of_which_nothing_is_known_raises_and_is_cleaned_up(make_env):
    env = make_env(faults=["upload:error-after"])
    with pytest.raises(
        OrchestratorError, match=r"run \S+: SALVAGED: upload error: .*its answer was lost"
    ):
        env.run("true")
    env.cleanup()
    assert env.sandbox_id is None
    assert env.result.verdict is Verdict.UNRESOLVED


def test_a_deadline_raises_what_gptme_has_a_status_for(make_env):
    env = make_env(deadline_s=0.2)
    with pytest.raises(TimeoutError, match=r"deadline exceeded \(0.2 s\)"):
        env.run("echo begun; sleep 8")
    assert env.result.evidence.stdout == b"begun\n"
    env.cleanup()
    assert env.sandbox_id is None


def test_output_too_long_to_be_kept_raises_and_is_cleaned_up(make_env):
    env = make_env(limits={"output_bytes": 100})
    with pytest.raises(OutputTruncatedError):
        env.run("head -c 1000 /dev/zero")
    env.cleanup()
    assert env.result.state is State.SCORED


def test_a_sandbox_that_is_not_confirmed_gone_keeps_its_id(make_env, backend, caplog):
    env = make_env(faults=["destroy:error-before"])
    assert env.run("true") == ("", "", 0)
    with caplog.at_level(logging.WARNING):
        env.cleanup()
    assert env.sandbox_id == env.result.run_id
    assert env.sandbox_id in caplog.text
    with Runner(backend, env.state) as runner:
        assert [swept.problem for swept in runner.sweep()] == [""]


# --- gptme's own runner ---------------------------------------------------------------------------

HOST = """
import json, os, sys
from pathlib import Path
from gptme.eval import run as host
from gptme.eval.agents import Agent
from gptme.eval.filestore import FileStore
from gptme.eval.types import ModelConfig
from orchestrator.backends.local import LocalBackend
from orchestrator.integrations.gptme import use_in_gptme
from orchestrator.testing.faults import FaultyBackend

PLACE = Path(sys.argv[1])


class Scripted(Agent):
    def act(self, files, prompt):
        store = FileStore(working_dir=self.workspace_dir)
        store.upload({**(files or {}), "hello.py": 'print("Hello, world!")'})
        return store.download()


def make():
    return FaultyBackend(
        LocalBackend(PLACE / "sandboxes"),
        ["fetch:truncated", "fetch#2:truncated", "fetch#3:truncated"] if sys.argv[2] else (),
    )


def greets(context):
    return context.stdout == "Hello, world!\\n"


def test(name, command):
    return {"name": name, "files": {}, "run": command, "prompt": "", "expect": {"greets": greets}}


host.GPTMe = Scripted
use_in_gptme(make, PLACE / "state", deadline_s=0.5)
tests = [test("good", "python hello.py"), test("late", "sleep 8"), test("bad", "exit 124")]
found = host.run_evals(tests, [ModelConfig("none/none", "markdown")], 60, 2, bool(sys.argv[3]))
[results] = found.values()
print(json.dumps([[each.name, each.status, passed(each)] for each in results]) if (
    passed := lambda each: [case.passed for case in each.results]) else "")
"""


def in_gptme(place, *, lost=False, docker=False):
    """Run three evals with gptme's own runner, in a process of its own."""
    logs = {"GPTME_LOGS_HOME": str(place / "logs"), "HOME": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", HOST, place, "lost" if lost else "", "docker" if docker else ""],
        env=os.environ | logs,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("docker", [False, True])
def test_gptmes_own_runner_uses_it(tmp_path, backend, docker):
    assert in_gptme(tmp_path, docker=docker) == [
        ["good", "success", [True]],
        ["late", "timeout", []],
        ["bad", "success", [False]],
    ]
    with Runner(backend, tmp_path / "state") as runner:
        states = [runner.result(run_id).state for run_id in runner.journal.run_ids()]
    assert states == [State.SCORED] * 3
    assert not list((tmp_path / "sandboxes").iterdir())


def test_gptmes_own_runner_scores_nothing_that_was_lost(tmp_path):
    assert ["good", "error", []] in in_gptme(tmp_path, lost=True)


def test_it_takes_the_place_of_every_environment_of_gptme(tmp_path, backend, monkeypatch):
    for name in dir(host):
        if name.endswith("ExecutionEnv") or name == "ProcessPoolExecutor":
            monkeypatch.setattr(host, name, getattr(host, name))
    use_in_gptme(lambda: backend, tmp_path / "state")
    for made in (
        host.SimpleExecutionEnv(working_dir=tmp_path),
        host.OpenShellExecutionEnv(host_dir=tmp_path),
        host.DockerExecutionEnv(),
    ):
        assert isinstance(made, GptmeExecutionEnv)
        assert made.backend is backend
    assert host.ProcessPoolExecutor.keywords["initializer"].func is use_in_gptme


# --- where gptme's own environment says otherwise -------------------------------------------------
# What docs/integrations/gptme.md lists. If one of these fails, gptme has changed: the list as well.


@pytest.fixture
def theirs(tmp_path):
    """gptme's own environment on this machine."""
    env = SimpleExecutionEnv(tmp_path / "theirs")
    yield env
    env.cleanup()


@pytest.fixture
def limit_of_1_s(monkeypatch):
    """gptme's limit of 30 s is written into its code."""
    communicate = subprocess.Popen.communicate
    monkeypatch.setattr(
        subprocess.Popen,
        "communicate",
        lambda self, text=None, timeout=None: communicate(self, text, timeout and 1.0),
    )


def test_gptme_waits_beyond_its_limit_and_calls_it_a_failure(theirs, make_env, limit_of_1_s):
    start = time.monotonic()
    assert theirs.run("sleep 3; echo x") == ("", "", -9)
    assert time.monotonic() - start > 2.5
    ours = make_env(deadline_s=1)
    with pytest.raises(TimeoutError):
        ours.run("sleep 8; echo x")
    assert ours.result.outcome.elapsed_s < 2.5
    ours.cleanup()


def test_gptme_waits_for_what_a_check_left_behind(theirs, make_env):
    check = "sleep 2 & echo hi; exit 0"
    start = time.monotonic()
    assert theirs.run(check) == ("hi\n", "", 0)
    assert time.monotonic() - start > 1.5
    ours = make_env()
    assert ours.run(check) == ("hi\n", "", 0)
    assert ours.result.outcome.descendants == 1
    assert ours.result.outcome.elapsed_s < 1.5
    ours.cleanup()


def test_gptme_leaves_a_silent_daemon_to_write_on(theirs, make_env):
    check = "(trap '' HUP; sleep 0.5; echo late > late) >/dev/null 2>&1 & exit 0"
    theirs.run(check)
    assert "late" not in theirs.download()
    end = time.monotonic() + 30
    while "late" not in theirs.download():  # the same sandbox, another answer
        assert time.monotonic() < end
    ours = make_env()
    ours.run(check)
    assert ours.result.outcome.descendants >= 1
    assert "late" not in ours.download()
    ours.cleanup()


def test_both_say_124_for_exit_124(theirs, make_env):
    ours = make_env()
    assert theirs.run("exit 124") == ours.run("exit 124") == ("", "", 124)
    ours.cleanup()


def test_gptme_takes_a_lost_workspace_for_an_empty_one(theirs, make_env):
    theirs.run("echo hi > made")
    shutil.rmtree(theirs.working_dir)
    assert theirs.download() == {}
    assert not getattr(theirs, "download_failed", False)
    ours = make_env(faults=["fetch:vanished"])
    ours.run("echo hi > made")
    assert ours.download_failed
    ours.cleanup()


def test_gptme_cannot_read_output_that_is_no_text(theirs, make_env):
    with pytest.raises(UnicodeDecodeError):
        theirs.run("printf '\\377'")
    ours = make_env()
    assert ours.run("printf '\\377'") == ("\ufffd", "", 0)
    ours.cleanup()


def test_gptme_gives_a_check_the_secrets_of_its_host(theirs, make_env, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert theirs.run("echo $OPENAI_API_KEY")[0] == "secret\n"
    ours = make_env()
    assert ours.run("echo $OPENAI_API_KEY")[0] == "\n"
    ours.cleanup()


def test_gptme_gives_a_check_the_input_of_its_host():
    program = """
    import sys, tempfile
    from pathlib import Path
    from gptme.eval.execenv import SimpleExecutionEnv
    from orchestrator.backends.local import LocalBackend
    from orchestrator.integrations.gptme import GptmeExecutionEnv
    with tempfile.TemporaryDirectory() as place:
        theirs = SimpleExecutionEnv(Path(place, "theirs"))
        ours = GptmeExecutionEnv(LocalBackend(Path(place, "s")), state=Path(place, "state"))
        print([env.run("head -n 1")[0] for env in (ours, theirs)])
        ours.cleanup()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        input="typed\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['', 'typed\\n']\n"


def test_gptme_reads_through_links_out_of_the_workspace(theirs, make_env):
    outside = Path("/etc/passwd")
    assert theirs.run(f"ln -s {outside} link")[2] == 0
    assert theirs.download()["link"] == outside.read_text()
    ours = make_env()
    ours.run(f"ln -s {outside} link")
    assert "link" not in ours.download()
    ours.cleanup()


def test_gptme_checks_in_the_agents_own_workspace(make_env, lay):
    workspace = lay({"answer": "42"})
    ours = make_env(workspace)
    ours.run("rm answer")
    assert (workspace / "answer").exists()
    SimpleExecutionEnv(workspace).run("rm answer")
    assert not (workspace / "answer").exists()
    ours.cleanup()
