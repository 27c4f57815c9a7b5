"""Late answers, lost daemons, containers and runners that are gone: one verdict, and nothing left.

Every call that a run makes of the daemon, and every question that it asks of the guest, goes wrong
in turn. What is claimed for each: the run ends within its bounds; a check that exits with 0 never
FAILED and one that exits with 1 never PASSED; the check ran at most once; nothing is left.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from docker_proxy import Proxy, Rule, Way
from docker_support import (
    BUSYBOX,
    LEAKY_SDK,
    SESSION,
    WatchedClock,
    container_of,
    docker,
    has_file,
    name_of,
    ours,
    passed,
    spec_of,
    story,
)

from orchestrator import Bounds, Cancellation, OutcomeKind, Reason, Runner, State, Verdict
from orchestrator.backends.docker import IDENTITY_LABEL, DockerBackend

pytest_plugins = ["docker_support"]
pytestmark = pytest.mark.usefixtures("clean")

SOCKET = "/var/run/docker.sock"
BOUND_S = 3.0
BOUNDS = Bounds(
    upload_s=BOUND_S, settle_s=BOUND_S, download_s=BOUND_S, destroy_s=BOUND_S, score_s=BOUND_S
)
ALL_S = 5 * BOUND_S + 4.0
"""Upload, check, settle, download and destroy, each to its end, and what it takes to say so."""
MARK = "echo x >>ran"
BEFORE_IT_BEGINS = {"GET version", "GET info", "GET images/*/json"}


@pytest.fixture(scope="module")
def socket_path(daemon):
    path = (os.environ.get("DOCKER_HOST") or f"unix://{SOCKET}").removeprefix("unix://")
    if not os.path.exists(path):  # noqa: PTH110 - `Path` says nothing more
        pytest.skip("a proxy can be put in front of a socket only, and the daemon has none here")
    return path


@pytest.fixture
def disturb(workshop, socket_path, daemon):
    """Has a run meet a fault; gives its result, and what is wrong with how it went."""
    held = set()

    def disturb(rule=None, check="true", *, files=None, image=BUSYBOX):
        clock = WatchedClock()
        place = workshop.directory / secrets.token_hex(6)
        with Proxy(socket_path, rule) as proxy:
            client = docker.APIClient(base_url=proxy.url, version="1.41", timeout=60)
            backend = DockerBackend(image, client=client, labels=workshop.backend().labels)
            spec = spec_of(
                f"{MARK}; {check}",
                files=files or {"a": "1"},
                deadline_s=1.0,
                grace_s=0.2,
                backstop_s=BOUND_S,
            )
            with Runner(backend, place, bounds=BOUNDS, clock=clock) as runner:
                start = time.monotonic()
                result = runner.run(spec)
                elapsed_s = time.monotonic() - start
                calls = list(proxy.calls)
                met = proxy.met.is_set()
                proxy.release()
                proxy.drain()
                clock.drain()
                swept = runner.sweep()
            held.update(each.image for each in backend.workspaces._held.values())
            backend.close()
        problems = list(_problems(result, check, elapsed_s))
        if rule is not None and not met:
            problems.append("the call never came")
        if container_of(daemon, result.run_id):
            problems.append(f"its container is left, swept: {swept}")
        return result, calls, [f"{rule}: {each}; {story(result)}" for each in problems]

    yield disturb
    for image in held:
        with suppress(docker.errors.NotFound):
            daemon.remove_image(image, force=True)


def _problems(result, check, elapsed_s):
    """Say what must not be."""
    right = Verdict.PASSED if check == "true" else Verdict.FAILED
    if result.verdict not in {right, Verdict.UNRESOLVED}:
        yield f"the verdict on `{check}` is {result.verdict}"
    if result.verdict is Verdict.UNRESOLVED and not result.faults:
        yield "no fault is listed"
    if elapsed_s > ALL_S:
        yield f"it took {elapsed_s:.1f} s"
    ran = b""
    if result.evidence is not None and result.evidence.exists("ran"):
        ran = result.evidence.read("ran")
    if ran not in {b"", b"x\n"} or (result.verdict is right and ran != b"x\n"):
        yield f"the check ran otherwise than once: {ran!r}"


def known_workspace(disturb):
    """Give a workspace that the daemon has already."""
    files = {"big": secrets.token_bytes(1 << 20)}
    disturb(files=files)
    return files


def calls_of_a_run(disturb, files):
    result, calls, problems = disturb(files=files)
    assert (result.verdict, result.faults, problems) == (Verdict.PASSED, (), [])
    begun = [call for call in calls if call.partition("#")[0] not in BEFORE_IT_BEGINS]
    # What the rest of this rests on: these are met, each with a way to go wrong.
    assert {
        "POST containers/create#1",
        "POST containers/*/start#1",
        "ask run#1",
        "ask send#1",
        "DELETE containers/*#1",
    } <= set(begun)
    return begun + [call for call in calls if call.startswith("GET images") and call[-1] != "1"]


def rules_of(calls, way, *, on=False):
    for call in calls:
        name, _, number = call.partition("#")
        if way is Way.ERROR and name.startswith("ask"):
            continue  # nobody says 500 there
        yield Rule(name, way, int(number), on)


def all_of_them(disturb, rules, **said):
    """Have a run for each rule, eight at a time; give what is wrong, and the results."""
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda rule: disturb(rule, **said), rules))
    assert done
    return [problem for *_, problems in done for problem in problems], [each[0] for each in done]


@pytest.mark.parametrize(
    "way", [Way.ERROR, Way.CUT_BEFORE, Way.CUT_AFTER, Way.HANG_AFTER, Way.LATE]
)
@pytest.mark.parametrize("check", ["true", "exit 1"])
def test_whichever_call_goes_wrong_no_verdict_is_wrong_and_nothing_is_left(disturb, way, check):
    """A workspace that is sent and a check that passes; a known one and a check that fails."""
    files = known_workspace(disturb) if check == "exit 1" else None
    rules = list(rules_of(calls_of_a_run(disturb, files), way))
    problems, results = all_of_them(disturb, rules, check=check, files=files)
    assert problems == []
    # Not everything is lost: reading is repeated, and what was done is found out.
    resolved = sum(result.verdict is not Verdict.UNRESOLVED for result in results)
    assert resolved >= (3 if way in {Way.HANG_AFTER, Way.LATE} else 5)


@pytest.mark.parametrize("call", ["ask list#2", "ask send#1", "ask record#2"])
def test_a_connection_that_breaks_in_a_download_is_made_again(disturb, call):
    name, _, number = call.partition("#")
    result, _, problems = disturb(Rule(name, Way.CUT_AFTER, int(number)))
    assert (result.verdict, problems) == (Verdict.PASSED, []), story(result)
    assert len(result.faults) == 1


DEAD = [
    "POST containers/create#1",
    "POST containers/*/start#1",
    "ask run#1",
    "ask send#1",
    "DELETE containers/*#1",
]


@pytest.mark.parametrize("way", [Way.CUT_BEFORE, Way.HANG_BEFORE])
def test_a_daemon_that_is_gone_for_good_leaves_a_verdict_and_a_sandbox_to_sweep(disturb, way):
    rules = []
    for call in DEAD:
        name, _, number = call.partition("#")
        rules.append(Rule(name, way, int(number), on=True))
    problems, results = all_of_them(disturb, rules)
    assert problems == []
    for rule, result in zip(rules, results, strict=True):
        wanted = Verdict.PASSED if rule.call.startswith("DELETE") else Verdict.UNRESOLVED
        assert result.verdict is wanted, f"{rule}: {story(result)}"
        assert result.retained_sandbox == result.run_id, f"{rule}: {story(result)}"


@pytest.mark.parametrize("call", sorted(BEFORE_IT_BEGINS - {"GET version"}))
@pytest.mark.parametrize("way", [Way.ERROR, Way.CUT_BEFORE])
def test_a_daemon_that_cannot_be_asked_begins_nothing(workshop, socket_path, call, way):
    with Proxy(socket_path, Rule(call, way)) as proxy:
        client = workshop.client(proxy.url)
        runner = workshop.runner(workshop.backend(BUSYBOX, client=client))
        spec = spec_of("true", limits={"cpus": 0.5})
        with pytest.raises(Exception, match=r"500|Connection aborted|injected") as raised:
            runner.run(spec)
        assert not isinstance(raised.value, AssertionError)
        assert runner.journal.run_ids() == []
        assert not any("create" in each for each in proxy.calls)
        passed(runner.run(spec))


# --- containers that do not stay ------------------------------------------------------------------


def replace(daemon, run_id):
    """Put another container in the place of a run's, with all its labels but who it is."""
    found = daemon.inspect_container(name_of(run_id))
    daemon.remove_container(found["Id"], v=True, force=True)
    labels = {**found["Config"]["Labels"], IDENTITY_LABEL: "another"}
    daemon.create_container(
        BUSYBOX,
        ["/bin/sh"],
        name=name_of(run_id),
        labels=labels,
        stdin_open=True,
        network_disabled=True,
    )


DEEDS = {
    "killed": lambda daemon, run_id: daemon.kill(name_of(run_id)),
    "restarted": lambda daemon, run_id: daemon.restart(name_of(run_id), timeout=0),
    "removed": lambda daemon, run_id: daemon.remove_container(name_of(run_id), force=True, v=True),
    "replaced": replace,
}


@pytest.mark.parametrize("deed", DEEDS)
def test_a_container_that_is_disturbed_before_the_download_is_scored_only_if_it_is_the_same(
    daemon, workshop, deed
):
    def observe(progress):
        if progress.run.state is State.CHECKED:
            DEEDS[deed](daemon, progress.run.run_id)

    runner = workshop.runner(workshop.backend(BUSYBOX), observer=observe, bounds=BOUNDS)
    result = runner.run(spec_of(f"{MARK}; echo said", files={"a": "1"}))
    if deed in {"removed", "replaced"}:
        assert (result.verdict, result.reason) == (Verdict.UNRESOLVED, Reason.DOWNLOAD_FAILED)
    elif result.verdict is not Verdict.UNRESOLVED:
        evidence = passed(result)
        assert (evidence.read("ran"), evidence.stdout) == (b"x\n", b"said\n")
    runner.sweep()
    assert container_of(daemon, result.run_id) is None


def once_started(daemon, act):
    """Give an observer that acts once the run's check has made the file `started`."""
    threads = []

    def wait(run_id):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if has_file(daemon, name_of(run_id), "/workspace/started"):
                act(run_id)
                return
            threading.Event().wait(0.02)  # there is nothing to wait at

    def observe(progress):
        if progress.run.state is State.UPLOADED and progress.fact is not None:
            threads.append(threading.Thread(target=wait, args=[progress.run.run_id]))
            threads[0].start()

    return observe, threads


@pytest.mark.parametrize("deed", DEEDS)
def test_a_container_that_is_disturbed_in_its_check_has_no_outcome(daemon, workshop, deed):
    observe, threads = once_started(daemon, lambda run_id: DEEDS[deed](daemon, run_id))
    runner = workshop.runner(workshop.backend(BUSYBOX), observer=observe, bounds=BOUNDS)
    result = runner.run(spec_of("echo 1 >started; sleep 30; exit 0", deadline_s=40.0))
    threads[0].join()
    assert result.verdict is Verdict.UNRESOLVED, story(result)
    assert result.outcome is None
    assert result.timings["check"] < 20
    runner.sweep()
    if deed == "replaced" and (another := container_of(daemon, result.run_id)):
        daemon.remove_container(another["Id"], force=True)  # it came after all was over
    assert container_of(daemon, result.run_id) is None


def test_a_sandbox_that_is_paused_is_given_up_on_and_goes(daemon, workshop):
    observe, threads = once_started(daemon, lambda run_id: daemon.pause(name_of(run_id)))
    runner = workshop.runner(workshop.backend(BUSYBOX), observer=observe, bounds=BOUNDS)
    spec = spec_of("echo 1 >started; sleep 30", deadline_s=1.0, grace_s=0.1, backstop_s=4.0)
    result = runner.run(spec)
    threads[0].join()
    assert result.verdict is Verdict.UNRESOLVED
    runner.sweep()
    assert container_of(daemon, result.run_id) is None


# --- daemons that do not stay ---------------------------------------------------------------------


def test_a_daemon_that_restarts_before_the_download_loses_nothing(private_daemon, workshop):
    def observe(progress):
        if progress.run.state is State.CHECKED:
            private_daemon.stop()
            private_daemon.start()

    backend = workshop.backend(BUSYBOX, client=workshop.client(private_daemon.url))
    result = workshop.runner(backend, observer=observe).run(
        spec_of(f"{MARK}; echo said; exit 7", expect={"exit_code": 7})
    )
    evidence = passed(result)
    assert (evidence.read("ran"), evidence.stdout) == (b"x\n", b"said\n")
    assert backend.client.containers(all=True) == []


def test_a_daemon_that_restarts_and_forgets_how_a_check_ended_is_told_by_the_guest(
    private_daemon, workshop
):
    """The answer is lost with the daemon; the next daemon says 255, or 137; the record says 7."""

    def restart():
        private_daemon.stop()
        private_daemon.start()
        proxy.hang_up()  # as the daemon that ended has done

    rule = Rule("ask run", Way.CUT_AFTER)
    with Proxy(str(private_daemon.socket), rule, then=restart) as proxy:
        backend = workshop.backend(BUSYBOX, client=workshop.client(proxy.url))
        spec = spec_of(f"{MARK}; exit 7", expect={"exit_code": 7})
        result = workshop.runner(backend).run(spec)
        assert proxy.met.is_set()
        assert passed(result).read("ran") == b"x\n"
        assert result.outcome.kind is OutcomeKind.EXITED
        assert backend.client.containers(all=True) == []


@LEAKY_SDK
def test_a_daemon_that_is_gone_in_a_check_leaves_no_verdict_and_the_next_one_is_swept(
    private_daemon, workshop
):
    direct = workshop.client(private_daemon.url)
    observe, threads = once_started(direct, lambda _: private_daemon.stop())
    backend = workshop.backend(BUSYBOX, client=workshop.client(private_daemon.url))
    runner = workshop.runner(backend, observer=observe, bounds=BOUNDS)
    try:
        result = runner.run(spec_of("echo 1 >started; sleep 30", deadline_s=40.0))
        threads[0].join()
    finally:
        private_daemon.stop()
        private_daemon.start()
    assert result.verdict is Verdict.UNRESOLVED, story(result)
    assert result.retained_sandbox == result.run_id
    assert [each.problem for each in runner.sweep()] == [""]
    assert direct.containers(all=True) == []


# --- runs that are stopped ------------------------------------------------------------------------


def test_fifty_runs_that_are_cancelled_at_any_moment_leave_nothing(daemon, session, workshop):
    runner = workshop.runner(workshop.backend(BUSYBOX))
    moments = random.Random(50)

    def one(number):
        cancellation = Cancellation()
        timer = threading.Timer(moments.uniform(0.0, 1.2), cancellation.cancel)
        timer.start()
        files = {"a": str(number)}
        result = runner.run(
            spec_of("sleep 3", files=files, deadline_s=5.0), cancellation=cancellation
        )
        timer.join()
        return result

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(50)))
    assert {result.reason for result in results} == {Reason.CANCELLED}
    assert len({result.outcome for result in results} - {None}) == 0
    end = time.monotonic() + 20
    while ours(daemon, session) and time.monotonic() < end:
        runner.sweep()
        threading.Event().wait(0.1)  # a creation that was given up on may still come
    assert ours(daemon, session) == []


PROGRAM = """
import sys
from orchestrator import EvalSpec, Runner
from orchestrator.backends.docker import DockerBackend

place, image, label, value, stop, check = sys.argv[1:]

def observe(progress):
    if progress.run.state.value == stop:
        print(progress.run.run_id, flush=True)
        sys.stdin.read()

backend = DockerBackend(image, labels={label: value})
with Runner(backend, place, observer=observe) as runner:
    runner.run(EvalSpec(name="killed", check=check, files={"a": "1"}, deadline_s=30, grace_s=0.5))
"""


@pytest.fixture
def child(workshop, session):
    """Starts a runner as a process of its own, which stops in a state and waits to be killed."""
    children = []

    def child(stop, check=MARK, host=None):
        environment = {**os.environ, **({"DOCKER_HOST": host} if host else {})}
        argv = [
            sys.executable,
            "-c",
            PROGRAM,
            str(workshop.directory / "state"),
            BUSYBOX,
            SESSION,
            session,
            stop,
            check,
        ]
        started = subprocess.Popen(
            argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        children.append(started)
        return started

    yield child
    for each in children:
        each.kill()
        each.communicate()


def resumed(workshop, daemon):
    """Resume the one run that is not finished; make sure that nothing of it is left."""
    runner = workshop.runner(workshop.backend(BUSYBOX))
    [run_id] = runner.unfinished()
    result = runner.resume(run_id)
    assert container_of(daemon, run_id) is None
    assert runner.sweep() == []
    return result


@pytest.mark.parametrize("state", ["NEW", "UPLOADED", "CHECKED", "DOWNLOADED", "CLEANED_UP"])
def test_a_runner_that_is_killed_is_followed_by_one_that_finishes(daemon, workshop, child, state):
    killed = child(state)
    assert killed.stdout.readline(), "it never came to that"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert passed(resumed(workshop, daemon)).read("ran") == b"x\n"


@pytest.mark.parametrize(
    "rule",
    [
        Rule(call, way)
        for call in ("PUT containers/*/archive", "POST containers/*/start", "ask run")
        for way in (Way.HANG_BEFORE, Way.HANG_AFTER)
    ],
    ids=str,
)
def test_a_runner_that_is_killed_in_a_call_is_followed_by_one_that_finishes(
    daemon, workshop, child, socket_path, rule
):
    with Proxy(socket_path, rule) as proxy:
        killed = child("nowhere", host=proxy.url)
        assert proxy.met.wait(20), "it never came to that"
        if rule.way is Way.HANG_AFTER:
            proxy.drain()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        result = resumed(workshop, daemon)
    assert passed(result).read("ran") == b"x\n"


def test_a_runner_that_is_killed_while_its_check_runs_is_told_how_it_ended(
    daemon, workshop, child, session
):
    """Who follows joins the check that runs; it runs in a container that has no end with it."""
    killed = child("nowhere", check=f"{MARK}; mkfifo go; echo 1 >started; read line <go; exit 0")
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = ours(daemon, session)
        if found and has_file(daemon, found[0]["Id"], "/workspace/started"):
            break
        threading.Event().wait(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    go = daemon.exec_create(found[0]["Id"], ["/bin/sh", "-c", "echo on >/workspace/go"])["Id"]
    runner = workshop.runner(workshop.backend(BUSYBOX))
    [run_id] = runner.unfinished()
    with ThreadPoolExecutor(1) as pool:
        resuming = pool.submit(runner.resume, run_id)
        daemon.exec_start(go)
        result = resuming.result()
    assert passed(result).read("ran") == b"x\n"
    assert container_of(daemon, run_id) is None
