"""The command line as its users meet it: as a process, by what it prints and how it exits."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

PASSES = '[[eval]]\nname = "passes"\ncheck = "echo hi"\n[eval.expect]\nstdout_equals = "hi\\n"\n'
FAILS = '[[eval]]\nname = "fails"\ncheck = "exit 7"\n'
UNRESOLVED = '[[eval]]\nname = "unresolved"\nsetup = "exit 1"\ncheck = "true"\n'
KEYS = [
    "run_id",
    "name",
    "backend",
    "verdict",
    "reason",
    "outcome",
    "expectations",
    "evidence",
    "stdout",
    "stderr",
    "faults",
    "retained_sandbox",
    "timings",
]


@pytest.fixture
def cli(tmp_path):
    """Run the command line in a directory of its own; give what it printed and its status."""
    own = {"TMPDIR": str(tmp_path / "tmp"), "COLUMNS": "200"}
    (tmp_path / "tmp").mkdir()

    def run(*arguments: str, status: int | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *arguments],
            cwd=tmp_path,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.mark.parametrize(
    ("specs", "status"),
    [
        (PASSES, 0),
        (PASSES + FAILS, 1),
        (PASSES + FAILS + UNRESOLVED, 3),
        (PASSES + UNRESOLVED, 3),
    ],
    ids=["all passed", "some failed", "some failed and some unresolved", "some unresolved"],
)
def test_the_exit_status_of_run_tells_the_verdicts(cli, tmp_path, specs, status):
    (tmp_path / "a.toml").write_text(specs)
    done = cli("run", "a.toml", status=status)
    assert "passed" in done.stderr
    assert done.stdout == ""


def test_json_is_one_object_a_run_with_the_promised_keys(cli, tmp_path):
    (tmp_path / "a.toml").write_text(PASSES + FAILS + UNRESOLVED)
    done = cli("run", "a.toml", "--json", "--jobs", "3", status=3)
    results = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert {name: each["verdict"] for name, each in results.items()} == {
        "passes": "PASSED",
        "fails": "FAILED",
        "unresolved": "UNRESOLVED",
    }
    for each in results.values():
        assert set(KEYS) <= set(each)
    passed = results["passes"]
    assert passed["reason"] is None
    assert passed["backend"] == "local"
    assert passed["stdout"] == {"text": "hi\n", "bytes": 3, "truncated": False}
    assert passed["expectations"] == [
        {"name": "stdout_equals", "passed": True, "message": passed["expectations"][0]["message"]}
    ]
    outcome = passed["outcome"]
    assert (outcome["kind"], outcome["exit_code"], outcome["signal"]) == ("exited", 0, None)
    assert outcome["observed_by"] == "guest"
    assert set(passed["evidence"]) == {
        "sealed",
        "entries",
        "bytes",
        "created",
        "modified",
        "deleted",
        "path",
    }
    lost = results["unresolved"]
    assert lost["reason"] == "setup_failed"
    assert lost["outcome"] is None
    assert lost["faults"][0].keys() == {"phase", "kind", "message"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[eval]]\nname = "x"\ncheck = "true"\ndeadlin_s = 3\n', ["deadlin_s", "deadline_s"]),
        ('[[eval]]\nname = "x"\n', ["number 1 (x)", "check", "missing"]),
        ('[[eval]]\ncheck = "true"\n', ["number 1", "name", "missing"]),
        ('[[eval]]\nname = "x"\ncheck = 3\n', ["check", "got 3"]),
        ('[[eval]]\nname = "x"\ncheck = "true"\ndeadline_s = "3"\n', ["deadline_s", "'3'"]),
        ('[[eval]]\nname = "x"\ncheck = "true"\nbackstop_s = 3\n', ["backstop_s", "cut"]),
        ('[[eval]]\nname = "x"\ncheck = "true"\nworkspace = "nowhere"\n', ["workspace", "nowhere"]),
        ('[[eval]]\nname = "x"\ncheck = "true"\n[eval.expect]\nexit = 1\n', ["exit", "exit_code"]),
        ('[[evals]]\nname = "x"\n', ["evals", "'eval'"]),
        ("[[eval]\n", ["not TOML", "line 1"]),
        ("", ["eval", "missing"]),
        ("\xff", ["not UTF-8"]),
        (
            PASSES + '[[eval]]\nname = "y"\ncheck = "true"\nlimits = {memory_bytes = 1}\n',
            ["limits.memory_bytes"],
        ),
    ],
)
def test_a_bad_spec_is_refused_by_file_key_and_expectation_and_nothing_is_started(
    cli, tmp_path, text, words
):
    (tmp_path / "bad.toml").write_bytes(text.encode("latin-1"))
    done = cli("run", "bad.toml", status=2)
    for word in [*words, "expected"]:
        assert word in done.stderr
    assert json.loads("[" + ",".join(cli("runs", "--json").stdout.split()) + "]") == []


def test_bad_usage_exits_with_2(cli):
    cli("run", status=2)
    cli("run", "nowhere.toml", status=2)
    cli("run", "x", "--bogus", status=2)
    cli("show", "nothing", status=2)
    cli("resume", status=2)
    cli("run", "x", "--jobs", "0", status=2)


def test_runs_and_show_tell_what_was_done_and_escape_what_was_printed(cli, tmp_path):
    (tmp_path / "a.toml").write_text(
        '[[eval]]\nname = "raw"\ncheck = \'printf "\\377\\000\\033[2Jx"; echo y > made\'\n'
    )
    result = json.loads(cli("run", "a.toml", "--json", status=0).stdout)
    listed = cli("runs", status=0).stdout
    assert result["run_id"] in listed
    assert "PASSED" in listed
    shown = cli("show", result["run_id"][:12], status=0).stdout
    assert "\x1b" not in shown
    assert "\\x1b[2Jx" in shown
    for word in ("Uploaded", "Checked", "Downloaded", "CleanedUp", "Scored", "sealed"):
        assert word in shown
    assert json.loads(cli("show", result["run_id"], "--json").stdout) == result
    cli("show", result["run_id"], "--export", "tree", status=0)
    assert (tmp_path / "tree" / "made").read_text() == "y\n"
    cli("show", result["run_id"], "--export", "tree", status=2)


def test_a_journal_that_cannot_be_used_is_named_and_left_alone(cli, tmp_path):
    (tmp_path / "a.toml").write_text(PASSES)
    (tmp_path / ".orchestrator").mkdir()
    journal = tmp_path / ".orchestrator" / "journal.db"
    journal.write_bytes(b"not a journal at all, but more than a hundred bytes " * 4)
    before = journal.read_bytes()
    for command in (["run", "a.toml"], ["runs"], ["resume"], ["show", "x"]):
        assert "journal.db" in cli(*command, status=2).stderr
    assert journal.read_bytes() == before


def test_the_state_directory_is_where_it_is_told_to_be(cli, tmp_path):
    (tmp_path / "a.toml").write_text(PASSES)
    cli("run", "a.toml", "--state-dir", "elsewhere", status=0)
    assert (tmp_path / "elsewhere" / "journal.db").exists()
    assert (tmp_path / "elsewhere" / ".gitignore").read_text() == "*\n"
    assert not (tmp_path / ".orchestrator").exists()


def test_a_workspace_is_relative_to_its_spec_file(cli, tmp_path):
    (tmp_path / "specs" / "w").mkdir(parents=True)
    (tmp_path / "specs" / "w" / "f").write_text("content")
    (tmp_path / "specs" / "a.toml").write_text(
        '[[eval]]\nname = "x"\nworkspace = "w"\ncheck = "cat f"\n'
    )
    done = cli("run", "specs/a.toml", "--json", status=0)
    assert json.loads(done.stdout)["stdout"]["text"] == "content"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_exits_with_130_and_is_resumed(cli, tmp_path, number):
    """Interrupted in mid-check, by Ctrl-C or TERM: the evidence is there when it is resumed."""
    started, go = tmp_path / "started", tmp_path / "go"
    os.mkfifo(started)
    os.mkfifo(go)
    spec = f"""
        [[eval]]
        name = "x"
        check = "echo x > {started}; read line < {go}; echo $line; echo $line > made"
        [eval.expect]
        stdout_equals = "went\\n"
        files = [{{path = "made", equals = "went\\n"}}]
    """
    (tmp_path / "a.toml").write_text(spec)
    first = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "run", "a.toml"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.read_text() == "x\n"
    first.send_signal(number)
    _, errors = first.communicate(timeout=30)
    assert first.returncode == 130
    assert "resume" in errors
    assert "unfinished" in cli("runs").stdout
    second = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "resume", "--json"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    go.write_text("went\n")
    output, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert json.loads(output)["verdict"] == "PASSED"


def test_a_retry_is_shown_with_the_run_that_it_retries(cli, tmp_path):
    (tmp_path / "a.toml").write_text(UNRESOLVED)
    done = cli("run", "a.toml", "--json", "--attempts", "3", status=3)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["retry_of"] for each in results] == [
        None,
        results[0]["run_id"],
        results[1]["run_id"],
    ]
    assert "0 failed, 1 unresolved" in done.stderr


def test_progress_is_lines_when_not_on_a_terminal_and_moves_on_one(cli, tmp_path):
    (tmp_path / "a.toml").write_text(PASSES.replace("echo hi", "echo hi; sleep 0.3"))
    assert "\x1b" not in cli("run", "a.toml", status=0).stderr
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "run", "a.toml"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "TERM": "xterm"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # a terminal whose other end closed
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"\x1b[" in shown
    assert b"passes" in shown
    assert b"PASSED" in shown


def test_the_lifecycle_is_drawn_in_every_format(cli):
    assert cli("diagram", status=0).stdout.startswith("stateDiagram")
    assert cli("diagram", "--format", "dot", status=0).stdout.startswith("digraph")
    assert "<svg" in cli("diagram", "--format", "svg", status=0).stdout


def test_output_that_nobody_reads_any_more_is_no_crash(cli, tmp_path):
    (tmp_path / "a.toml").write_text(PASSES * 30)
    cli("run", "a.toml", "--jobs", "4", status=0)
    done = subprocess.run(
        f"{sys.executable} -m orchestrator runs --json | head -n 1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["name"] == "passes"


def test_runs_are_resumed_where_their_sandboxes_are_whatever_tmpdir_says_later(tmp_path):
    started, go = tmp_path / "started", tmp_path / "go"
    os.mkfifo(started)
    os.mkfifo(go)
    (tmp_path / "a.toml").write_text(
        f'[[eval]]\nname = "x"\ncheck = "echo x > {started}; cat {go}"\n'
        '[eval.expect]\nstdout_equals = "went"\n'
    )
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-m", "orchestrator"]
    first = subprocess.Popen(
        [*command, "run", "a.toml"], cwd=tmp_path, env={**os.environ, "TMPDIR": "here"}
    )
    assert started.read_text() == "x\n"
    first.kill()
    first.wait()
    second = subprocess.Popen(
        [*command, "resume"], cwd=tmp_path, env={**os.environ, "TMPDIR": "there"}
    )
    go.write_text("went")
    assert second.wait(timeout=60) == 0
    assert list((tmp_path / "here").rglob("identity")) == []


def test_a_gitignore_that_is_there_is_somebodys_own(cli, tmp_path):
    (tmp_path / "a.toml").write_text(PASSES)
    (tmp_path / ".gitignore").write_text("mine\n")
    cli("run", "a.toml", "--state-dir", ".", status=0)
    assert (tmp_path / ".gitignore").read_text() == "mine\n"


@pytest.mark.parametrize("where", ["--json >/dev/full", "--json | true", "2>/dev/full"])
def test_results_that_nobody_can_be_told_are_no_verdict(cli, tmp_path, where):
    """Not 0, 1, 2 or 3, which say something of the runs: 130, and what was begun is resumed."""
    (tmp_path / "a.toml").write_text(PASSES * 4)
    script = f"set -o pipefail; {sys.executable} -m orchestrator run a.toml {where}"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 130
    cli("resume", status=0)


def test_names_and_errors_cannot_drive_the_terminal(cli, tmp_path):
    (tmp_path / "a.toml").write_text(
        '[[eval]]\nname = "a\\u001b]0;pwn\\u0007\\u001b[2J"\ncheck = "true"\nbogus = 1\n'
    )
    done = cli("run", "a.toml", status=2)
    assert "\x1b" not in done.stderr
    assert "\\x1b[2J" in done.stderr


def test_the_locale_of_the_host_changes_no_verdict(cli, tmp_path):
    (tmp_path / "a.toml").write_text(
        '[[eval]]\nname = "☃"\ncheck = "printf ☃"\n[eval.expect]\nstdout_equals = "☃"\n'
    )
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path / "tmp"),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    for command in (["run", "a.toml"], ["runs"]):
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_a_workspace_with_the_sandboxes_in_it_is_refused(cli, tmp_path):
    (tmp_path / "a.toml").write_text('[[eval]]\nname = "x"\ncheck = "true"\nworkspace = "."\n')
    assert "sandboxes" in cli("run", "a.toml", status=2).stderr  # TMPDIR is below


def test_sweep_takes_what_was_kept_when_it_is_told_to(cli, tmp_path):
    (tmp_path / "a.toml").write_text(UNRESOLVED + 'retain = "unresolved"\n')
    result = json.loads(cli("run", "a.toml", "--json", status=3).stdout)
    assert result["retained_sandbox"] == result["run_id"]
    assert cli("sweep", status=0).stdout == ""
    assert "gone" in cli("sweep", "--kept", status=0).stdout
    shown = json.loads(cli("show", result["run_id"], "--json").stdout)
    assert shown["retained_sandbox"] is None
    assert shown["verdict"] == "UNRESOLVED"


TELLS_HOME = '[[eval]]\nname = "tells"\ncheck = "echo $HOME"\n'


@pytest.mark.parametrize(
    ("specs", "more", "status"),
    [
        (PASSES, [], 0),
        (PASSES + FAILS, [], 0),
        (PASSES + TELLS_HOME, [], 1),
        (PASSES + TELLS_HOME, ["--declare", "stdout=homes differ"], 0),
        (PASSES + TELLS_HOME, ["--declare", "stderr=homes differ"], 1),
        (PASSES + TELLS_HOME + UNRESOLVED, [], 3),
        (PASSES + UNRESOLVED, [], 3),
        (PASSES, ["--declare", "stdout"], 2),
        (PASSES, ["--backends", "local"], 2),
        (PASSES, ["--backends", "local,moon"], 2),
        (PASSES + "bogus = 1", [], 2),
    ],
)
def test_the_exit_status_of_parity_tells_what_differs(cli, tmp_path, specs, more, status):
    (tmp_path / "a.toml").write_text(specs)
    done = cli("parity", "a.toml", "--backends", "local,local", *more, status=status)
    last = {0: "equal: ", 1: "different: ", 2: "", 3: "unresolved: "}[status]
    assert (done.stdout.splitlines() or [""])[-1].startswith(last)
    assert ("error:" in done.stderr) == (status == 2)
    assert ("tells: stdout: local '" in done.stdout) == (TELLS_HOME in specs)


def test_parity_says_where_backends_differ_and_keeps_the_runs(cli, tmp_path):
    (tmp_path / "a.toml").write_text(TELLS_HOME)
    declared = ["--declare", "tells/*=its home", "--declare", "mode=x"]
    done = cli("parity", "a.toml", "--backends", "local,local", *declared, "--json", status=0)
    told = json.loads(done.stdout)
    assert (told["status"], told["unmet"]) == ("equal", ["mode"])
    (difference,) = told["differences"]
    assert (difference["name"], difference["point"]) == ("tells", "stdout")
    assert set(difference["values"]) == {"local", "local#2"}
    assert difference["declared"] == "its home"
    assert done.stderr.count("PASSED") == 2
    for run in told["accounts"]["tells"].values():
        assert json.loads(cli("show", run["run_id"], "--json").stdout)["verdict"] == "PASSED"


def test_what_is_said_of_a_difference_cannot_drive_the_terminal(cli, tmp_path):
    (tmp_path / "a.toml").write_text(
        '[[eval]]\nname = "[red]x"\ncheck = \'printf "\\033[2J$HOME"\'\n'
    )
    done = cli("parity", "a.toml", "--backends", "local,local", status=1)
    assert "\x1b" not in done.stdout
    assert "[red]x: stdout: " in done.stdout


def test_a_report_that_nobody_can_be_told_is_no_answer(cli, tmp_path):
    (tmp_path / "a.toml").write_text(PASSES)
    command = f"{sys.executable} -m orchestrator parity a.toml --backends local,local >/dev/full"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 130


@pytest.mark.parametrize(
    "words",
    [
        ["run", "a.toml", "--backend", "docker", "--image", "x"],
        ["parity", "a.toml", "--backends", "local,docker", "--image", "x"],
    ],
)
def test_a_daemon_that_is_not_there_is_an_error_in_words_and_nothing_is_begun(
    cli, tmp_path, monkeypatch, words
):
    (tmp_path / "a.toml").write_text(PASSES)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-such-socket")
    done = cli(*words, status=2)
    assert "no Docker daemon answers at" in done.stderr
    assert "no-such-socket" in done.stderr
    assert "Traceback" not in done.stderr
    assert "PASSED" not in done.stderr
