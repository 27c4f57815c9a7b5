"""Workspaces that a daemon has: sent once, never mixed up, never spoilt, and gone when told to go.

And what is read again of one after a check: all that changed, by whatever means it was hidden.
"""

from __future__ import annotations

import os
import secrets
import time

import pytest
from docker_support import (
    BOUNDS,
    BUSYBOX,
    DEBIAN,
    SESSION,
    inventory,
    passed,
    spec_of,
)

from orchestrator import Provenance, Runner, Verdict
from orchestrator.backends.docker import DockerBackend
from orchestrator.backends.docker.workspaces import REPOSITORY

pytest_plugins = ["docker_support"]
pytestmark = pytest.mark.usefixtures("clean")

MIB = 1 << 20


class Counting:
    """A daemon's client that counts the bytes of workspaces that are sent, in whatever way."""

    def __init__(self, client):
        self._client = client
        self.sent = []

    def __getattr__(self, name):
        return getattr(self._client, name)

    def _counted(self, data):
        pieces = [data] if isinstance(data, bytes) else list(data)
        if (size := sum(map(len, pieces))) > 10_000:  # more than the guest
            self.sent.append(size)
        return iter(pieces)

    def put_archive(self, container, path, data):
        return self._client.put_archive(container, path, self._counted(data))

    def load_image(self, data, **options):
        return self._client.load_image(self._counted(data), **options)


@pytest.fixture
def counting(workshop):
    """Makes backends on debian whose client counts."""

    def make(**options):
        client = workshop.client(None)
        backend = workshop.backend(client=Counting(client), **options)
        return backend, backend.client.sent

    return make


@pytest.fixture
def large(tmp_path):
    """A workspace that is worth keeping, and that nobody else has."""
    tree = tmp_path / "large"
    (tree / "sub").mkdir(parents=True)
    (tree / "big").write_bytes(secrets.token_bytes(2 * MIB))
    (tree / "sub" / "run.sh").write_text("#!/bin/sh\nexit 0\n")
    (tree / "sub" / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("sub/run.sh")
    for place in [*tree.rglob("*"), tree]:
        os.utime(place, ns=(0, 1_600_000_000_123_456_789), follow_symlinks=False)
    return tree


@pytest.fixture
def kept(daemon, workshop):
    """Gives the images that hold workspaces of this test, and removes them at its end."""

    def kept():
        there = {image["Id"] for image in daemon.images(REPOSITORY)}
        backends = [each for each in workshop.made if isinstance(each, DockerBackend)]
        held = [held.image for each in backends for held in each.workspaces._held.values()]
        return there & set(held)

    yield kept
    for image in kept():
        daemon.remove_image(image, force=True)


def test_a_workspace_is_sent_to_a_daemon_once(run, counting, large, kept):
    backend, sent = counting()
    first = run("./sub/run.sh", backend=backend, workspace=str(large))
    passed(first)
    assert len(sent) == 1
    assert 2 * MIB < sent[0] < 2.2 * MIB
    assert len(kept()) == 1
    other, sent_by_other = counting()
    for each in (backend, other, other):
        again = run("./sub/run.sh && cat big >copy", backend=each, workspace=str(large))
        evidence = passed(again)
        assert evidence.read("copy") == (large / "big").read_bytes()
        assert evidence.paths(Provenance.CREATED) == ["copy"]
        assert evidence.paths(Provenance.MODIFIED) == []
        assert again.conditions["image"] == first.conditions["image"]
    assert (len(sent), sent_by_other) == (1, [])


def test_a_changed_workspace_is_another_one(run, counting, large, kept):
    backend, sent = counting()
    passed(run("true", backend=backend, workspace=str(large)))
    (large / "sub" / "run.sh").write_text("#!/bin/sh\nexit 1\n")
    os.utime(large / "sub" / "run.sh", ns=(0, 1_600_000_000_123_456_789))
    os.utime(large / "sub", ns=(0, 1_600_000_000_123_456_789))
    result = run("./sub/run.sh", backend=backend, workspace=str(large))
    assert (result.verdict, str(result.outcome)) == (Verdict.FAILED, "exited(1)")
    assert len(sent) == 2
    assert len(kept()) == 2


def test_small_workspaces_and_those_of_no_cache_are_not_kept(run, counting, large, kept):
    backend, sent = counting()
    for _ in range(2):
        passed(run("true", backend=backend, files={"a": "1"}))
    none, sent_without = counting(cache=False)
    for _ in range(2):
        passed(run("true", backend=none, workspace=str(large)))
    assert (len(sent), len(sent_without), kept()) == (2, 2, set())


def test_what_a_check_does_is_never_seen_by_the_next_run(run, counting, large, kept):
    backend, sent = counting()
    spoil = (
        "echo spoilt >big; rm link; echo new >made; chmod 0 sub/run.sh; echo x >/tmp/left;"
        "echo x >>/.orchestrator/account.sh; echo x >/.orchestrator/records/check/ended;"
        "echo 6.6.6.6 localhost >/etc/hosts; true"
    )
    look = (
        "set -e; [ $(wc -c <big) = 2097152 ]; [ -L link ]; [ ! -e made ]; ./sub/run.sh;"
        "[ ! -e /tmp/left ]; ! grep -q 6.6.6.6 /etc/hosts; grep -q localhost /etc/hosts;"
        "ls /.orchestrator/records"
    )
    for check in (look, spoil, look, spoil, look):
        result = run(check, backend=backend, workspace=str(large))
        if check is look:
            assert passed(result).stdout == b"check\n"
    assert len(sent) == 1


def test_a_kept_workspace_has_no_trace_of_a_run(daemon, run, large, kept):
    result = run("true", workspace=str(large))
    [image] = kept()
    config = daemon.inspect_image(image)["Config"]
    labels = {name: value for name, value in (config["Labels"] or {}).items() if value}
    assert result.run_id not in repr(config)
    assert "orchestrator.run" not in labels


def test_runs_of_every_kind_leave_a_daemon_as_it_was(private_daemon, workshop, large, tmp_path):
    client = workshop.client(private_daemon.url)
    before = inventory(client)
    backend = workshop.backend(BUSYBOX, client=client)
    with Runner(backend, tmp_path / "state") as runner:
        passed(runner.run(spec_of("true", workspace=str(large))))
        assert len(client.images(REPOSITORY)) == 1
        assert backend.forget_workspaces() == 1
        assert client.images(REPOSITORY) == []
        for check in ("true", "exit 1", "sleep 60 & mkfifo p", "kill -9 $$", "sleep 60"):
            runner.run(spec_of(check, workspace=str(large), deadline_s=0.5))
        runner.run(spec_of("true", setup="exit 1"))
        assert len(client.images(REPOSITORY)) == 1
    locked = workshop.backend(BUSYBOX, client=client, read_only=True)
    with Runner(locked, tmp_path / "locked") as runner:
        passed(runner.run(spec_of("echo 1 >made", workspace=str(large))))
        runner.run(spec_of("exit 1"))
    backend.forget_workspaces()
    assert inventory(client) == before


# The Python of the image has no mmap; its Perl can make system calls.
MAPPED = (
    'open F, "+<", "f" or die; my %numbers = (x86_64 => [9, 0], aarch64 => [222, 63]);'
    "my ($mmap, $read) = @{$numbers{$ARGV[0]}};"
    "my $at = syscall($mmap, 0, 4096, 3, 1, fileno(F), 0);"
    'pipe R, W; syswrite W, "NEW"; syscall($read, fileno(R), $at, 3) == 3 or die'
)
HIDDEN = {
    "touch -d": "printf NEW >f; touch -d '2001-02-03 04:05:06.123456789' f",
    "touch -r": "touch -r f stamp; printf NEW >f; touch -r stamp f; rm stamp",
    "cp -p": "cp -p f copy; printf NEW >f; touch -r copy f; rm copy",
    "in place of it": "printf NEW >new; touch -r f new; chmod 644 new; mv new f",
    "mmap": f"touch -r f stamp; perl -e '{MAPPED}' $(uname -m); touch -r stamp f; rm stamp",
    "os.utime": (
        "python3 -c \"import os; s = os.stat('f'); open('f', 'r+b', 0).write(b'NEW');"
        " os.utime('f', ns=(s.st_atime_ns, s.st_mtime_ns))\""
    ),
}


@pytest.fixture(scope="module")
def aged(daemon, session, tmp_path_factory):
    """Gives a runner, and files that its daemon has and that it knows: read once, and never again.

    A file is known when its last change is two seconds old: what is waited for here is time.
    """
    files = {"f": "old", "big": secrets.token_bytes(MIB)}
    backend = DockerBackend(DEBIAN, labels={SESSION: session})
    with Runner(backend, tmp_path_factory.mktemp("aged"), bounds=BOUNDS) as runner:
        passed(runner.run(spec_of("true", files=files)))
        time.sleep(3.5)
        passed(runner.run(spec_of("true", files=files)))
        yield runner, files
    for held in backend.workspaces._held.values():
        daemon.remove_image(held.image, force=True)
    backend.close()


def found_of(runner, files, check):
    """Run a check over `f`; give what is found of it, which has to be what the check sees."""
    evidence = passed(runner.run(spec_of(f"set -e; {check}; cat f", files=files)))
    assert evidence.stdout == evidence.read("f")
    return evidence.read("f"), evidence.provenance("f")


@pytest.mark.parametrize("how", HIDDEN)
def test_content_that_changed_behind_its_time_and_size_is_found(aged, how):
    runner, files = aged
    assert found_of(runner, files, HIDDEN[how]) == (b"NEW", Provenance.MODIFIED)
    assert found_of(runner, files, "true") == (b"old", Provenance.UNCHANGED)


@pytest.mark.parametrize("how", HIDDEN)
def test_content_that_changed_in_a_workspace_that_was_sent_is_found(workshop, how):
    runner = workshop.runner()
    files = {"f": "old"}
    assert found_of(runner, files, HIDDEN[how]) == (b"NEW", Provenance.MODIFIED)


@pytest.mark.parametrize("size", [10, MIB], ids=["small", "kept"])
def test_what_setup_changed_is_the_baseline_and_what_the_check_then_changes_is_found(
    run, size, kept
):
    """The check may come within the same tick of the clock as setup: no time tells them apart."""
    swap = "touch -r f stamp; printf {} >f; touch -r stamp f; rm stamp"
    files = {"f": "old", "g": "old", "big": secrets.token_bytes(size)}
    for _ in range(3):
        result = run(swap.format("chk"), setup=f"{swap.format('set')}; printf set >g", files=files)
        evidence = passed(result)
        assert (evidence.read("f"), evidence.read("g")) == (b"chk", b"set")
        assert evidence.paths(Provenance.MODIFIED) == ["f"]
