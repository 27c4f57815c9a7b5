"""The conformance kit: green over good backends, and every check of it red over some bad one.

A kit that cannot fail proves nothing. So each check is broken on purpose here, by a backend that
does one thing wrong and everything else right, and the checks that find it are named; two designs
from the field are built again from how they are known to behave, and found out in the same way.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from attrs import evolve

from orchestrator import Manifest, SpecError, tree
from orchestrator.backends.local import LocalBackend
from orchestrator.core.errors import PermitError, SandboxGoneError
from orchestrator.core.evidence import EntryKind
from orchestrator.core.facts import SandboxRef
from orchestrator.core.spec import ENV_NAME
from orchestrator.ports import Ending, Record
from orchestrator.testing import conformance
from orchestrator.testing.conformance import CASES, CHECKS, conform, orders, report_of

PROJECT = Path(__file__).parent.parent
GUIDE = PROJECT / "docs" / "write-a-backend.md"
EXAMPLE = PROJECT / "examples" / "directory_backend.py"


def load_example():
    spec = importlib.util.spec_from_file_location("directory_backend", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


def passed(findings):
    return {finding.name for finding in findings if finding.ok is True}


def failed(findings):
    return {finding.name for finding in findings if finding.ok is False}


def not_applicable(findings):
    return {finding.name for finding in findings if finding.ok is None}


# --- backends that are as they should be ----------------------------------------------------------


def test_the_local_backend_conforms_and_nothing_is_left_of_the_checks(tmp_path):
    findings = conform(lambda: LocalBackend(tmp_path))
    assert passed(findings) == set(CHECKS), report_of(findings)
    assert list(tmp_path.iterdir()) == []


def test_the_worked_example_conforms_and_says_what_does_not_apply(tmp_path):
    findings = conform(lambda: example.DirectoryBackend(tmp_path))
    assert failed(findings) == set(), report_of(findings)
    assert not_applicable(findings) == {"vanished_sandboxes_are_never_scored"}
    assert list(tmp_path.iterdir()) == []


# --- backends that do one thing wrong -------------------------------------------------------------


class Wrapped:
    """A backend that is another one, but for its sandboxes."""

    isolation = "none"
    kind = None  # of its sandboxes

    def __init__(self, root):
        self.backend = LocalBackend(root)
        self.name = self.backend.name

    def refuse(self, spec):
        self.backend.refuse(spec)

    def create(self, run_id, spec):
        return self.kind(self.backend.create(run_id, spec), self)

    def open(self, run_id):
        found = self.backend.open(run_id)
        return found and self.kind(found, self)

    def close(self):
        self.backend.close()


class WrappedSandbox:
    """A sandbox that is another one, but for what a subclass does wrong."""

    def __init__(self, sandbox, backend):
        self.sandbox = sandbox
        self.backend = backend

    def __getattr__(self, name):
        return getattr(self.sandbox, name)

    def record(self, order):
        return self.sandbox.home / "records" / order.slot

    def note(self, name):
        """Give a file beside the sandbox, where every handle of it finds what one has noted."""
        return self.sandbox.home / f"note-{name}"

    def remember(self, manifest, name="uploaded"):
        self.note(name).write_bytes(manifest.encode())

    def remembered(self, name="uploaded"):
        note = self.note(name)
        return Manifest.decode(note.read_bytes()) if note.exists() else None


class WrappedWorkspace:
    """A workspace that is another one, but for what is done to its entries."""

    def __init__(self, workspace, change):
        self.workspace = workspace
        self.change = change

    def manifest(self):
        changed = (self.change(entry) for entry in self.workspace.manifest())
        return Manifest.of(entry for entry in changed if entry is not None)

    def open(self, entry):
        return self.workspace.open(entry)


class WrappedIntake:
    """An intake that is another one, but for how output is told to it."""

    def __init__(self, intake, tell):
        self.intake = intake
        self.tell = tell

    def __getattr__(self, name):
        return getattr(self.intake, name)

    def output(self, stream, head, tail, total):
        self.tell(self.intake.output, stream, b"".join(head), b"".join(tail), total)


BROKEN = {}


def broken(*caught_by):
    """Register a backend, or the sandboxes of one, with the names of the checks that find it."""

    def register(made):
        backend = made
        if issubclass(made, WrappedSandbox):
            backend = type(made.__name__, (Wrapped,), {"kind": made})
        BROKEN[made.__name__] = (backend, set(caught_by))
        return made

    return register


# What it says of how a check ended.


@broken("exit_codes")
class TakesEvery124ForATimeout(WrappedSandbox):
    def execute(self, order):
        record = self.sandbox.execute(order)
        return evolve(record, ending=Ending.DEADLINE, code=None) if record.code == 124 else record


@broken("exit_codes", "programs_not_found")
class TakesShellErrorsForItsOwn(WrappedSandbox):
    def execute(self, order):
        record = self.sandbox.execute(order)
        lost = Record(ending=Ending.LOST, message="the command could not be run")
        return lost if record.code in {126, 127} else record


@broken("signals")
class TellsSignalsAsExits(WrappedSandbox):
    def execute(self, order):
        record = self.sandbox.execute(order)
        if record.ending is Ending.SIGNALLED:
            return evolve(record, ending=Ending.EXITED, code=128 + record.code)
        return record


@broken("printed_text_decides_nothing")
class ReadsTheExitCodeFromTheOutput(WrappedSandbox):
    def execute(self, order):
        record = self.sandbox.execute(order)
        printed = re.search(rb"exit code: (\d+)", (self.record(order) / "stdout.head").read_bytes())
        return evolve(record, code=int(printed[1])) if printed else record


@broken("secrets_are_not_shown")
class PassesTheSecretInTheEnvironment(WrappedSandbox):
    def execute(self, order):
        return self.sandbox.execute(evolve(order, env={**order.env, "NONCE": order.nonce}))


# Deadlines.


@broken("deadline_is_not_shortened", "deadline_ends_the_check")
class ShortensDeadlines(WrappedSandbox):
    def execute(self, order):
        return self.sandbox.execute(evolve(order, deadline_s=order.deadline_s * 0.9))


@broken("deadline_starts_with_the_check")
class CountsItsOwnStart(WrappedSandbox):
    def __init__(self, sandbox, backend):
        super().__init__(sandbox, backend)
        self.backend.created = getattr(self.backend, "created", time.monotonic())

    def execute(self, order):
        waited_s = time.monotonic() - self.backend.created
        left_s = max(order.deadline_s - waited_s, 0.05)
        return self.sandbox.execute(evolve(order, deadline_s=left_s))


@broken("deadline_ends_the_check", "deadline_escalates_to_kill")
class KnowsNoDeadline(WrappedSandbox):
    def execute(self, order):
        return self.sandbox.execute(evolve(order, deadline_s=60.0))


@broken("deadline_escalates_to_kill")
class KillsAtOnce(WrappedSandbox):
    def execute(self, order):
        return self.sandbox.execute(evolve(order, grace_s=0.001))


# Output and input.


class TellsOutput(WrappedSandbox):
    """Delivers output otherwise than it was kept."""

    def fetch(self, entries, slot, intake):
        self.sandbox.fetch(entries, slot, WrappedIntake(intake, self.tell))


@broken("output_is_bytes")
class DecodesOutput(TellsOutput):
    def tell(self, output, stream, head, tail, total):
        text = head.decode("utf-8", "replace").replace("\r\n", "\n").encode()
        output(stream, [text], [tail], len(text) + total - len(head))


@broken("floods_are_cut_and_counted", "truncated_output_answers_nothing")
class CallsTheHeadAllThereIs(TellsOutput):
    def tell(self, output, stream, head, tail, total):
        output(stream, [head], [], len(head))


@broken("last_output_is_kept")
class ClosesTheStreamAtTheExit(TellsOutput):
    def tell(self, output, stream, head, tail, total):
        short = head[:4096] if total == len(head) else head
        output(stream, [short], [tail], total - len(head) + len(short))


@broken("silence_is_evidence", "modes_arrive", "programs_not_found")
class TellsNothingOfSilence(TellsOutput):
    def tell(self, output, stream, head, tail, total):
        if total:
            output(stream, [head], [tail], total)


class ChangesTheCommand(WrappedSandbox):
    """Runs another command than the one that was ordered, or otherwise."""

    def execute(self, order):
        return self.sandbox.execute(self.changed(order))


@broken("input_is_empty")
class LeavesTheInputOpen(ChangesTheCommand):
    def changed(self, order):
        return evolve(order, argv=("/bin/sh", "-c", 'sleep 6 | "$@"', "sh", *order.argv))


@broken("environment_arrives")
class QuotesVariablesTwice(ChangesTheCommand):
    def changed(self, order):
        return evolve(order, env={name: shlex.quote(text) for name, text in order.env.items()})


@broken("environment_does_not_leak")
class InheritsTheEnvironment(ChangesTheCommand):
    def changed(self, order):
        own = {name: text for name, text in os.environ.items() if ENV_NAME.fullmatch(name)}
        return evolve(order, env={**own, **order.env})


@broken("arguments_arrive", "exit_codes", "output_is_bytes")
class JoinsWordsWithBlanks(ChangesTheCommand):
    def changed(self, order):
        return evolve(order, argv=("/bin/sh", "-c", " ".join(order.argv)))


@broken("check_runs_in_the_workspace", "modes_arrive", "programs_not_found")
class StartsAtHome(ChangesTheCommand):
    def changed(self, order):
        return evolve(order, argv=("/bin/sh", "-c", 'cd && exec "$@"', "sh", *order.argv))


@broken("runs_keep_apart")
class KeepsVariablesInOnePlace(ChangesTheCommand):
    def changed(self, order):
        self.backend.env = order.env
        time.sleep(0.2)
        return evolve(order, env=self.backend.env)


# Uploads.


class UploadsOtherwise(WrappedSandbox):
    """Sends another tree than the one that it is given."""

    def upload(self, workspace):
        return self.sandbox.upload(WrappedWorkspace(workspace, self.sent))


@broken("modes_arrive", "repositories_arrive_clean")
class LosesModes(UploadsOtherwise):
    def sent(self, entry):
        return evolve(entry, mode=0o644) if entry.kind is EntryKind.FILE else entry


@broken("links_arrive_as_links", "repositories_arrive_clean", "times_arrive")
class LeavesLinksOut(UploadsOtherwise):
    def sent(self, entry):
        return None if entry.kind is EntryKind.SYMLINK else entry


@broken("hidden_and_ignored_files_arrive", "repositories_arrive_clean", "names_arrive")
class LeavesHiddenFilesOut(UploadsOtherwise):
    def sent(self, entry):
        return None if any(part.startswith(".") for part in entry.path.split("/")) else entry


@broken("hidden_and_ignored_files_arrive")
class LeavesEmptyDirectoriesOut(UploadsOtherwise):
    def upload(self, workspace):
        self.parents = {str(Path(entry.path).parent) for entry in workspace.manifest()}
        return super().upload(workspace)

    def sent(self, entry):
        empty = entry.kind is EntryKind.DIRECTORY and entry.path not in self.parents
        return None if empty else entry


@broken("times_arrive", "links_arrive_as_links")
class ForgetsTimesOfLinks(UploadsOtherwise):
    def sent(self, entry):
        return evolve(entry, mtime_ns=1) if entry.kind is EntryKind.SYMLINK else entry


@broken("names_arrive")
class KnowsUnicodeOnly(UploadsOtherwise):
    def sent(self, entry):
        return entry if entry.path.isprintable() else None


@broken("large_files_arrive")
class SendsTenMegabytesAtMost(UploadsOtherwise):
    def sent(self, entry):
        return None if entry.size > 10_000_000 else entry


@broken("upload_replaces_what_was_there")
class AddsToWhatWasThere(WrappedSandbox):
    def upload(self, workspace):
        before = self.manifest() if self.sandbox.workspace.exists() else Manifest({})
        kept = self.sandbox.home / "kept"
        if len(before):
            self.sandbox.workspace.rename(kept)
        answer = self.sandbox.upload(workspace)
        for entry in before:
            place = self.sandbox.workspace / entry.path
            if entry.kind is EntryKind.FILE and not place.exists() and place.parent.is_dir():
                (kept / entry.path).rename(place)
        return answer


@broken("upload_spares_what_was_started")
class UploadsOverWhatRan(WrappedSandbox):
    def upload(self, workspace):
        (self.sandbox.home / "records").rename(self.sandbox.home / f"records-{time.monotonic_ns()}")
        (self.sandbox.home / "records").mkdir()
        return self.sandbox.upload(workspace)


@broken("short_uploads_are_refused")
class BelievesItsOwnUpload(WrappedSandbox):
    def upload(self, workspace):
        self.remember(workspace.manifest(), "asked-for")
        return self.sandbox.upload(workspace)

    def manifest(self):
        ran = (self.sandbox.home / "records" / "check").exists()
        return self.sandbox.manifest() if ran else self.remembered("asked-for")


# Downloads.


@broken("provenance_is_known")
class ComparesSizesAndTimes(WrappedSandbox):
    def upload(self, workspace):
        self.remember(workspace.manifest())
        return self.sandbox.upload(workspace)

    def manifest(self):
        known = self.remembered().entries

        def guessed(entry):
            before = known.get(entry.path)
            same = before and (before.size, before.mtime_ns) == (entry.size, entry.mtime_ns)
            return evolve(entry, sha256=before.sha256) if same else entry

        return Manifest.of(map(guessed, self.sandbox.manifest()))


class AccountsFor(WrappedSandbox):
    """Accounts for a part of what is there."""

    def manifest(self):
        return Manifest.of(filter(self.accounted, self.sandbox.manifest()))


@broken(
    "what_a_check_makes_comes_back",
    "provenance_is_known",
    "short_downloads_are_never_scored",
    "deadline_lets_it_save",
)
class AccountsForWhatWasSent(AccountsFor):
    def upload(self, workspace):
        self.remember(workspace.manifest())
        return self.sandbox.upload(workspace)

    def accounted(self, entry):
        return entry.path in self.remembered().entries


@broken("special_files_are_listed")
class OverlooksSpecialFiles(AccountsFor):
    def accounted(self, entry):
        return entry.kind in {EntryKind.FILE, EntryKind.DIRECTORY, EntryKind.SYMLINK}


@broken("locked_files_come_back")
class OverlooksLockedFiles(AccountsFor):
    def accounted(self, entry):
        return bool(entry.mode & 0o400) and not entry.path.startswith("closed/")


@broken("missing_is_not_absent", "provenance_is_known")
class WantsBackWhatItSent(WrappedSandbox):
    def upload(self, workspace):
        self.remember(workspace.manifest())
        return self.sandbox.upload(workspace)

    def fetch(self, entries, slot, intake):
        for path in self.remembered().entries:
            (self.sandbox.workspace / path).lstat()
        self.sandbox.fetch(entries, slot, intake)


# Permits, and the end of a sandbox.


@broken("destroy_wants_its_own_permit")
class IgnoresPermits(WrappedSandbox):
    def destroy(self, permit):
        tree.remove(self.sandbox.home)


@broken("destroy_is_confirmed_and_repeatable")
class ComplainsOfASecondDestroy(WrappedSandbox):
    def destroy(self, permit):
        if not self.sandbox.home.exists():
            raise SandboxGoneError("there is no such sandbox")
        self.sandbox.destroy(permit)


@broken("destroy_takes_what_was_never_seen")
class WantsASandboxInThePermit(WrappedSandbox):
    def destroy(self, permit):
        if permit.sandbox_id is None:
            raise PermitError("for no sandbox")
        self.sandbox.destroy(permit)


@broken(
    "finished_runs_leave_no_sandbox",
    "destroy_is_confirmed_and_repeatable",
    "kept_sandboxes_can_be_destroyed",
    "identities_differ",
)
class StopsAndDoesNotRemove(WrappedSandbox):
    def destroy(self, permit):
        pass


# One sandbox for one run.


@broken(
    "open_finds_what_was_created",
    "kept_sandboxes_can_be_destroyed",
    "interrupted_runs_are_resumed",
    "destroy_takes_what_was_never_seen",
)
class KnowsItsOwnSandboxesOnly(Wrapped):
    kind = WrappedSandbox

    def __init__(self, root):
        super().__init__(root)
        self.mine = set()

    def create(self, run_id, spec):
        self.mine.add(run_id)
        return super().create(run_id, spec)

    def open(self, run_id):
        return super().open(run_id) if run_id in self.mine else None


@broken("create_is_idempotent", "interrupted_runs_are_resumed")
class CreatesAnotherEveryTime(Wrapped):
    kind = WrappedSandbox

    def create(self, run_id, spec):
        tree.remove(self.backend.root / run_id)
        return super().create(run_id, spec)

    def open(self, run_id):
        found = super().open(run_id)
        ran = found and any((found.home / "records").glob("*/claim"))
        return self.create(run_id, None) if found and not ran else found


@broken("open_finds_what_was_created", "destroy_is_confirmed_and_repeatable")
class CreatesWhatItDoesNotFind(Wrapped):
    kind = WrappedSandbox

    def open(self, run_id):
        return self.create(run_id, None)


@broken("identities_differ", "recreated_sandboxes_are_never_scored")
class HasNoIdentity(WrappedSandbox):
    @property
    def ref(self):
        return SandboxRef(self.sandbox.ref.sandbox_id, "local")


class AnswersForTheGone(WrappedSandbox):
    def manifest(self):
        try:
            return self.sandbox.manifest()
        except SandboxGoneError:
            return Manifest({})

    def fetch(self, entries, slot, intake):
        try:
            self.sandbox.fetch(entries, slot, intake)
        except SandboxGoneError:
            for stream in ("stdout", "stderr"):
                intake.output(stream, [], [], 0)


@broken("destroyed_sandboxes_are_never_scored", "vanished_sandboxes_are_never_scored")
class RemembersTheGone(Wrapped):
    kind = AnswersForTheGone

    def __init__(self, root):
        super().__init__(root)
        self.known = {}

    def create(self, run_id, spec):
        self.known[run_id] = super().create(run_id, spec)
        return self.known[run_id]

    def open(self, run_id):
        return self.known.get(run_id)


# At most once.


@broken("orders_are_executed_once", "settled_orders_never_start")
class ExecutesAgain(WrappedSandbox):
    def execute(self, order):
        if (record := self.record(order)).exists():
            record.rename(record.parent.parent / f"record-{time.monotonic_ns()}")
        return self.sandbox.execute(order)


@broken("orders_that_come_twice_are_one")
class DoesNotWaitForOthers(WrappedSandbox):
    def execute(self, order):
        record = self.record(order)
        if (record / "claim").exists() and not (record / "ended").exists():
            return Record(ending=Ending.LOST, message="busy")
        return self.sandbox.execute(order)


@broken(
    "settled_orders_never_start",
    "settling_stops_what_runs",
    "settling_tells_how_it_ended",
    "client_timeouts_are_settled",
)
class SettlesWithoutLooking(WrappedSandbox):
    def settle(self, order):
        return Record(ending=Ending.NOT_STARTED)


@broken("settling_tells_how_it_ended", "lost_answers_are_settled", "client_timeouts_are_settled")
class LosesWhatItDidNotAnswer(WrappedSandbox):
    def settle(self, order):
        return evolve(self.sandbox.settle(order), ending=Ending.LOST, code=None)


@broken("late_orders_never_start")
class StartsLateOrders(ChangesTheCommand):
    def changed(self, order):
        return evolve(order, start_by=order.now() + 60.0)


# Setup, silence, and what it says of itself.


@broken("setup_is_not_counted")
class CountsSetupAsTheChecks(WrappedSandbox):
    def upload(self, workspace):
        self.remember(workspace.manifest())
        return self.sandbox.upload(workspace)

    def manifest(self):
        ran = (self.sandbox.home / "records" / "check").exists()
        return self.sandbox.manifest() if ran else self.remembered()


@broken("setup_failures_are_unresolved")
class OverlooksFailuresOfSetup(WrappedSandbox):
    def execute(self, order):
        record = self.sandbox.execute(order)
        return Record(ending=Ending.EXITED, code=0) if order.slot == "setup" else record


@broken("every_phase_is_bounded")
class WaitsForEver(WrappedSandbox):
    """Asks its daemon for the identity, and the daemon is in no hurry."""

    @property
    def ref(self):
        time.sleep(6)
        return self.sandbox.ref


@broken("backend_says_what_it_is")
class HasALongName(Wrapped):
    kind = WrappedSandbox

    def __init__(self, root):
        super().__init__(root)
        self.name = "My Sandboxes, by Me"


@broken("limits_are_kept_or_refused")
class PromisesEveryLimit(Wrapped):
    kind = WrappedSandbox

    def refuse(self, spec):
        pass


# What a check leaves running: the worked example without its one precaution.


careless = load_example()
careless.ADOPT_ORPHANS = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
careless.DirectoryBackend.__name__ = "AdoptsNoOrphans"
broken("daemons_without_a_trace_do_not_escape", "sessions_do_not_escape")(careless.DirectoryBackend)


# --- two designs from the field -------------------------------------------------------------------


class Foreign(example.DirectorySandbox):
    """A sandbox that runs a command with what the standard library offers."""

    def guest(self, verb, order):
        record = self.place / "records" / order.slot
        record.mkdir(exist_ok=True)
        if verb == "settle" or (record / "claim").exists():
            return Record(ending=Ending.LOST, message="nothing is known of it")
        (record / "claim").touch()
        environment = {"PATH": example.guest.SANE_PATH, "HOME": str(self.place), **order.env}
        ended, out, err = self.run(order, {"cwd": self.workspace, "env": environment})
        for name, data in (("stdout", out), ("stderr", err)):
            (record / f"{name}.head").write_bytes(data)
            (record / f"{name}.size").write_text(f"{len(data)} head")
        (record / "keep").write_text(str(order.output_bytes))
        return ended


def exited(code):
    if code < 0:
        return Record(ending=Ending.SIGNALLED, code=-code)
    return Record(ending=Ending.EXITED, code=code)


def directories_of(kind):
    class Directories(example.DirectoryBackend):
        def create(self, run_id, spec):
            return kind(super().create(run_id, spec).place)

        def open(self, run_id):
            found = super().open(run_id)
            return found and kind(found.place)

    Directories.__name__ = kind.__name__
    return Directories


class KillsTheShellAndReadsOn(Foreign):
    """`communicate(timeout)`, `kill()`, `communicate()`, without a process group: case A6."""

    def run(self, order, place):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(shlex.join(order.argv), shell=True, **pipes, **place) as process:
            try:
                out, err = process.communicate(timeout=order.deadline_s)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                return Record(ending=Ending.DEADLINE), out, err
        return exited(process.returncode), out, err


class RunsUnderTimeout(Foreign):
    """`timeout -k grace deadline command`, and 124 is read as late: cases B1, A10."""

    def run(self, order, place):
        limiter = ["timeout", "-k", str(order.grace_s), str(order.deadline_s), *order.argv]
        done = subprocess.run(
            limiter, stdin=subprocess.DEVNULL, capture_output=True, check=False, **place
        )
        late = done.returncode == 124
        record = Record(ending=Ending.DEADLINE) if late else exited(done.returncode)
        return record, done.stdout, done.stderr


FOREIGN = {
    KillsTheShellAndReadsOn: {
        "deadline_waits_for_no_pipe",
        "daemons_end_with_the_check",
        "sessions_do_not_escape",
        "sessions_do_not_escape_a_deadline",
        "late_orders_never_start",
    },
    RunsUnderTimeout: {
        "exit_codes",
        "deadline_escalates_to_kill",
        "daemons_end_with_the_check",
        "settling_stops_what_runs",
    },
}
GOOD_AT = {"output_is_bytes", "environment_arrives", "modes_arrive", "provenance_is_known"}


@pytest.mark.parametrize("kind", FOREIGN, ids=lambda kind: kind.__name__)
def test_faults_of_designs_from_the_field_are_found_by_name(tmp_path, kind):
    findings = conform(lambda: directories_of(kind)(tmp_path), only=[*FOREIGN[kind], *GOOD_AT])
    assert failed(findings) == FOREIGN[kind], report_of(findings)
    assert all(finding.reason for finding in findings if finding.ok is False)


# --- each check can fail --------------------------------------------------------------------------

BYSTANDERS = ("programs_not_found", "modes_arrive", "identities_differ", "output_is_bytes")
"""Checks that a backend which is wrong somewhere else has to pass: the kit points at what is."""
SLOW_EVERYWHERE = {"CreatesAnotherEveryTime", "LeavesTheInputOpen", "WaitsForEver"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_backend_that_is_wrong_somewhere_is_found_out_there(tmp_path, name):
    make, caught_by = BROKEN[name]
    others = set() if name in SLOW_EVERYWHERE else set(BYSTANDERS) - caught_by
    findings = conform(lambda: make(tmp_path), only=[*caught_by, *others])
    assert failed(findings) == caught_by, report_of(findings)
    assert not_applicable(findings) == set()


def test_every_check_fails_for_some_backend():
    found = set().union(*(caught_by for _, caught_by in BROKEN.values()), *FOREIGN.values())
    assert found == set(CHECKS)


# --- the kit itself -------------------------------------------------------------------------------


def test_every_check_makes_a_claim_and_names_its_case():
    assert list(CASES) == list(CHECKS)
    for name, check in CHECKS.items():
        assert check.__doc__.strip().endswith("."), name
        assert CASES[name], name


def test_a_check_that_is_not_known_is_refused_with_the_nearest_one(tmp_path):
    with pytest.raises(SpecError, match=r"'exit_code'.*'exit_codes'"):
        conform(lambda: LocalBackend(tmp_path), only=["exit_code"])


@pytest.fixture
def own_check(monkeypatch):
    """Register checks of this test's own."""
    monkeypatch.setattr(conformance, "CHECKS", {})
    monkeypatch.setattr(conformance, "CASES", {})
    return conformance.check(case="Z1")


def test_a_check_that_hangs_is_a_finding(own_check, tmp_path):
    held = threading.Event()

    @own_check
    def hangs(_):
        """It ends."""
        held.wait()

    [finding] = conform(lambda: LocalBackend(tmp_path), bound_s=0.2)
    held.set()
    assert finding.ok is False
    assert finding.reason == "BoundExceededError: no answer within 0.2 s"
    assert finding.elapsed_s < 10


@pytest.mark.parametrize("error", [AssertionError(), ValueError("bad"), SystemExit(3)], ids=repr)
def test_a_check_that_raises_is_a_finding_with_a_reason(own_check, tmp_path, error):
    @own_check
    def raises(_):
        """It does not."""
        raise error

    reported = []
    [finding] = conform(lambda: LocalBackend(tmp_path), report=reported.append)
    assert reported == [finding]
    assert finding.ok is False
    assert finding.reason


def test_a_factory_that_fails_is_a_finding_of_each_check():
    def make():
        raise OSError("no daemon here")

    [first, second] = conform(make, only=["exit_codes", "create_is_idempotent"])
    assert first.ok is second.ok is False
    assert first.reason == "OSError: no daemon here"


def test_what_a_check_leaves_is_destroyed_although_something_of_it_runs(own_check, tmp_path):
    started = threading.Event()

    @own_check
    def leaves(bench):
        """It leaves a command running."""
        sandbox = bench.sandbox()
        order = bench.order("echo > begun; sleep 7401")
        threading.Thread(target=sandbox.execute, args=[order], daemon=True).start()
        orders._wait_for(sandbox, "begun")
        started.set()

    [finding] = conform(lambda: LocalBackend(tmp_path))
    assert started.is_set()
    assert finding.ok is True
    assert list(tmp_path.iterdir()) == []


def test_the_report_has_a_line_for_each_finding_and_the_reasons():
    text = report_of(
        [
            conformance.Finding("exit_codes", ok=False, reason="it says 1", elapsed_s=0.5),
            conformance.Finding("signals", ok=True, reason="", elapsed_s=0.25),
            conformance.Finding("times_arrive", ok=None, reason="no clock", elapsed_s=0.0),
        ]
    )
    assert text.splitlines() == [
        "FAILED exit_codes     0.50 s  B1",
        "       it says 1",
        "ok     signals        0.25 s  B8",
        "n/a    times_arrive   0.00 s  section 6",
        "       no clock",
        "1 ok, 1 failed, 1 not applicable, in 0.8 s",
    ]


def test_the_kit_needs_neither_pytest_nor_hypothesis():
    program = "import sys, orchestrator.testing.conformance; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
    assert not {"pytest", "_pytest", "hypothesis"} & set(loaded.stdout.split())


# --- the guide ------------------------------------------------------------------------------------


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_the_code_of_the_guide_is_the_code_of_the_example():
    code = EXAMPLE.read_text()
    shown = blocks("python")
    assert len(shown) >= 5
    for block in shown:
        assert block in code, f"not in {EXAMPLE.name}:\n{block}"


def test_the_report_of_the_guide_is_a_report_of_these_checks():
    [report] = blocks("text")
    assert re.findall(r"^(?:ok|n/a) +(\w+)", report, re.MULTILINE) == list(CHECKS)
    assert "0 failed" in report


def test_the_example_prints_its_report_and_exits_with_zero(tmp_path, monkeypatch):
    only = "{'exit_codes': CHECKS['exit_codes']}"
    program = (
        "import runpy, orchestrator.testing.conformance as kit\n"
        f"CHECKS = dict(kit.CHECKS); kit.CHECKS.clear(); kit.CHECKS.update({only})\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok     exit_codes")
