"""Claims about trees on disk and the accounts of them: what is kept, and what is never touched."""
# ruff: noqa: PTH115, PTH119, PTH208

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import io
import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator import tree
from orchestrator.core.errors import EvidenceIncompleteError, OrchestratorError
from orchestrator.core.evidence import (
    Changes,
    Entry,
    EntryKind,
    Manifest,
    Provenance,
    provenance,
)

ROOT = os.geteuid() == 0
SECOND = 10**9
EMPTY = hashlib.sha256(b"").hexdigest()
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

examples = settings(deadline=None, max_examples=50)
many_examples = settings(deadline=None, max_examples=100)


# --- trees as values, made and read by other means than the library's -----------------------------


@dataclass(frozen=True)
class File:
    content: bytes
    hole: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class Link:
    target: bytes
    mtime_ns: int


@dataclass(frozen=True)
class Fifo:
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class Folder:
    children: dict[bytes, object]
    mode: int
    mtime_ns: int


modes = st.integers(0, 0o7777) | st.sampled_from([0, 0o111, 0o444, 0o555, 0o755, 0o1777, 0o4755])
times = st.integers(-2_147_000_000 * SECOND, 15_000_000_000 * SECOND)  # what ext4 can keep
names = (
    st.binary(min_size=1, max_size=40)
    | st.binary(min_size=255, max_size=255)
    | st.sampled_from(
        [b".hidden", b".git", b"-rf", b"a\nb", b" ", b"*", b"\xff\xfe", b"A", b"a", b"\xc3\xa9"]
    )
).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"_"))
names = names.filter(lambda name: name not in {b".", b".."})
targets = st.binary(min_size=1, max_size=80).map(lambda target: target.replace(b"\0", b"_"))
leaves = (
    st.builds(File, st.binary(max_size=80), st.sampled_from([0, 0, 1, 9000, 3 << 20]), modes, times)
    | st.builds(Link, targets | st.sampled_from([b"/etc/passwd", b"..", b".", b"a"]), times)
    | st.builds(Fifo, modes, times)
)
folders = st.recursive(
    st.dictionaries(names, leaves, max_size=4),
    lambda below: st.dictionaries(names, leaves | st.builds(Folder, below, modes, times)),
    max_leaves=8,
)


def plant(parent, children):
    for name, node in children.items():
        match node:
            case File(content, hole, mode, mtime_ns):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                descriptor = os.open(name, flags, 0o600, dir_fd=parent)
                os.write(descriptor, content)
                os.ftruncate(descriptor, len(content) + hole)
            case Folder(below, mode, mtime_ns):
                os.mkdir(name, 0o700, dir_fd=parent)
                descriptor = os.open(name, DIRECTORY, dir_fd=parent)
                plant(descriptor, below)
            case Link(target, mtime_ns):
                os.symlink(target, name, dir_fd=parent)
                os.utime(name, ns=(0, mtime_ns), dir_fd=parent, follow_symlinks=False)
                continue
            case Fifo(mode, mtime_ns):
                os.mkfifo(name, 0o600, dir_fd=parent)
                descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=parent)
        os.fchmod(descriptor, mode)
        os.utime(descriptor, ns=(0, mtime_ns))
        os.close(descriptor)


def expected(children, prefix=b""):
    entries = {}
    for name, node in children.items():
        path = os.fsdecode(prefix + name)
        match node:
            case File(content, hole, mode, mtime_ns):
                data = content + bytes(hole)
                digest = hashlib.sha256(data).hexdigest()
                entry = Entry(path, EntryKind.FILE, mode, mtime_ns, len(data), digest)
            case Folder(below, mode, mtime_ns):
                entry = Entry(path, EntryKind.DIRECTORY, mode, mtime_ns)
                entries.update(expected(below, prefix + name + b"/"))
            case Link(target, mtime_ns):
                text = os.fsdecode(target)
                entry = Entry(path, EntryKind.SYMLINK, 0o777, mtime_ns, target=text)
            case Fifo(mode, mtime_ns):
                entry = Entry(path, EntryKind.FIFO, mode, mtime_ns)
        entries[path] = entry
    return entries


@contextlib.contextmanager
def fresh():
    """Give a new directory, and remove it by other means than the library's."""
    place = Path(tempfile.mkdtemp(prefix="tree-"))
    try:
        yield place
    finally:
        for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            if place.exists():
                subprocess.run([*command, "--", place], check=False, capture_output=True)


def planted(place, children):
    root = place / "tree"
    root.mkdir()
    descriptor = os.open(root, DIRECTORY)
    plant(descriptor, children)
    os.close(descriptor)
    return root


def copied(root, place, manifest=None):
    """Build a tree out of another, and give its root."""
    copy = place / "copy"
    copy.mkdir()
    manifest = tree.scan(root, ours=True) if manifest is None else manifest
    tree.build(copy, manifest, lambda entry: tree.open_file(root, entry.path, ours=True))
    return copy


def survives(root, place):
    """Check that the copy of a tree equals it, and give its manifest."""
    before = tree.scan(root, ours=True)
    after = tree.scan(copied(root, place, before), ours=True)
    assert before.differences(after) == []
    assert before == after
    return before


def file_entry(path, content=b""):
    digest = hashlib.sha256(content).hexdigest()
    return Entry(path, EntryKind.FILE, 0o644, 0, len(content), digest)


def nothing(_entry):
    return io.BytesIO(b"")


def descriptors():
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))


# --- fidelity -------------------------------------------------------------------------------------


@examples
@given(folders)
def test_an_account_says_what_was_put_on_disk(children):
    with fresh() as place:
        assert tree.scan(planted(place, children), ours=True).entries == expected(children)


@examples
@given(folders)
def test_a_copy_of_any_tree_has_an_equal_account(children):
    with fresh() as place:
        survives(planted(place, children), place)


@examples
@given(folders)
def test_a_tree_of_any_shape_and_mode_is_removed(children):
    with fresh() as place:
        root = planted(place, children)
        tree.remove(root)
        assert not os.path.lexists(root)


@examples
@given(folders)
def test_taking_an_account_changes_nothing_but_access_times(children):
    def snapshot(root):
        found = subprocess.run(
            ["find", ".", "-printf", r"%i %y %m %n %U %G %s %b %T@ %l\n"],
            cwd=root,
            check=True,
            capture_output=True,
        )
        return found.stdout

    with fresh() as place:
        root = planted(place, children)
        before = snapshot(root)
        assert tree.scan(root, ours=True) == tree.scan(root, ours=True)
        assert snapshot(root) == before


def test_names_that_differ_only_in_unicode_form_or_case_stay_apart(tmp_path):
    children = {
        name: File(name, 0, 0o644, 0)
        for name in ("é".encode(), "e\u0301".encode(), b"\xe9", b"a", b"A", "ß".encode(), b"ss")
    }
    manifest = survives(planted(tmp_path, children), tmp_path)
    assert len({entry.sha256 for entry in manifest}) == len(children)


def test_links_of_every_kind_stay_links(tmp_path):
    root = tmp_path / "tree"
    (root / "real").mkdir(parents=True)
    (root / "real" / "f").write_text("x")
    wanted = {
        "l": "real",
        "dangling": "nope",
        "abs": "/etc/hostname",
        "a": "b",
        "b": "a",
        "self": "self",
        "up": "../../..",
        "long": "x/" * 2000,
    }
    for name, target in wanted.items():
        (root / name).symlink_to(target)
    manifest = survives(root, tmp_path)
    found = {entry.path: entry.target for entry in manifest if entry.kind is EntryKind.SYMLINK}
    assert {path: Path(target) for path, target in found.items()} == {
        path: Path(target) for path, target in wanted.items()
    }
    assert found["long"] == os.readlink(root / "long")
    assert "l/f" not in manifest.entries


def test_read_only_directories_are_filled_and_stay_read_only(tmp_path):
    root = tmp_path / "tree"
    (root / "ro" / "deeper").mkdir(parents=True)
    (root / "ro" / "deeper" / "f").write_text("x")
    for path in ("ro/deeper/f", "ro/deeper", "ro"):
        (root / path).chmod(0o444 if path.endswith("f") else 0o555)
    manifest = survives(root, tmp_path)
    assert [oct(entry.mode) for entry in manifest] == ["0o555", "0o555", "0o444"]


def test_both_names_of_a_hard_link_are_kept(tmp_path):
    root = tmp_path / "tree"
    root.mkdir()
    (root / "one").write_text("same")
    (root / "two").hardlink_to(root / "one")
    manifest = survives(root, tmp_path)
    assert manifest.entries["one"].sha256 == manifest.entries["two"].sha256
    (tmp_path / "copy" / "one").write_text("other")
    assert (root / "one").read_text() == "same"


def test_a_gibibyte_of_nothing_costs_little_disk(tmp_path):
    root = tmp_path / "tree"
    root.mkdir()
    with (root / "hole").open("wb") as file:
        file.write(b"start")
        file.truncate(1 << 30)
    copy = copied(root, tmp_path)
    assert (copy / "hole").stat().st_size == 1 << 30
    assert (copy / "hole").stat().st_blocks * 512 <= 2 << 20
    with (copy / "hole").open("rb") as file:
        assert file.read(10) == b"start\0\0\0\0\0"


@many_examples
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1]), st.sampled_from([1, 4095, 4096, 1 << 20, (1 << 20) + 1])
        ),
        max_size=5,
    )
)
def test_holes_change_no_byte(parts):
    data = b"".join(bytes([value]) * size for value, size in parts)
    with tempfile.TemporaryFile() as file:
        size, digest = tree.write_sparse(io.BytesIO(data), file.fileno())
        file.seek(0)
        assert (size, digest) == (len(data), hashlib.sha256(data).hexdigest())
        assert file.read() == data


def test_a_stream_that_gives_a_byte_at_a_time_is_written_whole():
    class Slow(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, 1))

    with tempfile.TemporaryFile() as file:
        assert tree.write_sparse(Slow(b"\0" * 100 + b"x" * 100), file.fileno())[0] == 200
        file.seek(0)
        assert file.read() == b"\0" * 100 + b"x" * 100


# --- depth and width ------------------------------------------------------------------------------


def dig(root, levels, name):
    root.mkdir()
    descriptor = os.open(root, DIRECTORY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=descriptor)
        deeper = os.open(name, DIRECTORY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = deeper
    with os.fdopen(os.open("end", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor), "w") as file:
        file.write("the end")
    os.close(descriptor)
    return root


@pytest.mark.parametrize(
    ("levels", "name"), [(300, "n" * 60), (3000, "n" * 60), (40, "é" * 127), (700, "a")]
)
def test_paths_far_beyond_path_max_are_kept(levels, name):
    with fresh() as place:
        root = dig(place / "tree", levels, name)
        manifest = tree.scan(root)
        end = "/".join([name] * levels + ["end"])
        assert len(manifest) == levels + 1
        assert manifest.entries[end].sha256 == hashlib.sha256(b"the end").hexdigest()
        with tree.open_file(root, end) as stream:
            assert stream.read() == b"the end"
        assert tree.scan(copied(root, place, manifest)) == manifest


@pytest.mark.parametrize("levels", [300, 3000])
def test_trees_far_deeper_than_python_recurses_are_removed(levels):
    with fresh() as place:
        root = dig(place / "tree", levels, "n" * 60)
        tree.remove(root)
        assert not root.exists()


def test_a_wide_and_deep_tree_needs_few_descriptors(tmp_path):
    script = """
        import resource, sys
        from pathlib import Path
        from orchestrator import tree
        root = Path(sys.argv[1])
        for top in range(20):
            (root / "tree" / "/".join([f"d{top}"] * 100)).mkdir(parents=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
        (root / "copy").mkdir()
        manifest = tree.scan(root / "tree")
        tree.build(root / "copy", manifest, lambda entry: None)
        assert tree.scan(root / "copy") == manifest
        tree.remove(root / "copy")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), tmp_path]
    subprocess.run(command, check=True, timeout=60)
    assert not (tmp_path / "copy").exists()


# --- what is no file ------------------------------------------------------------------------------


@pytest.fixture
def odd(tmp_path):
    """Make a tree with an entry of every kind that must not be opened."""
    root = tmp_path / "tree"
    root.mkdir()
    os.mkfifo(root / "fifo")
    os.mknod(root / "socket", stat.S_IFSOCK | 0o600)
    if ROOT:
        os.mknod(root / "char", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.mknod(root / "block", stat.S_IFBLK | 0o600, os.makedev(7, 200))
    return root


def test_what_is_no_file_is_listed_and_never_opened(odd, monkeypatch):
    opened = []

    def recorded(path, flags, *args, **kwargs):
        opened.append(os.path.basename(os.fspath(path)))
        return real(path, flags, *args, **kwargs)

    real = os.open
    monkeypatch.setattr(os, "open", recorded)
    manifest = tree.scan(odd, ours=True)
    monkeypatch.undo()
    kinds = {entry.path: entry.kind for entry in manifest}
    devices = {"char": EntryKind.DEVICE, "block": EntryKind.DEVICE} if ROOT else {}
    assert kinds == {"fifo": EntryKind.FIFO, "socket": EntryKind.SOCKET, **devices}
    assert not {"fifo", "socket", "char", "block"} & set(opened)
    assert all(entry.sha256 is None and entry.size == 0 for entry in manifest)


def test_a_live_socket_is_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        server.listen()
        assert tree.scan(tmp_path).entries["s"].kind is EntryKind.SOCKET


@pytest.mark.parametrize("kind", [EntryKind.SOCKET, EntryKind.DEVICE])
def test_a_socket_or_device_is_never_made(tmp_path, kind):
    with pytest.raises(OSError, match="cannot be copied"):
        tree.build(tmp_path, Manifest.of([Entry("x", kind, 0o600, 0)]), nothing)
    assert os.listdir(tmp_path) == []


# --- nothing outside ------------------------------------------------------------------------------


def link(path, target):
    return Entry(path, EntryKind.SYMLINK, 0o777, 0, target=str(target))


def folder(path):
    return Entry(path, EntryKind.DIRECTORY, 0o755, 0)


HOSTILE = {
    "a name above": lambda out: [file_entry("../out/x")],
    "a way up and down": lambda out: [folder("d"), file_entry("d/../../out/x")],
    "an absolute path": lambda out: [file_entry(f"{out}/x")],
    "an absolute path of two slashes": lambda out: [file_entry(f"/{out}/x")],
    "through a link": lambda out: [link("a", out), file_entry("a/x")],
    "through a relative link": lambda out: [link("a", "../out"), file_entry("a/x")],
    "through a link to /": lambda out: [link("a", "/"), file_entry(f"a{out}/x")],
    "a directory above": lambda out: [folder("../out/x")],
    "a directory through a link": lambda out: [link("a", out), folder("a/x"), file_entry("a/x/y")],
    "a link above": lambda out: [link("../out/x", "y")],
    "a link through a link": lambda out: [link("a", out), link("a/x", "y")],
    "a fifo through a link": lambda out: [link("a", out), Entry("a/x", EntryKind.FIFO, 0o600, 0)],
    "a mode above": lambda out: [folder("..")],
    "the root itself": lambda out: [folder(".")],
    "no name": lambda out: [file_entry("")],
    "a directory's own name": lambda out: [folder("d"), file_entry("d/")],
    "in no directory": lambda out: [file_entry("d/x")],
    "below a file": lambda out: [file_entry("d"), file_entry("d/x")],
    "a name with an end": lambda out: [file_entry("x\0y")],
    "no way to write it": lambda out: [file_entry("\ud800")],
    "a name too long": lambda out: [file_entry("x" * 300)],
    "a name beyond every limit": lambda out: [file_entry("x" * 5000)],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_account_makes_nothing_outside_its_destination(tmp_path, kind):
    out, inside = tmp_path / "out", tmp_path / "in"
    for place in (out, inside):
        place.mkdir(mode=0o700)
        os.utime(place, ns=(1, 1))
    with pytest.raises((OSError, ValueError, OrchestratorError)):
        tree.build(inside, Manifest.of(HOSTILE[kind](out)), nothing)
    assert os.listdir(out) == []
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    assert [stat.S_IMODE(place.stat().st_mode) for place in (out, inside)] == [0o700, 0o700]


def test_building_replaces_nothing_that_is_there(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        tree.build(tmp_path, Manifest.of([file_entry("x")]), nothing)
    assert (tmp_path / "x").read_text() == "mine"


def test_removing_a_link_leaves_its_target_as_it_is(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "f").write_text("x")
    (target / "f").chmod(0o040)
    (tmp_path / "link").symlink_to(target)
    tree.remove(tmp_path / "link")
    assert not os.path.lexists(tmp_path / "link")
    assert stat.S_IMODE((target / "f").stat().st_mode) == 0o040


def test_removing_does_not_follow_links_inside(tmp_path):
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "f").write_text("x")
    root = tmp_path / "tree"
    (root / "d").mkdir(parents=True)
    (root / "d" / "l").symlink_to(keep)
    (root / "l").symlink_to(keep / "f")
    tree.remove(root)
    assert (keep / "f").read_text() == "x"


def test_removing_what_is_not_there_is_no_error(tmp_path):
    tree.remove(tmp_path / "never")


def test_removing_a_file_removes_it(tmp_path):
    (tmp_path / "f").write_text("x")
    tree.remove(tmp_path / "f")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_removed_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(tree.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(tree.subprocess, "run", lambda *_, **__: None)
    with pytest.raises(OSError, match="could not be removed"):
        tree.remove(tmp_path)


# --- trees that change while they are read --------------------------------------------------------


@pytest.fixture
def when_opened(monkeypatch):
    """Have something happen in the moment before an entry of some name is opened, once."""

    def arm(name, act):
        def interfering(path, flags, *args, **kwargs):
            if pending and os.path.basename(os.fspath(path)) == name:
                pending.pop()()
            return real(path, flags, *args, **kwargs)

        pending = [act]
        real = os.open
        monkeypatch.setattr(os, "open", interfering)
        return pending

    return arm


@pytest.fixture
def guarded(tmp_path):
    """Make a tree beside a secret."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("secret")
    (tmp_path / "out" / "victim").write_text("secret")
    root = tmp_path / "tree"
    (root / "a" / "b").mkdir(parents=True)
    (root / "victim").write_text("x")
    (root / "a" / "b" / "f").write_text("x")
    return root


def replaced_by_link(path, target):
    def act():
        path.rename(path.with_name("moved"))
        path.symlink_to(target)

    return act


@pytest.mark.parametrize("ours", [False, True])
def test_a_file_that_becomes_a_link_is_not_followed(guarded, when_opened, ours):
    when_opened("victim", replaced_by_link(guarded / "victim", "../out/secret"))
    with pytest.raises((OSError, EvidenceIncompleteError)):
        tree.scan(guarded, ours=ours)


@pytest.mark.parametrize("ours", [False, True])
def test_a_directory_that_becomes_a_link_is_not_followed(guarded, when_opened, ours):
    when_opened("a", replaced_by_link(guarded / "a", "../out"))
    with pytest.raises((OSError, EvidenceIncompleteError)):
        tree.scan(guarded, ours=ours)


@pytest.mark.parametrize("ours", [False, True])
def test_a_directory_above_that_becomes_a_link_is_not_followed(
    guarded, tmp_path, when_opened, ours
):
    (tmp_path / "out" / "b").mkdir()
    (tmp_path / "out" / "b" / "f").write_text("secret")
    left = when_opened("b", replaced_by_link(guarded / "a", "../out"))
    try:
        manifest = tree.scan(guarded, ours=ours)
    except (OSError, EvidenceIncompleteError):
        return
    assert not left
    assert manifest.entries["a/b/f"].sha256 == hashlib.sha256(b"x").hexdigest()


def test_a_file_is_not_opened_through_a_link_above_it(guarded, tmp_path):
    replaced_by_link(guarded / "a", tmp_path / "out")()
    with pytest.raises(OSError, match=r".") as caught:
        tree.open_file(guarded, "a/secret").close()
    assert caught.value.errno in {errno.ENOTDIR, errno.ELOOP}


def test_a_file_that_becomes_a_fifo_stops_the_account_and_hangs_nothing(guarded, when_opened):
    def act():
        (guarded / "victim").unlink()
        os.mkfifo(guarded / "victim")

    when_opened("victim", act)
    with pytest.raises(EvidenceIncompleteError, match="victim"):
        tree.scan(guarded)


def test_a_fifo_is_not_given_out_as_a_file(tmp_path):
    os.mkfifo(tmp_path / "f")
    with pytest.raises((OSError, EvidenceIncompleteError)):
        tree.open_file(tmp_path, "f").close()


def test_a_file_that_becomes_a_directory_stops_the_account_and_leaks_nothing(guarded, when_opened):
    def act():
        (guarded / "victim").unlink()
        (guarded / "victim").mkdir()

    before = descriptors()
    when_opened("victim", act)
    with pytest.raises((OSError, EvidenceIncompleteError)):
        tree.scan(guarded)
    assert descriptors() == before


def test_a_file_that_goes_stops_the_account(guarded, when_opened):
    when_opened("victim", (guarded / "victim").unlink)
    with pytest.raises(FileNotFoundError):
        tree.scan(guarded)


def test_a_file_replaced_at_once_is_accounted_for_as_one_version_of_it(guarded, when_opened):
    def act():
        other = guarded.parent / "other"
        other.write_text("another version")
        other.chmod(0o600)
        os.utime(other, ns=(5, 5))
        other.replace(guarded / "victim")

    (guarded / "victim").chmod(0o640)
    when_opened("victim", act)
    try:
        manifest = tree.scan(guarded)
    except EvidenceIncompleteError:
        return
    assert manifest.entries["victim"] == tree.scan(guarded).entries["victim"]


@pytest.fixture
def while_hashed(monkeypatch):
    """Have something happen after each chunk of a file that is hashed, at most a hundred times."""

    def arm(act):
        class Interfering:
            def __init__(self):
                self.real = real()

            def update(self, data):
                self.real.update(data)
                if len(acted) < 100:
                    acted.append(len(data))
                    act()

            def hexdigest(self):
                return self.real.hexdigest()

        acted = []
        real = hashlib.sha256
        monkeypatch.setattr(hashlib, "sha256", Interfering)
        return acted

    return arm


def test_a_file_that_grows_as_fast_as_it_is_read_stops_the_account_soon(tmp_path, while_hashed):
    (tmp_path / "log").write_bytes(b"x" * 1000)

    def grow():
        with (tmp_path / "log").open("ab") as file:
            file.write(b"x" * 2000)

    chunks = while_hashed(grow)
    with pytest.raises(EvidenceIncompleteError, match="log"):
        tree.scan(tmp_path)
    assert len(chunks) <= 2


@pytest.mark.parametrize("how", ["shrinks", "is overwritten", "is overwritten, its time set back"])
def test_a_file_that_changes_while_it_is_read_stops_the_account(tmp_path, while_hashed, how):
    path = tmp_path / "f"
    path.write_bytes(b"x" * (3 << 20))
    before = path.stat()

    def change():
        if how == "shrinks":
            os.truncate(path, 10)
        else:
            with path.open("r+b") as file:
                file.write(b"y")
            if "time" in how:
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    while_hashed(change)
    with pytest.raises(EvidenceIncompleteError, match="changed while it was read"):
        tree.scan(tmp_path)


# --- permissions ----------------------------------------------------------------------------------

UNPRIVILEGED = """
    import hashlib, os, shutil, stat, subprocess, sys
    from pathlib import Path
    from orchestrator import tree
    from orchestrator.core.evidence import Manifest

    root = Path(sys.argv[1])
    was_root = os.geteuid() == 0

    def drop():
        if was_root:
            os.chown(root, 65534, 65534)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        os.umask(0o022)

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def modes(top):
        return {
            entry.path: oct(entry.mode) for entry in tree.scan(top, ours=True)
        }

    def refused(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except OSError:
            return True
        return False
"""


def unprivileged(body):
    """Run code as a user who may not read everything."""
    script = textwrap.dedent(UNPRIVILEGED) + textwrap.dedent(body)
    with fresh() as place:
        done = subprocess.run(
            [sys.executable, "-c", script, place],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["0o000", "0o111", "0o333", "0o444", "0o555"])
def test_what_a_check_took_permissions_from_is_read_and_left_as_it_was(mode):
    unprivileged(f"""
        drop()
        top = root / "tree"
        (top / "d" / "e").mkdir(parents=True)
        for path in ("f", "d/f", "d/e/f"):
            (top / path).write_text(path)
        paths = ["d/e/f", "d/f", "f", "d/e", "d"]
        for path in paths:
            (top / path).chmod({mode})
        open_before = descriptors()
        manifest = tree.scan(top, ours=True)
        assert {{e.path: e.mode for e in manifest}} == dict.fromkeys(paths, {mode})
        for path in ("f", "d/f", "d/e/f"):
            assert manifest.entries[path].sha256 == hashlib.sha256(path.encode()).hexdigest()
            with tree.open_file(top, path, ours=True) as stream:
                assert stream.read() == path.encode()
        assert tree.scan(top, ours=True) == manifest
        assert descriptors() == open_before
        (root / "copy").mkdir()
        tree.build(root / "copy", manifest, lambda e: tree.open_file(top, e.path, ours=True))
        assert tree.scan(root / "copy", ours=True) == manifest
        assert refused(tree.scan, top) or {mode} == 0o555
        for place in (top, root / "copy"):
            tree.remove(place)
            assert not os.path.lexists(place)
        assert descriptors() == open_before
    """)


def test_a_chain_of_directories_without_permissions_is_read_and_removed():
    unprivileged("""
        drop()
        top = root / "tree"
        bottom = top.joinpath(*["d"] * 150)
        bottom.mkdir(parents=True)
        (bottom / "f").write_text("x")
        here = bottom
        while here != top:
            here.chmod(0)
            here = here.parent
        before = descriptors()
        assert set(modes(top).values()) == {"0o0", "0o644"}
        assert set(modes(top).values()) == {"0o0", "0o644"}
        tree.remove(top)
        assert not os.path.lexists(top)
        assert descriptors() == before
    """)


@pytest.mark.skipif(not ROOT, reason="only root can make somebody else's file")
def test_somebody_elses_unreadable_entry_is_an_error_and_not_an_absence():
    unprivileged("""
        for top, name in (("files", "f"), ("directories", "d")):
            (root / top).mkdir()
            os.chown(root / top, 65534, 65534)
        (root / "files" / "f").write_text("x")
        (root / "files" / "f").chmod(0o600)
        (root / "directories" / "d").mkdir(mode=0o700)
        (root / "directories" / "d" / "f").write_text("x")
        drop()
        before = descriptors()
        for ours in (False, True):
            assert refused(tree.scan, root / "files", ours=ours)
            assert refused(tree.scan, root / "directories", ours=ours)
            assert refused(tree.open_file, root / "files", "f", ours=ours)
            assert refused(tree.open_file, root / "directories", "d/f", ours=ours)
        assert descriptors() == before
        tree.remove(root / "files")
        assert refused(tree.remove, root / "directories")
        assert (root / "directories" / "d").is_dir()
    """)


def test_the_mode_is_given_back_when_reading_fails():
    unprivileged("""
        drop()
        top = root / "tree"
        (top / "d").mkdir(parents=True)
        (top / "d" / "f").write_text("x")
        (top / "d" / "f").chmod(0)
        (top / "d").chmod(0)

        class Failing:
            def update(self, data):
                raise OSError(5, "Input/output error")

        before = descriptors()
        real, hashlib.sha256 = hashlib.sha256, Failing
        assert refused(tree.scan, top, ours=True)
        hashlib.sha256 = real
        assert modes(top) == {"d": "0o0", "d/f": "0o0"}
        assert descriptors() == before
    """)


def test_giving_permissions_back_never_touches_what_a_link_points_to():
    unprivileged("""
        drop()
        for name in ("file", "directory"):
            top, out = root / name, root / f"outside-{name}"
            top.mkdir()
            for place in (out, top / "victim"):
                place.write_text("x") if name == "file" else place.mkdir()
            out.chmod(0o640)
            (top / "victim").chmod(0)
            real = os.chmod

            def interfering(*args, **kwargs):
                os.chmod = real
                (top / "victim").rename(root / f"moved-{name}")
                (top / "victim").symlink_to(out)
                return real(*args, **kwargs)

            os.chmod = interfering
            try:
                assert refused(tree.scan, top, ours=True)
            finally:
                os.chmod = real
            assert stat.S_IMODE(out.stat().st_mode) == 0o640, name
    """)


def test_a_scan_that_is_not_ours_changes_no_permissions():
    unprivileged("""
        drop()
        top = root / "tree"
        top.mkdir()
        (top / "f").write_text("x")
        (top / "f").chmod(0)
        before = (top / "f").stat().st_ctime_ns
        assert refused(tree.scan, top)
        assert refused(tree.open_file, top, "f")
        assert (top / "f").stat().st_ctime_ns == before
    """)


# --- descriptors ----------------------------------------------------------------------------------


def test_no_descriptor_outlives_what_it_was_opened_for(tmp_path):
    root = planted(
        tmp_path,
        {b"d%d" % n: Folder({b"f": File(b"x", 5000, 0o644, 0)}, 0o755, 0) for n in range(10)},
    )
    before = descriptors()
    manifest = tree.scan(root, ours=True)
    copied(root, tmp_path, manifest)
    tree.remove(tmp_path / "copy")
    for path in ("d1/none", "none/f", "d1", "d1/f/x"):
        with contextlib.suppress(OSError, EvidenceIncompleteError):
            tree.open_file(root, path).close()
    with pytest.raises(OSError, match="No such file"):
        tree.scan(root / "none")

    def failing(_entry):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "copy").mkdir()
    with pytest.raises(OSError, match="Input/output error"):
        tree.build(tmp_path / "copy", manifest, failing)
    assert descriptors() == before


# --- manifests ------------------------------------------------------------------------------------

paths = st.lists(names.map(os.fsdecode), min_size=1, max_size=3).map("/".join)
digests = st.binary(max_size=2).map(lambda data: hashlib.sha256(data).hexdigest())
entries = st.one_of(
    st.builds(Entry, paths, st.just(EntryKind.FILE), modes, times, st.integers(0, 2**63), digests),
    st.builds(
        Entry,
        paths,
        st.sampled_from([kind for kind in EntryKind if kind is not EntryKind.FILE]),
        modes,
        times,
    ),
    st.builds(
        lambda path, mtime_ns, target: Entry(
            path, EntryKind.SYMLINK, 0o777, mtime_ns, target=os.fsdecode(target)
        ),
        paths,
        times,
        targets,
    ),
)
some_entries = st.lists(entries, max_size=8, unique_by=lambda entry: entry.path)
manifests = some_entries.map(Manifest.of)


@st.composite
def pairs(draw):
    """Give two accounts of trees that have much in common."""
    before = draw(some_entries)
    after = {entry.path: entry for entry in draw(some_entries)}
    for entry in before:
        fate = draw(st.sampled_from(["keep", "drop", "touch", "as it is there"]))
        if fate == "keep":
            after[entry.path] = entry
        elif fate == "touch":
            after[entry.path] = draw(
                st.builds(Entry, st.just(entry.path), st.just(entry.kind), modes, times)
            )
        elif fate == "drop":
            after.pop(entry.path, None)
    return Manifest.of(before), Manifest.of(after.values())


@many_examples
@given(manifests)
def test_a_manifest_reads_back_as_it_was_written(manifest):
    again = Manifest.decode(manifest.encode())
    assert again == manifest
    assert again.encode() == manifest.encode()
    assert again.digest == manifest.digest == hashlib.sha256(manifest.encode()).hexdigest()
    assert list(again) == list(manifest)


@many_examples
@given(some_entries, st.randoms(use_true_random=False))
def test_equal_manifests_have_equal_bytes_whatever_made_them(given_entries, random):
    shuffled = list(given_entries)
    random.shuffle(shuffled)
    one = Manifest.of(given_entries)
    for other in (Manifest.of(shuffled), Manifest({entry.path: entry for entry in shuffled})):
        assert one == other
        assert one.encode() == other.encode()


@many_examples
@given(pairs())
def test_manifests_are_equal_exactly_if_their_digests_are(pair):
    one, other = pair
    assert (one == other) == (one.digest == other.digest) == (one.differences(other) == [])


@many_examples
@given(manifests)
def test_parents_come_before_their_children(manifest):
    order = {path: index for index, path in enumerate(manifest.entries)}
    for path, index in order.items():
        assert order.get(path.rpartition("/")[0], -1) < index


@many_examples
@given(pairs())
def test_changes_make_the_second_tree_of_the_first(pair):
    before, after = pair
    changes = Changes.between(before, after)
    assert changes.apply(before) == after
    assert changes.apply(before).encode() == after.encode()
    assert Changes.between(after, before).apply(after) == before


@many_examples
@given(pairs())
def test_changes_name_what_differs_and_nothing_else(pair):
    before, after = pair
    changes = Changes.between(before, after)
    named = {entry.path for entry in changes.entries} | set(changes.deleted)
    common = before.entries.keys() | after.entries.keys()
    differing = {path for path in common if before.entries.get(path) != after.entries.get(path)}
    assert named == differing
    assert len(before.differences(after)) == len(differing)
    assert Changes.between(after, after) == Changes((), ())


@many_examples
@given(pairs())
def test_every_path_has_the_one_provenance_that_the_two_trees_give_it(pair):
    before, after = pair
    for path in before.entries.keys() | after.entries.keys():
        old, new = before.entries.get(path), after.entries.get(path)
        if old is None:
            wanted = Provenance.CREATED
        elif new is None:
            wanted = Provenance.DELETED
        else:
            wanted = Provenance.UNCHANGED if old.same_content(new) else Provenance.MODIFIED
        assert provenance(path, before, after) is wanted
    assert provenance("/never", before, after) is None


def test_a_result_that_was_already_in_the_upload_is_told_from_one_that_was_written():
    given_tree = Manifest.of([file_entry("result.json", b"1"), file_entry("old", b"x")])
    left = Manifest.of([file_entry("result.json", b"1"), file_entry("reward.txt", b"1")])
    assert provenance("result.json", given_tree, left) is Provenance.UNCHANGED
    assert provenance("reward.txt", given_tree, left) is Provenance.CREATED
    assert provenance("old", given_tree, left) is Provenance.DELETED


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        (Entry("f", EntryKind.FILE, 0o644, 99, 0, EMPTY), Provenance.UNCHANGED),
        (Entry("f", EntryKind.FILE, 0o755, 0, 0, EMPTY), Provenance.MODIFIED),
        (file_entry("f", b"x"), Provenance.MODIFIED),
        (link("f", "f"), Provenance.MODIFIED),
        (folder("f"), Provenance.MODIFIED),
    ],
)
def test_times_alone_are_no_modification_and_all_else_is(after, wanted):
    assert provenance("f", Manifest.of([file_entry("f")]), Manifest.of([after])) is wanted


@example(Manifest({}))
@given(manifests)
def test_the_sum_of_sizes_counts_every_file(manifest):
    assert manifest.total_bytes == sum(entry.size for entry in manifest)
    assert len(manifest) == len(list(manifest))


def test_differences_name_the_entry_and_the_field():
    one = Manifest.of([file_entry("same"), file_entry("f", b"x"), file_entry("gone")])
    two = Manifest.of([file_entry("same"), file_entry("f", b"yy"), file_entry("new")])
    text = "\n".join(one.differences(two))
    assert "'gone': missing" in text
    assert "'new': not expected" in text
    assert "size 2 instead of 1" in text
    assert "'same'" not in text


def test_a_left_out_directory_is_not_part_of_the_tree(tmp_path):
    (tmp_path / "d" / "state").mkdir(parents=True)
    (tmp_path / "d" / "state" / "f").write_text("x")
    (tmp_path / "d" / "state2").write_text("x")
    manifest = tree.scan(tmp_path, leave_out="d/state")
    assert list(manifest.entries) == ["d", "d/state2"]
