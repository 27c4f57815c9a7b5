"""Sandboxes that nobody will come back for: found by their labels, ended by the lifecycle."""

import subprocess
import sys

import pytest

from orchestrator import EvalSpec, Runner, Verdict
from orchestrator.backends.local import LocalBackend
from orchestrator.owner import alive, owner
from orchestrator.ports import Labelled
from orchestrator.strays import sweep_all

ABANDON = """
import os, sys
from orchestrator import EvalSpec, Runner
from orchestrator.backends.local import LocalBackend

def stop(progress):
    if progress.run.state.value == sys.argv[3]:
        print(progress.run.run_id, flush=True)
        os._exit(1)

runner = Runner(LocalBackend(sys.argv[1]), sys.argv[2], observer=stop)
runner.run(EvalSpec(name="left", check="echo x >> runs.log", expect={"exit_code": 0}))
"""


def abandon(root, state_dir, state):
    """Have another process begin a run and die in a state; give the run's id."""
    done = subprocess.run(
        [sys.executable, "-c", ABANDON, str(root), str(state_dir), state],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "sandboxes"


@pytest.fixture
def runner(root, tmp_path):
    backend = LocalBackend(root)
    with Runner(backend, tmp_path / "mine") as runner:
        yield runner
    backend.close()


def test_a_process_has_a_name_that_survives_the_reuse_of_its_id():
    name = owner()
    assert alive(name) is True
    machine, boot, pid, started = name.split(".")
    assert alive(f"{machine}.{boot}.{pid}.{int(started) + 1}") is False
    assert alive(f"{machine}.{'0' * 12}.{pid}.{started}") is False
    assert alive(f"{'0' * 12}.{boot}.{pid}.{started}") is None
    assert alive("") is None
    assert len(name) < 64


def test_a_runner_labels_its_sandboxes(runner, tmp_path):
    seen = []

    def look(progress):
        if progress.run.state.value == "UPLOADED":
            seen.extend(runner.backend.labelled())

    with Runner(runner.backend, tmp_path / "mine", observer=look) as watched:
        run_id = watched.run(EvalSpec(name="x", check="true")).run_id
    assert seen == [Labelled(run_id, owner(), str(tmp_path / "mine"))]
    assert runner.backend.labelled() == []


@pytest.mark.parametrize("state", ["UPLOADED", "CHECKED", "DOWNLOADED"])
def test_a_run_of_another_journal_is_finished_there(runner, root, tmp_path, state):
    run_id = abandon(root, tmp_path / "theirs", state)
    assert list(sweep_all(runner)) == []
    assert runner.backend.labelled() == []
    assert runner.journal.run_ids() == []
    with Runner(runner.backend, tmp_path / "theirs") as theirs:
        result = theirs.result(run_id)
    assert result.verdict is Verdict.PASSED
    assert result.evidence.read("runs.log") == b"x\n"


def test_what_no_journal_has_becomes_a_run_here_and_its_evidence_is_saved_first(
    runner, root, tmp_path
):
    run_id = abandon(root, tmp_path / "theirs", "CHECKED")
    (tmp_path / "theirs").rename(tmp_path / "gone")
    (swept,) = sweep_all(runner)
    assert (swept.run_id, swept.problem) == (run_id, "")
    assert runner.backend.labelled() == []
    result = runner.result(run_id)
    assert result.verdict is Verdict.UNRESOLVED
    assert "found by its label" in result.faults[0].message
    assert result.evidence.read("runs.log") == b"x\n"
    assert list(sweep_all(runner)) == []


def test_what_a_live_runner_made_is_not_touched(runner, tmp_path):
    with Runner(runner.backend, tmp_path / "other") as other:
        record, step = other.begin(EvalSpec(name="x", check="true"))
        steps = other.steps(record, step)
        next(steps), next(steps)
        (found,) = runner.backend.labelled()
        assert list(sweep_all(runner)) == []
        assert runner.backend.labelled() == [found]
        *_, last = steps
        assert last.run.verdict is Verdict.PASSED


def test_what_another_machine_made_is_listed_and_left(runner, root):
    runner.backend.create("foreign", EvalSpec(name="x", check="true"))
    label = root / "foreign" / "label"
    machine, rest = owner().split(".", 1)
    label.write_text(f"{machine[::-1]}.{rest}\n")
    (swept,) = sweep_all(runner)
    assert swept.run_id == "foreign"
    assert "another machine" in swept.problem
    assert label.exists()


def test_what_came_after_its_run_was_cleaned_up_is_destroyed(runner):
    result = runner.run(EvalSpec(name="x", check="true"))
    runner.backend.create(result.run_id, EvalSpec(name="x", check="true"))
    (swept,) = sweep_all(runner)
    assert (swept.run_id, swept.problem) == (result.run_id, "")
    assert runner.backend.labelled() == []
    assert runner.result(result.run_id).verdict is Verdict.PASSED


def test_a_process_in_another_namespace_is_neither_dead_nor_alive_from_here():
    program = "from orchestrator.owner import owner; print(owner())"
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    said = subprocess.run(argv, capture_output=True, text=True, check=False)
    if said.returncode:
        pytest.skip(f"no namespaces here: {said.stderr}")
    assert alive(said.stdout.strip()) is None


def test_what_two_journals_keep_on_purpose_does_not_send_a_sweep_in_circles(runner, root, tmp_path):
    program = (
        "import sys\n"
        "from orchestrator import EvalSpec, Runner\n"
        "from orchestrator.backends.local import LocalBackend\n"
        "spec = EvalSpec(name='x', check='true', setup='exit 1', retain='unresolved')\n"
        "Runner(LocalBackend(sys.argv[1]), sys.argv[2]).run(spec)\n"
    )
    for name in ("one", "other"):
        argv = [sys.executable, "-c", program, root, tmp_path / name]
        subprocess.run(argv, check=True)
    assert list(sweep_all(runner)) == []
    assert len(runner.backend.labelled()) == 2
    assert [each.problem for each in sweep_all(runner, kept=True)] == ["", ""]


def test_a_journal_that_cannot_be_read_keeps_nothing_else_from_being_swept(runner, root, tmp_path):
    unknown = abandon(root, tmp_path / "damaged", "CHECKED")
    gone = abandon(root, tmp_path / "theirs", "CHECKED")
    (tmp_path / "damaged" / "journal.db").write_bytes(b"no database" * 99)
    (tmp_path / "theirs").rename(tmp_path / "gone")
    problems = {each.run_id: each.problem for each in sweep_all(runner)}
    assert "damaged" in problems[unknown]
    assert problems[gone] == ""


def test_a_sweep_that_was_killed_while_it_adopted_is_finished_by_the_next(runner, root, tmp_path):
    run_id = abandon(root, tmp_path / "theirs", "UPLOADED")
    (tmp_path / "theirs").rename(tmp_path / "gone")
    begin = runner.journal.begin

    def die(*args, **options):
        begin(*args, **options)
        raise KeyboardInterrupt

    runner.journal.begin = die
    with pytest.raises(KeyboardInterrupt):
        list(sweep_all(runner))
    runner.journal.release(run_id)
    del runner.journal.begin
    (swept,) = sweep_all(runner)
    assert (swept.run_id, swept.problem) == (run_id, "")
    assert runner.result(run_id).verdict is Verdict.UNRESOLVED
