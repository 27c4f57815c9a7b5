"""The Docker backend over a real daemon: what every backend must do, and what only this one can."""

from __future__ import annotations

import io
import os
import secrets
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from docker_support import (
    BUSYBOX,
    DEBIAN,
    LEAKY_SDK,
    NOSHELL,
    container_of,
    ours,
    passed,
    settle_threads,
    spec_of,
    story,
)

from orchestrator import OutcomeKind, Provenance, Reason, Runner, SpecError, State, Verdict
from orchestrator.backends.docker import DockerBackend
from orchestrator.backends.docker.sandbox import DockerSandbox
from orchestrator.core.evidence import EntryKind
from orchestrator.core.verdict import ObservedBy
from orchestrator.testing.conformance import CHECKS, conform, report_of

pytest_plugins = ["docker_support"]
pytestmark = pytest.mark.usefixtures("clean")

MIB = 1 << 20


# --- what every backend must do -------------------------------------------------------------------


class TamperedSandbox(DockerSandbox):
    __slots__ = ()

    """A container that can be made to vanish, or to be replaced, behind the back of its run."""

    def tamper(self, act):
        client = self.backend.client
        client.remove_container(self.container["Id"], v=True, force=True)
        if act == "replace":
            self.backend.make(self.run_id, spec_of("true"), secrets.token_hex(16))


class TamperingBackend(DockerBackend):
    def create(self, run_id, spec):
        return self._tampering(super().create(run_id, spec))

    def open(self, run_id):
        return self._tampering(super().open(run_id))

    def _tampering(self, sandbox):
        if type(sandbox) is DockerSandbox:
            sandbox.__class__ = TamperedSandbox
        return sandbox


# On busybox it is the guest that can differ: what it says, stops, and reads.
GUESTS = [
    name
    for name, check in CHECKS.items()
    if check.__module__.rpartition(".")[2] in {"ends", "streams", "uploads", "downloads"}
]
NO_GIT = {"repositories_arrive_clean": "there is no git in the sandbox"}


@pytest.mark.parametrize(
    ("image", "name"),
    [(DEBIAN, name) for name in CHECKS] + [(BUSYBOX, name) for name in GUESTS],
    ids=lambda word: word.rpartition(":")[2],
)
@LEAKY_SDK
def test_it_does_what_every_backend_must_do(workshop, image, name):
    labels = workshop.backend().labels
    [finding] = conform(lambda: TamperingBackend(image, labels=labels), only=[name])
    settle_threads()
    if image == BUSYBOX and name in NO_GIT:
        assert (finding.ok, finding.reason) == (None, NO_GIT[name])
    else:
        assert finding.ok is True, report_of([finding])


# --- images ---------------------------------------------------------------------------------------


def test_an_image_without_a_shell_is_found_out_before_anything_runs(daemon, session, run):
    result = run("true", image=NOSHELL)
    assert (result.verdict, result.reason) == (Verdict.UNRESOLVED, Reason.UPLOAD_FAILED)
    assert result.outcome is None
    assert "the image has no /bin/sh, which the guest needs" in result.faults[0].message
    assert ours(daemon, session) == []


@pytest.mark.parametrize("pull", [False, True])
def test_an_image_that_is_not_there_is_named_and_nothing_is_begun(workshop, pull):
    name = "localhost:1/orchestrator-test:missing"  # a registry that nobody is
    runner = workshop.runner(workshop.backend(name, pull=pull))
    with pytest.raises(SpecError) as refused:
        runner.run(spec_of("true"))
    assert refused.value.key == "image"
    assert name in str(refused.value)
    assert runner.journal.run_ids() == []


def test_no_image_at_all_is_a_wrong_spec(workshop):
    backend = DockerBackend(labels=workshop.backend().labels)
    with pytest.raises(SpecError, match="image: there is none"):
        backend.refuse(spec_of("true"))
    backend.close()


def test_a_tag_means_one_image_for_as_long_as_the_backend_lives(daemon, workshop, run):
    name, tag = "orchestrator-test", f"moving-{secrets.token_hex(4)}"
    moving = f"{name}:{tag}"
    ids = {image: daemon.inspect_image(image)["Id"] for image in (DEBIAN, BUSYBOX)}
    try:
        daemon.tag(BUSYBOX, name, tag)
        backend = workshop.backend(moving)
        first = run("[ ! -e /etc/debian_version ]", backend=backend)
        daemon.tag(DEBIAN, name, tag)
        second = run("[ ! -e /etc/debian_version ]", backend=backend)
        other = run("[ -e /etc/debian_version ]", image=moving)
    finally:
        daemon.remove_image(moving)
    for result, image in ((first, BUSYBOX), (second, BUSYBOX), (other, DEBIAN)):
        passed(result)
        assert result.conditions["image"] == ids[image]


@pytest.fixture
def derive(daemon):
    """Makes an image of another one, with another configuration and more files."""
    made = []

    def derive(image, files=None, **config):
        name = f"orchestrator-test:derived-{secrets.token_hex(4)}"
        container = daemon.create_container(image, ["/bin/true"])["Id"]
        try:
            if files:
                daemon.put_archive(container, "/", tar_of(files))
            repository, tag = name.split(":")
            daemon.commit(container, repository, tag, conf=config)
        finally:
            daemon.remove_container(container, v=True, force=True)
        made.append(name)
        return name

    yield derive
    for name in made:
        daemon.remove_image(name, force=True)


def tar_of(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as bundle:
        for path, (data, mode) in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), mode
            bundle.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def test_what_the_image_says_of_path_and_environment_holds_for_the_check(run, derive):
    tool = {"opt/tools/greet": (b"#!/bin/sh\necho hello from $WHERE\n", 0o755)}
    image = derive(
        DEBIAN, tool, Env=["PATH=/opt/tools:/usr/bin:/bin", "WHERE=the image", "LANG=C", "X=1"]
    )
    evidence = passed(run("greet; echo $LANG $X", image=image, env={"X": "2"}))
    assert evidence.stdout == b"hello from the image\nC 2\n"


def test_an_image_whose_user_has_a_name_runs_as_that_user(run, derive):
    image = derive(DEBIAN, User="daemon")
    result = run(
        "id -un; cat given; echo 1 >made; stat -c %u:%g given made .",
        image=image,
        files={"given": "1\n"},
    )
    assert passed(result).stdout == b"daemon\n1\n1:1\n1:1\n1:1\n"
    assert result.conditions["user"] == "daemon"


def test_entrypoint_and_command_and_health_check_of_the_image_are_not_run(run, derive):
    health = {"Test": ["CMD", "false"], "Interval": 10**9}
    image = derive(DEBIAN, Entrypoint=["/bin/false"], Cmd=["x"], WorkingDir="/", Healthcheck=health)
    passed(run("[ $(pwd) = /workspace ]", image=image))


# --- what a check is kept away from ---------------------------------------------------------------

FORBIDDEN = """
set -e
status() {
    while read -r key value; do [ "$key" != "$1:" ] || echo "$value"; done </proc/self/status
}
for set in CapInh CapPrm CapEff CapBnd CapAmb; do [ "$(status $set)" = 0000000000000000 ]; done
[ "$(status NoNewPrivs)" = 1 ]
[ "$(ls /sys/class/net)" = lo ]
[ ! -e /var/run/docker.sock ] && [ ! -e /run/docker.sock ]
[ -z "$(grep -E '^/dev/[^ ]+ /(work|home|root|mnt|host)' /proc/mounts)" ]
! mount -t tmpfs none /mnt 2>/dev/null
! chown 1:1 given 2>/dev/null
echo kept
"""


def test_a_check_has_no_capability_and_no_way_out(run):
    assert passed(run(FORBIDDEN, files={"given": "1"})).stdout == b"kept\n"


def test_there_is_no_network_but_the_check_can_talk_to_itself(run):
    program = (
        "import socket\n"
        "there = socket.create_server(('localhost', 0))\n"
        "here = socket.create_connection(there.getsockname())\n"
        "there.accept()[0].sendall(b'said'); print(here.recv(4))\n"
        "try: socket.create_connection(('192.0.2.1', 80), 5)\n"
        "except OSError as error: print(error.errno)\n"
    )
    result = run(["python3", "-W", "ignore", "-c", program])
    assert passed(result).stdout == b"b'said'\n101\n"
    assert result.conditions["network"] == "none"


def test_no_runs_secret_can_be_read_by_its_check(workshop, run):
    """A nonce of the supervisor's is in no file, argument or variable that a check can read."""
    backend = workshop.backend()
    with Runner(backend, workshop.directory / "state") as runner:
        record, step = runner.begin(
            spec_of(
                "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n';"
                "find /.orchestrator -type f -exec cat {} + 2>/dev/null; true"
            )
        )
        *_, last = runner.steps(record, step)
        result = runner.result(record.run_id)
    assert last.run.verdict is Verdict.PASSED
    assert record.nonce.encode() not in bytes(result.evidence.stdout)
    assert b"supervisor" in bytes(result.evidence.stdout)


# --- limits ---------------------------------------------------------------------------------------

HUNGRY = "python3 -c 'bytearray(300 << 20)'"
BLAME = (
    "head -c 30000000 /dev/zero >/dev/shm/nobodys;"
    "echo 1000 >/proc/1/oom_score_adj; echo 0 >/proc/self/oom_score_adj"
)
LITTLE = {"memory_bytes": 64 * MIB}


@pytest.mark.parametrize(
    ("check", "by"),
    [
        (f"exec {HUNGRY}", ObservedBy.GUEST),
        (f"{HUNGRY} || exit 1", ObservedBy.GUEST),
        # It offers the kernel the guest in its own place.
        (
            f"{BLAME}; exec {HUNGRY}",
            ObservedBy.BACKEND,
        ),
    ],
    ids=["itself", "a child", "the guest"],
)
def test_want_of_memory_is_said_to_be_that(run, check, by):
    result = run(f"echo 1 >made; {check}", limits=LITTLE)
    assert result.outcome is not None, story(result)
    assert (result.outcome.kind, result.outcome.exit_code) == (OutcomeKind.OUT_OF_MEMORY, None)
    assert result.outcome.oom_kills >= 1
    assert result.outcome.observed_by is by
    assert result.conditions["memory_bytes"] == str(64 * MIB)
    # What a guest that is gone had not kept may be lost; it is never a pass, and never a bare 137.
    assert result.verdict is Verdict.FAILED or by is ObservedBy.BACKEND, story(result)
    assert result.verdict is not Verdict.PASSED
    if result.verdict is Verdict.FAILED:
        assert result.evidence.read("made") == b"1\n"


def test_a_child_that_the_kernel_killed_fails_nobody_who_does_not_mind(run):
    result = run(f"{HUNGRY}; echo went on", limits=LITTLE)
    assert passed(result).stdout == b"went on\n"
    assert result.outcome.oom_kills == 1


def test_our_own_kill_at_the_deadline_is_never_want_of_memory(run):
    result = run("trap '' TERM; while :; do sleep 0.1; done", deadline_s=1.0, limits=LITTLE)
    assert result.outcome.kind is OutcomeKind.DEADLINE_EXCEEDED
    assert (result.outcome.escalated, result.outcome.oom_kills) == (True, 0)


def test_an_exit_with_137_is_an_exit_with_137(run):
    result = run("exit 137", limits=LITTLE, expect={"exit_code": 137})
    assert str(result.outcome) == "exited(137)"
    passed(result)


def test_more_processes_than_the_limit_fail_and_the_guest_lives_on(daemon, session, run):
    result = run("for i in $(seq 200); do sleep 60 & done; echo all of them", limits={"pids": 32})
    assert result.verdict is Verdict.FAILED, story(result)
    assert result.outcome.kind is OutcomeKind.EXITED
    assert b"fork" in bytes(result.evidence.stderr).lower()
    assert 16 <= result.outcome.descendants <= 48
    assert result.conditions["pids"] == "32"


def test_a_fork_bomb_ends_with_its_check(daemon, session, run):
    result = run(
        "bomb() { bomb | bomb & }; bomb; sleep 1; exit 7",
        limits={"pids": 64},
        expect={"exit_code": 7},
        deadline_s=10.0,
    )
    passed(result)
    assert ours(daemon, session) == []


def test_processor_limits_are_set_and_those_that_nobody_has_are_refused(daemon, workshop, run):
    show = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || cat /sys/fs/cgroup/cpu.max"
    assert passed(run(show, limits={"cpus": 0.5})).stdout.text.split()[0] == "50000"
    there = daemon.info()["NCPU"]
    with pytest.raises(SpecError, match=rf"limits.cpus: got {there + 1}; expected .* the {there}"):
        workshop.backend().refuse(spec_of("true", limits={"cpus": there + 1}))


def test_limits_that_the_daemon_cannot_enforce_are_refused_in_words(daemon, workshop):
    backend = workshop.backend()
    info = daemon.info()
    backing = dict(info["DriverStatus"])["Backing Filesystem"]
    if (info["Driver"], backing) == ("overlay2", "xfs"):
        pytest.skip("this daemon may be able to")
    with pytest.raises(SpecError, match=r"limits.disk_bytes: this daemon, with .* cannot enforce"):
        backend.refuse(spec_of("true", limits={"disk_bytes": 1 << 26}))
    with pytest.raises(SpecError, match=r"limits.memory_bytes"):
        backend.refuse(spec_of("true", limits={"memory_bytes": 1000}))


# --- users, and a root that is read only ----------------------------------------------------------


def test_another_user_owns_its_workspace_and_has_a_home(run, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "secret").write_text("mine\n")
    (tree / "secret").chmod(0o600)
    (tree / "deep").mkdir(mode=0o700)
    check = (
        "set -e; cat secret; stat -c '%u:%g %a' . secret deep; id -u; id -g;"
        'echo 1 >"$HOME/there"; echo 1 >deep/made; [ ! -w /etc/hosts ]'
    )
    result = run(check, workspace=str(tree), options={"user": "1000:1000"})
    evidence = passed(result)
    wanted = b"mine\n1000:1000 755\n1000:1000 600\n1000:1000 700\n1000\n1000\n"
    assert evidence.stdout == wanted
    assert evidence.paths(Provenance.CREATED) == ["deep/made"]
    assert result.conditions["user"] == "1000:1000"


@pytest.mark.parametrize("user", [None, "1000:1000"], ids=["root", "another user"])
@pytest.mark.parametrize("image", [DEBIAN, BUSYBOX], ids=["debian", "busybox"])
def test_what_a_check_locks_comes_back_as_it_is(run, user, image):
    check = (
        "set -e; echo 1 >locked; mkdir -p closed/deeper; echo 2 >closed/in;"
        "echo 3 >closed/deeper/x;"
        "echo 4 >given; chmod 0 locked given closed/in closed/deeper closed"
    )
    evidence = passed(run(check, image=image, files={"given": "0\n"}, options={"user": user}))
    read = {
        path: evidence.read(path) for path in ("locked", "closed/in", "closed/deeper/x", "given")
    }
    assert list(read.values()) == [b"1\n", b"2\n", b"3\n", b"4\n"]
    modes = [evidence.entry(path).mode for path in ("locked", "closed", "closed/deeper", "given")]
    assert modes == [0, 0, 0, 0]
    assert evidence.paths(Provenance.MODIFIED) == ["given"]


@pytest.mark.parametrize("user", [None, "1000:1000"], ids=["root", "another user"])
def test_a_root_that_is_read_only_leaves_the_workspace_and_tmp(run, user):
    check = (
        "for place in /x /etc/x /bin/x; do ! touch $place 2>/dev/null || exit 9; done; set -e;"
        "echo 1 >/tmp/x; echo 2 >made; cat given; mkdir new; mv given new; echo 3 >$HOME/x"
    )
    if user is None:
        check = check.replace("; echo 3 >$HOME/x", "")
    result = run(check, files={"given": "1\n"}, options={"read_only": True, "user": user})
    assert passed(result).stdout == b"1\n"
    assert result.evidence.paths(Provenance.CREATED) == ["made", "new", "new/given"]
    assert result.conditions["read_only"] == "true"


# --- trees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("image", [DEBIAN, BUSYBOX], ids=["debian", "busybox"])
def test_odd_names_and_times_survive_both_ways(run, tmp_path, image):
    tree = tmp_path / "tree"
    deep = "/".join(["d" * 200] * 8)
    names = [
        "-n",
        " ",
        "a b",
        "new\nline",
        "back\\slash",
        "car\rriage",
        "tab\t",
        "*",
        "'q'",
        '"',
        "$HOME",
        "%s",
        "\\101",
        b"\xff\xfe".decode("utf-8", "surrogateescape"),
        "ü→",
    ]
    (tree / deep).mkdir(parents=True)
    (tree / deep / ("f" * 255)).write_text("deep")
    for number, name in enumerate(names):
        path = os.fsencode(tree) + b"/" + name.encode("utf-8", "surrogateescape")
        with open(path, "wb") as file:  # noqa: PTH123 - no Path has every name
            file.write(name.encode("utf-8", "surrogateescape"))
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number))
    (tree / "li\nnk").symlink_to("new\nline")
    check = (
        'set -e; mkdir out; for name in *; do [ ! -f "$name" ] || cp -p -- "$name" out; done;'
        "printf x >\"out/made\nhere\"; ln -s 'to\nthere' out/link; ls -A | wc -l >count"
    )
    evidence = passed(run(check, workspace=str(tree), image=image))
    for number, name in enumerate(names):
        assert evidence.read(f"out/{name}") == name.encode("utf-8", "surrogateescape")
        assert evidence.entry(f"{name}").mtime_ns == 1_600_000_000_123_456_789 + number
        assert evidence.provenance(name) is Provenance.UNCHANGED
    assert evidence.read(f"{deep}/{'f' * 255}") == b"deep"
    assert evidence.read("out/made\nhere") == b"x"
    assert [evidence.entry(path).target for path in ("li\nnk", "out/link")] == [
        "new\nline",
        "to\nthere",
    ]


def test_fifos_sockets_and_devices_are_listed_and_nobody_waits_at_them(run, daemon, workshop):
    def device(progress):  # as nobody without a capability can make one
        if progress.run.state is State.UPLOADED and progress.fact is not None:
            info = tarfile.TarInfo("null")
            info.type, info.devmajor, info.devminor, info.mode = tarfile.CHRTYPE, 1, 3, 0o666
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w") as bundle:
                bundle.addfile(info)
            found = container_of(daemon, progress.run.run_id)["Id"]
            daemon.put_archive(found, "/workspace", stream.getvalue())

    check = (
        "mkfifo p; python3 -W ignore -c \"import socket; socket.socket(socket.AF_UNIX).bind('s')\""
    )
    result = workshop.runner(observer=device).run(spec_of(check))
    kinds = {path: entry.kind for path, entry in passed(result).manifest.entries.items()}
    assert kinds == {"p": EntryKind.FIFO, "s": EntryKind.SOCKET, "null": EntryKind.DEVICE}


@pytest.mark.parametrize("user", [None, "1000:1000"], ids=["root", "another user"])
def test_git_takes_an_uploaded_repository_for_the_checks_own(run, user):
    make = "git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm first"
    check = 'set -e; test -z "$(git status --short)"; git log --format=%s; git fsck --strict'
    result = run(check, setup=make, files={"a": "1", "b/c": "2"}, options={"user": user})
    assert passed(result).stdout.text.startswith("first\n")


# --- many at once ---------------------------------------------------------------------------------


def test_sixty_four_tiny_runs_at_once_are_all_there(daemon, session, workshop):
    runner = workshop.runner(workshop.backend(BUSYBOX))

    def one(number):
        spec = spec_of(
            '[ "$(cat me)" = "$ME" ] && echo "$ME" >out',
            files={"me": str(number)},
            env={"ME": str(number)},
            deadline_s=60.0,
            backstop_s=200.0,
        )
        return runner.run(spec)

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(one, range(64)))
    for number, result in enumerate(results):
        assert passed(result).text("out") == f"{number}\n"
        assert (result.faults, result.retained_sandbox) == ((), None)
    assert len({result.run_id for result in results}) == 64
    assert ours(daemon, session) == []
