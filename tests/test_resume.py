"""A runner that is killed, at every moment at which that could matter, and the one that resumes.

A real process, a real SIGKILL: the script below is the runner, and it kills itself before or after
the n-th write of its journal, or in the middle of performing a command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from orchestrator import EvalSpec, Runner, Verdict
from orchestrator.backends.local import LocalBackend

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = textwrap.dedent(
    """
    import json, os, signal, sys
    from orchestrator import EvalSpec, Runner
    from orchestrator.backends.local import LocalBackend, LocalSandbox
    from orchestrator.journal import Journal
    from orchestrator.vault import Vault

    state, sandboxes, spec, where, number = sys.argv[1:]
    seen = 0

    def die_at(kind):
        global seen
        if kind == where:
            seen += 1
            if seen == int(number):
                os.kill(os.getpid(), signal.SIGKILL)

    commit = Journal.append
    def append(self, *arguments):
        die_at("before write")
        commit(self, *arguments)
        die_at("after write")
    Journal.append = append
    begin = Journal.begin
    def begin_and_die(self, *arguments, **options):
        answer = begin(self, *arguments, **options)
        die_at("after write")
        return answer
    Journal.begin = begin_and_die
    for kind, verbs in {LocalSandbox: ["upload", "manifest", "execute", "fetch", "destroy"],
                        LocalBackend: ["create"], Vault: ["seal"]}.items():
        for verb in verbs:
            def wrapped(self, *arguments, _act=getattr(kind, verb), _verb=verb, **options):
                die_at("before " + _verb)
                answer = _act(self, *arguments, **options)
                die_at("after " + _verb)
                return answer
            setattr(kind, verb, wrapped)

    runner = Runner(LocalBackend(sandboxes), state)
    if spec == "resume":
        for run_id in runner.unfinished():
            runner.resume(run_id)
    else:
        runner.run(EvalSpec(**json.loads(spec)))
    """
)
POINTS = [
    *[("before write", number) for number in range(1, 6)],
    *[("after write", number) for number in range(1, 7)],
    *[
        (f"{when} {verb}", number)
        for verb, times in (
            ("create", 1),
            ("upload", 1),
            ("manifest", 3),
            ("execute", 2),
            ("fetch", 1),
            ("seal", 1),
            ("destroy", 1),
        )
        for when in ("before", "after")
        for number in range(1, times + 1)
    ],
]


def run_script(tmp_path: Path, spec: str, where: str, number: int) -> int:
    script = tmp_path / "runner.py"
    script.write_text(SCRIPT)
    arguments = [str(tmp_path / "state"), str(tmp_path / "sandboxes"), spec, where, str(number)]
    return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode


def snapshot(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        str(path.relative_to(directory)): (
            path.read_bytes(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(("where", "number"), POINTS, ids=str)
def test_a_runner_killed_anywhere_is_resumed_to_the_same_verdict(tmp_path, where, number):
    """No verdict lost, no check run twice, no sandbox left, the original untouched."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "input").write_text("given\n")
    runs_log = tmp_path / "runs.log"
    spec = {
        "name": "killed",
        "workspace": str(workspace),
        "setup": "echo prepared > prepared",
        "check": f"echo x >> {runs_log}; cat input prepared > output; sleep 0.05; echo end",
        "deadline_s": 20.0,
        "expect": {
            "exit_code": 0,
            "stdout_equals": "end\n",
            "files": [
                {"path": "output", "equals": "given\nprepared\n"},
                {"path": "prepared", "unchanged": True},
                {"path": "input", "unchanged": True},
            ],
        },
    }
    before = snapshot(workspace)
    assert run_script(tmp_path, json.dumps(spec), where, number) == -signal.SIGKILL
    assert run_script(tmp_path, "resume", where, number) in {0, -signal.SIGKILL}, "killed twice"
    backend = LocalBackend(tmp_path / "sandboxes")
    with Runner(backend, tmp_path / "state") as runner:
        run_ids = runner.journal.run_ids()
        for run_id in runner.unfinished():
            runner.resume(run_id)
        results = [runner.result(run_id) for run_id in run_ids]
    backend.close()
    assert [result.verdict for result in results] == [Verdict.PASSED], results
    assert runs_log.read_text() == "x\n"
    assert list(backend.root.iterdir()) == []
    assert snapshot(workspace) == before
    assert results[0].retained_sandbox is None


def test_a_runner_killed_while_its_check_runs_is_resumed_by_one_that_joins_the_check(tmp_path):
    """Killed with the check in mid-run, many times over: it goes on, and ends once."""
    started, go = tmp_path / "started", tmp_path / "go"
    os.mkfifo(started)
    os.mkfifo(go)
    check = f"echo x > {started}; read line < {go}; echo $line"
    spec = {"name": "x", "check": check, "expect": {"stdout_equals": "went\n"}}
    script = tmp_path / "runner.py"
    script.write_text(SCRIPT)
    places = [str(tmp_path / "state"), str(tmp_path / "sandboxes")]
    first = subprocess.Popen([sys.executable, str(script), *places, json.dumps(spec), "never", "1"])
    assert started.read_text() == "x\n"  # opens when the check opens it
    first.kill()
    first.wait()
    second = subprocess.Popen([sys.executable, str(script), *places, "resume", "never", "1"])
    go.write_text("went\n")
    assert second.wait(timeout=60) == 0
    backend = LocalBackend(tmp_path / "sandboxes")
    with Runner(backend, tmp_path / "state") as runner:
        (run_id,) = runner.journal.run_ids()
        assert runner.result(run_id).verdict is Verdict.PASSED
    backend.close()


def test_finished_runs_are_never_run_again(tmp_path):
    backend = LocalBackend(tmp_path / "sandboxes")
    counter = tmp_path / "counter"
    spec = EvalSpec(name="x", check=f"echo x >> {counter}")
    with Runner(backend, tmp_path / "state") as runner:
        result = runner.run(spec)
        assert runner.unfinished() == []
        again = runner.resume(result.run_id)
    backend.close()
    assert again.verdict is result.verdict
    assert counter.read_text() == "x\n"
