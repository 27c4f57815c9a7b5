"""Checks in a container of somebody else, with processes, a tree and a life of its own."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from itertools import pairwise

import pytest
from docker_support import (
    BUSYBOX,
    DEBIAN,
    SESSION,
    docker,
    has_file,
    passed,
    spec_of,
    story,
)

from orchestrator import (
    Bounds,
    Cancellation,
    OutcomeKind,
    Provenance,
    Reason,
    SpecError,
    State,
    Verdict,
)
from orchestrator.core.errors import SandboxGoneError

pytest_plugins = ["docker_support"]
pytestmark = pytest.mark.usefixtures("clean")

SLEEPS = ["sleep", "3600"]
REAPS_NOBODY = ["tail", "-f", "/dev/null"]
HOSTS = pytest.mark.parametrize(
    ("image", "command"),
    [(DEBIAN, SLEEPS), (DEBIAN, REAPS_NOBODY), (BUSYBOX, REAPS_NOBODY)],
    ids=["debian-sleep", "debian-tail", "busybox-tail"],
)
BOUNDS = Bounds(upload_s=20.0, settle_s=20.0, download_s=20.0, destroy_s=20.0, score_s=20.0)


@pytest.fixture
def container(daemon, session):
    """Starts containers, as a host of agents would."""
    made = []

    def container(command, image=DEBIAN, **options):
        found = daemon.create_container(
            image,
            command,
            working_dir="/repo",
            labels={SESSION: session},
            network_disabled=True,
            **options,
        )["Id"]
        made.append(found)
        daemon.start(found)
        return found

    yield container
    for each in made:
        with suppress(docker.errors.NotFound):
            daemon.remove_container(each, v=True, force=True)


def tell(daemon, container, program, user=""):
    """Have a shell in a container run a program; give what it says."""
    made = daemon.exec_create(container, ["/bin/sh", "-c", program], user=user)["Id"]
    said = daemon.exec_start(made)
    assert daemon.exec_inspect(made)["ExitCode"] == 0, said
    return said.decode()


def processes(daemon, container):
    """Give the processes of a container, by id; the dead ones, too."""
    rows = daemon.top(container, "-eo pid,stat,args")["Processes"]
    return {row[0]: (row[1], row[2]) for row in rows}


@pytest.fixture
def attach(workshop):
    """Attaches to a container, and has a runner for it."""

    def attach(container, *, observer=None, **options):
        backend = workshop.backend()
        attached = backend.attach(container, **options)
        return workshop.runner(attached, observer=observer, bounds=BOUNDS)

    return attach


# --- the tree -------------------------------------------------------------------------------------


@HOSTS
def test_a_check_is_measured_against_the_tree_that_it_found(
    daemon, container, attach, image, command
):
    found = container(command, image)
    tell(daemon, found, "cd /repo; echo agent >work; mkdir lib; echo 1 >lib/code; ln -s work link")
    runner = attach(found)
    check = "set -e; cat work given; echo 2 >lib/code; echo 3 >result; rm link"
    result = runner.run(spec_of(check, files={"given": "sent\n"}))
    evidence = passed(result)
    assert evidence.stdout == b"agent\nsent\n"
    assert evidence.paths(Provenance.CREATED) == ["result"]
    assert evidence.paths(Provenance.MODIFIED) == ["lib/code"]
    assert evidence.paths(Provenance.DELETED) == ["link"]
    assert evidence.paths(Provenance.UNCHANGED) == ["given", "lib", "work"]
    assert evidence.read("work") == b"agent\n"
    assert result.conditions["container"] == found
    assert tell(daemon, found, "cat /repo/work /repo/given /repo/result") == "agent\nsent\n3\n"


def test_files_are_laid_over_what_is_there_and_take_its_place(daemon, container, attach):
    found = container(SLEEPS)
    tell(daemon, found, "cd /repo; echo old >given; echo other >kept; mkdir sub; echo 1 >sub/kept")
    files = {"given": "new\n", "sub/given": "too\n"}
    evidence = passed(attach(found).run(spec_of("cat given sub/given kept sub/kept", files=files)))
    assert evidence.stdout == b"new\ntoo\nother\n1\n"
    assert evidence.paths(Provenance.MODIFIED) == []


def test_another_place_and_another_user(daemon, container, attach):
    found = container(SLEEPS)
    tell(daemon, found, "mkdir /tree && echo 1 >/tree/there && chown -R 1000:1000 /tree")
    runner = attach(found, workdir="/tree", user="1000:1000")
    evidence = passed(runner.run(spec_of("id -u; pwd; cat there; echo 2 >made")))
    assert evidence.stdout == b"1000\n/tree\n1\n"
    assert evidence.paths(Provenance.CREATED) == ["made"]
    assert tell(daemon, found, "stat -c %u /tree/made") == "1000\n"


# --- processes ------------------------------------------------------------------------------------


@HOSTS
def test_processes_that_were_there_go_on_and_those_of_the_check_do_not(
    daemon, container, attach, command, image
):
    found = container(command, image)
    for program in ("exec sleep 3001", "setsid sh -c 'sleep 3002 & exec sleep 3003'"):
        made = daemon.exec_create(found, ["/bin/sh", "-c", program])["Id"]
        daemon.exec_start(made, detach=True)
    end = time.monotonic() + 10
    while (
        time.monotonic() < end
        and len([each for _, each in processes(daemon, found).values() if "sleep 300" in each]) < 3
    ):
        threading.Event().wait(0.02)
    before = processes(daemon, found)
    leaves = (
        "sleep 4001 & setsid sleep 4002 & (setsid sh -c '(sleep 4003 &) & sleep 4004 &' &);"
        "sh -c \"trap '' TERM HUP; sleep 4005 & wait\" & echo left"
    )
    result = attach(found).run(spec_of(leaves))
    assert passed(result).stdout == b"left\n"
    assert result.outcome.descendants >= 1
    after = processes(daemon, found)
    alive = {pid: row for pid, row in after.items() if not row[0].startswith("Z")}
    assert {pid: row[1] for pid, row in alive.items()} == {
        pid: row[1] for pid, row in before.items()
    }


def test_a_deadline_stops_all_of_the_check_and_nothing_else(daemon, container, attach):
    found = container(REAPS_NOBODY)
    made = daemon.exec_create(found, ["sleep", "3001"])["Id"]
    daemon.exec_start(made, detach=True)
    check = "setsid sh -c 'while :; do echo x >>tick; sleep 0.05; done' & sleep 60"
    result = attach(found).run(spec_of(check, deadline_s=1.0, expect={"timed_out": True}))
    passed(result)
    assert result.outcome.kind is OutcomeKind.DEADLINE_EXCEEDED
    alive = [args for stat, args in processes(daemon, found).values() if stat[0] != "Z"]
    assert sorted(alive) == ["sleep 3001", "tail -f /dev/null"]


def test_what_was_there_and_forks_during_the_check_is_not_the_checks(daemon, container, attach):
    found = container(SLEEPS)
    server = "i=0; while :; do sleep 0.02; i=$((i + 1)); echo $i >/tmp/served; done"
    daemon.exec_start(daemon.exec_create(found, ["/bin/sh", "-c", server])["Id"], detach=True)
    passed(attach(found).run(spec_of("sleep 1")))
    served = "cat /tmp/served"
    first = int(tell(daemon, found, served) or 0)
    end = time.monotonic() + 10
    while int(tell(daemon, found, served) or 0) <= first and time.monotonic() < end:
        threading.Event().wait(0.05)
    assert int(tell(daemon, found, served) or 0) > first, "the server was stopped"


def test_twenty_timed_out_checks_in_one_container_leave_only_what_its_process_1_does_not_reap(
    daemon, container, attach
):
    found = container(REAPS_NOBODY)
    runner = attach(found)
    counts = []
    for _ in range(20):
        spec = spec_of("sleep 60 & sleep 60", deadline_s=0.2, grace_s=0.1)
        result = runner.run(spec)
        assert result.outcome.kind is OutcomeKind.DEADLINE_EXCEEDED, story(result)
        rows = processes(daemon, found).values()
        assert [args for stat, args in rows if stat[0] != "Z"] == ["tail -f /dev/null"]
        counts.append(len(rows) - 1)
    each = [later - sooner for sooner, later in pairwise(counts)]
    assert max(each) <= 8, f"dead processes by run: {counts}"


# --- one run after another ------------------------------------------------------------------------


def test_runs_follow_one_another_each_on_what_the_one_before_it_left(daemon, container, attach):
    found = container(SLEEPS)
    runner = attach(found)
    for number in range(4):
        result = runner.run(spec_of(f"ls | wc -l; echo {number} >made{number}"))
        evidence = passed(result)
        assert evidence.stdout == f"{number}\n".encode()
        assert evidence.paths(Provenance.CREATED) == [f"made{number}"]
        assert result.retained_sandbox is None
    assert tell(daemon, found, "ls -A /tmp") == ""
    assert daemon.inspect_container(found)["State"]["Running"]


def test_failures_of_setup_and_check_leave_the_container(daemon, container, attach):
    found = container(SLEEPS)
    runner = attach(found)
    failed = runner.run(spec_of("exit 3"))
    assert (failed.verdict, str(failed.outcome)) == (Verdict.FAILED, "exited(3)")
    unprepared = runner.run(spec_of("true", setup="exit 1"))
    assert unprepared.reason is Reason.SETUP_FAILED
    assert tell(daemon, found, "ls -A /tmp") == ""
    passed(runner.run(spec_of("true")))


def test_a_container_that_was_given_away_goes_with_its_run(daemon, container, attach):
    found = container(SLEEPS)
    result = attach(found, owned=True).run(spec_of("echo 1 >made"))
    assert passed(result).read("made") == b"1\n"
    with pytest.raises(docker.errors.NotFound):
        daemon.inspect_container(found)


# --- what cannot be -------------------------------------------------------------------------------


def test_what_cannot_be_attached_to_is_said_at_once(daemon, container, workshop):
    backend = workshop.backend()
    with pytest.raises(SandboxGoneError, match="there is none"):
        backend.attach("orchestrator-nobody")
    stopped = container(SLEEPS)
    daemon.kill(stopped)
    daemon.wait(stopped)
    with pytest.raises(SandboxGoneError, match="it is not running"):
        backend.attach(stopped)


def test_limits_and_images_of_a_container_that_is_there_are_refused(container, attach):
    runner = attach(container(SLEEPS))
    for said, key in (
        ({"limits": {"memory_bytes": 1 << 26}}, "limits.memory_bytes"),
        ({"limits": {"pids": 5}}, "limits.pids"),
        ({"image": "another"}, "image"),
    ):
        with pytest.raises(SpecError) as refused:
            runner.run(spec_of("true", **said))
        assert refused.value.key == key
    assert runner.journal.run_ids() == []


DEEDS = {
    "killed": lambda daemon, found: daemon.kill(found),
    "stopped": lambda daemon, found: daemon.stop(found, timeout=0),
    "removed": lambda daemon, found: daemon.remove_container(found, force=True),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_a_container_that_ends_in_a_check_leaves_no_verdict(daemon, container, attach, deed):
    found = container(SLEEPS)
    threads = []

    def end_it():
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if has_file(daemon, found, "/repo/started"):
                DEEDS[deed](daemon, found)
                return
            threading.Event().wait(0.02)

    def observe(progress):
        if progress.run.state is State.UPLOADED and progress.fact is not None:
            threads.append(threading.Thread(target=end_it))
            threads[0].start()

    runner = attach(found, observer=observe)
    start = time.monotonic()
    result = runner.run(spec_of("echo 1 >started; sleep 60; exit 0", deadline_s=100.0))
    threads[0].join()
    assert (result.verdict, result.outcome) == (Verdict.UNRESOLVED, None), story(result)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("deed", DEEDS)
def test_a_container_that_ends_before_the_download_leaves_no_verdict(
    daemon, container, attach, deed
):
    found = container(SLEEPS)

    def observe(progress):
        if progress.run.state is State.CHECKED:
            DEEDS[deed](daemon, found)

    result = attach(found, observer=observe).run(spec_of("echo 1 >made"))
    assert (result.verdict, result.reason) == (Verdict.UNRESOLVED, Reason.DOWNLOAD_FAILED)


def test_a_check_that_its_client_gave_up_on_is_stopped_in_the_container(daemon, container, attach):
    """The client's backstop, that is: what was started is settled, and the container lives on."""
    found = container(REAPS_NOBODY)
    runner = attach(found)
    cancellation = Cancellation()

    def cancel():
        end = time.monotonic() + 20
        while not has_file(daemon, found, "/repo/started") and time.monotonic() < end:
            threading.Event().wait(0.02)
        cancellation.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    spec = spec_of("echo 1 >started; setsid sleep 61 & sleep 60", deadline_s=100.0)
    result = runner.run(spec, cancellation=cancellation)
    thread.join()
    assert (result.verdict, result.reason) == (Verdict.UNRESOLVED, Reason.CANCELLED), story(result)
    alive = [args for stat, args in processes(daemon, found).values() if stat[0] != "Z"]
    assert alive == ["tail -f /dev/null"]
    assert tell(daemon, found, "ls -A /tmp") == ""
