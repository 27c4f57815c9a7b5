"""What a run in a container costs, beside the least that the same work could cost.

    python benchmarks/containers.py --image IMAGE            about ten minutes
    python benchmarks/containers.py --image IMAGE --large    500 MB, too
    python benchmarks/containers.py --image IMAGE --only tiny,many --json figures.json

Contestants take turns, so that noise of machine and daemon falls on all alike; figures are medians
with their spread. Absolute times are not stable between machines: read the ratios. The image is one
that the daemon has, with a shell, tar, `yes` and `tail`. The daemon is one behind a unix socket.

* `bare one-shot` is what a script without any promises does with Docker's SDK: create, put_archive,
  start, wait, get_archive, remove. It is there with a network of none, which is the usual way, and
  without any network, which is the cheapest way and the one that ours takes.
* `ours` is a runner with journal and evidence on the disk, `ours, verbs only` the backend alone:
  create, upload, manifest, execute, manifest, fetch, destroy.
* `ours, cold` opens a state directory, a backend and a client that have never been used. What the
  daemon keeps for the next run (see `DockerBackend`) it has then already.
* Bytes are counted at the socket, headers and all; calls are requests of the API.
* Client memory is the growth of the peak resident set of a fresh process, over its size when a
  tiny run has been made in it and it idles.

Peers are measured where they are installed and can run here, else the table says why not.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import docker
from docker.transport import unixconn
from local import MIB, PRINT, Clock, Load, Row, grown, nested, resident, show, take_turns, timings
from rich.console import Console

from orchestrator import EvalSpec, Runner, run_batch
from orchestrator.backends.docker import DockerBackend
from orchestrator.ports import Ending, Order
from orchestrator.runner import time_sorted_run_id
from orchestrator.testing.conformance.bench import permit
from orchestrator.workspace import SpecWorkspace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

    from local import Sample

    from orchestrator import Entry, Manifest

WORKLOADS: Final = ("tiny", "medium", "output", "many")
SIZES: Final = {"tiny": (3, 3 * 1024, 0), "medium": (2_000, 50 * MIB, 5)}
LARGE: Final = (20_000, 500 * MIB, 5)
"""Files, bytes of all of them together, and how many of them the check touches."""
PHASES: Final = ("create", "upload", "start", "check", "download", "destroy", "score")
AT_ONCE: Final = 64
WORKDIR: Final = "/workspace"
LABEL: Final = "benchmark"
PEER_RUNS: Final = 2


# --- the daemon, with what it is asked counted ----------------------------------------------------


class CountingSocket(socket.socket):
    """A socket that tells its client how many bytes went over it."""

    client: Client

    def sendall(self, data: Any, *args: Any) -> None:
        """Send; count."""
        self.client.sent += memoryview(data).nbytes
        super().sendall(data, *args)

    def recv_into(self, *args: Any) -> int:
        """Receive; count."""
        got = super().recv_into(*args)
        self.client.received += got
        return got


class Client(docker.APIClient):
    """A client of the daemon that counts calls and bytes, and removes the workspaces it kept."""

    def __init__(self) -> None:
        self.calls = self.sent = self.received = 0
        self._made: set[str] = set()
        super().__init__(version="auto")
        adapter = self.adapters["http+docker://"]
        if not isinstance(adapter, unixconn.UnixHTTPAdapter):
            raise SystemExit("the daemon is to be one behind a unix socket")
        client = self

        class Connection(unixconn.UnixHTTPConnection):
            def connect(self) -> None:
                made = CountingSocket(socket.AF_UNIX, socket.SOCK_STREAM)
                made.client = client
                made.settimeout(self.timeout)
                made.connect(self.unix_socket)
                self.sock = made

        class Pool(unixconn.UnixHTTPConnectionPool):
            def _new_conn(self) -> Connection:
                return Connection(self.base_url, self.socket_path, self.timeout)

        class Adapter(unixconn.UnixHTTPAdapter):
            def get_connection(self, url: str, proxies: Any = None) -> Pool:
                del proxies
                with self.pools.lock:
                    if (pool := self.pools.get(url)) is None:
                        pool = self.pools[url] = Pool(url, self.socket_path, self.timeout)
                return pool

        # As many connections as there are threads, for everybody.
        self.mount("http+docker://", Adapter(f"http+unix://{adapter.socket_path}"))

    def send(self, request: Any, **options: Any) -> Any:
        """Make a call; count it."""
        self.calls += 1
        return super().send(request, **options)

    def inspect_image(self, image: str) -> Any:
        """Look at an image; remember it if it may be one that holds a workspace."""
        if image.startswith("orchestrator-workspace:"):
            self._made.add(image)
        return super().inspect_image(image)

    def count(self) -> Sample:
        """Give the counts so far."""
        return {"calls": self.calls, "sent": self.sent, "received": self.received}

    def since(self, before: Sample) -> Sample:
        """Give what was counted since."""
        return {name: now - before[name] for name, now in self.count().items()}

    def tidy(self) -> None:
        """Remove the images with workspaces in them: every tree here is a new one."""
        for name in self._made:
            with contextlib.suppress(docker.errors.APIError):
                self.remove_image(name, force=True)
        self._made.clear()

    def __enter__(self) -> Self:
        """Give the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Tidy up and let go."""
        self.tidy()
        self.close()


# --- bare contestants -----------------------------------------------------------------------------


def packed(tree: Path) -> BinaryIO:
    """Give a tree as a tar file: on the disk, as the way that takes no memory."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with tarfile.open(fileobj=file, mode="w") as bundle:
        bundle.add(tree, WORKDIR.strip("/"))
    file.seek(0)
    return file


def bring(client: docker.APIClient, container: str) -> None:
    """Download the whole tree, to a file."""
    stream, _ = client.get_archive(container, WORKDIR)
    with tempfile.TemporaryFile() as file:
        for piece in stream:
            file.write(piece)


def one_shot(client: docker.APIClient, image: str, load: Load, **network: Any) -> Sample:
    """Run the check as the main process of a container, without any promises."""
    clock, cpu = Clock(), time.process_time()
    host = client.create_host_config(
        log_config={"Type": "none", "Config": {}},
        **({"network_mode": network["mode"]} if "mode" in network else {}),
    )
    container = client.create_container(
        image,
        ["/bin/sh", "-c", f"cd {WORKDIR} && {{ {load.check}; }}"],
        entrypoint=[],
        labels=[LABEL],
        host_config=host,
        network_disabled=network.get("disabled", False),
    )["Id"]
    clock.lap("create")
    with packed(load.tree) as bundle:
        client.put_archive(container, "/", bundle)
    clock.lap("upload")
    client.start(container)
    clock.lap("start")
    assert client.wait(container)["StatusCode"] == 0
    clock.lap("check")
    bring(client, container)
    clock.lap("download")
    client.remove_container(container, v=True)
    clock.lap("destroy")
    return {**clock.done(), "cpu": time.process_time() - cpu}


def idle_and_exec(client: docker.APIClient, image: str, load: Load) -> Sample:
    """Run the check beside a main process that idles."""
    clock, cpu = Clock(), time.process_time()
    container = client.create_container(
        image,
        ["tail", "-f", "/dev/null"],
        entrypoint=[],
        labels=[LABEL],
        host_config=client.create_host_config(network_mode="none"),
    )["Id"]
    clock.lap("create")
    client.start(container)
    clock.lap("start")
    with packed(load.tree) as bundle:
        client.put_archive(container, "/", bundle)
    clock.lap("upload")
    made = client.exec_create(container, ["/bin/sh", "-c", f"cd {WORKDIR} && {{ {load.check}; }}"])
    client.exec_start(made["Id"])
    assert client.exec_inspect(made["Id"])["ExitCode"] == 0
    clock.lap("check")
    bring(client, container)
    clock.lap("download")
    client.remove_container(container, v=True, force=True)
    clock.lap("destroy")
    return {**clock.done(), "cpu": time.process_time() - cpu}


# --- ours -----------------------------------------------------------------------------------------


class Ours:
    """A runner over the Docker backend, in a state directory of its own."""

    def __init__(self, place: Path, image: str, client: Client | None = None) -> None:
        """Open state, backend and client."""
        clock = Clock()
        self.client = client or Client()
        self.backend = DockerBackend(image, client=self.client)
        self.runner = Runner(self.backend, place / "state")
        self.open_s = clock.done()["total"]

    def __enter__(self) -> Self:
        """Give it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go."""
        self.runner.close()
        self.client.tidy()
        self.backend.close()

    def run(self, spec: EvalSpec) -> Sample:
        """Run a spec; give seconds by phase, and what was counted."""
        before, clock, cpu = self.client.count(), Clock(), time.process_time()
        result = self.runner.run(spec)
        total = clock.done()["total"]
        rest = {"total": total, "cpu": time.process_time() - cpu}
        return {**timings(result), **rest, **self.client.since(before)}


class Nowhere:
    """Takes delivery and keeps nothing: what a backend costs without evidence."""

    def __init__(self, given: Manifest) -> None:
        """Have what was given."""
        self._given = given

    def missing(self, manifest: Manifest) -> list[Entry]:
        """Say what the check changed."""
        before = self._given.entries
        return [
            entry
            for entry in manifest
            if entry.sha256 is not None
            and (entry.path not in before or before[entry.path].sha256 != entry.sha256)
        ]

    def receive(self, entry: Entry, stream: BinaryIO) -> None:
        """Read a file."""
        left = entry.size
        while left and (piece := stream.read(left)):
            left -= len(piece)

    def output(self, stream: Any, head: Iterable[bytes], tail: Iterable[bytes], total: int) -> None:
        """Read an output."""


def verbs_only(backend: DockerBackend, load: Load) -> Sample:
    """Ask the backend for what a run asks, and nothing else."""
    clock, cpu = Clock(), time.process_time()
    run_id, workspace = time_sorted_run_id(), SpecWorkspace(str(load.tree), {})
    backend.refuse(load.spec)
    sandbox = backend.create(run_id, load.spec)
    clock.lap("create")
    sandbox.upload(workspace)
    given = sandbox.manifest()
    clock.lap("upload")
    order = Order(
        slot="check",
        argv=("/bin/sh", "-c", load.check),
        env={},
        deadline_s=60.0,
        grace_s=5.0,
        start_by=time.monotonic() + 60.0,
        now=time.monotonic,
        output_bytes=1 << 20,
        nonce=os.urandom(16).hex(),
    )
    record = sandbox.execute(order)
    assert (record.ending, record.code) == (Ending.EXITED, 0)
    clock.lap("check")
    intake = Nowhere(given)
    sandbox.fetch(intake.missing(sandbox.manifest()), "check", intake)
    clock.lap("download")
    sandbox.destroy(permit(run_id, sandbox.ref))
    clock.lap("destroy")
    return {**clock.done(), "cpu": time.process_time() - cpu}


def cold(place: Path, image: str, load: Load) -> Sample:
    """Run with state, backend and client that have never been used."""
    with Ours(place / "cold", image) as ours:
        sample = ours.run(load.spec)
    shutil.rmtree(place / "cold")
    sample["open"] = ours.open_s
    sample["total"] += ours.open_s
    return sample


# --- peers ----------------------------------------------------------------------------------------


def gptme(image: str, load: Load) -> Callable[[], Sample]:
    """Give a run in gptme's Docker environment."""
    from gptme.eval.execenv import DockerExecutionEnv  # noqa: PLC0415 - only if it is installed

    logging.getLogger().setLevel(logging.WARNING)  # gptme shows all that its libraries say
    files = {
        str(path.relative_to(load.tree)): path.read_bytes()
        for path in load.tree.rglob("*")
        if path.is_file()
    }

    def life() -> Sample:
        clock = Clock()
        env = DockerExecutionEnv(image=image)
        env.start_container()
        clock.lap("start")
        env.upload(files)
        clock.lap("upload")
        assert env.run(load.check)[2] == 0
        clock.lap("check")
        assert len(env.download()) == len(files)
        clock.lap("download")
        env.cleanup()
        clock.lap("destroy")
        return clock.done()

    return life


def inspect(image: str, load: Load) -> Callable[[], Sample]:
    """Give a run in Inspect AI's Docker sandbox."""
    import asyncio  # noqa: PLC0415 - as all that follows, only if it is installed

    from inspect_ai.util._sandbox.docker.docker import DockerSandboxEnvironment  # noqa: PLC0415

    files = [path for path in load.tree.rglob("*") if path.is_file()]
    version = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if version.returncode:
        raise CannotRunError("needs docker compose, which is not here")
    numbers = itertools.count()
    config = tempfile.NamedTemporaryFile("w", suffix="compose.yaml")  # noqa: SIM115 - while it lives
    config.write(
        f"services:\n  default:\n    image: {image}\n    command: tail -f /dev/null\n"
        f"    network_mode: none\n    working_dir: {WORKDIR}\n"
    )
    config.flush()

    async def life() -> Sample:
        clock, task = Clock(), f"benchmark{next(numbers)}"
        await DockerSandboxEnvironment.task_init(task, config.name)
        made = await DockerSandboxEnvironment.sample_init(task, config.name, {})
        clock.lap("start")
        sandbox = made["default"]
        for path in files:
            await sandbox.write_file(str(path.relative_to(load.tree)), path.read_bytes())
        clock.lap("upload")
        assert (await sandbox.exec(["sh", "-c", load.check])).success
        clock.lap("check")
        for path in files:
            await sandbox.read_file(str(path.relative_to(load.tree)), text=False)
        clock.lap("download")
        await DockerSandboxEnvironment.sample_cleanup(task, config.name, made, interrupted=False)
        clock.lap("destroy")
        return clock.done()

    return lambda: asyncio.run(life())


class CannotRunError(Exception):
    """A peer is installed, and cannot run here; says why."""


PEERS: Final = {"gptme, Docker": gptme, "Inspect AI, Docker": inspect}


def peers(image: str, load: Load) -> tuple[dict[str, Callable[[], Sample]], list[str]]:
    """Give the peers that can run here, and for the others the reason."""
    found, reasons = {}, []
    for name, make in PEERS.items():
        try:
            life = make(image, load)
            life()
        except ModuleNotFoundError as missing:
            reasons.append(f"{name}: not installed ({missing.name})")
        except CannotRunError as why:
            reasons.append(f"{name}: {why}")
        except Exception as error:  # noqa: BLE001 - whatever keeps it from running, it is the peer's
            reasons.append(f"{name}: {type(error).__name__}: {str(error)[:100]}")
        else:
            found[name] = at_most(PEER_RUNS, life)
    return found, reasons


def at_most(runs: int, life: Callable[[], Sample]) -> Callable[[], Sample]:
    """Take part in so many rounds, and sit out the others: some peers take long."""
    turns = itertools.count()
    return lambda: life() if next(turns) < runs else {}


# --- workloads ------------------------------------------------------------------------------------


def column(samples: dict[str, list[Sample]], name: str, key: str = "total") -> list[float]:
    """Give what a contestant's turns measured of one thing."""
    return [sample[key] for sample in samples[name] if key in sample]


def rows_of(samples: dict[str, list[Sample]], base: str, goals: dict[str, str]) -> Iterator[Row]:
    """Lay out totals against one contestant's, phases below each."""
    reference = statistics.median(column(samples, base))
    for name in samples:
        total = column(samples, name)
        ratio = statistics.median(total) / reference
        yield Row(name, total, ratio=ratio, goal=goals.get(name, ""))
        for phase in ("open", *PHASES):
            if found := column(samples, name, phase):
                goal = "0.15 s" if phase == "destroy" and name == "ours" else ""
                yield Row(f"  {phase}", found, goal=goal)
        if found := column(samples, name, "cpu"):
            yield Row("  client CPU", [second * 1e3 for second in found], "ms")
        if found := column(samples, name, "calls"):
            yield Row("  API calls", found, "")


def tiny(place: Path, image: str, runs: int) -> tuple[list[Row], list[str]]:
    """Measure whole runs over three small files."""
    files, total, touch = SIZES["tiny"]
    load = Load.make(place / "tree", files, total, touch=touch)
    found, reasons = peers(image, load)
    with Client() as client, Ours(place / "warm", image) as warm:
        contestants: dict[str, Callable[[], Sample]] = {
            "bare one-shot, network none": partial(one_shot, client, image, load, mode="none"),
            "bare one-shot, no network": partial(one_shot, client, image, load, disabled=True),
            "bare idle and exec": partial(idle_and_exec, client, image, load),
            "ours": lambda: warm.run(load.spec),
            "ours, verbs only": lambda: verbs_only(warm.backend, load),
            "ours, cold": lambda: cold(place, image, load),
            **found,
        }
        for name, turn in contestants.items():
            if name not in found:
                turn()  # what idles is loaded and warm
        samples = take_turns(contestants, runs, flush=False)
    base = "bare one-shot, network none"
    rows = list(rows_of(samples, base, {"ours": "1.10x, and 0.8x with what may be warm"}))
    cheapest = statistics.median(column(samples, "bare one-shot, no network"))
    ours = column(samples, "ours")
    ratio = statistics.median(ours) / cheapest
    return [*rows, Row("ours, against bare without a network", ours, ratio=ratio)], reasons


def fresh(function: Callable[..., Sample], *arguments: Any) -> Sample:
    """Measure in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def whole_bare(image: str, load: Load) -> Sample:
    """Measure the bare one-shot, the whole tree back."""
    with Client() as client:
        small = Load(load.tree.parent / "small", "true", ())
        one_shot(client, image, small, disabled=True)
        before, idle = client.count(), resident("VmRSS")
        sample = one_shot(client, image, load, disabled=True)
        return {**sample, **client.since(before), **grown(idle)}


def whole_new(place: Path, image: str, load: Load) -> Sample:
    """Measure a workspace that neither the daemon nor the vault has seen."""
    stamp = load.tree / "d000" / "f00000.bin"
    stamp.write_bytes(os.urandom(stamp.stat().st_size))
    with Ours(place / "new", image) as ours:
        ours.run(Load(load.tree.parent / "small", "true", ()).spec)
        idle = resident("VmRSS")
        sample = ours.run(load.spec) | grown(idle)
    shutil.rmtree(place / "new")
    return sample


def whole_known(place: Path, image: str, load: Load, runs: int) -> dict[str, list[Sample]]:
    """Measure one that both know, in turns with tiny runs, in one process."""
    small = Load(load.tree.parent / "small", "true", ())
    with Ours(place / "known", image) as ours:
        idle = resident("VmRSS")
        for spec in (small.spec, load.spec, load.spec):
            ours.run(spec)
        samples = take_turns(
            {
                "ours, tiny": lambda: ours.run(small.spec),
                "ours, known": lambda: ours.run(load.spec),
            },
            runs,
            flush=False,
        )
    samples["ours, known"][0] |= grown(idle)
    return samples


def trees(place: Path, image: str, runs: int, *, large: bool) -> list[Row]:
    """Measure whole runs over many files, of which the check changes five."""
    Load.make(place / "small", *SIZES["tiny"][:2], touch=0)
    files, total, touch = LARGE if large else SIZES["medium"]
    load = Load.make(place / "tree", files, total, touch=touch)
    samples = take_turns(
        {
            "bare one-shot, whole tree back": lambda: fresh(whole_bare, image, load),
            "ours, new to the daemon": lambda: fresh(whole_new, place, image, load),
        },
        1 if large else runs,
        flush=True,
    )
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        samples |= pool.submit(whole_known, place, image, load, max(runs, 5)).result()
    goals = {"ours, known": "1.5x of ours, tiny"}
    rows = list(rows_of(samples, "ours, tiny", goals))
    for name in ("bare one-shot, whole tree back", "ours, new to the daemon", "ours, known"):
        sent = column(samples, name, "sent")
        goal = "1.05x of the workspace" if "new" in name else ""
        ratio = statistics.median(sent) / total
        rows.append(Row(f"bytes sent: {name}", [b / 1e6 for b in sent], "MB", ratio, goal))
    for name in ("bare one-shot, whole tree back", "ours, new to the daemon", "ours, known"):
        goal = "20 MB over idle" if "new" in name else ""
        rows.append(Row(f"client memory: {name}", column(samples, name, "grown"), "MB", goal=goal))
    whole = statistics.median(column(samples, "bare one-shot, whole tree back", "download"))
    for name in ("ours, new to the daemon", "ours, known"):
        took = column(samples, name, "download")
        ratio = whole / statistics.median(took)
        rows.append(Row(f"get_archive over download: {name}", took, ratio=ratio, goal="50x"))
    return rows


def output(place: Path, image: str, runs: int) -> list[Row]:
    """Measure a check that prints 200 MB, each turn in a process of its own."""
    samples = take_turns(
        {
            "bare, SDK's attach stream": lambda: fresh(output_attached, image),
            "bare, its socket read by hand": lambda: fresh(output_by_hand, image),
            "ours": lambda: fresh(output_ours, place, image),
        },
        runs,
        flush=True,
    )
    goals = {"ours": "1.3x of the stream"}
    rows = list(rows_of(samples, "bare, SDK's attach stream", goals))
    for name in samples:
        goal = "32 MB over idle" if name == "ours" else ""
        rows.append(Row(f"client memory: {name}", column(samples, name, "grown"), "MB", goal=goal))
    return rows


@contextlib.contextmanager
def printer(client: Client, image: str) -> Iterator[str]:
    """Give a container that is about to print 200 MB, and remove it."""
    container = client.create_container(
        image,
        ["/bin/sh", "-c", PRINT],
        entrypoint=[],
        labels=[LABEL],
        host_config=client.create_host_config(log_config={"Type": "none", "Config": {}}),
        network_disabled=True,
    )["Id"]
    yield container
    client.wait(container)
    client.remove_container(container, v=True)


def output_attached(image: str) -> Sample:
    """Write what the SDK gives of the stream to a file."""
    with Client() as client, tempfile.TemporaryFile() as file:
        one_line(client, image)
        clock, idle = Clock(), resident("VmRSS")
        with printer(client, image) as container:
            stream = client.attach(container, stream=True)
            client.start(container)
            for piece in stream:
                file.write(piece)
        return clock.done() | grown(idle)


def output_by_hand(image: str) -> Sample:
    """Read the socket below the SDK."""
    with Client() as client, tempfile.TemporaryFile() as file:
        one_line(client, image)
        clock, idle = Clock(), resident("VmRSS")
        with printer(client, image) as container:
            hijacked = client.attach_socket(container, {"stdout": 1, "stream": 1})
            client.start(container)
            stream = hijacked._response.raw._fp.fp  # noqa: SLF001 - there is no other way to it
            while head := stream.read(8):
                left = struct.unpack(">BxxxL", head)[1]
                while left:
                    piece = stream.read1(min(left, 1 << 16))
                    left -= len(piece)
                    file.write(piece)
        return clock.done() | grown(idle)


def one_line(client: Client, image: str) -> None:
    """Make a container, as small as it can be, so that what idles is loaded and warm."""
    container = client.create_container(image, ["true"], entrypoint=[], labels=[LABEL])["Id"]
    client.remove_container(container, v=True)


def output_ours(place: Path, image: str) -> Sample:
    """Run it as a check, with the default limit on what is kept."""
    with Ours(place / f"output-{os.getpid()}", image) as ours:
        ours.run(EvalSpec(name="small", check="true"))
        idle = resident("VmRSS")
        return ours.run(EvalSpec(name="output", check=PRINT)) | grown(idle)


def many(place: Path, image: str, runs: int) -> list[Row]:
    """Measure 64 tiny runs at once."""
    load = Load.make(place / "tree", *SIZES["tiny"][:2], touch=0)
    bound = 2 * (os.cpu_count() or 1)
    gate = threading.BoundedSemaphore(bound)

    def bare(client: Client, **network: Any) -> Sample:
        def life(_: int) -> Sample:
            with gate:
                return one_shot(client, image, load, **network)

        clock, cpu = Clock(), time.process_time()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            assert len(list(pool.map(life, range(AT_ONCE)))) == AT_ONCE
        return {**clock.done(), "cpu": time.process_time() - cpu}

    def ours(warm: Ours, jobs: int) -> Sample:
        clock, cpu = Clock(), time.process_time()
        attempts = list(run_batch(warm.runner, [load.spec] * AT_ONCE, jobs=jobs))
        sample = {**clock.done(), "cpu": time.process_time() - cpu}
        passed = [attempt for attempt in attempts if getattr(attempt.result, "passed", False)]
        return {**sample, "lost": AT_ONCE - len(passed)}

    with Client() as client, Ours(place / "warm", image) as warm:
        samples = take_turns(
            {
                f"bare, {bound} in flight, network none": partial(bare, client, mode="none"),
                f"bare, {bound} in flight, no network": partial(bare, client, disabled=True),
                f"ours, {bound} jobs": partial(ours, warm, bound),
                f"ours, {AT_ONCE} jobs": partial(ours, warm, AT_ONCE),
            },
            runs,
            flush=False,
        )
    base = f"bare, {bound} in flight, no network"
    rows = list(rows_of(samples, base, {}))
    reference = statistics.median(column(samples, base))
    for name in samples:
        if name.startswith("ours"):
            took = column(samples, name)
            rates = [AT_ONCE / second for second in took]
            ratio = reference / statistics.median(took)
            rows.append(Row(f"throughput: {name}", rates, "/s", ratio, "0.9x of bare"))
            rows.append(Row(f"lost: {name}", column(samples, name, "lost"), "", goal="0"))
    return rows


# --- the command line -----------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--image", required=True, help="that the daemon has")
    parser.add_argument("--large", action="store_true", help="500 MB in 20,000 files, too")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(WORKLOADS),
        metavar="NAMES",
        help=f"of {', '.join(WORKLOADS)}",
    )
    parser.add_argument("--runs", type=int, help="of each contestant (tiny: 15, all others: 3)")
    parser.add_argument("--dir", type=Path, help="directory to work in (a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    found = parser.parse_args()
    for name in found.only:
        if name not in WORKLOADS:
            parser.error(f"--only: no workload is called {name!r}; see --help")
    if found.runs is not None and found.runs < 1:
        parser.error("--runs: expected a whole number above 0")
    return found


def main() -> None:
    """Measure what was asked for."""
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    with Client() as client:
        client.inspect_image(options.image)
        engine = client.version()["Version"]
    figures: dict[str, Any] = {
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "engine": engine,
    }
    for name in [*options.only, *(["large"] if options.large else [])]:
        runs = options.runs or (15 if name == "tiny" else 3)
        remarks: list[str] = []
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.dir) as scratch:
            place = Path(scratch)
            match name:
                case "tiny":
                    rows, remarks = tiny(place, options.image, runs)
                case "medium" | "large":
                    rows = trees(place, options.image, runs, large=name == "large")
                case "output":
                    rows = output(place, options.image, runs)
                case "many":
                    rows = many(place, options.image, runs)
                case _:
                    continue
        show(console, f"{name} (n = {runs})", rows)
        for remark in remarks:
            console.print(remark)
        figures[name] = {"runs": runs, "figures": nested(rows), "remarks": remarks}
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
