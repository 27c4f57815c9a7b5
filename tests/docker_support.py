"""What the tests of the Docker backend share: the daemon, its images, backends, and no leftovers.

They need a daemon that answers and three images, which `bash .ci/images` builds. Without them they
are skipped, and say so; where ORCHESTRATOR_REQUIRE_DOCKER is 1 they fail instead.

PYTEST_DONT_REWRITE: the tests import this before pytest takes it for a plugin.
"""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest

from orchestrator import Bounds, EvalSpec, Runner, Verdict
from orchestrator.clock import SystemClock

try:
    import docker
    from docker.errors import APIError, DockerException, NotFound

    from orchestrator.backends.docker import RUN_LABEL, DockerBackend
except ImportError as error:
    docker, MISSING = None, f"the Docker SDK is not installed ({error}): pip install docker"
else:
    MISSING = ""

REQUIRED = os.environ.get("ORCHESTRATOR_REQUIRE_DOCKER") == "1"
DEBIAN = "orchestrator-test:debian"
BUSYBOX = "orchestrator-test:busybox"
NOSHELL = "orchestrator-test:noshell"
BOUNDS = Bounds(upload_s=60.0, settle_s=30.0, download_s=30.0, destroy_s=60.0, score_s=30.0)
"""What waits for longer than this waits for ever."""
LEAKY_SDK = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)
"""For tests in which connections are refused, or come after their client was closed: their sockets
are left to the garbage collector by the SDK."""
SESSION = "orchestrator.test"
"""Label of every container of these tests: the daemon may have other users."""


def lacking(problem):
    """Skip, or fail where Docker has to be there."""
    if REQUIRED:
        pytest.fail(f"ORCHESTRATOR_REQUIRE_DOCKER=1, and {problem}", pytrace=False)
    pytest.skip(f"NO DOCKER, NOTHING OF ITS BACKEND IS TESTED: {problem}")


if MISSING and not REQUIRED:
    pytest.skip(f"NO DOCKER, NOTHING OF ITS BACKEND IS TESTED: {MISSING}", allow_module_level=True)


@pytest.fixture(scope="session")
def daemon():
    """The daemon's own client, beside the backends'."""
    if MISSING:
        lacking(MISSING)
    problem = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the socket that was refused
        try:
            client = docker.APIClient(version="auto", timeout=60, **docker.utils.kwargs_from_env())
        except DockerException as error:
            problem = f"no daemon answers: {error}"
        gc.collect()
    if problem:
        lacking(problem)
    for image in (DEBIAN, BUSYBOX, NOSHELL):
        try:
            client.inspect_image(image)
        except NotFound:
            client.close()
            lacking(f"the daemon has no image {image}: build it with `bash .ci/images`")
    yield client
    client.close()


@pytest.fixture(scope="session")
def session():
    """A word that every container of this session has in a label."""
    return secrets.token_hex(8)


def ours(client, session):
    """Give the containers of this session, running or not."""
    return client.containers(all=True, filters={"label": [f"{SESSION}={session}"]})


def inventory(client):
    """Give all that a daemon could be left with: containers, volumes, networks and images."""
    return (
        {each["Id"] for each in client.containers(all=True)}
        | {each["Name"] for each in client.volumes()["Volumes"] or []}
        | {each["Id"] for each in client.networks()}
        | {each["Id"] for each in client.images(all=True)}
    )


@pytest.fixture(scope="module")
def clean(daemon, session):
    """After a module no container is left of it."""
    yield
    left = [each["Names"] for each in ours(daemon, session)]
    for each in ours(daemon, session):
        daemon.remove_container(each["Id"], v=True, force=True)
    assert left == []


class Workshop:
    """Makes backends and runners, and closes them all."""

    def __init__(self, directory, session):
        self.directory = directory
        self.session = session
        self.made = []
        self._clocks = []

    def backend(self, image=None, **options):
        labels = {SESSION: self.session, **options.pop("labels", {})}
        made = DockerBackend(image or DEBIAN, labels=labels, **options)
        self.made.append(made)
        return made

    def runner(self, backend=None, place="state", **options):
        clock = WatchedClock()
        made = Runner(backend or self.backend(), self.directory / place, clock=clock, **options)
        self.made.append(made)
        self._clocks.append(clock)
        return made

    def client(self, url, timeout=60):
        made = docker.APIClient(base_url=url, version="auto", timeout=timeout)
        self.made.append(made)
        return made

    def close(self):
        for clock in self._clocks:
            clock.drain()  # who comes late opens connections again
        for each in reversed(self.made):
            each.close()
        self.made.clear()
        gc.collect()  # what is left open is found out here, and not in the next test


@pytest.fixture
def workshop(tmp_path, session, daemon, clean):
    made = Workshop(tmp_path, session)
    yield made
    made.close()


@pytest.fixture
def run(workshop):
    """Runs a check to its result; `image`, `backend` and what else a spec says are named."""

    def run(check, *, backend=None, image=None, options=None, **spec):
        chosen = backend or workshop.backend(image, **(options or {}))
        place = workshop.directory / f"state-{secrets.token_hex(4)}"
        with Runner(chosen, place, bounds=BOUNDS) as runner:
            return runner.run(spec_of(check, **spec))

    return run


def spec_of(check, **said):
    return EvalSpec(
        **{"name": "docker", "deadline_s": 20.0, "grace_s": 0.5, "check": check, **said}
    )


def passed(result):
    """Give the evidence of a run that passed."""
    assert result.verdict is Verdict.PASSED, story(result)
    return result.evidence


def story(result):
    stderr = result.evidence and result.evidence.output("stderr")
    said = stderr.text[-400:] if stderr else ""
    return f"{result.verdict} {result.reason} {result.outcome} {result.faults} {said}"


def name_of(run_id):
    return f"orchestrator-{run_id}"


def container_of(client, run_id):
    """Give a run's container as the daemon has it; None where there is none."""
    found = client.containers(all=True, filters={"label": [f"{RUN_LABEL}={run_id}"]})
    return found[0] if found else None


def settle_threads(seconds=10.0):
    """Wait for calls that were given up on, so that nothing of a test is left to the next."""
    end = time.monotonic() + seconds
    for each in threading.enumerate():
        if each.name == "bounded call":
            each.join(max(end - time.monotonic(), 0))
    gc.collect()


def has_file(client, container, path):
    """Tell whether there is a file in a container. What the daemon sends is read to its end:
    till then it holds the container."""
    try:
        stream, _ = client.get_archive(container, path)
    except APIError:
        return False
    return bool(b"".join(stream))


class WatchedClock(SystemClock):
    """The clock of this machine, which knows of the calls that were given up on."""

    def __init__(self):
        self._open = 0
        self._changed = threading.Condition()

    def call(self, function, bound_s, cancellation=None):
        def counted():
            try:
                return function()
            finally:
                with self._changed:
                    self._open -= 1
                    self._changed.notify_all()

        with self._changed:
            self._open += 1
        if cancellation is not None and cancellation.cancelled:
            with self._changed:
                self._open -= 1
        return super().call(counted, bound_s, cancellation)

    def drain(self, seconds=20.0):
        """Wait until every call has come back."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._open == 0, seconds), "a call never ends"


class PrivateDaemon:
    """A daemon of our own, to be killed and started again."""

    def __init__(self):
        self.home = Path(mkdtemp(prefix="dockerd-"))
        self.socket = self.home / "socket"
        self.url = f"unix://{self.socket}"
        self._process = None

    def start(self):
        options = [
            f"--data-root={self.home / 'data'}",
            f"--exec-root={self.home / 'exec'}",
            f"--pidfile={self.home / 'pid'}",
            f"--host={self.url}",
            "--bridge=none",
            "--shutdown-timeout=1",
            "--iptables=false",
        ]
        with (self.home / "log").open("ab") as log:
            # A daemon without a bridge takes away the one that another daemon made.
            command = ["unshare", "--net", "dockerd", *options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.socket))
                probe.settimeout(60)
                probe.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                if probe.recv(100).startswith(b"HTTP/1.0 200"):
                    return
            threading.Event().wait(0.05)  # it has nothing to wait at before it listens
        log = (self.home / "log").read_text("utf-8", "replace")[-1000:]
        self.stop()
        lacking(f"a second daemon does not start: {log}")

    def stop(self):
        """Have it end, and its containers with it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None

    def close(self):
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)


@pytest.fixture(scope="session")
def private_daemon(daemon):
    """A daemon of our own that has the image `busybox`."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        lacking("a second daemon needs root and a dockerd")
    made = PrivateDaemon()
    try:
        made.start()
        client = docker.APIClient(base_url=made.url, version="auto", timeout=60)
        client.load_image(b"".join(daemon.get_image(BUSYBOX)))
        client.close()
        yield made
    finally:
        made.close()
