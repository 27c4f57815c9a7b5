"""Claims about evidence on disk: what is sealed, what is refused, and what damage does."""
# ruff: noqa: PTH208

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path, PurePosixPath

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import tree
from orchestrator.core.errors import (
    EvidenceIncompleteError,
    OrchestratorError,
    OutputTruncatedError,
    VaultError,
)
from orchestrator.core.evidence import Entry, EntryKind, Manifest, Output, Provenance
from orchestrator.vault import Vault

ROOT = os.geteuid() == 0
RUN = "r0-run"
examples = settings(deadline=None, max_examples=40)
many_examples = settings(deadline=None, max_examples=150)

part = st.sampled_from(["a", "b", "é", "A", ".git", "\udcff", "x y"])
path = st.lists(part, min_size=1, max_size=3).map("/".join)
content = st.binary(max_size=20)
outputs = st.binary(max_size=20)


def apart(files):
    """Tell whether no path is below another."""
    return not any(str(parent) in files for name in files for parent in PurePosixPath(name).parents)


trees = st.dictionaries(path, content, max_size=5).filter(apart)


@contextlib.contextmanager
def fresh():
    place = Path(tempfile.mkdtemp(prefix="vault-"))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def write(root, files):
    root.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def file_entry(name, data=b""):
    digest = hashlib.sha256(data).hexdigest()
    return Entry(name, EntryKind.FILE, 0o644, 0, len(data), digest)


def folder(name):
    return Entry(name, EntryKind.DIRECTORY, 0o755, 0)


def link(name, target):
    return Entry(name, EntryKind.SYMLINK, 0o777, 0, target=str(target))


def deliver(intake, root, manifest, stdout=b"out", stderr=b"err"):
    """Deliver a tree as the local backend does."""
    for entry in intake.missing(manifest):
        with tree.open_file(root, entry.path) as stream:
            intake.receive(entry, stream)
    intake.output("stdout", [stdout], [], len(stdout))
    intake.output("stderr", [stderr], [], len(stderr))


def sealed(vault, root, baseline=None, run_id=RUN, **streams):
    """Deliver and seal a tree, and give the receipt."""
    manifest = tree.scan(root)
    intake = vault.intake(run_id, Manifest({}) if baseline is None else baseline)
    deliver(intake, root, manifest, **streams)
    return vault.seal(intake, manifest)


def intake_of(vault, manifest, contents, *, stdout=b"out", stderr=b"err"):
    """Deliver contents that need not be those of the manifest; give the intake."""
    intake = vault.intake(RUN, Manifest({}))
    for name, data in contents.items():
        with contextlib.suppress(EvidenceIncompleteError):
            intake.receive(manifest.entries[name], io.BytesIO(data))
    for stream, data in (("stdout", stdout), ("stderr", stderr)):
        if data is not None:
            intake.output(stream, [data], [], len(data))
    return intake


def is_evidence(vault):
    """Say what is there that could be taken for evidence."""
    return sorted(os.listdir(vault.path / "evidence"))


def is_sound(vault):
    """Check that whatever has a name in the vault is what its name says."""
    for found in (vault.path / "objects").glob("*/*"):
        assert hashlib.sha256(found.read_bytes()).hexdigest() == found.name
    for found in (vault.path / "manifests").iterdir():
        assert hashlib.sha256(found.read_bytes()).hexdigest() == found.stem
    for found in (vault.path / "evidence").iterdir():
        assert (found / "record.json").is_file()
    return True


@pytest.fixture
def vault(tmp_path):
    return Vault(tmp_path / "vault")


@pytest.fixture
def origin(tmp_path):
    return write(
        tmp_path / "origin",
        {"a": b"first", "d/b": b"second" * 50, "d/same": b"first", "empty": b""},
    )


# --- what is sealed -------------------------------------------------------------------------------


@examples
@given(trees, trees, outputs, outputs)
def test_sealed_evidence_reads_back(before, after, stdout, stderr):
    with fresh() as place:
        vault = Vault(place / "vault")
        baseline = tree.scan(write(place / "before", before))
        root = write(place / "after", after)
        receipt = sealed(vault, root, baseline, stdout=stdout, stderr=stderr)
        manifest = tree.scan(root)
        assert (receipt.sealed, receipt.manifest) == (True, manifest.digest)
        assert (receipt.entries, receipt.bytes) == (len(manifest), manifest.total_bytes)
        shutil.rmtree(root)
        evidence = Vault(place / "vault").evidence(receipt, None)
        assert evidence.sealed
        assert (evidence.manifest, evidence.baseline) == (manifest, baseline)
        assert (evidence.stdout, evidence.stderr) == (stdout, stderr)
        for name, data in after.items():
            assert evidence.read(name) == data
        assert receipt.created == len(evidence.paths(Provenance.CREATED))
        assert receipt.modified == len(evidence.paths(Provenance.MODIFIED))
        assert receipt.deleted == len(evidence.paths(Provenance.DELETED))
        evidence.export(place / "export")
        assert tree.scan(place / "export") == manifest


def test_evidence_of_every_provenance_is_told_apart(vault, tmp_path):
    root = write(tmp_path / "tree", {"same": b"1", "changed": b"1", "gone": b"1", "mode": b"1"})
    baseline = tree.scan(root)
    write(root, {"changed": b"2", "new": b"1"})
    (root / "gone").unlink()
    (root / "mode").chmod(0o755)
    os.utime(root / "same", ns=(0, 0))
    evidence = vault.evidence(sealed(vault, root, baseline), None)
    assert {kind: evidence.paths(kind) for kind in Provenance} == {
        Provenance.UNCHANGED: ["same"],
        Provenance.MODIFIED: ["changed", "mode"],
        Provenance.CREATED: ["new"],
        Provenance.DELETED: ["gone"],
    }
    assert evidence.provenance("never") is None
    assert not evidence.exists("gone")


def test_content_that_is_here_is_not_asked_for_again(vault, origin):
    manifest = tree.scan(origin)
    wanted = vault.intake(RUN, Manifest({})).missing(manifest)
    assert len(wanted) == len({entry.sha256 for entry in wanted}) == 3
    sealed(vault, origin)
    assert vault.intake("r1", Manifest({})).missing(manifest) == []


def test_a_file_that_is_absent_is_told_from_what_is_no_file(vault, origin):
    (origin / "link").symlink_to("a")
    evidence = vault.evidence(sealed(vault, origin), None)
    with pytest.raises(FileNotFoundError):
        evidence.read("nothing")
    with pytest.raises(IsADirectoryError):
        evidence.read("d")
    with pytest.raises(OSError, match="a symlink, not a file"):
        evidence.read("link")
    assert evidence.read("./d//b") == b"second" * 50


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "d/../../a", "..", "", ".", "d/.."])
def test_no_question_leads_out_of_the_evidence(vault, origin, name):
    evidence = vault.evidence(sealed(vault, origin), None)
    for ask in (evidence.entry, evidence.exists, evidence.read, evidence.provenance):
        with pytest.raises(ValueError, match="relative path"):
            ask(name)


# --- what is not sealed ---------------------------------------------------------------------------


def test_missing_content_is_not_sealed(vault, origin):
    manifest = tree.scan(origin)
    intake = intake_of(vault, manifest, {"a": b"first", "empty": b""})
    with pytest.raises(EvidenceIncompleteError, match=r"1 files did not arrive.*'d/b'"):
        vault.seal(intake, manifest)
    assert is_evidence(vault) == []


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_missing_output_is_not_sealed(vault, stream):
    intake = intake_of(vault, Manifest({}), {}, **{stream: None})
    with pytest.raises(EvidenceIncompleteError, match=f"{stream} did not arrive"):
        vault.seal(intake, Manifest({}))
    assert is_evidence(vault) == []


@pytest.mark.parametrize(
    ("head", "tail", "total"),
    [(b"ab", b"", 1), (b"ab", b"c", 2), (b"ab", b"", 9), (b"", b"ab", 9), (b"", b"", 9)],
)
def test_output_that_does_not_add_up_is_refused(vault, head, tail, total):
    intake = vault.intake(RUN, Manifest({}))
    with pytest.raises(EvidenceIncompleteError, match="stdout"):
        intake.output("stdout", [head], [tail], total)
    assert intake.outputs == {}


WHOLE = bytes(range(256)) * 2
OFFSETS = [*range(0, len(WHOLE), 7), 1, 255, 256, 257, len(WHOLE) - 1]


def refuses(vault, whole, arriving):
    """Check that what arrives in place of `whole` is refused, not sealed, and kept aside."""
    manifest = Manifest.of([file_entry("f", whole)])
    intake = vault.intake(RUN, Manifest({}))
    with pytest.raises(EvidenceIncompleteError, match="'f' arrived with"):
        intake.receive(manifest.entries["f"], io.BytesIO(arriving))
    intake.output("stdout", [b""], [], 0)
    intake.output("stderr", [b""], [], 0)
    with pytest.raises(EvidenceIncompleteError, match="did not arrive"):
        vault.seal(intake, manifest)
    assert is_evidence(vault) == []
    receipt = vault.put_aside(intake, manifest)
    evidence = vault.evidence(receipt, None)
    assert (receipt.sealed, evidence.sealed) == (False, False)
    assert evidence.read("f") == arriving
    shutil.rmtree(vault.path / "evidence" / RUN)


@pytest.mark.parametrize("at", OFFSETS)
def test_content_cut_short_anywhere_is_refused_and_kept_aside(vault, at):
    refuses(vault, WHOLE, WHOLE[:at])


@pytest.mark.parametrize("at", [*range(0, len(WHOLE), 31), len(WHOLE) - 1])
def test_a_byte_changed_anywhere_is_refused_and_kept_aside(vault, at):
    refuses(vault, WHOLE, WHOLE[:at] + bytes([WHOLE[at] ^ 1]) + WHOLE[at + 1 :])


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1])
@pytest.mark.parametrize("by", [-(1 << 20), -1, 1, 512, 1 << 20])
def test_content_too_short_or_too_long_at_a_chunk_is_refused(vault, size, by):
    refuses(vault, b"x" * size, b"x" * (size + by))


@given(content, content)
@many_examples
def test_only_the_very_content_is_taken(wanted, arriving):
    with fresh() as place:
        intake = Vault(place / "vault").intake(RUN, Manifest({}))
        entry = file_entry("f", wanted)
        if wanted == arriving:
            intake.receive(entry, io.BytesIO(arriving))
        else:
            with pytest.raises(EvidenceIncompleteError):
                intake.receive(entry, io.BytesIO(arriving))


def test_a_file_of_no_known_content_is_not_sealed(vault):
    manifest = Manifest.of([evolve(file_entry("f"), sha256=None)])
    with pytest.raises(EvidenceIncompleteError):
        vault.seal(intake_of(vault, manifest, {}), manifest)
    assert is_evidence(vault) == []


def test_a_file_of_the_right_content_and_a_wrong_size_is_not_sealed(vault):
    manifest = Manifest.of([evolve(file_entry("f", b"four"), size=5)])
    with pytest.raises(EvidenceIncompleteError):
        vault.seal(intake_of(vault, manifest, {"f": b"four"}), manifest)
    assert is_evidence(vault) == []


@pytest.mark.parametrize("digest", ["../" * 20 + "etc/passwd", "", "a", "A" * 64, "/etc/passwd"])
def test_a_digest_that_is_none_names_nothing_on_this_machine(vault, digest, tmp_path):
    manifest = Manifest.of([evolve(file_entry("f"), sha256=digest)])
    with pytest.raises(EvidenceIncompleteError):
        vault.seal(intake_of(vault, manifest, {}), manifest)
    with pytest.raises(EvidenceIncompleteError):
        vault.open(digest).close()
    with pytest.raises(EvidenceIncompleteError):
        vault.content(digest)


# --- what is put aside ----------------------------------------------------------------------------


def test_what_is_put_aside_has_what_arrived_and_nothing_else(vault, origin):
    manifest = tree.scan(origin)
    intake = intake_of(vault, manifest, {"a": b"first", "d/b": b"secon"}, stderr=None)
    receipt = vault.put_aside(intake, manifest)
    evidence = vault.evidence(receipt, None)
    assert not receipt.sealed
    assert evidence.read("a") == evidence.read("d/same") == b"first"
    assert evidence.read("d/b") == b"secon"
    assert not evidence.exists("empty")
    assert evidence.stdout == b"out"
    assert evidence.output("stderr") is None
    with pytest.raises(EvidenceIncompleteError, match="stderr never arrived"):
        _ = evidence.stderr


@pytest.mark.parametrize("known", [True, False])
def test_what_is_put_aside_can_be_written_out(vault, origin, tmp_path, known):
    manifest = tree.scan(origin)
    intake = intake_of(vault, manifest, {"d/b": b"secon"})
    receipt = vault.put_aside(intake, manifest if known else None)
    vault.evidence(receipt, None).export(tmp_path / "export")
    assert (tmp_path / "export" / "d" / "b").read_bytes() == b"secon"
    assert not (tmp_path / "export" / "a").exists()


def test_nothing_at_all_can_be_put_aside(vault):
    evidence = vault.evidence(vault.put_aside(vault.intake(RUN, Manifest({})), None), None)
    assert len(evidence.manifest) == 0
    assert evidence.output("stdout") is None


def test_sealed_after_it_was_put_aside_is_sealed_and_the_part_is_kept(vault, origin):
    manifest = tree.scan(origin)
    vault.put_aside(intake_of(vault, manifest, {"a": b"first"}), manifest)
    receipt = sealed(vault, origin)
    assert vault.evidence(receipt, None).sealed
    assert is_evidence(vault) == [RUN, f"{RUN}.superseded-1"]


# --- damage ---------------------------------------------------------------------------------------

DAMAGE = {
    "a bit": lambda data, at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
    "a cut": lambda data, at: data[:at],
    "an addition": lambda data, at: data[:at] + b"\0" + data[at:],
    "all of it": lambda data, at: None,
    "zeros": lambda data, at: data[:at] + bytes(len(data) - at),
}


def asked(question):
    """Give the answer, or that there is none."""
    try:
        return question()
    except EvidenceIncompleteError:
        return "no answer"


def answers(place, receipt, name):
    """Ask all that can be asked of evidence."""
    vault = Vault(place / "vault")
    try:
        evidence = vault.evidence(receipt, None)
    except EvidenceIncompleteError:
        return {}
    found = {
        "manifest": evidence.manifest,
        "baseline": evidence.baseline,
        "stdout": asked(lambda: bytes(evidence.stdout)),
        "stderr": asked(lambda: evidence.stderr.text),
    }
    for path_ in evidence.manifest.entries:
        with contextlib.suppress(IsADirectoryError):
            found[f"content of {path_}"] = asked(lambda path_=path_: evidence.read(path_))

    def exported():
        evidence.export(place / name)
        return tree.scan(place / name)

    found["export"] = asked(exported)
    return found


@examples
@given(st.data(), st.sampled_from(sorted(DAMAGE)))
def test_damage_to_any_file_of_the_vault_is_found_and_never_returned(data, kind):
    with fresh() as place:
        vault = Vault(place / "vault")
        baseline = tree.scan(write(place / "tree", {"kept": b"kept", "d/changed": b"1"}))
        root = write(place / "tree", {"d/changed": b"changed", "new": b"new"})
        receipt = sealed(vault, root, baseline)
        truth = answers(place, receipt, "undamaged")
        assert truth["export"] == truth["manifest"] == tree.scan(root)
        files = sorted(found for found in vault.path.rglob("*") if found.is_file())
        victim = data.draw(st.sampled_from(files).map(str), label="victim")
        victim = Path(victim)
        whole = victim.read_bytes()
        at = data.draw(st.integers(0, len(whole) - 1), label="at")
        after = DAMAGE[kind](whole, at)
        victim.unlink()
        if after is not None:
            victim.write_bytes(after)
        found = answers(place, receipt, "damaged")
        for question, answer in found.items():
            assert answer in (truth[question], "no answer"), question
        if after != whole and victim.parent.parent.name == "objects":
            assert "no answer" in found.values()


def test_every_file_of_a_record_is_missed_when_it_is_gone(vault, origin):
    receipt = sealed(vault, origin)
    for found in sorted((vault.path / "evidence" / RUN).iterdir()):
        data = found.read_bytes()
        found.unlink()
        with pytest.raises(EvidenceIncompleteError, match=RUN):
            vault.evidence(receipt, None)
        found.write_bytes(data)
    assert vault.evidence(receipt, None).read("a") == b"first"


def test_a_receipt_is_no_key_to_another_runs_record(vault, origin, tmp_path):
    receipt = sealed(vault, origin)
    other = sealed(vault, write(tmp_path / "other", {"x": b"x"}), run_id="r1")
    with pytest.raises(EvidenceIncompleteError, match="damaged"):
        vault.evidence(evolve(receipt, run_id=other.run_id), None)


def test_content_cut_short_on_disk_is_asked_for_again_and_mended(vault, origin):
    receipt = sealed(vault, origin)
    entry = tree.scan(origin).entries["d/b"]
    (place,) = (vault.path / "objects").glob(f"*/{entry.sha256}")
    place.chmod(0o644)
    place.write_bytes(b"")
    manifest = tree.scan(origin)
    intake = vault.intake("r1", Manifest({}))
    assert [found.sha256 for found in intake.missing(manifest)] == [entry.sha256]
    deliver(intake, origin, manifest)
    assert vault.evidence(vault.seal(intake, manifest), None).read("d/b") == b"second" * 50
    assert vault.evidence(receipt, None).read("d/b") == b"second" * 50


# --- sharing --------------------------------------------------------------------------------------


def test_destroying_the_sandbox_leaves_what_it_shared(vault, origin):
    baseline = tree.scan(origin)
    receipt = sealed(vault, origin, baseline)
    tree.remove(origin)
    evidence = vault.evidence(receipt, None)
    assert evidence.read("d/b") == b"second" * 50
    assert evidence.manifest == baseline
    assert is_sound(vault)


def test_a_file_without_permissions_is_shared_only_where_it_can_be_read_again(vault, origin):
    (origin / "a").chmod(0)
    (origin / "d" / "b").chmod(0o200)
    manifest = tree.scan(origin, ours=True)
    intake = vault.intake(RUN, manifest)
    for entry in intake.missing(manifest):
        with tree.open_file(origin, entry.path, ours=True) as stream:
            intake.receive(entry, stream)
    for found in (vault.path / "objects").glob("*/*"):
        assert found.stat().st_mode & 0o400


def test_editing_a_sandbox_that_was_kept_is_damage_that_is_found(vault, origin):
    baseline = tree.scan(origin)
    receipt = sealed(vault, origin, baseline)
    (origin / "d" / "b").write_bytes(b"edited")
    found = asked(lambda: vault.evidence(receipt, None).read("d/b"))
    assert found in (b"second" * 50, "no answer")


def test_what_the_check_wrote_is_never_shared_with_its_sandbox(vault, origin):
    baseline = tree.scan(origin)
    write(origin, {"a": b"written by the check", "new": b"new"})
    receipt = sealed(vault, origin, baseline)
    write(origin, {"a": b"edited afterwards!!!", "new": b"NEW"})
    evidence = vault.evidence(receipt, None)
    assert (evidence.read("a"), evidence.read("new")) == (b"written by the check", b"new")


def test_a_stream_that_has_a_descriptor_and_cannot_be_read_twice_is_taken(vault):
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as stream:
        stream.write(b"content")
    entry = file_entry("f", b"content")
    with os.fdopen(reading, "rb") as stream:
        vault.intake(RUN, Manifest.of([entry])).receive(entry, stream)
    assert vault.content(entry.sha256) == b"content"


# --- many at once ---------------------------------------------------------------------------------


def test_threads_that_store_the_same_content_disturb_nobody(vault, origin):
    count = 8
    gate = threading.Barrier(count)
    receipts, errors = [], []

    def work(number):
        try:
            gate.wait(30)
            receipts.append(sealed(Vault(vault.path), origin, run_id=f"r{number}"))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert len({receipt.manifest for receipt in receipts}) == 1
    for receipt in receipts:
        assert vault.evidence(receipt, None).read("d/b") == b"second" * 50
    assert is_sound(vault)
    assert os.listdir(vault.path / "staging") == []


def test_processes_that_store_the_same_content_disturb_nobody(vault):
    script = """
        import hashlib, io, sys
        from orchestrator.core.evidence import Entry, EntryKind, Manifest
        from orchestrator.vault import Vault

        vault, run_id = Vault(sys.argv[1]), sys.argv[2]
        contents = [b"%d" % number * 1000 for number in range(30)]
        manifest = Manifest.of(
            Entry(f"f{n}", EntryKind.FILE, 0o644, 0, len(c), hashlib.sha256(c).hexdigest())
            for n, c in enumerate(contents)
        )
        print("ready", flush=True)
        sys.stdin.readline()
        intake = vault.intake(run_id, Manifest({}))
        for number, content in enumerate(contents):
            intake.receive(manifest.entries[f"f{number}"], io.BytesIO(content))
        for stream in ("stdout", "stderr"):
            intake.output(stream, [b""], [], 0)
        vault.seal(intake, manifest)
    """
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), vault.path, f"r{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        worker.communicate(timeout=30)
        assert worker.returncode == 0
    assert is_evidence(vault) == ["r0", "r1", "r2"]
    assert is_sound(vault)
    assert os.listdir(vault.path / "staging") == []


# --- this machine's trouble -----------------------------------------------------------------------


class Broken(io.RawIOBase):
    """A stream that fails after some bytes."""

    def __init__(self, good, error):
        self.good, self.error = io.BytesIO(good), error

    def read(self, size=-1):
        data = self.good.read(size)
        if not data:
            raise self.error
        return data


@pytest.mark.parametrize("good", [b"", b"some", b"x" * (2 << 20)])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ECONNRESET])
def test_an_error_of_the_source_is_not_one_of_the_vault(vault, good, code):
    intake = vault.intake(RUN, Manifest({}))
    error = OSError(code, os.strerror(code))
    with pytest.raises(OSError, match=r".") as caught:
        intake.receive(file_entry("f", b"whole"), Broken(good, error))
    assert caught.value is error
    assert os.listdir(vault.path / "staging") == []
    assert is_sound(vault)


def test_an_error_of_the_source_that_is_shared_is_not_one_of_the_vault(vault, origin):
    class Failing(io.FileIO):
        def read(self, size=-1):
            raise OSError(errno.EIO, "Input/output error")

    manifest = tree.scan(origin)
    intake = vault.intake(RUN, manifest)
    with Failing(origin / "a") as stream, pytest.raises(OSError, match="Input/output"):
        intake.receive(manifest.entries["a"], stream)
    assert list((vault.path / "objects").glob("*/*")) == []


def test_a_vault_that_cannot_be_made_is_a_vault_error(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(VaultError, match="evidence cannot be kept in"):
        Vault(tmp_path / "f")


@pytest.fixture
def small_disk(tmp_path):
    """Mount a disk of 256 KiB, where that can be done."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place]
    if not ROOT or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("no disk can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("pages", range(0, 40, 3))
def test_a_full_disk_is_a_vault_error_and_leaves_nothing_like_evidence(small_disk, tmp_path, pages):
    page = os.sysconf("SC_PAGE_SIZE")
    root = write(tmp_path / "tree", {"big": b"x" * 9 * page, "small": b"y" * page, "d/z": b"z"})
    vault = Vault(small_disk / "vault")
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        with contextlib.suppress(OSError):
            while filler.write(b"\1" * page):
                pass
        filler.truncate(filler.tell() - pages * page)
    try:
        receipt = sealed(vault, root, stdout=b"o" * 5 * page)
    except VaultError:
        assert is_evidence(vault) == []
        assert os.listdir(vault.path / "staging") == []
    else:
        assert vault.evidence(receipt, None).read("big") == b"x" * 9 * page
    assert is_sound(vault)
    (small_disk / "filler").unlink()
    receipt = sealed(vault, root, stdout=b"o" * 5 * page)
    assert vault.evidence(receipt, None).read("big") == b"x" * 9 * page


def test_content_beyond_a_limit_of_this_process_is_a_vault_error(vault):
    script = """
        import io, resource, signal, sys
        from orchestrator.core.errors import VaultError
        from orchestrator.core.evidence import Entry, EntryKind, Manifest
        from orchestrator.vault import Vault

        vault = Vault(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        entry = Entry("f", EntryKind.FILE, 0o644, 0, 1 << 17, "0" * 64)
        try:
            vault.intake("r", Manifest({})).receive(entry, io.BytesIO(b"x" * (1 << 17)))
        except VaultError as error:
            assert "File too large" in str(error), error
        else:
            raise AssertionError("stored")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), vault.path]
    subprocess.run(command, check=True, timeout=60)
    assert os.listdir(vault.path / "staging") == []
    assert is_sound(vault)


# --- crashes --------------------------------------------------------------------------------------


class CrashError(BaseException):
    """The end of a process, as far as what it left on disk goes."""


CALLS = ("fsync", "replace", "rename", "mkdir", "link", "fchmod", "chmod", "open", "write")


def crash_at(monkeypatch, count):
    """Have the process end in place of one of its calls; give the names of those it made."""
    made = []

    def ending(name, real):
        def call(*args, **kwargs):
            made.append(name)
            if len(made) >= count:
                raise CrashError
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, ending(name, getattr(os, name)))
    # A process that is gone tidies nothing away.
    monkeypatch.setattr(os, "unlink", lambda *_, **__: None)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    return made


@pytest.mark.parametrize("shared", [False, True])
def test_a_crash_at_any_call_leaves_all_or_nothing_and_sealing_again_is_the_same(
    tmp_path, monkeypatch, origin, shared
):
    manifest = tree.scan(origin)
    baseline = manifest if shared else Manifest({})
    reference = sealed(Vault(tmp_path / "reference"), origin, baseline)
    count, ended = 0, False
    while not ended:
        count += 1
        vault = Vault(tmp_path / f"vault-{count}")
        contents = {
            entry.path: (origin / entry.path).open("rb") for entry in manifest if entry.size
        }
        with monkeypatch.context() as patch:
            made = crash_at(patch, count)
            intake = vault.intake(RUN, baseline)
            try:
                for entry in intake.missing(manifest):
                    intake.receive(entry, contents.get(entry.path, io.BytesIO()))
                intake.output("stdout", [b"out"], [], 3)
                intake.output("stderr", [b"err"], [], 3)
                assert vault.seal(intake, manifest) == reference
                ended = True
            except CrashError:
                pass
        for stream in contents.values():
            stream.close()
        assert len(made) >= count or ended
        assert is_sound(vault)
        if is_evidence(vault):
            assert vault.evidence(reference, None).read("d/b") == b"second" * 50
        again = Vault(vault.path)
        assert sealed(again, origin, baseline) == reference
        assert is_evidence(again) == [RUN]
        assert again.evidence(reference, None).read("d/b") == b"second" * 50
        shutil.rmtree(vault.path)
    assert count > 20


def test_nothing_that_the_check_wrote_has_its_name_before_it_is_flushed(vault, origin, monkeypatch):
    flushed, named = set(), []

    def identity(info):
        return info.st_dev, info.st_ino

    def fsync(descriptor, real=os.fsync):
        flushed.add(identity(os.fstat(descriptor)))
        return real(descriptor)

    def moving(real):
        def move(source, target):
            paths = [Path(source), *Path(source).glob("*")]
            named.extend((str(found), identity(found.lstat()) in flushed) for found in paths)
            flushed.discard(identity(Path(target).parent.stat()))
            parents.add(Path(target).parent)
            return real(source, target)

        return move

    parents = set()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", moving(os.replace))
    monkeypatch.setattr(os, "rename", moving(os.rename))
    sealed(vault, origin)
    assert len(named) >= 3
    assert [name for name, done in named if not done] == []
    assert {parent for parent in parents if identity(parent.stat()) not in flushed} == set()


def test_sealing_again_changes_nothing(vault, origin):
    first = sealed(vault, origin)
    assert sealed(Vault(vault.path), origin) == first
    assert is_evidence(vault) == [RUN]
    assert os.listdir(vault.path / "staging") == []


def test_sealing_again_mends_a_record_that_was_damaged_meanwhile(vault, origin):
    first = sealed(vault, origin)
    damaged = vault.path / "evidence" / RUN / "stdout"
    damaged.chmod(0o644)
    damaged.write_bytes(b"forged")
    again = sealed(vault, origin)
    assert again == first
    assert vault.evidence(again, None).stdout == b"out"


@pytest.mark.parametrize(
    "kind", ["another record", "an empty directory", "foreign files", "a file", "a dangling link"]
)
def test_something_else_in_the_place_of_a_record_is_kept_under_another_name(
    vault, origin, tmp_path, kind
):
    place = vault.path / "evidence" / RUN
    if kind == "another record":
        other = sealed(vault, write(tmp_path / "other", {"x": b"x"}))
    elif kind == "a file":
        place.write_text("foreign")
    elif kind == "a dangling link":
        place.symlink_to("nowhere")
    else:
        place.mkdir()
        if kind == "foreign files":
            (place / "notes").write_text("foreign")
    receipt = sealed(vault, origin)
    assert vault.evidence(receipt, None).read("a") == b"first"
    assert is_evidence(vault) == [RUN, f"{RUN}.superseded-1"]
    older = vault.path / "evidence" / f"{RUN}.superseded-1"
    if kind == "another record":
        data = (older / "record.json").read_bytes()
        assert hashlib.sha256(data).hexdigest() == other.record
    elif kind == "foreign files":
        assert (older / "notes").read_text() == "foreign"


def test_every_older_record_keeps_a_name_of_its_own(vault, tmp_path):
    receipts = [
        sealed(vault, write(tmp_path / f"t{number}", {"x": b"%d" % number})) for number in range(4)
    ]
    assert is_evidence(vault) == [RUN, *(f"{RUN}.superseded-{n}" for n in (1, 2, 3))]
    assert vault.evidence(receipts[-1], None).read("x") == b"3"


# --- export ---------------------------------------------------------------------------------------


def test_an_export_goes_to_a_new_directory_only(vault, origin, tmp_path):
    evidence = vault.evidence(sealed(vault, origin), None)
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError):
        evidence.export(tmp_path / "there")
    assert os.listdir(tmp_path / "there") == []
    evidence.export(tmp_path / "new" / "place")
    assert tree.scan(tmp_path / "new" / "place") == tree.scan(origin)


def test_an_export_leaves_sockets_and_devices_out_and_nothing_else(vault, origin, tmp_path):
    manifest = tree.scan(origin)
    odd = [Entry("s", EntryKind.SOCKET, 0o600, 0), Entry("v", EntryKind.DEVICE, 0o600, 0)]
    intake = vault.intake(RUN, manifest)
    whole = Manifest.of([*manifest, *odd])
    deliver(intake, origin, whole)
    evidence = vault.evidence(vault.seal(intake, whole), None)
    evidence.export(tmp_path / "export")
    assert tree.scan(tmp_path / "export") == manifest
    assert evidence.exists("s")


HOSTILE = {
    "a name above": lambda out: [file_entry("../out/x", b"x")],
    "an absolute path": lambda out: [file_entry(f"{out}/x", b"x")],
    "through a link": lambda out: [link("a", out), file_entry("a/x", b"x")],
    "through a link to /": lambda out: [link("a", "/"), file_entry(f"a{out}/x", b"x")],
    "a directory through a link": lambda out: [link("a", out), folder("a/x")],
    "a link above": lambda out: [link("../out/x", "y")],
    "up and down": lambda out: [folder("d"), file_entry("d/../../out/x", b"x")],
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("whole", [True, False])
def test_an_export_of_a_hostile_account_writes_nothing_outside(vault, tmp_path, kind, whole):
    out = tmp_path / "out"
    out.mkdir()
    manifest = Manifest.of(HOSTILE[kind](out))
    names = [entry.path for entry in manifest if entry.kind is EntryKind.FILE]
    intake = intake_of(vault, manifest, dict.fromkeys(names, b"x"))
    receipt = vault.seal(intake, manifest) if whole else vault.put_aside(intake, manifest)
    with pytest.raises((OSError, ValueError, OrchestratorError)):
        vault.evidence(receipt, None).export(tmp_path / "export")
    assert os.listdir(out) == []
    assert sorted(os.listdir(tmp_path)) == ["export", "out", "vault"]


# --- output ---------------------------------------------------------------------------------------


@st.composite
def kept(draw):
    """Give a stream and what was kept of it."""
    stream = draw(st.text(alphabet="ab\n", max_size=12)).encode()
    limit = draw(st.integers(0, 12))
    if len(stream) <= limit:
        cut = draw(st.integers(0, len(stream)))
        return stream, Output(stream[:cut], stream[cut:], len(stream))
    head = draw(st.integers(0, limit))
    tail = limit - head
    return stream, Output(stream[:head], stream[len(stream) - tail :], len(stream))


def or_refusal(question):
    try:
        return question()
    except OutputTruncatedError:
        return None


@many_examples
@given(kept(), st.text(alphabet="ab\n", max_size=12).map(str.encode))
def test_output_answers_as_the_whole_stream_would_or_not_at_all(pair, other):
    stream, output = pair
    assert len(output) == output.total == len(stream)
    assert output.truncated == (len(output.head) + len(output.tail) < len(stream))
    assert or_refusal(lambda: output == other) in {stream == other, None}
    assert or_refusal(lambda: output != other) in {stream != other, None}
    assert or_refusal(lambda: other in output) in {other in stream, None}
    assert or_refusal(lambda: bytes(output)) in {stream, None}
    assert or_refusal(output.decode) in {stream.decode(), None}
    if not output.truncated:
        assert output == stream
        assert bytes(output) == stream
        assert (other in output) == (other in stream)
        assert output.text == stream.decode()


@pytest.mark.parametrize(
    "question",
    [
        lambda output: output == b"abXYef",
        lambda output: output != b"abXYef",
        lambda output: output in [b"", b"abXYef"],
        lambda output: b"XY" in output,
        lambda output: b"bX" in output,
        bytes,
        Output.decode,
    ],
)
def test_what_depends_on_what_was_not_kept_is_refused(question):
    with pytest.raises(OutputTruncatedError, match="only 4 of 6 bytes"):
        question(Output(b"ab", b"ef", 6))


def test_what_does_not_depend_on_what_was_not_kept_is_answered():
    output = Output(b"ab", b"ef", 6)
    assert b"ab" in output
    assert b"ef" in output
    assert output != b"abef"
    assert output != b"abXYe"
    assert output != b"aXXYef"
    assert output != b"abXYeX"
    assert output.text == "ab\n[... 2 bytes not kept ...]\nef"


def test_bytes_that_are_no_text_are_kept_raw():
    output = Output(b"\xff\0\x1b[2J")
    assert output == b"\xff\0\x1b[2J"
    assert output.decode() == "\ufffd\0\x1b[2J"
    assert (output == "text") is False


@many_examples
@given(kept())
def test_output_reads_back_with_its_gap(pair):
    _, output = pair
    with fresh() as place:
        vault = Vault(place / "vault")
        intake = vault.intake(RUN, Manifest({}))
        if output.truncated and not (output.head and output.tail):
            return
        intake.output("stdout", [output.head], [output.tail], output.total)
        intake.output("stderr", [], [], 0)
        evidence = vault.evidence(vault.seal(intake, Manifest({})), None)
        assert evidence.stdout == output
        assert evidence.stderr == b""


# --- descriptors ----------------------------------------------------------------------------------


def test_no_descriptor_outlives_a_delivery_that_worked_or_failed(vault, origin, tmp_path):
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    manifest = tree.scan(origin)
    before = descriptors()
    receipt = sealed(vault, origin, manifest)
    refuses(Vault(tmp_path / "other"), b"whole", b"part")
    with pytest.raises(OSError, match="Input/output error"):
        vault.intake(RUN, manifest).receive(
            file_entry("f", b"x"), Broken(b"x", OSError(errno.EIO, "Input/output error"))
        )
    vault.evidence(receipt, None).export(tmp_path / "export")
    with pytest.raises(EvidenceIncompleteError):
        vault.open("0" * 64).close()
    assert descriptors() == before
