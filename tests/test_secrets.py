"""Variables that are given by name: they reach the programs, and nothing that is kept."""

import sqlite3

import pytest

from orchestrator import EvalSpec, Runner, SpecError, Verdict
from orchestrator.backends.local import LocalBackend, LocalSandbox

SECRET = "s3cr3t-%\\n-of-the-runner"


@pytest.fixture
def runner(tmp_path):
    backend = LocalBackend(tmp_path / "sandboxes")
    with Runner(backend, tmp_path / "state") as runner:
        yield runner
    backend.close()


def spec(**given):
    return EvalSpec(
        **{"name": "secret", "secrets": ["KEY"], "check": 'test "$KEY" = "$WANTED"'} | given
    )


def test_a_secret_reaches_setup_and_check_and_nothing_that_is_kept(runner, tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", SECRET)
    same = 'test "$(printf %s "$KEY" | wc -c)" = ' + str(len(SECRET))
    result = runner.run(
        spec(
            setup=same, check=f"{same}; ps -ef; tr '\\0' ' ' </proc/$$/cmdline", retain="unresolved"
        )
    )
    assert result.verdict is Verdict.PASSED, result
    runner.journal.close()
    kept = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        assert SECRET.encode() not in path.read_bytes(), path
    with sqlite3.connect(tmp_path / "state" / "journal.db") as database:
        assert SECRET not in "\n".join(database.iterdump())
    assert SECRET not in str(result)
    assert SECRET not in str(result.as_json())


def test_a_secret_that_is_not_set_is_refused_before_anything_is_begun(runner, monkeypatch):
    monkeypatch.delenv("KEY", raising=False)
    with pytest.raises(SpecError, match="secrets: KEY is not set here"):
        runner.run(spec())
    assert runner.journal.run_ids() == []


def test_a_run_whose_check_is_to_come_is_not_resumed_without_its_secrets(runner, monkeypatch):
    monkeypatch.setenv("KEY", SECRET)
    record, _ = runner.begin(spec(check='test "$KEY" = other'))
    runner.journal.release(record.run_id)
    monkeypatch.delenv("KEY")
    with pytest.raises(SpecError, match="secrets: KEY is not set here"):
        runner.resume(record.run_id)
    monkeypatch.setenv("KEY", "other")
    assert runner.resume(record.run_id).verdict is Verdict.PASSED


def test_an_order_does_not_show_its_secrets(runner, monkeypatch):
    monkeypatch.setenv("KEY", SECRET)
    seen = []

    def execute(self, order):
        seen.append(order)
        raise OSError(f"cannot run {order}")

    monkeypatch.setattr(LocalSandbox, "execute", execute)
    result = runner.run(spec(check="true"))
    assert seen[0].env["KEY"] == SECRET
    assert "cannot run Order" in str(result.faults)
    assert SECRET not in str(result.faults)
    assert seen[0].nonce not in str(result.faults)
