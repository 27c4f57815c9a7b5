"""The journal: what it was told is on disk, in order, for good, and one runner drives each run.

Other processes are real ones. `Other` evaluates what it is told in a fresh interpreter, so a test
reads like a conversation: tell it something, ask what it sees, kill it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from test_machine import FACTS, RUN, fact, facts, lives, retains
from test_spec import answers, specs

from orchestrator.codec import decode, encode
from orchestrator.core.errors import JournalConflictError, JournalError, StorageError
from orchestrator.core.facts import (
    Checked,
    CheckLost,
    CleanedUp,
    Downloaded,
    DownloadFailed,
    Fault,
    FaultKind,
    Phase,
    Scored,
    Uploaded,
    UploadFailed,
)
from orchestrator.core.machine import Check, Download, advance, begin, replay
from orchestrator.core.spec import EvalSpec
from orchestrator.core.states import State
from orchestrator.journal import Journal

SPEC = EvalSpec(name="hello", check="true")
VERSION = 1
LIFE = (Uploaded, Checked, Downloaded, CleanedUp, Scored)


def started(journal, run_id=RUN, spec=SPEC):
    return journal.begin(run_id, spec, backend="local", isolation="none")


def told(journal, *kinds, run_id=RUN):
    """Append the plainest facts of these kinds to a run that was begun."""
    step = journal.step(run_id)
    for kind in kinds:
        sealed = step.run.state is State.CHECKED
        each = fact(kind, sealed=sealed, run_id=run_id)
        step = advance(step.run, each)
        journal.append(run_id, each, step.command)
    return step


def names(journal, run_id=RUN):
    return [(entry.kind, entry.name) for entry in journal.entries(run_id) if entry.kind != "owner"]


def everything(journal):
    """Read all that a journal holds."""
    return [
        (journal.record(run_id), journal.entries(run_id), journal.step(run_id))
        for run_id in journal.run_ids()
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "journal.db"


@pytest.fixture
def journal(path):
    made = Journal(path)
    yield made
    made.close()


class Other:
    """Another process with the journal open, that evaluates what it is told."""

    PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
from test_journal import *
journal = None
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""

    def __init__(self, path=None):
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if path is not None:
            self.tell(f"(journal := Journal({str(path)!r})) and None")

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self):
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, line):
        self.tell(line)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def others(path):
    """Give a function that starts processes with the journal open, and waits for them."""
    running = []

    def start(number=1, *, opened=True):
        fresh = [Other(path if opened else None) for _ in range(number)]
        running.extend(fresh)
        if opened:
            assert [each.answer() for each in fresh] == ["None"] * number
        return fresh

    yield start
    for each in running:
        each.process.kill()
        each.close()


# --- round trips ----------------------------------------------------------------------------------


@given(each=st.sampled_from(FACTS).flatmap(facts))
def test_every_kind_of_fact_comes_back_as_it_was(each):
    assert decode(encode(each), type(each)) == each


@given(spec=specs)
def test_a_spec_comes_back_as_it_was_but_for_its_functions(spec):
    back = decode(encode(spec), EvalSpec)
    nameless = evolve(spec.expect, predicates=dict.fromkeys(spec.expect.predicates))
    assert back == evolve(spec, expect=nameless)
    assert back.digest == spec.digest
    assert all(test is None for test in back.expect.predicates.values())


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A journal for many examples, each with a run of its own."""
    made = Journal(tmp_path_factory.mktemp("shared") / "journal.db")
    yield made
    made.close()


numbers = count()


@settings(max_examples=60)
@given(data=st.data(), whole=st.booleans(), retain=retains)
def test_a_run_comes_back_as_it_was(shared, data, whole, retain):
    run_id = f"run-{next(numbers)}"
    life = data.draw(lives(run_id, whole=whole))
    record, step = started(shared, run_id, evolve(SPEC, retain=retain))
    intents = [type(step.command).__name__]
    for each in life:
        step = advance(step.run, each)
        shared.append(run_id, each, step.command)
        intents += [type(step.command).__name__] if step.command else []
    entries = shared.entries(run_id)
    assert [entry.fact for entry in entries if entry.kind == "fact"] == life
    assert [entry.name for entry in entries if entry.kind == "intent"] == intents
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    assert shared.step(run_id) == step == replay(run_id, life, retain)
    assert shared.record(run_id) == record


def test_what_was_written_is_there_when_the_journal_is_opened_again(journal, path):
    started(journal)
    told(journal, *LIFE)
    before = everything(journal)
    journal.close()
    again = Journal(path)
    assert everything(again) == before
    again.close()


def test_a_run_is_kept_as_it_was_begun(journal):
    spec = evolve(SPEC, expect={"greets": answers}, deadline_s=5)
    first, step = started(journal, "r1", spec)
    second, _ = journal.begin("r2", spec, backend="local", isolation="none", retry_of="r1")
    assert step == begin("r1")
    assert (second.retry_of, first.retry_of) == ("r1", None)
    assert len({first.nonce, second.nonce}) == 2
    assert len(first.nonce) == 32
    back = journal.record("r1")
    assert back == evolve(first, spec=back.spec)
    assert back.spec.expect.predicates == {"greets": None}
    assert journal.run_ids() == ["r1", "r2"]


# --- durable, and before the next command ---------------------------------------------------------


def test_every_entry_can_be_read_by_another_process_before_the_next_command(journal, others):
    started(journal)
    (reader,) = others()
    seen = [("intent", "Upload")]
    assert reader.ask("names(journal)") == repr(seen)
    for kind in LIFE:
        step = told(journal, kind)
        seen.append(("fact", kind.__name__))
        seen += [("intent", type(step.command).__name__)] if step.command else []
        assert reader.ask("names(journal)") == repr(seen)
        assert reader.ask("journal.step(RUN).run.state.value") == repr(step.run.state.value)


def test_what_a_killed_runner_wrote_is_there(journal, others):
    (writer,) = others()
    assert writer.ask("started(journal) and told(journal, Uploaded, Checked) and None") == "None"
    writer.kill()
    assert journal.step(RUN) == replay(RUN, [fact(Uploaded), fact(Checked)])
    assert names(journal)[-1] == ("intent", "Download")


def test_each_commit_reaches_the_disk_before_it_returns(journal):
    # 2 is FULL: in WAL mode, an fsync of the log on every commit.
    assert journal._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert journal._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_fact_and_the_intent_that_follows_are_one_entry_or_none(journal):
    started(journal)
    with pytest.raises(TypeError):
        journal.append(RUN, evolve(fact(Uploaded), setup_s={1}), Check())
    assert names(journal) == [("intent", "Upload")]
    told(journal, Uploaded)
    assert names(journal) == [("intent", "Upload"), ("fact", "Uploaded"), ("intent", "Check")]


def test_a_second_journal_on_the_path_does_not_unlock_the_first(path, others):
    # Closing any descriptor of a file drops all of a process's POSIX locks on it, SQLite's too. The
    # last process that closes a journal takes its log away; without its lock, a writer would go on
    # writing to a log that is gone.
    (writer, closer) = others(2, opened=False)
    opened = f"(journal := Journal({str(path)!r})) and started(journal, 'before') and None"
    assert writer.ask(opened) == "None"
    assert writer.ask(f"(second := Journal({str(path)!r})) and None") == "None"
    assert closer.ask(f"(journal := Journal({str(path)!r})).close()") == "None"
    assert writer.ask("started(journal, 'after') and None") == "None"
    writer.kill()
    survivor = Journal(path)
    assert survivor.run_ids() == ["before", "after"]
    survivor.close()


# --- append-only ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM entries",
        "DELETE FROM runs",
        "UPDATE entries SET name = 'Scored'",
        "UPDATE entries SET seq = seq + 1",
        "UPDATE OR REPLACE entries SET seq = 1",
        "UPDATE runs SET spec = '{}'",
        "REPLACE INTO entries SELECT run_id, 1, kind, 'Scored', payload, at FROM entries",
        "REPLACE INTO runs SELECT * FROM runs",
    ],
)
def test_the_file_itself_refuses_to_change_what_it_holds(journal, path, statement):
    started(journal)
    told(journal, Uploaded)
    before = everything(journal)
    raw = sqlite3.connect(path)
    # REPLACE has to name every column, whatever more there are.
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        raw.execute(with_every_column(raw, statement))
    raw.close()
    assert everything(journal) == before


def with_every_column(raw, statement):
    known = "run_id, 1, kind, 'Scored', payload, at"
    more = [row[1] for row in raw.execute("PRAGMA table_info(entries)")][6:]
    return statement.replace(known, ", ".join([known, *more]))


def test_the_file_itself_refuses_a_gap(journal, path):
    started(journal)
    raw = sqlite3.connect(path)
    (last,) = raw.execute("SELECT max(seq) FROM entries").fetchone()
    columns = [row[1] for row in raw.execute("PRAGMA table_info(entries)")][2:]
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        raw.execute(
            f"INSERT INTO entries SELECT run_id, {last + 2}, {', '.join(columns)} "
            f"FROM entries WHERE seq = {last}"
        )
    raw.close()


def test_the_file_itself_refuses_entries_of_a_run_that_was_not_begun(journal):
    started(journal)
    rows = journal._connection.execute("PRAGMA table_info(entries)")
    rest = ", ".join(row[1] for row in rows if row[1] != "run_id")
    with pytest.raises(sqlite3.IntegrityError):
        journal._connection.execute(
            f"INSERT INTO entries SELECT 'ghost', {rest} FROM entries WHERE seq = 1"
        )
    assert journal.run_ids() == [RUN]


# --- one runner for each run ----------------------------------------------------------------------


def test_a_run_cannot_be_begun_twice(journal, path):
    started(journal)
    told(journal, Uploaded)
    second = Journal(path)
    before = everything(journal)
    for writer in (journal, second):
        with pytest.raises(JournalConflictError, match=f"run {RUN}"):
            started(writer)
    assert everything(second) == before
    told(journal, Checked)
    second.close()


def test_a_run_cannot_be_taken_over_while_its_runner_lives(journal, path, others):
    started(journal)
    second = Journal(path)
    (third,) = others()
    with pytest.raises(JournalConflictError, match="driven by a live runner"):
        second.take_over(RUN)
    assert third.ask("journal.take_over(RUN)").startswith("JournalConflictError: run r1 is being")
    assert second.driven(RUN)
    assert third.ask("journal.driven(RUN)") == "True"
    told(journal, Uploaded)
    second.close()


def test_a_run_can_be_taken_over_when_its_runner_was_killed(journal, others):
    (runner,) = others()
    assert runner.ask("started(journal) and told(journal, Uploaded) and None") == "None"
    assert journal.driven(RUN)
    runner.kill()
    assert not journal.driven(RUN)
    journal.take_over(RUN)
    assert journal.driven(RUN)
    assert journal.owner_of(RUN) == journal.owner
    told(journal, Checked)
    assert journal.step(RUN).run.state is State.CHECKED


def test_a_run_can_be_taken_over_when_its_runner_was_closed(journal, path):
    first = Journal(path)
    started(first)
    assert journal.driven(RUN)
    first.close()
    assert not journal.driven(RUN)
    journal.take_over(RUN)
    told(journal, Uploaded)


def test_a_process_that_has_the_id_of_the_dead_runner_does_not_keep_its_run(journal, others):
    # The runner believes that it is process 1, which lives longer than it does.
    (runner,) = others()
    assert runner.ask("setattr(os, 'getpid', lambda: 1) or started(journal) and None") == "None"
    assert journal.owner_of(RUN).startswith("1-")
    with pytest.raises(JournalConflictError):
        journal.take_over(RUN)
    runner.kill()
    journal.take_over(RUN)
    told(journal, Uploaded)


def test_programs_that_a_runner_started_do_not_keep_its_runs(journal, others):
    (runner,) = others()
    started_program = (
        "started(journal) and setattr(sys, 'child', "
        "subprocess.Popen(['sleep', '60'])) or sys.child.pid"
    )
    child = int(runner.ask(started_program))
    runner.kill()
    assert not journal.driven(RUN)
    os.kill(child, signal.SIGKILL)


def test_two_that_look_at_a_dead_runner_at_once_both_see_that_it_is_dead(journal, others, path):
    (runner,) = others()
    assert runner.ask("started(journal) and None") == "None"
    runner.kill()
    # Somebody else is looking: as `_alive` does, but not yet done.
    lock = path.parent / "runners" / journal.owner_of(RUN)
    with lock.open("r+") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not journal.driven(RUN)


def test_of_many_that_take_over_a_dead_runners_runs_one_gets_each(journal, others):
    (runner, *heirs) = others(4)
    run_ids = [f"r{number}" for number in range(12)]
    assert runner.ask(f"[started(journal, r) for r in {run_ids!r}] and None") == "None"
    runner.kill()
    for run_id in run_ids:
        for heir in heirs:
            heir.tell(f"journal.take_over({run_id!r})")
        answers = Counter(heir.answer().split(":")[0] for heir in heirs)
        assert answers == {"None": 1, "JournalConflictError": 2}
        for heir in heirs:
            heir.tell(f"journal.append({run_id!r}, fact(Uploaded), Check())")
        answers = Counter(heir.answer().split(":")[0] for heir in heirs)
        assert answers == {"None": 1, "JournalConflictError": 2}
        assert journal.step(run_id).run.state is State.UPLOADED


def test_a_runner_whose_run_was_taken_over_is_stopped_by_the_file(journal, path, others):
    # Somebody deletes the lock files by hand: nothing else tells the two runners apart.
    (other,) = others()
    started(journal)
    told(journal, Uploaded)
    for lock in (path.parent / "runners").iterdir():
        lock.unlink()
    assert other.ask("journal.take_over(RUN)") == "None"
    before = names(journal)
    with pytest.raises(JournalConflictError, match="this one stops driving it"):
        journal.append(RUN, fact(Checked), Download(salvage=False))
    assert names(journal) == before
    assert other.ask("told(journal, CheckLost) and None") == "None"
    assert journal.step(RUN).run.state is State.BROKEN


def test_one_runner_does_not_drive_a_run_twice_at_once(journal):
    started(journal)
    with pytest.raises(JournalConflictError):
        journal.take_over(RUN)
    told(journal, Uploaded)
    assert journal.step(RUN).run.state is State.UPLOADED


def test_a_runner_that_let_go_of_a_run_can_take_it_up_again(journal):
    started(journal)
    journal.release(RUN)
    assert not journal.driven(RUN)
    with pytest.raises(JournalConflictError):
        journal.append(RUN, fact(Uploaded), Check())
    journal.take_over(RUN)
    assert journal.driven(RUN)
    told(journal, Uploaded)


def test_a_runner_cannot_write_to_a_run_that_it_does_not_drive(journal, path):
    started(journal)
    second = Journal(path)
    with pytest.raises(JournalConflictError):
        second.append(RUN, fact(Uploaded), Check())
    with pytest.raises(JournalError):
        second.append("nobody's", fact(Uploaded), Check())
    second.close()
    assert names(journal) == [("intent", "Upload")]


def test_a_takeover_that_could_not_be_written_leaves_no_gap(journal, path):
    first = Journal(path)
    started(first)
    first.close()
    journal._connection.execute("PRAGMA query_only = 1")
    with pytest.raises(JournalError):
        journal.take_over(RUN)
    journal._connection.execute("PRAGMA query_only = 0")
    with pytest.raises(JournalError):
        journal.append(RUN, fact(Uploaded), Check())
    journal.take_over(RUN)
    told(journal, Uploaded)


def test_where_the_process_goes_does_not_change_where_its_journal_is(tmp_path, monkeypatch, others):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    made = Journal("state/journal.db")
    monkeypatch.chdir(tmp_path / "elsewhere")
    started(made)
    (other,) = others()
    assert other.ask("journal.take_over(RUN)").startswith("JournalConflictError")
    told(made, Uploaded)
    made.close()


# --- what cannot be answered ----------------------------------------------------------------------


def test_a_run_that_is_not_there_is_said_to_be_missing(journal, path):
    for question in (journal.record, journal.entries, journal.step, journal.take_over):
        with pytest.raises(JournalError, match="run r9") as refused:
            question("r9")
        assert str(path) in str(refused.value)
    assert not journal.driven("r9")
    assert journal.owner_of("r9") == ""


def test_a_closed_journal_says_so(journal, path):
    started(journal)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.run_ids()
    with pytest.raises(JournalError, match="closed"):
        journal.append(RUN, fact(Uploaded), Check())


def test_facts_that_are_no_lifecycle_are_not_folded(journal):
    started(journal)
    journal.append(RUN, fact(CleanedUp), None)
    with pytest.raises(JournalError, match="CleanedUp is not legal in NEW"):
        journal.step(RUN)


@pytest.mark.parametrize(
    ("name", "payload", "problem"),
    [
        ("Applauded", "{}", "no fact is called 'Applauded'"),
        ("Uploaded", "{}", "Uploaded"),
        ("Uploaded", "not JSON", "Uploaded"),
        ("CleanedUp", '{"elapsed_s": 1.0, "since": "a newer version"}', "since"),
        ("Checked", '{"outcome": 3}', "Checked"),
    ],
)
def test_what_cannot_be_read_names_the_run_and_the_file(journal, path, name, payload, problem):
    started(journal)
    with journal._transaction(RUN):
        journal._add(RUN, "fact", name, payload)
    for question in (journal.entries, journal.step):
        with pytest.raises(JournalError) as refused:
            question(RUN)
        for part in (str(path), RUN, problem):
            assert part in str(refused.value)


def test_a_runners_directory_that_cannot_be_made_is_the_journals_trouble(journal, path):
    (path.parent / "runners").write_text("in the way")
    with pytest.raises(JournalError, match="runners"):
        started(journal)
    assert journal.run_ids() == []
    (path.parent / "runners").unlink()
    started(journal)


# --- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a journal with a few runs, and what it says."""
    path = tmp_path_factory.mktemp("whole") / "journal.db"
    made = Journal(path)
    for number, kinds in enumerate((LIFE, LIFE[:3], (UploadFailed, DownloadFailed))):
        started(made, f"r{number}")
        told(made, *kinds, run_id=f"r{number}")
    said = everything(made)
    made.close()
    return path.read_bytes(), said


def litter(path):
    return sorted(each.name for each in path.parent.iterdir() if each != path)


def refused_and_left(path, *, match=None):
    """Open a journal that has to be refused by name, without a byte of it changing."""
    before = hashlib.sha256(path.read_bytes()).digest()
    with pytest.raises(JournalError, match=match) as refused:
        Journal(path)
    assert str(path) in str(refused.value)
    assert isinstance(refused.value, StorageError)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert [name for name in litter(path) if name.endswith(("-wal", "-shm", "-journal"))] == []


@pytest.mark.parametrize("size", [0, 1, 15, 16, 99, 100, 101, 512, 4095, 4096, 4097, 8192, -1])
def test_a_truncated_journal_is_refused_and_left_as_it_is(tmp_path, whole, size):
    path = tmp_path / "journal.db"
    path.write_bytes(whole[0][:size])
    refused_and_left(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"SQLite format 3\0", b"x" * 5000])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    refused_and_left(path)


@settings(max_examples=50)
@given(content=st.binary(max_size=300) | st.binary(max_size=300).map(b"SQLite format 3\0".__add__))
def test_garbage_is_refused_and_left_as_it_is(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("garbage") / "journal.db"
    path.write_bytes(content)
    refused_and_left(path)


def test_a_file_of_another_program_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "journal.db"
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE runs (run_id TEXT)")
    foreign.commit()
    foreign.close()
    refused_and_left(path, match="another program")


def test_a_journal_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path, whole):
    path = tmp_path / "journal.db"
    newer = bytearray(whole[0])
    newer[60:64] = (VERSION + 1).to_bytes(4, "big")
    path.write_bytes(newer)
    refused_and_left(path, match=f"version {VERSION + 1} .* use the program that wrote it")


def test_a_journal_without_its_guards_is_refused_and_left_as_it_is(tmp_path, whole):
    path = tmp_path / "journal.db"
    path.write_bytes(whole[0])
    raw = sqlite3.connect(path)
    raw.execute("DROP TRIGGER entries_hold")
    raw.close()
    refused_and_left(path)


def test_a_directory_is_refused(tmp_path):
    path = tmp_path / "journal.db"
    path.mkdir()
    with pytest.raises(JournalError, match=r"journal\.db"):
        Journal(path)
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("parent", ["a file", "missing permission"])
def test_a_place_where_no_journal_can_be_is_refused(tmp_path, nobody, parent):
    place = tmp_path / "place"
    if parent == "a file":
        place.write_text("")
    else:
        place.mkdir(mode=0o500)
    with nobody(), pytest.raises(JournalError, match=r"journal\.db"):
        Journal(place / "journal.db")


@pytest.fixture
def nobody(tmp_path):
    """Be somebody whom permissions apply to, for a while."""
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_uid == os.geteuid() and each.stat().st_mode & 0o005 != 0o005:
            each.chmod(each.stat().st_mode | 0o005)

    class Nobody:
        def __enter__(self):
            self.before = os.geteuid()
            if self.before == 0:
                os.seteuid(65534)

        def __exit__(self, *_):
            os.seteuid(self.before)

    return Nobody


def test_a_journal_that_may_not_be_read_is_refused_and_left_as_it_is(tmp_path, whole, nobody):
    path = tmp_path / "journal.db"
    path.write_bytes(whole[0])
    path.chmod(0o000)
    with nobody(), pytest.raises(JournalError, match=r"journal\.db"):
        Journal(path)
    path.chmod(0o600)
    assert path.read_bytes() == whole[0]
    assert [name for name in litter(path) if name.startswith("journal")] == []


def test_a_flipped_byte_is_found_or_changes_nothing(tmp_path, whole):
    data, said = whole
    found = Counter()
    path = tmp_path / "journal.db"
    for offset in range(0, len(data), 61):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        opened = refusal(path)
        if isinstance(opened, JournalError):
            assert str(path) in str(opened)
            assert path.read_bytes() == damaged
            assert not path.with_name("journal.db-wal").exists()
            assert not path.with_name("journal.db-shm").exists()
            found["when it was opened"] += 1
            continue
        read = refusal(opened)
        opened.close()
        if isinstance(read, JournalError):
            assert str(path) in str(read)
            found["when it was read"] += 1
        else:
            assert read == said, f"byte {offset}"
            found["never: it changed nothing"] += 1
    assert len(found) == 3


def refusal(what):
    """Open a journal, or read all of one: give what comes of it, or how it is refused."""
    try:
        return everything(what) if isinstance(what, Journal) else Journal(what)
    except JournalError as error:
        return error


def test_damage_does_not_hide_behind_a_log_that_a_killed_runner_left(path, others):
    (runner,) = others()
    assert runner.ask("started(journal) and None") == "None"
    runner.kill()
    assert path.with_name("journal.db-wal").stat().st_size > 0
    damaged = bytearray(path.read_bytes())
    damaged[105:120] = b"\xff" * 15
    path.write_bytes(damaged)
    assert str(path) in str(refusal(path))
    assert path.read_bytes() == damaged


# --- full disks -----------------------------------------------------------------------------------


def fill(journal):
    """Begin runs until the journal cannot take more; give how it says so."""
    try:
        for number in count():
            started(journal, f"fill-{number}")
            told(journal, Uploaded, run_id=f"fill-{number}")
    except JournalError as error:
        return error


def survives_a_full_disk(journal, make_room):
    started(journal)
    told(journal, Uploaded)
    full = fill(journal)
    assert not isinstance(full, JournalConflictError)
    assert str(journal.path) in str(full)
    assert "full" in str(full)
    before = everything(journal)
    long = CheckLost(fault=Fault(Phase.CHECK, FaultKind.ERROR, "it broke " * 50_000))
    with pytest.raises(JournalError, match="make room"):
        journal.append(RUN, long, Download(salvage=True))
    assert everything(journal) == before
    make_room()
    assert told(journal, *LIFE[1:]).run.state is State.SCORED
    assert everything(journal)[1:] == before[1:]
    started(journal, "late")
    assert journal.step("late").run.state is State.NEW


def test_a_journal_that_may_not_grow_keeps_what_it_has_and_goes_on_when_it_may(journal, path):
    def pages(number):
        journal._connection.execute(f"PRAGMA max_page_count = {number}")

    pages(12)
    survives_a_full_disk(journal, lambda: pages(10**6))
    said = everything(journal)
    journal.close()
    again = Journal(path)
    assert everything(again) == said
    again.close()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 320 kB, and a way to make it larger; only root can have one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs to be root where file systems may be mounted")
    yield (
        place,
        lambda: subprocess.run(["mount", "-o", "remount,size=8m", str(place)], check=True),
    )
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_loses_nothing_and_runs_go_on_when_there_is_room(small_disk):
    place, make_room = small_disk
    journal = Journal(place / "state" / "journal.db")
    survives_a_full_disk(journal, make_room)
    said = everything(journal)
    journal.close()
    again = Journal(place / "state" / "journal.db")
    assert everything(again) == said
    again.close()


def test_on_a_full_disk_no_journal_is_made_and_no_draft_is_left(small_disk):
    place, make_room = small_disk
    with (place / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(b"\0" * 4096):
            pass
    with pytest.raises(JournalError, match=r"journal\.db"):
        Journal(place / "journal.db")
    assert {each.name for each in place.iterdir()} <= {"ballast", ".journal.db.lock"}
    make_room()
    Journal(place / "journal.db").close()


# --- many at once ---------------------------------------------------------------------------------


@pytest.fixture
def hurry():
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_many_threads_share_a_journal(journal, hurry):
    start, failures = threading.Barrier(8), []

    def drive(run_id):
        try:
            start.wait()
            started(journal, run_id)
            told(journal, *LIFE, run_id=run_id)
        except BaseException as error:  # noqa: BLE001 - told to the test, on its own thread
            failures.append(error)

    threads = [threading.Thread(target=drive, args=(f"r{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(journal.run_ids()) == [f"r{number}" for number in range(8)]
    for run_id in journal.run_ids():
        assert journal.step(run_id).run.state is State.SCORED


def test_many_processes_make_one_journal(path, others):
    crowd = others(5, opened=False)
    for each in crowd:  # All of them are up, and wait to be told.
        assert each.ask("None") == "None"
    for each in crowd:
        each.tell(f"(journal := Journal({str(path)!r})) and None")
    assert [each.answer() for each in crowd] == ["None"] * 5
    for number, each in enumerate(crowd):
        each.tell(f"[started(journal, f'{number}-{{n}}') for n in range(5)] and None")
    assert [each.answer() for each in crowd] == ["None"] * 5
    for each in crowd:
        assert each.ask("len(everything(journal))") == "25"
    assert litter(path) == [".journal.db.lock", "journal.db-shm", "journal.db-wal", "runners"]


def test_a_new_journal_says_what_it_is(journal, path):
    assert journal.run_ids() == []
    journal.close()
    header = path.read_bytes()[:100]
    assert header[68:72] == b"eval"
    assert int.from_bytes(header[60:64], "big") == VERSION
