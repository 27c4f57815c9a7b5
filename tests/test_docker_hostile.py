"""What a check, an image or a neighbour can do by accident or on purpose, and what comes of it."""

from __future__ import annotations

import secrets

import pytest
from docker_support import BUSYBOX, DEBIAN, SESSION, passed, spec_of
from test_docker import derive
from test_docker_workspaces import kept, large

from orchestrator import Provenance, Runner, State, Verdict
from orchestrator.backends.docker import DockerBackend
from orchestrator.backends.docker.workspaces import REPOSITORY

pytest_plugins = ["docker_support"]
pytestmark = pytest.mark.usefixtures("clean")
__all__ = ["derive", "kept", "large"]  # fixtures


@pytest.mark.parametrize("image", [DEBIAN, BUSYBOX])
def test_a_workspace_that_cannot_be_reached_is_not_an_empty_one(run, image):
    result = run(
        "touch junk; chmod 000 /srv/above",
        image=image,
        options={"workdir": "/srv/above/tree"},
        expect={"no junk": lambda evidence: not evidence.exists("junk")},
    )
    assert result.verdict is Verdict.FAILED
    assert [entry.path for entry in result.evidence.manifest] == ["junk"]


def test_variables_of_the_image_that_the_guest_uses_too_are_the_checks_as_they_are(run, derive):
    said = {"nonce": "mine", "tag": "v1", "workdir": "/app", "record": "it's $1", "root": "/opt"}
    said |= {"given": "g", "line": "l", "rest": "r", "verb": "v", "IFS_": "a b", "status": "prod"}
    image = derive(DEBIAN, Env=[f"{name}={value}" for name, value in said.items()])
    program = "import os; print(*(f'{n}={v}' for n, v in os.environ.items()), sep=chr(10))"
    evidence = passed(run(["python3", "-c", program], image=image))
    found = dict(line.split("=", 1) for line in evidence.stdout.text.splitlines())
    assert {name: found.get(name) for name in said} == said
    assert found["PWD"] == "/workspace"


def test_half_a_question_of_a_runner_that_was_killed_is_passed_over(workshop):
    backend = workshop.backend()

    def die(progress):
        if progress.run.state is State.CHECKED:
            live = backend._live[progress.record.run_id]
            live._attached.send(b"hash 0123 .half-of-it")
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        Runner(backend, workshop.directory / "state", observer=die) as runner,
    ):
        runner.run(spec_of("echo said"))
    runner = workshop.runner(workshop.backend())
    (run_id,) = runner.journal.run_ids()
    assert passed(runner.resume(run_id)).stdout == b"said\n"


def test_an_image_that_somebody_made_of_a_sandbox_is_no_kept_workspace(run, daemon, large, kept):
    name = f"orchestrator-test:mine-{secrets.token_hex(4)}"
    backend = DockerBackend(DEBIAN)
    result = run("true", backend=backend, workspace=str(large), setup="exit 1", retain="unresolved")
    container = daemon.inspect_container(f"orchestrator-{result.run_id}")["Id"]
    daemon.commit(container, *name.split(":"))
    daemon.remove_container(container, force=True, v=True)
    try:
        listed = [tag for each in backend.workspaces._images() for tag in each["RepoTags"]]
        assert listed
        assert all(tag.startswith(f"{REPOSITORY}:") for tag in listed)
    finally:
        daemon.remove_image(name)
        backend.close()


def test_a_workspace_that_is_removed_while_a_run_asks_for_it_is_sent(run, workshop, large, kept):
    backend = workshop.backend()
    hold = backend.workspaces.hold

    def hold_and_lose(*args):
        held = hold(*args)
        backend.client.remove_image(held.image, force=True)
        return held

    backend.workspaces.hold = hold_and_lose
    assert passed(run("cat big", backend=backend, workspace=str(large)))


@pytest.mark.parametrize("size", ["small", "kept"])
def test_the_directories_that_the_workspace_lies_in_stay_as_the_image_has_them(
    run, large, kept, size
):
    workspace = {"workspace": str(large)} if size == "kept" else {}
    options = {"workdir": "/tmp/tree", "user": "1000:1000"}
    for _ in range(2):
        result = run("echo x >/tmp/mine && stat -c %a /tmp", options=options, **workspace)
        assert passed(result).stdout == b"1777\n"


def test_a_workspace_below_a_link_of_the_image_does_not_take_its_place(run):
    result = run("true", options={"workdir": "/var/run/tree"})
    assert result.verdict is Verdict.UNRESOLVED
    assert "/var/run is no directory" in result.faults[0].message


def test_a_tree_behind_a_symlink_is_accounted_for(daemon, session, workshop, run):
    program = "mkdir -p /srv/app; echo 1 >/srv/app/given; ln -s /srv/app /app; exec sleep 600"
    made = daemon.create_container(DEBIAN, ["sh", "-c", program], labels={SESSION: session})
    daemon.start(made["Id"])
    try:
        while daemon.exec_inspect(_done(daemon, made["Id"]))["ExitCode"]:
            pass
        result = run("touch junk", backend=workshop.backend().attach(made["Id"], workdir="/app"))
        assert passed(result).paths(Provenance.CREATED) == ["junk"]
        assert result.evidence.exists("given")
    finally:
        daemon.remove_container(made["Id"], force=True)


def _done(daemon, container):
    made = daemon.exec_create(container, ["test", "-L", "/app"])["Id"]
    daemon.exec_start(made)
    return made


@pytest.mark.parametrize("image", [DEBIAN, BUSYBOX])
def test_a_check_that_stops_everything_is_seen_to_end(run, image):
    result = run("kill -STOP -1; echo after; exit 3", image=image)
    assert str(result.outcome) == "exited(3)", result.faults
    assert result.evidence.stdout == b"after\n"


@pytest.mark.parametrize("tool", ["find", "stat"])
def test_a_tool_that_says_nothing_does_not_say_that_nothing_is_there(run, tool):
    result = run(
        f"touch junk; ln -sf /bin/true /usr/bin/{tool}",
        expect={"no junk": lambda evidence: not evidence.exists("junk")},
    )
    assert result.verdict is Verdict.UNRESOLVED


def test_a_workspace_that_was_removed_is_absent(run):
    evidence = passed(run("touch junk; cd /; rm -rf /workspace"))
    assert list(evidence.manifest) == []
