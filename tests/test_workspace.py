"""Claims about the tree that a spec asks to run over."""
# ruff: noqa: PTH115, PTH208

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import tree
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.evidence import EntryKind, Manifest
from orchestrator.core.spec import EvalSpec
from orchestrator.workspace import SpecWorkspace, WorkspaceError, missing_directory

ROOT = os.geteuid() == 0
examples = settings(deadline=None, max_examples=60)

part = st.sampled_from(["a", "b", "é", "e\u0301", "A", ".git", "x y", "-rf"])
path = st.lists(part, min_size=1, max_size=3).map("/".join)
content = st.binary(max_size=20)


def apart(files):
    """Tell whether no path is below another."""
    return not any(str(parent) in files for name in files for parent in PurePosixPath(name).parents)


trees = st.dictionaries(path, content, max_size=6).filter(apart)


def write(root, files):
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def read(root):
    return {
        str(found.relative_to(root)): found.read_bytes()
        for found in root.rglob("*")
        if found.is_file() and not found.is_symlink()
    }


def built(workspace, place):
    """Make the tree of a workspace as a backend does, and give its root."""
    place.mkdir()
    tree.build(place, workspace.manifest(), workspace.open)
    return place


def snapshot(root):
    """Give all that `stat` and reading tell of a tree, but for access times."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in [".", *folders, *files]:
            entry = Path(folder, name)
            info = entry.lstat()
            kept = [
                getattr(info, field)
                for field in dir(info)
                if field.startswith("st_") and "atime" not in field
            ]
            if stat.S_ISLNK(info.st_mode):
                kept.append(os.readlink(entry))
            elif stat.S_ISREG(info.st_mode):
                kept.append(entry.read_bytes())
            found[str(entry)] = kept
    return found


@pytest.fixture
def origin(tmp_path):
    """Make a workspace with a little of everything, beside a secret."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("secret")
    root = tmp_path / "origin"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "src" / "run.sh").write_text("#!/bin/sh\n")
    (root / "src" / "run.sh").chmod(0o755)
    (root / "src" / "deep" / "private").write_text("x")
    (root / "src" / "deep" / "private").chmod(0o600)
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text("ref")
    (root / ".gitignore").write_text("*.log\n")
    (root / "a.log").write_text("ignored by git, kept here")
    (root / "to-secret").symlink_to("../secret")
    (root / "to-secrets").symlink_to(tmp_path / "secrets")
    (root / "dangling").symlink_to("nope")
    os.mkfifo(root / "fifo")
    os.link(root / "a.log", root / "b.log")
    (root / "src").chmod(0o555)
    return root


def test_a_workspace_is_copied_whole_and_never_changed(origin, tmp_path):
    before = snapshot(origin)
    workspace = SpecWorkspace(str(origin), {"new": b"1", "src/run.sh": b"2", "a.log": b"3"})
    copy = built(workspace, tmp_path / "copy")
    assert tree.scan(copy, ours=True) == workspace.manifest()
    for entry in workspace.manifest():
        if entry.kind is EntryKind.FILE:
            with workspace.open(entry) as stream:
                assert hashlib.sha256(stream.read()).hexdigest() == entry.sha256
    (copy / "b.log").write_text("changed in the copy")
    tree.remove(copy)
    assert snapshot(origin) == before


def test_hidden_and_ignored_files_are_part_of_it(origin):
    paths = SpecWorkspace(str(origin), {}).manifest().entries
    assert {".git/HEAD", ".gitignore", "a.log", "empty", "fifo"} <= set(paths)


def test_what_a_link_points_to_is_never_read(origin, tmp_path):
    workspace = SpecWorkspace(str(origin), {})
    secret = hashlib.sha256(b"secret").hexdigest()
    assert secret not in {entry.sha256 for entry in workspace.manifest()}
    assert workspace.manifest().entries["to-secrets"].kind is EntryKind.SYMLINK
    assert not [path for path in workspace.manifest().entries if path.startswith("to-secrets/")]
    copy = built(workspace, tmp_path / "copy")
    assert os.readlink(copy / "to-secret") == "../secret"


def test_a_file_that_became_a_link_after_the_account_is_not_followed(origin, tmp_path):
    workspace = SpecWorkspace(str(origin), {})
    entry = workspace.manifest().entries["a.log"]
    (origin / "a.log").unlink()
    (origin / "a.log").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match=r"a\.log"):
        workspace.open(entry).close()


def test_a_file_below_what_became_a_link_is_not_followed(origin, tmp_path):
    (tmp_path / "secrets" / "HEAD").write_text("secret")
    workspace = SpecWorkspace(str(origin), {})
    entry = workspace.manifest().entries[".git/HEAD"]
    (origin / ".git").rename(origin / "moved")
    (origin / ".git").symlink_to(tmp_path / "secrets")
    with pytest.raises((OSError, OrchestratorError)):
        workspace.open(entry).close()


def test_a_workspace_may_itself_be_reached_over_a_link(origin, tmp_path):
    (tmp_path / "link").symlink_to(origin)
    assert (
        SpecWorkspace(str(tmp_path / "link"), {}).manifest()
        == SpecWorkspace(str(origin), {}).manifest()
    )


def test_no_directory_and_no_files_is_an_empty_tree():
    assert SpecWorkspace(None, {}).manifest() == Manifest({})


# --- inline files ---------------------------------------------------------------------------------


@examples
@given(trees, trees)
def test_inline_files_lie_over_those_of_the_directory(below, above):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "origin")
        root.mkdir()
        write(root, below)
        workspace = SpecWorkspace(str(root), EvalSpec(name="x", check="x", files=above).files)
        if not apart({**below, **above}):
            with pytest.raises(WorkspaceError, match="in the spec's files"):
                workspace.manifest()
        else:
            copy = built(workspace, Path(name, "copy"))
            assert read(copy) == {**below, **above}
            assert tree.scan(copy) == workspace.manifest()
        assert read(root) == below


@examples
@given(trees, st.randoms(use_true_random=False))
def test_equal_files_make_equal_trees_in_any_order(files, random):
    names = list(files)
    random.shuffle(names)
    one = SpecWorkspace(None, files).manifest()
    other = SpecWorkspace(None, {name: files[name] for name in names}).manifest()
    assert one == other
    assert one.digest == other.digest


def test_an_inline_file_replaces_a_link_and_not_what_it_points_to(origin, tmp_path):
    workspace = SpecWorkspace(str(origin), {"to-secret": b"mine", "dangling": b"mine"})
    copy = built(workspace, tmp_path / "copy")
    assert (copy / "to-secret").read_bytes() == (copy / "dangling").read_bytes() == b"mine"
    assert not (copy / "to-secret").is_symlink()
    assert (tmp_path / "secret").read_text() == "secret"


def test_an_inline_file_replaces_a_fifo(origin):
    entry = SpecWorkspace(str(origin), {"fifo": b"mine"}).manifest().entries["fifo"]
    assert (entry.kind, entry.size) == (EntryKind.FILE, 4)


def test_an_inline_file_leaves_the_directory_that_it_is_put_in_as_it_was(origin):
    plain = SpecWorkspace(str(origin), {}).manifest()
    laid = SpecWorkspace(str(origin), {"src/deep/new": b"x"}).manifest()
    assert plain.differences(laid) == ["'src/deep/new': not expected"]


@pytest.mark.parametrize(
    "name", ["to-secrets/new", "to-secret/new", "dangling/x", "to-secrets/a/b"]
)
def test_an_inline_file_below_a_link_is_refused_and_writes_nothing(origin, tmp_path, name):
    with pytest.raises(WorkspaceError, match=f"'{name.partition('/')[0]}' is a symlink there"):
        SpecWorkspace(str(origin), {name: b"x"}).manifest()
    assert os.listdir(tmp_path / "secrets") == ["key"]


@pytest.mark.parametrize(
    ("name", "blamed"),
    [("src", "'src' is a directory"), ("a.log/x", "'a.log' is a file"), ("fifo/x", "'fifo'")],
)
def test_a_file_in_place_of_a_directory_or_below_a_file_is_refused(origin, name, blamed):
    with pytest.raises(WorkspaceError, match=blamed):
        SpecWorkspace(str(origin), {name: b"x"}).manifest()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["socket", "char device", "block device"])
def test_a_socket_or_device_is_refused_by_its_path(origin, kind, tmp_path):
    if kind != "socket" and not ROOT:
        pytest.skip("only root can make a device")
    place = origin / "src" / "deep" / "odd"
    if kind == "socket":
        os.mknod(place, stat.S_IFSOCK | 0o600)
    elif kind == "char device":
        os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    else:
        os.mknod(place, stat.S_IFBLK | 0o600, os.makedev(7, 200))
    with pytest.raises(WorkspaceError, match="'src/deep/odd' is a "):
        SpecWorkspace(str(origin), {}).manifest()


def test_a_live_socket_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        server.listen()
        with pytest.raises(WorkspaceError, match="'s' is a socket"):
            SpecWorkspace(str(tmp_path), {}).manifest()


def test_a_workspace_that_is_gone_is_an_error_that_names_it(tmp_path):
    with pytest.raises(WorkspaceError, match="gone: No such file"):
        SpecWorkspace(str(tmp_path / "gone"), {}).manifest()


def test_a_workspace_that_is_a_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(WorkspaceError, match="f: Not a directory"):
        SpecWorkspace(str(tmp_path / "f"), {}).manifest()


def test_what_is_wrong_with_a_directory_is_said_beforehand(tmp_path):
    (tmp_path / "f").write_text("x")
    (tmp_path / "dangling").symlink_to("nope")
    (tmp_path / "link").symlink_to(tmp_path)
    assert missing_directory(str(tmp_path)) is None
    assert missing_directory(str(tmp_path / "link")) is None
    assert missing_directory(str(tmp_path / "f")) == f"not a directory: {tmp_path / 'f'}"
    for name in ("gone", "dangling", "f/x"):
        assert str(tmp_path / name) in (missing_directory(str(tmp_path / name)) or "")


@pytest.mark.parametrize("what", ["a/unreadable", "a/closed/f"])
def test_what_the_user_may_not_read_is_refused_by_its_path_and_left_alone(what):
    script = """
        import os, re, sys
        from pathlib import Path
        from orchestrator.workspace import SpecWorkspace, WorkspaceError

        root, what = Path(sys.argv[1]), sys.argv[2]
        if os.geteuid() == 0:
            os.chown(root, 65534, 65534)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        (root / what).parent.mkdir(parents=True)
        (root / what).write_text("x")
        shut = (root / what).parent if "closed" in what else root / what
        shut.chmod(0)
        before = shut.stat()
        try:
            SpecWorkspace(str(root), {}).manifest()
        except WorkspaceError as error:
            assert f"{shut.relative_to(root)}: Permission denied" in str(error), error
        else:
            raise AssertionError("not refused")
        after = shut.stat()
        assert (before.st_mode, before.st_ctime_ns) == (after.st_mode, after.st_ctime_ns)
        shut.chmod(0o700)
    """
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-c", textwrap.dedent(script), place, what]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=60, cwd="/"
        )
        assert done.returncode == 0, done.stderr


# --- the runner's own directory -------------------------------------------------------------------


@pytest.mark.parametrize("linked", [False, True])
def test_the_runners_own_directory_is_not_part_of_the_workspace(tmp_path, linked):
    root = tmp_path / "origin"
    (root / "a" / "state").mkdir(parents=True)
    (root / "a" / "state" / "journal").write_text("x")
    (root / "a" / "f").write_text("x")
    given_root = root
    if linked:
        given_root = tmp_path / "link"
        given_root.symlink_to(root)
    workspace = SpecWorkspace(str(given_root), {}, root / "a" / "state")
    assert list(workspace.manifest().entries) == ["a", "a/f"]


def test_a_runners_directory_elsewhere_takes_nothing_from_the_workspace(tmp_path):
    root = tmp_path / "origin"
    root.mkdir()
    (root / "f").write_text("x")
    workspace = SpecWorkspace(str(root), {}, tmp_path / "origin-state")
    assert list(workspace.manifest().entries) == ["f"]
