"""What arrives in a sandbox is what was sent."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ... import tree
from ...core.verdict import Reason
from ..faults import Injection, Way
from . import check
from .bench import (
    Bench,
    NotApplicableError,
    _passed,
    _same,
    _spec,
    _that,
    _tree,
    _unresolved,
)


def _see(bench: Bench, workspace: Path, program: str, **spec: Any) -> str:
    """Have a check look at an uploaded directory, which must arrive unchanged; give its words."""
    sent = tree.scan(workspace)
    evidence = _passed(bench.run(program, workspace=str(workspace), **spec))
    changed = sent.differences(evidence.manifest)
    _that(not changed, f"it arrived otherwise than it was sent: {'; '.join(changed[:3])}")
    return evidence.stdout.decode("utf-8", "surrogateescape")


@check(case="D3")
def modes_arrive(bench: Bench) -> None:
    """Permissions arrive: of programs, of secrets, of directories that are read-only."""
    workspace = bench.fresh("workspace")
    for name, mode in (("run.sh", 0o755), ("secret", 0o600), ("plain", 0o644), ("kept", 0o440)):
        (workspace / name).write_text("#!/bin/sh\necho ran\n")
        (workspace / name).chmod(mode)
    (workspace / "readonly").mkdir()
    (workspace / "readonly" / "file").write_text("in it")
    (workspace / "readonly").chmod(0o555)
    seen = _see(bench, workspace, "./run.sh && stat -c %a secret plain kept readonly")
    _same("what the check sees", seen.split(), ["ran", "600", "644", "440", "555"])


@check(case="D2, D4")
def links_arrive_as_links(bench: Bench) -> None:
    """Symlinks stay symlinks: to directories, to nowhere, to elsewhere, to each other."""
    workspace = bench.fresh("workspace")
    (workspace / "real").mkdir()
    (workspace / "real" / "file").write_text("one")
    outside = bench.directory / "outside"
    outside.write_text("never copied")
    targets = {
        "to-directory": "real",
        "dangling": "no where",
        "absolute": str(outside),
        "loop-a": "loop-b",
        "loop-b": "loop-a",
        "up": "../../..",
    }
    for name, target in targets.items():
        (workspace / name).symlink_to(target)
    look = 'for l in {}; do [ -L "$l" ] || exit 9; readlink "$l"; done; cat to-directory/file'
    seen = _see(bench, workspace, look.format(" ".join(targets)))
    _same("what the check sees", seen.splitlines(), [*targets.values(), "one"])


@check(case="D1")
def hidden_and_ignored_files_arrive(bench: Bench) -> None:
    """Hidden files, files that git ignores, and directories with nothing in them arrive."""
    workspace = bench.fresh("workspace")
    files = (".hidden", ".gitignore", "a.log", "node_modules/x/index.js", ".git/config", "core~")
    for name in files:
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text("*.log\nnode_modules\n")
    for name in ("empty", ".empty/below", "__pycache__"):
        (workspace / name).mkdir(parents=True)
    look = f"for f in {' '.join(files)}; do [ -f $f ] || echo $f; done; [ -d .empty/below ]"
    _same("files that the check misses", _see(bench, workspace, f"{look} && [ -d empty ]"), "")


@check(case="D2")
def repositories_arrive_clean(bench: Bench) -> None:
    """A git repository arrives with nothing changed, as `git status` in the sandbox sees it."""
    git = shutil.which("git")
    if git is None:
        raise NotApplicableError("there is no git on this machine")
    workspace = bench.fresh("workspace")
    (workspace / "run").write_text("#!/bin/sh\n")
    (workspace / "run").chmod(0o755)
    (workspace / "link").symlink_to("run")
    (workspace / ".gitignore").write_text("*.log\n")
    (workspace / "a.log").write_text("ignored")
    who = ["-c", "user.name=conformance", "-c", "user.email=conformance@localhost"]
    quiet = ["-c", "init.defaultBranch=main", "-c", "core.hooksPath=", "-c", "commit.gpgSign=no"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        env = {"PATH": os.environ["PATH"], "HOME": str(bench.directory)}
        subprocess.run([git, *who, *quiet, *words], cwd=workspace, env=env, check=True)
    trust = {"COUNT": "1", "KEY_0": "safe.directory", "VALUE_0": "*"}
    look = "command -v git >/dev/null || exit 77; git status --porcelain; git log --format=%s"
    env = {f"GIT_CONFIG_{name}": value for name, value in trust.items()}
    result = bench.run(look, workspace=str(workspace), env=env)
    if str(result.outcome) == "exited(77)":
        raise NotApplicableError("there is no git in the sandbox")
    _same("status and log", _passed(result).stdout.decode(), "first\n")


@check(case="section 6")
def times_arrive(bench: Bench) -> None:
    """Times of last change arrive to the second: of files, of directories, of symlinks."""
    workspace = bench.fresh("workspace")
    (workspace / "directory").mkdir()
    (workspace / "directory" / "file").write_text("old")
    (workspace / "link").symlink_to("directory")
    times = {"directory/file": 1_000_000_000, "directory": 1_100_000_000, "link": 1_200_000_000}
    for name, moment_s in times.items():
        os.utime(workspace / name, (moment_s, moment_s), follow_symlinks=False)
    seen = _see(bench, workspace, f"stat -c %Y {' '.join(times)}").split()
    apart = [abs(int(mine) - theirs) for mine, theirs in zip(seen, times.values(), strict=True)]
    _that(max(apart) <= 1, f"times are {apart} s apart, of {list(times)}")


@check(case="section 6")
def names_arrive(bench: Bench) -> None:
    """Names of any bytes arrive, long ones and deep ones too, as far as this machine has them."""
    workspace = os.fsencode(bench.fresh("workspace"))
    names = [
        b"a b",
        b"line\nend",
        b"'\"`$HOME",
        b"-rf",
        b"*",
        b"\xff\xfe",
        b"\x01\x7f",
        b"\xc3\xbc",
    ]
    names += [b"n" * 255, b"back\\slash", b" ", b"C:", b"...", b"a\xcc\x88", b"A", b"a"]
    taken = 0
    for name in names:
        with suppress(OSError):
            Path(os.fsdecode(workspace + b"/" + name)).write_text("x")
            taken += 1
    deep = Path(os.fsdecode(workspace), *["d" * 100] * 12)
    deep.mkdir(parents=True)
    (deep / "file").write_text("deep")
    look = 'c=0; for f in ./* ./...; do [ -f "$f" ] && c=$((c + $(wc -c < "$f"))); done; echo $c'
    looked = _see(bench, Path(os.fsdecode(workspace)), look)
    _same("files that the check can read", int(looked), taken)


@check(case="D5")
def large_files_arrive(bench: Bench) -> None:
    """A file of many megabytes with a hole in it arrives whole, and comes back whole."""
    workspace = bench.fresh("workspace")
    with (workspace / "large").open("wb") as file:
        file.write(b"begin" * 100_000)
        file.seek(12_000_000)
        file.write(b"end")
    evidence = _passed(bench.run("cp large copy; wc -c < copy", workspace=str(workspace)))
    _same("bytes that the check sees", int(evidence.stdout.decode()), 12_000_003)
    same = evidence.read("copy") == (workspace / "large").read_bytes()
    _that(same, "its copy is another file than the one that was sent")


@check(case="ports")
def upload_replaces_what_was_there(bench: Bench) -> None:
    """An upload makes the workspace equal to what is sent, after one that was cut short as well."""
    sandbox = bench.sandbox(files={"left/over": "1", "changed": "1", "extra": "1"})
    wanted = _tree(_spec("true", files={"changed": "2", "left": "a file now"}))
    _that(sandbox.upload(wanted) is True, "it was refused, though nothing was started")
    wrong = wanted.manifest().differences(sandbox.manifest())
    _that(not wrong, f"the workspace is not what was sent: {'; '.join(wrong[:3])}")


@check(case="ports")
def upload_spares_what_was_started(bench: Bench) -> None:
    """After a command of the run was started, an upload touches nothing, and says so."""
    sandbox = bench.sandbox(files={"input": "1"})
    sandbox.execute(bench.order("echo result > output"))
    before = sandbox.manifest()
    refused = sandbox.upload(_tree(_spec("true", files={"input": "2"})))
    _that(refused is False, "an upload over a check that ran was accepted")
    _that(not before.differences(sandbox.manifest()), "an upload changed what a check had left")


@check(case="D5")
def short_uploads_are_refused(bench: Bench) -> None:
    """A workspace that arrives otherwise than it was sent is found out before the check starts."""
    files = {"a": "first content", "b": "second content"}
    for way in (Way.TRUNCATED, Way.CORRUPTED, Way.LEFT_OUT, Way.REORDERED):
        result = bench.run("echo ran > ran", faults=[Injection("upload", way)], files=files)
        _unresolved(result, Reason.UPLOAD_FAILED)
        ran = result.evidence is not None and result.evidence.exists("ran")
        _that(not ran and result.outcome is None, f"the check ran after an upload was {way}")
