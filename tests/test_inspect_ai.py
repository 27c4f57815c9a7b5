"""Inspect AI: what a run comes to is what its log says, and what is not known is in no number."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("inspect_ai", reason="inspect-ai is not installed (the extra is `inspect`)")

from inspect_ai import Task
from inspect_ai import eval as inspect_eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer
from inspect_ai.solver import solver
from inspect_ai.util import sandbox
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

from orchestrator import EvalSpec, Reason, Runner, SpecError, Verdict
from orchestrator.core.verdict import Tally
from orchestrator.integrations.inspect_ai import check_scorer, tally
from orchestrator.integrations.inspect_sandbox import InspectSandboxBackend, copy_of
from orchestrator.testing.conformance import conform
from orchestrator.testing.faults import FaultyBackend

pytestmark = pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")
LOST = ("fetch:error-before", "fetch#2:error-before", "fetch#3:error-before")


@solver
def agent(command="true"):
    """A solver that asks no model and does one thing in the sandbox."""

    async def solve(state, generate):
        if state.sample_id is not None and command != "true":
            done = await sandbox().exec(["sh", "-c", command])
            assert done.success, done.stderr
        return state

    return solve


@pytest.fixture
def evaluate(tmp_path):
    """Run a task of Inspect's and give its log, read back from disk; `place` is a provider."""

    def run(scorer, *samples, solver=None, place=None, **options):
        task = Task(
            dataset=list(samples) or [Sample(input="?")],
            solver=solver or agent(),
            sandbox=place,
            scorer=scorer,
        )
        [log] = inspect_eval(
            task, model="mockllm/model", display="none", log_dir=str(tmp_path / "logs"), **options
        )
        return read_eval_log(log.location)

    return run


@pytest.fixture
def scored(tmp_path, backend):
    """Make a scorer whose journal and evidence are the test's own."""

    def make(spec, on=backend, **options):
        return check_scorer(spec, on, state_dir=tmp_path / "state", **options)

    return make


def spec(check, **keys):
    return EvalSpec(name="answer", check=check, **{"deadline_s": 20, **keys})


def only(log):
    [sample] = log.samples
    return sample


def score_of(log):
    [score] = only(log).scores.values()
    return score


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "value"), [(0, "C"), (1, "I"), (124, "I")])
def test_a_verdict_is_an_answer(evaluate, scored, code, value):
    score = score_of(evaluate(scored(spec(f"exit {code}"))))
    assert score.value == value
    assert score.answer == f"exited({code})"
    assert score.metadata["outcome"]["exit_code"] == code


def test_a_score_leads_to_its_evidence(tmp_path, backend, evaluate, scored):
    wanted = spec("echo made >made; echo said", files={"given": "as it was"})
    told = score_of(evaluate(scored(wanted))).metadata
    with Runner(backend, tmp_path / "state") as runner:
        result = runner.result(told["run_id"])
    assert (told["verdict"], result.verdict) == ("PASSED", Verdict.PASSED)
    assert result.evidence.text("made") == "made\n"
    assert told["receipt"]["manifest"] == result.evidence.manifest.digest
    assert told["receipt"]["sealed"] is True
    assert told["stdout"] == {"text": "said\n", "bytes": 5, "truncated": False}
    assert told["expectations"] == [
        {"name": "exit_code", "passed": True, "message": "expected exited(0), exited(0)"}
    ]
    assert told["faults"] == []


def test_a_log_holds_the_end_of_long_output(evaluate, scored):
    told = score_of(evaluate(scored(spec("yes | head -c 100000; echo end")))).metadata
    assert told["stdout"]["bytes"] == 100_004
    assert len(told["stdout"]["text"]) == 4000
    assert told["stdout"]["text"].endswith("y\nend\n")


@pytest.mark.parametrize("awaited", [False, True])
def test_a_spec_is_made_of_the_sample(evaluate, scored, awaited):
    def make(state, target):
        return spec(
            "cat answer", files={"answer": state.input_text}, expect={"stdout_equals": target.text}
        )

    async def make_later(state, target):
        await asyncio.sleep(0)
        return make(state, target)

    samples = [Sample(input="42", target="42"), Sample(input="41", target="42")]
    log = evaluate(scored(make_later if awaited else make), *samples)
    assert [sample.scores["check_scorer"].value for sample in log.samples] == ["C", "I"]
    assert log.results.scores[0].metrics["accuracy"].value == 0.5


# --- what is not known ----------------------------------------------------------------------------


def test_unresolved_is_an_error_of_the_sample(tmp_path, backend, evaluate, scored):
    with FaultyBackend(backend, LOST) as faulty:
        log = evaluate(scored(spec("true"), faulty), fail_on_error=False)
    sample = only(log)
    assert not sample.scores
    assert "UNRESOLVED (download_failed)" in sample.error.message
    told = next(event.data for event in sample.events if event.event == "info")
    assert told["verdict"] == "UNRESOLVED"
    assert told["run_id"] in sample.error.message
    assert [fault["phase"] for fault in told["faults"]] == ["download"] * 3
    with Runner(backend, tmp_path / "state") as runner:
        assert runner.result(told["run_id"]).reason is Reason.DOWNLOAD_FAILED
    assert tally(log) == Tally(unresolved=1)


def test_unresolved_is_in_no_average(backend, evaluate, scored):
    with FaultyBackend(backend, LOST) as faulty:
        log = evaluate(
            scored(spec("true"), faulty, jobs=1),
            *(Sample(input=str(number)) for number in range(3)),
            fail_on_error=False,
            max_samples=1,
        )
    assert log.status == "success"
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert (log.results.total_samples, log.results.completed_samples) == (3, 2)
    assert tally(log).bounds == (2 / 3, 1.0)


def test_unresolved_fails_the_eval_where_errors_do(backend, evaluate, scored):
    with FaultyBackend(backend, LOST) as faulty:
        log = evaluate(scored(spec("true"), faulty), fail_on_error=True)
    assert log.status == "error"
    assert "UNRESOLVED" in log.error.message


def test_inspect_tries_an_unresolved_sample_again(backend, evaluate, scored):
    with FaultyBackend(backend, LOST) as faulty:
        log = evaluate(scored(spec("true"), faulty), retry_on_error=1)
    sample = only(log)
    assert sample.error is None
    assert sample.scores["check_scorer"].value == "C"
    [before] = sample.error_retries
    assert "UNRESOLVED (download_failed)" in before.message
    assert sample.scores["check_scorer"].metadata["run_id"] not in before.message


def test_attempts_run_the_check_again_and_not_the_model(backend, evaluate, scored):
    asked = []

    @solver
    def counting():
        async def solve(state, generate):
            asked.append(state.sample_id)
            return state

        return solve

    with FaultyBackend(backend, LOST) as faulty:
        log = evaluate(scored(spec("true"), faulty, attempts=2), solver=counting())
    told = score_of(log).metadata
    assert (told["verdict"], len(asked)) == ("PASSED", 1)
    assert told["retry_of"] is not None


def test_attempts_stop_where_another_would_meet_the_same(evaluate, scored):
    wanted = spec(
        "yes | head -c 100000", limits={"output_bytes": 10}, expect={"stdout_contains": "no"}
    )
    log = evaluate(scored(wanted, attempts=3), fail_on_error=False)
    told = [event.data for event in only(log).events if event.event == "info"]
    assert [each["reason"] for each in told] == ["output_truncated"]


def test_a_limit_of_the_sample_leaves_nothing_behind(tmp_path, backend, evaluate, scored):
    log = evaluate(scored(spec("sleep 60")), time_limit=2, fail_on_error=False)
    assert not only(log).scores
    assert tally(log).unresolved == 1
    with Runner(backend, tmp_path / "state") as runner:
        [run_id] = runner.journal.run_ids()
        result = runner.result(run_id)
    assert result.reason is Reason.CANCELLED
    assert result.retained_sandbox is None
    assert not list(backend.root.iterdir())


# --- work of the sample ---------------------------------------------------------------------------


def test_work_arrives_as_it_was_left(evaluate, scored):
    left = r"""
        mkdir -p tool empty shut; printf '#!/bin/sh\necho ran\n' >tool/run; chmod 755 tool/run
        ln -s tool/run link; ln -s /nowhere dangling; head -c 3000000 /dev/urandom >large
        printf x >"$(printf 'bad\377name')"; echo s >shut/s; chmod 0 shut/s shut; cp large copy
    """
    kept = [
        {"path": path, "unchanged": True}
        for path in ("tool/run", "empty", "link", "dangling", "large", "copy", "bad\udcffname")
    ]
    wanted = spec("./link; cmp large copy", expect={"stdout_equals": "ran\n", "files": kept})
    log = evaluate(scored(wanted, work=copy_of(".")), solver=agent(left), place="local")
    told = score_of(log)
    assert told.value == "C", told.explanation
    assert told.metadata["evidence"]["entries"] == 10


def test_files_of_the_spec_are_laid_over_the_work(evaluate, scored):
    wanted = spec("sh test.sh", files={"test.sh": "grep -q 42 answer"})
    cheat = agent("echo 41 >answer; echo exit 0 >test.sh")
    log = evaluate(scored(wanted, work=copy_of()), solver=cheat, place="local")
    assert score_of(log).value == "I"


def test_work_that_is_not_there_is_no_empty_work(evaluate, scored):
    wanted = spec("test ! -e junk")
    log = evaluate(scored(wanted, work=copy_of("typo")), place="local", fail_on_error=False)
    assert not only(log).scores
    assert "typo" in only(log).error.message


def test_work_that_arrives_short_is_not_scored(evaluate, scored, monkeypatch):
    read = LocalSandboxEnvironment.read_file

    async def short(self, file, *, text):
        content = await read(self, file, text)
        return content[:-1] if file.endswith(".cut") else content

    monkeypatch.setattr(LocalSandboxEnvironment, "read_file", short)
    many = agent("head -c 2000000 /dev/urandom >large")
    log = evaluate(
        scored(spec("true"), work=copy_of()), solver=many, place="local", fail_on_error=False
    )
    assert not only(log).scores
    assert "bytes arrived" in only(log).error.message


# --- the log elsewhere ----------------------------------------------------------------------------

TASK = """
    from inspect_ai import Task, task
    from inspect_ai.dataset import Sample
    from inspect_ai.solver import solver

    from orchestrator import EvalSpec
    from orchestrator.backends.local import LocalBackend
    from orchestrator.integrations.inspect_ai import check_scorer

    @solver
    def silent():
        async def solve(state, generate):
            return state
        return solve

    @task
    def answers():
        spec = EvalSpec(name="answer", check="exit 0", deadline_s=20)
        backend = LocalBackend("sandboxes")
        return Task([Sample(input="?")], solver=silent(), scorer=check_scorer(spec, backend))
"""


def test_the_command_line_of_inspect_runs_it(tmp_path):
    (tmp_path / "answers.py").write_text(textwrap.dedent(TASK))
    command = [sys.executable, "-m", "inspect_ai", "eval", "answers.py"]
    done = subprocess.run(
        [*command, "--model", "mockllm/model", "--display", "none", "--log-dir", "logs"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [file] = (tmp_path / "logs").glob("*.eval")
    log = read_eval_log(str(file))
    assert score_of(log).value == "C"
    assert (tmp_path / ".orchestrator" / "journal.db").exists()


def test_the_viewer_of_inspect_opens_the_log(evaluate, scored):
    import httpx  # noqa: PLC0415

    pytest.importorskip("uvicorn", reason="this Inspect has a viewer of another kind")
    from inspect_ai._view.fastapi_server import view_server_app  # noqa: PLC0415

    log = evaluate(scored(spec("exit 0")))

    async def opened():
        transport = httpx.ASGITransport(app=view_server_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://viewer") as client:
            return await client.get(f"/logs/{Path(log.location)}")

    answer = asyncio.run(opened())
    assert answer.status_code == 200, answer.text
    [sample] = json.loads(answer.text)["samples"]
    assert sample["scores"]["check_scorer"]["metadata"]["verdict"] == "PASSED"


# --- in the sample's own sandbox ------------------------------------------------------------------


@pytest.fixture
def inside(scored, tmp_path):
    """Make a scorer that runs its check in the sample's sandbox."""

    def make(spec, faults=(), **options):
        def backend(environment):
            inner = InspectSandboxBackend(environment, root=str(tmp_path / "inside"))
            return FaultyBackend(inner, faults)

        return scored(spec, backend, **options)

    return make


def usual(wanted, limit_s=None):
    """Score as scorers of Inspect commonly do: run it, and take a timeout for a wrong answer."""

    @scorer(metrics=[accuracy()], name="usual")
    def make():
        async def score(state, target):
            try:
                done = await sandbox().exec(["sh", "-c", wanted.check], timeout=limit_s)
            except TimeoutError:
                return Score(value=INCORRECT, explanation="timed out")
            return Score(value=CORRECT if done.success else INCORRECT, explanation=done.stdout)

        return score

    return make()


def test_a_check_runs_in_the_sandbox_of_the_sample(tmp_path, evaluate, inside):
    wanted = spec('echo here >made; cat given "$HOME/../workspace/made"', files={"given": "was "})
    told = score_of(evaluate(inside(wanted), place="local")).metadata
    assert (told["verdict"], told["stdout"]["text"]) == ("PASSED", "was here\n")
    assert (told["backend"], told["isolation"]) == ("inspect", "none")
    assert (told["evidence"]["created"], told["evidence"]["sealed"]) == (1, True)
    assert not list((tmp_path / "inside").iterdir())


def test_work_can_be_checked_where_it_was_done(evaluate, inside):
    wanted = spec("./tool", files={"expected": "42"}, expect={"stdout_equals": "42"})
    left = agent("printf '#!/bin/sh\nexec cat expected\n' >tool; chmod +x tool; echo 41 >expected")
    log = evaluate(inside(wanted, work=copy_of(".")), solver=left, place="local")
    assert score_of(log).value == "C"


@pytest.fixture
def in_place(scored, tmp_path):
    """Make a scorer that runs its check in the directory in which the agent worked."""

    def make(spec, directory, **options):
        place = {"directory": str(directory), "root": str(tmp_path / "inside")}
        return scored(spec, partial(InspectSandboxBackend, **place), **options)

    return make


def test_work_can_be_checked_in_place(tmp_path, evaluate, in_place):
    app = tmp_path / "app"
    left = agent(f"mkdir {app}; cd {app}; pwd >where; echo exit 0 >test.sh; echo old >old")
    wanted = spec("sh test.sh", files={"test.sh": 'test "$(pwd)" = "$(cat where)" && rm old'})
    told = score_of(evaluate(in_place(wanted, app), solver=left, place="local")).metadata
    assert told["verdict"] == "PASSED", told
    assert (told["evidence"]["entries"], told["evidence"]["deleted"]) == (2, 1)
    assert sorted(path.name for path in app.iterdir()) == ["test.sh", "where"]


def test_a_place_that_is_not_there_is_no_empty_one(tmp_path, evaluate, in_place):
    scorer = in_place(spec("true"), tmp_path / "typo", attempts=2)
    log = evaluate(scorer, place="local", fail_on_error=False)
    assert not only(log).scores
    assert "typo: not a directory" in only(log).error.message


def test_a_limit_of_the_sample_leaves_nothing_in_its_sandbox(tmp_path, evaluate, inside):
    log = evaluate(inside(spec("sleep 60")), place="local", time_limit=4, fail_on_error=False)
    assert tally(log) == Tally(unresolved=1)
    assert not list((tmp_path / "inside").iterdir())


def test_a_deadline_is_the_checks_and_not_the_clients(evaluate, inside):
    wanted = spec("sleep 8; echo x", deadline_s=1)
    [ours] = only(evaluate(inside(wanted), place="local")).scores.values()
    outcome = ours.metadata["outcome"]
    assert (ours.value, outcome["kind"]) == ("I", "deadline_exceeded")
    assert 1 <= outcome["elapsed_s"] < 4


def test_a_daemon_is_no_timeout(evaluate, inside):
    wanted = spec("echo hi; sleep 4 & exit 0", expect={"stdout_equals": "hi\n"})
    theirs = score_of(evaluate(usual(wanted, limit_s=1), place="local"))
    ours = score_of(evaluate(inside(wanted), place="local"))
    assert (theirs.value, theirs.explanation) == ("I", "timed out")
    assert (ours.value, ours.answer) == ("C", "exited(0)")
    assert ours.metadata["outcome"]["descendants"] == 1


def test_exit_124_is_no_timeout(evaluate, inside):
    wanted = spec("exit 124", expect={"exit_code": 124})
    assert score_of(evaluate(inside(wanted), place="local")).value == "C"


def test_output_that_is_cut_answers_nothing(evaluate, inside):
    wanted = spec(
        "echo WRONG; yes | head -c 11000000", expect={"right": lambda e: b"wrong" not in e.stdout}
    )
    theirs = score_of(evaluate(usual(wanted), place="local"))
    log = evaluate(inside(wanted), place="local", fail_on_error=False)
    assert "WRONG" not in theirs.explanation  # Inspect keeps the end, and does not say so
    assert not only(log).scores
    assert "output_truncated" in only(log).error.message


@pytest.mark.parametrize("way", ["error-before", "truncated", "left-out"])
def test_a_lost_download_is_no_answer(evaluate, inside, way):
    wanted = spec("echo junk >junk", expect={"files": [{"path": "junk", "exists": False}]})
    faults = [f"fetch{number}:{way}" for number in ("", "#2", "#3")]
    log = evaluate(inside(wanted, faults), place="local", fail_on_error=False)
    assert not only(log).scores
    assert "UNRESOLVED (download_failed)" in only(log).error.message


def test_checks_do_not_hold_each_other_up(tmp_path, evaluate, inside):
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)

    def either(state, target):
        return spec(f"echo met >{meeting}" if state.sample_id == 1 else f"cat {meeting}")

    log = evaluate(inside(either, jobs=2), Sample(input="1"), Sample(input="2"), place="local")
    assert tally(log) == Tally(passed=2)


CHECKS = (
    "signals",
    "printed_text_decides_nothing",
    "deadline_waits_for_no_pipe",
    "daemons_without_a_trace_do_not_escape",
    "output_is_bytes",
    "environment_does_not_leak",
    "names_arrive",
    "short_uploads_are_refused",
    "locked_files_come_back",
    "missing_is_not_absent",
    "recreated_sandboxes_are_never_scored",
    "orders_are_executed_once",
    "late_orders_never_start",
    "settling_stops_what_runs",
    "client_timeouts_are_settled",
    "interrupted_runs_are_resumed",
)
"""The others hold, too, and all of them together take minutes: `conform(make)`."""


@pytest.fixture(scope="module")
def make_backend(tmp_path_factory):
    """Make backends over one sandbox of Inspect's, in an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    async def open_sandbox():
        return LocalSandboxEnvironment()

    async def make():
        return InspectSandboxBackend(environment, root=str(root))

    root, environment = tmp_path_factory.mktemp("inside"), there(open_sandbox())
    yield lambda: there(make())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()
    environment.directory.cleanup()


@pytest.mark.parametrize("name", CHECKS)
def test_the_backend_conforms(make_backend, name):
    [finding] = conform(make_backend, only=[name])
    assert finding.ok is True, finding.reason


@pytest.mark.parametrize(
    ("key", "value"), [("limits", {"memory_bytes": 1}), ("limits", {"cpus": 1}), ("image", "x")]
)
def test_what_is_inspects_to_set_is_refused(make_backend, key, value):
    with pytest.raises(SpecError, match="the sandbox is Inspect's"):
        make_backend().refuse(spec("true", **{key: value}))
