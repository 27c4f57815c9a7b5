"""What comes back is what the check left, or is not scored; then the sandbox goes."""

from __future__ import annotations

from ...core.clocks import Bounds
from ...core.errors import PermitError
from ...core.evidence import EntryKind, Provenance
from ...core.facts import SandboxRef
from ...core.verdict import Reason, Verdict
from ..faults import Injection, Way
from . import check
from .bench import (
    Bench,
    _passed,
    _same,
    _story,
    _that,
    _unresolved,
    permit,
)

# --- download -------------------------------------------------------------------------------------


@check(case="E10")
def provenance_is_known(bench: Bench) -> None:
    """What the check made, changed, deleted or left is told apart, by content and not by time."""
    names = ("kept", "touched", "stale.json", "changed", "same-size", "mode", "deleted")
    program = (
        "echo new > made; echo longer > changed; touch touched; chmod 600 mode; rm deleted;"
        "printf NEW > same-size; touch -r kept same-size"
    )
    result = bench.run(program, files=dict.fromkeys(names, "old"))
    evidence = _passed(result)
    wanted = {
        Provenance.CREATED: ["made"],
        Provenance.MODIFIED: ["changed", "mode", "same-size"],
        Provenance.DELETED: ["deleted"],
        Provenance.UNCHANGED: ["kept", "stale.json", "touched"],
    }
    _same("provenance", {kind: evidence.paths(kind) for kind in wanted}, wanted)
    _same("content", evidence.read("same-size"), b"NEW")


@check(case="section 6")
def what_a_check_makes_comes_back(bench: Bench) -> None:
    """Content, modes, links, times and empty directories that a check makes are in its evidence."""
    program = (
        "mkdir -p deep/er empty; printf 'data\\377' > deep/er/file; chmod 750 deep/er/file;"
        "ln -s 'no where' dangling; ln -s /etc/hostname absolute; : > nothing; echo h > .hidden;"
        "TZ=UTC0 touch -t 200102030405.06 deep/er/file; chmod 1777 empty"
    )
    evidence = _passed(bench.run(program))
    _same("content", evidence.read("deep/er/file"), b"data\xff")
    _same("an empty file", evidence.read("nothing"), b"")
    found = {path: evidence.entry(path) for path in ("deep/er/file", "empty", "dangling")}
    modes = {path: oct(entry.mode) if entry else None for path, entry in found.items()}
    _same("modes", modes, {"deep/er/file": "0o750", "empty": "0o1777", "dangling": "0o777"})
    links = [getattr(evidence.entry(path), "target", None) for path in ("dangling", "absolute")]
    _same("links", links, ["no where", "/etc/hostname"])
    _that(evidence.exists(".hidden"), "a hidden file did not come back")
    file = found["deep/er/file"]
    apart_s = abs(file.mtime_ns / 1e9 - 981_173_106) if file else None
    _that(apart_s is not None and apart_s <= 1, f"a time came back {apart_s} s off")


@check(case="E4")
def special_files_are_listed(bench: Bench) -> None:
    """A FIFO or a socket that a check leaves is listed as one, and nobody waits at it."""
    socket = "perl -e 'use Socket; socket S, PF_UNIX, SOCK_STREAM, 0; bind S, sockaddr_un(q(s))'"
    python = "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'"
    program = f"mkfifo p; echo x > after; {socket} 2>/dev/null || {python} 2>/dev/null || :"
    result = bench.run(program, bounds=Bounds(download_s=20.0))
    evidence = _passed(result)
    kinds = {path: entry.kind for path, entry in evidence.manifest.entries.items()}
    wanted = {"p": EntryKind.FIFO, "after": EntryKind.FILE}
    _same("kinds", kinds, wanted | ({"s": EntryKind.SOCKET} if "s" in kinds else {}))


@check(case="E12")
def locked_files_come_back(bench: Bench) -> None:
    """What a check took its own permissions from comes back, with the permissions it has."""
    program = (
        "echo 1 > locked; mkdir -p closed/deeper; echo 2 > closed/in; echo 3 > closed/deeper/in;"
        "chmod 0 locked closed/in closed/deeper closed"
    )
    evidence = _passed(bench.run(program))
    files = {"locked": b"1\n", "closed/in": b"2\n", "closed/deeper/in": b"3\n"}
    _same("content", {path: evidence.read(path) for path in files}, files)
    modes = {path: getattr(evidence.entry(path), "mode", None) for path in ("locked", "closed")}
    _same("modes", modes, {"locked": 0, "closed": 0})


@check(case="E2, E3")
def missing_is_not_absent(bench: Bench) -> None:
    """A file that a check did not write is absent from sealed evidence, which is then scored."""
    expect = {"files": [{"path": "wanted", "exists": True}]}
    result = bench.run("rm given", files={"given": "1"}, expect=expect)
    scored = result.verdict is Verdict.FAILED and result.evidence and result.evidence.sealed
    _that(scored, f"it should be FAILED on sealed evidence, and is {_story(result)}")


@check(case="E1, E2")
def short_downloads_are_never_scored(bench: Bench) -> None:
    """Evidence that arrives otherwise than the sandbox has it, three times, is never scored."""
    program = "echo the result of the check > result"
    for way in (Way.TRUNCATED, Way.CORRUPTED, Way.LEFT_OUT):
        plan = [Injection("fetch", way, call) for call in (1, 2, 3)]
        result = bench.run(program, faults=plan)
        _unresolved(result, Reason.DOWNLOAD_FAILED)
        sealed = result.evidence is not None and result.evidence.sealed
        _that(not sealed, f"evidence that was {way} is sealed")


# --- permits, and the end of a sandbox ------------------------------------------------------------


@check(case="section 2")
def destroy_wants_its_own_permit(bench: Bench) -> None:
    """A permit for another sandbox or another run is refused, and the sandbox is still there."""
    sandbox = bench.sandbox(files={"evidence": "1"})
    run_id, ref = sandbox.ref.sandbox_id, sandbox.ref
    for what, wrong in (
        ("sandbox", permit(run_id, SandboxRef("another", "one"))),
        ("run", permit("another", ref)),
    ):
        try:
            sandbox.destroy(wrong)
        except PermitError:
            pass
        else:
            raise AssertionError(f"it was destroyed with a permit for another {what}")
    _that(bench.backend.open(run_id) is not None, "it is gone, though the permits were refused")
    _that("evidence" in sandbox.manifest().entries, "it is empty, though the permits were refused")


@check(case="G4")
def destroy_is_confirmed_and_repeatable(bench: Bench) -> None:
    """After destroy there is no such sandbox; destroying it again is as good."""
    sandbox = bench.sandbox(files={"evidence": "1"})
    run_id = sandbox.ref.sandbox_id
    for _ in range(2):
        sandbox.destroy(permit(run_id, sandbox.ref))
        _that(bench.backend.open(run_id) is None, "destroy came back, and it is still there")
    _that(bench.another_backend().open(run_id) is None, "for another backend it is still there")


@check(case="section 2")
def destroy_takes_what_was_never_seen(bench: Bench) -> None:
    """A run that never saw its sandbox may have whatever bears its name destroyed."""
    run_id = bench.sandbox().ref.sandbox_id
    found = bench.another_backend().open(run_id)
    _that(found is not None, "another backend does not find it")
    if found is not None:
        found.destroy(permit(run_id, None))
    _that(bench.backend.open(run_id) is None, "destroy came back, and it is still there")


@check(case="G3")
def finished_runs_leave_no_sandbox(bench: Bench) -> None:
    """After a run that passed, one that failed and one that was late, no sandbox is left."""
    for program in ("true", "exit 1", "sleep 6"):
        result = bench.run(program, deadline_s=0.5)
        _that(result.retained_sandbox is None, _story(result))
        _that(bench.backend.open(result.run_id) is None, f"the sandbox of `{program}` is left")


@check(case="G1, G4")
def kept_sandboxes_can_be_destroyed(bench: Bench) -> None:
    """A sandbox that is kept, on purpose or because deleting it failed, is found by its id."""
    kept = bench.run("true", setup="exit 1", retain="unresolved")
    left = bench.run("true", faults=["destroy:error-before"])
    _that(left.verdict is Verdict.PASSED, f"deleting failed, the check did not: {_story(left)}")
    for result in (kept, left):
        name = result.retained_sandbox
        _that(name is not None, f"the id of the sandbox is lost: {_story(result)}")
        sandbox = bench.another_backend().open(name or "")
        _that(sandbox is not None, "a sandbox that was kept is not found by its id")
        if sandbox is not None:
            sandbox.destroy(permit(result.run_id, sandbox.ref))
        _that(bench.backend.open(result.run_id) is None, "it is still there")
