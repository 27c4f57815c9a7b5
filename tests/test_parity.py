"""Parity: backends that agree are equal in every point, and each way to differ is found by name."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from attrs import evolve

from orchestrator import EvalSpec, Limits, Runner, SpecError
from orchestrator.backends.local import LocalBackend
from orchestrator.journal import Journal
from orchestrator.parity import account_of, compare, numbered, parity
from orchestrator.ports import Ending
from orchestrator.specfile import load
from orchestrator.testing.faults import FaultyBackend

EXAMPLES = Path(__file__).parent.parent / "examples"


class Seeded:
    """A local backend with one difference: in what it says of itself, does, or makes of a tree."""

    def __init__(
        self,
        root,
        *,
        slot="check",
        tree=None,
        record=None,
        before=None,
        shell="/bin/sh",
        free=False,
    ):
        self.backend = LocalBackend(root, shell=shell)
        self.name, self.isolation, self.shell = "seeded", "none", shell
        self.slot, self.tree, self.record, self.before, self.free = slot, tree, record, before, free

    def refuse(self, spec):
        if not self.free:
            self.backend.refuse(spec)

    def create(self, run_id, spec):
        if self.before:
            self.before()
        return SeededSandbox(self.backend.create(run_id, spec), self)

    def open(self, run_id):
        found = self.backend.open(run_id)
        return found and SeededSandbox(found, self)


class SeededSandbox:
    def __init__(self, sandbox, seeded):
        self.sandbox, self.seeded = sandbox, seeded

    def __getattr__(self, name):
        return getattr(self.sandbox, name)

    def execute(self, order):
        done = self.sandbox.execute(order)
        if order.slot != self.seeded.slot:
            return done
        if self.seeded.tree:
            self.seeded.tree(self.sandbox.workspace)
        return evolve(done, **(self.seeded.record or {}))


@pytest.fixture
def spec(tmp_path):
    """A spec that has a value at every point."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "keep").write_text("kept\n")
    (workspace / "edit").write_text("before\n")
    return EvalSpec(
        name="whole",
        workspace=workspace,
        setup="echo set up > set",
        check="echo hi; echo ho >&2; echo made > made; ln -s made link; echo after >> edit",
        deadline_s=20.0,
        env={"A": "1"},
        expect={"exit_code": 0},
    )


@pytest.fixture
def ask(tmp_path, spec):
    """Compare a local backend with a seeded one; give the names of the points that differ."""

    def ask(spec=spec, other=None, **seed):
        other = other or Seeded(tmp_path / "b", **seed)
        report = parity({"a": LocalBackend(tmp_path / "a"), "b": other}, [spec], tmp_path / "state")
        return {each.point for each in report.differences}, report

    return ask


# --- backends that agree --------------------------------------------------------------------------


def example_backend(root):
    found = importlib.util.spec_from_file_location("worked", EXAMPLES / "directory_backend.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.DirectoryBackend(root)


def shell(tmp_path, name):
    """Find a shell; `ash` is a link to busybox, which looks at the name that it is called by."""
    found = shutil.which("busybox" if name == "ash" else name)
    if found is None:
        pytest.fail(f"no {name} here: install dash, bash and busybox-static", pytrace=False)
    link = tmp_path / name
    link.symlink_to(found)
    return str(link)


def test_the_examples_come_to_the_same_on_every_backend_and_shell_there_is(tmp_path):
    backends = {
        name: LocalBackend(tmp_path / f"in {name}", shell=shell(tmp_path, name))
        for name in ("dash", "bash", "ash")
    }
    backends["directory"] = example_backend(tmp_path / "in directory")
    backends["local"] = LocalBackend(tmp_path / "in local")
    specs = [spec for file in sorted(EXAMPLES.glob("*.eval.toml")) for spec in load(file)]
    assert len(specs) == 4
    report = parity(backends, specs, tmp_path / "state")
    assert {each.point for each in report.differences} == {"contract.shell"}, report
    assert len(report.differences) == len(specs)
    assert report.points > 100
    assert report.status == "unresolved"  # as one of the examples is meant to be
    assert len(report.unresolved) == len(backends)
    assert all("never got to add up: UNRESOLVED (setup_failed)" in x for x in report.unresolved)
    twins = {name: backends[name] for name in ("directory", "local")}
    report = parity(twins, specs[:1], tmp_path / "state")
    assert (report.status, report.differences) == ("equal", ())


def test_backends_that_agree_are_equal_in_every_point(ask):
    points, report = ask()
    assert points == set()
    assert report.points > 50
    assert report.status == "equal"
    assert str(report) == f"equal: 1 evals, 0 of {report.points} points differ, 0 as declared"


def test_a_state_directory_in_the_workspace_is_no_part_of_what_is_compared(tmp_path, spec):
    backends = {name: LocalBackend(tmp_path / name) for name in "ab"}
    report = parity(backends, [spec], Path(spec.workspace) / ".orchestrator")
    assert report.status == "equal", report


# --- backends that differ in one thing ------------------------------------------------------------


def manifest(path, *details):
    return {f"manifest:{path} {detail}" for detail in details}


def replace_by_directory(tree):
    (tree / "made").unlink()
    (tree / "made").mkdir(mode=0o755)


def retarget(tree):
    (tree / "link").unlink()
    (tree / "link").symlink_to("keep")


SEEDS = {
    # of the contract
    "shell": ({"shell": shutil.which("bash")}, {"contract.shell"}),
    # of the end
    "exit code": (
        {"record": {"code": 3}},
        {"outcome.exit_code", "expectation:exit_code", "verdict"},
    ),
    "signal": (
        {"record": {"ending": Ending.SIGNALLED, "code": 9}},
        {
            "outcome.kind",
            "outcome.exit_code",
            "outcome.signal",
            "expectation:exit_code",
            "verdict",
        },
    ),
    "escalated": ({"record": {"escalated": True}}, {"outcome.escalated"}),
    "descendants": ({"record": {"descendants": 2}}, {"outcome.descendants"}),
    # of the tree
    "mode": ({"tree": lambda tree: (tree / "made").chmod(0o600)}, manifest("made", "mode")),
    "bytes": (
        {"tree": lambda tree: (tree / "made").write_text("MADE\n")},
        manifest("made", "sha256"),
    ),
    "size": (
        {"tree": lambda tree: (tree / "made").write_text("much\nmore\n")},
        manifest("made", "size", "sha256"),
    ),
    "kind": (
        {"tree": replace_by_directory},
        manifest("made", "kind", "mode", "size", "sha256"),
    ),
    "target": ({"tree": retarget}, manifest("link", "target")),
    "missing": (
        {"tree": lambda tree: (tree / "made").unlink()},
        manifest("made", "kind") | {"provenance:made"},
    ),
    "too much": (
        {"tree": lambda tree: (tree / "extra").touch()},
        manifest("extra", "kind") | {"provenance:extra"},
    ),
    "time of what was sent": (
        {"tree": lambda tree: os.utime(tree / "keep", ns=(1, 1))},
        manifest("keep", "mtime_ns"),
    ),
    "provenance": (
        {"tree": lambda tree: (tree / "keep").chmod(0o600)},
        manifest("keep", "mode") | {"provenance:keep"},
    ),
    # of what setup made
    "mode by setup": (
        {"slot": "setup", "tree": lambda tree: (tree / "set").chmod(0o600)},
        {"setup:set mode", "manifest:set mode"},
    ),
    "bytes by setup": (
        {"slot": "setup", "tree": lambda tree: (tree / "set").write_text("SET UP\n")},
        {"setup:set sha256", "manifest:set sha256"},
    ),
    "size by setup": (
        {"slot": "setup", "tree": lambda tree: (tree / "set").write_text("set\nup\nmore\n")},
        {"setup:set size", "setup:set sha256", "manifest:set size", "manifest:set sha256"},
    ),
    "deleted by setup": (
        {"slot": "setup", "tree": lambda tree: (tree / "keep").unlink()},
        {"setup:keep kind", "manifest:keep kind", "provenance:keep"},
    ),
    "added by setup": (
        {"slot": "setup", "tree": lambda tree: (tree / "extra").touch()},
        {"setup:extra kind", "manifest:extra kind", "provenance:extra"},
    ),
    # no difference: times of what setup or the check wrote
    "time of what the check made": (
        {"tree": lambda tree: os.utime(tree / "made", ns=(1, 1))},
        set(),
    ),
    "time of what the check changed": (
        {"tree": lambda tree: os.utime(tree / "edit", ns=(1, 1))},
        set(),
    ),
    "time of what setup made": (
        {"slot": "setup", "tree": lambda tree: os.utime(tree / "set", ns=(1, 1))},
        set(),
    ),
}


@pytest.mark.parametrize("name", SEEDS)
def test_what_a_backend_does_otherwise_is_found_and_nothing_else(ask, name):
    seed, expected = SEEDS[name]
    points, report = ask(**seed)
    assert points == expected, report
    assert report.status == ("different" if expected else "equal")


def test_what_a_check_deleted_is_told_from_what_was_never_there(ask):
    points, report = ask(tree=lambda tree: (tree / "keep").unlink())
    assert points == {"manifest:keep kind", "provenance:keep"}
    values = {each.point: each.values for each in report.differences}
    assert values["provenance:keep"] == {"a": "unchanged", "b": "deleted"}


PROGRAMS = {
    "home": ({"check": "echo $HOME"}, {"stdout"}),
    "home as an error": ({"check": "echo $HOME >&2"}, {"stderr"}),
    "process": ({"check": "exec >out; echo $$ | sha256sum"}, manifest("out", "sha256")),
    "a link to home": ({"check": 'ln -s "$HOME" home'}, manifest("home", "target")),
    "a link to home by setup": (
        {"setup": 'ln -s "$HOME" home', "check": "true"},
        {"setup:home target", "manifest:home target"},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_tells_where_it_is_is_found(ask, spec, name):
    said, expected = PROGRAMS[name]
    points, report = ask(evolve(spec, **said))
    assert points == expected, report


def test_bytes_that_were_not_kept_are_counted_all_the_same(tmp_path, ask, spec):
    """The homes differ in length: between the same two first and last bytes, so do the streams."""
    check = 'printf "aa${HOME}bb"; printf "aa${HOME}bb" >&2'
    spec = evolve(spec, check=check, limits={"output_bytes": 4})
    points, report = ask(spec, LocalBackend(tmp_path / "longer"))
    assert points == {"stdout.total", "stderr.total"}, report


def test_bytes_that_are_no_text_are_compared_as_bytes(ask, spec):
    """As text for people, these two would be the same."""
    check = "case $HOME in */a/*) printf '\\377';; *) printf '\\376';; esac"
    points, report = ask(evolve(spec, check=check))
    assert points == {"stdout"}, report
    assert json.loads(json.dumps(report.as_json()))["differences"]


def test_a_long_stream_is_shown_where_it_begins_to_differ(ask, spec):
    check = "head -c 100000 /dev/zero | tr '\\0' x; echo $HOME; head -c 1000 /dev/zero"
    _, report = ask(evolve(spec, check=check))
    (difference,) = report.differences
    assert len(difference.values["a"]) == 160
    assert "/a/" in difference.values["a"]
    assert "/b/" in difference.values["b"]


def test_an_expectation_that_one_backend_meets_and_another_does_not_is_found(ask, spec):
    spec = evolve(spec, check="echo $HOME", expect={"stdout_contains": ["/home", "/a/", "r"]})
    points, report = ask(spec)
    assert points == {"stdout", "expectation:stdout_contains#2", "verdict"}, report


# Before and after: the spec, and the points in which it differs from one with that changed.
CONTRACTS = {
    "tags": ({"tags": ["x"]}, set()),
    "check": ({"check": "true"}, {"check"}),
    "deadline": ({"deadline_s": 21.0}, {"deadline_s", "backstop"}),
    "grace": ({"grace_s": 3.0}, {"grace_s", "backstop"}),
    "backstop": ({"backstop_s": 600.0}, {"backstop"}),
    "setup": ({"setup": "echo set up >set"}, {"setup"}),
    "setup deadline": ({"setup_deadline_s": 30.0}, {"setup_deadline_s"}),
    "environment": ({"env": {"A": "2", "B": "1"}}, {"env.A", "env.B"}),
    "output": ({"limits": Limits(output_bytes=100)}, {"limits.output_bytes"}),
    "memory": ({"limits": Limits(memory_bytes=1 << 30)}, {"limits.memory_bytes"}),
    "processors": ({"limits": Limits(cpus=2)}, {"limits.cpus"}),
    "processes": ({"limits": Limits(pids=100)}, {"limits.pids"}),
    "disk": ({"limits": Limits(disk_bytes=1 << 30)}, {"limits.disk_bytes"}),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_runs_that_were_begun_with_another_contract_are_told_apart(tmp_path, spec, name):
    said, expected = CONTRACTS[name]
    with Runner(Seeded(tmp_path / "a", free=True), tmp_path / "state") as runner:
        runs = {
            name: account_of(runner, runner.run(each).run_id)
            for name, each in (("before", spec), ("after", evolve(spec, **said)))
        }
    report = compare({"whole": runs})
    contract = {each.point for each in report.differences if each.point.startswith("contract.")}
    assert contract == {f"contract.{name}" for name in expected | {"spec"}}, report


def test_a_workspace_that_changes_between_two_runs_is_found(tmp_path, spec):
    """The first run was begun when the file comes; the second one is sent it."""
    added = Path(spec.workspace) / "added"
    backends = {
        "a": Seeded(tmp_path / "a", before=added.touch),
        "b": LocalBackend(tmp_path / "b"),
    }
    report = parity(backends, [spec], tmp_path / "state")
    points = {each.point for each in report.differences}
    assert points == {"contract.input", "manifest:added kind", "provenance:added"}, report


def families(points):
    """Give the kinds of points: without paths, and names of expectations and variables."""
    for point in points:
        match = re.fullmatch(r"(manifest|setup):\S+ (\w+)", point)
        yield f"{match[1]}: {match[2]}" if match else re.sub(r":.*|(?<=env)\..*", "", point)


def test_every_kind_of_point_has_a_seed_above(tmp_path, spec):
    """So that none is compared that could not be seen to differ."""
    with Runner(LocalBackend(tmp_path / "a"), tmp_path / "state") as runner:
        account = account_of(runner, runner.run(spec).run_id)
    known = set(families([*account.stated, *account.found]))
    seeded = {"contract.spec", "stdout.total", "stderr.total", "contract.input"}
    seeded |= {"reason", "evidence"}  # see below
    seeded.update(*(points for _, points in (*SEEDS.values(), *PROGRAMS.values())))
    seeded |= {f"contract.{name}" for _, names in CONTRACTS.values() for name in names}
    assert known == set(families(seeded))


# --- runs that say nothing ------------------------------------------------------------------------


def test_an_unresolved_run_is_never_equal(tmp_path, ask, spec):
    with FaultyBackend(LocalBackend(tmp_path / "b"), ["execute#2:vanished"]) as lost:
        points, report = ask(spec, lost)
    ended = {"outcome.kind", "outcome.exit_code", "outcome.escalated", "outcome.descendants"}
    told = {"verdict", "reason", "evidence", "expectation:exit_code"}
    assert points == ended | told, "of a tree that did not arrive, nothing is said"
    assert report.status == "unresolved"
    assert "whole: UNRESOLVED (check_lost) on b, run " in str(report)
    declared = compare(report.accounts, {"*": "whatever it is"})
    assert all(each.declared for each in declared.differences)
    assert declared.status == "unresolved", "and no declaration makes it known"


def test_two_ways_to_be_unresolved_are_told_apart(tmp_path, spec):
    plans = {"a": ["create:error-before"], "b": ["execute:error-before"]}
    with (
        FaultyBackend(LocalBackend(tmp_path / "a"), plans["a"]) as a,
        FaultyBackend(LocalBackend(tmp_path / "b"), plans["b"]) as b,
    ):
        report = parity({"a": a, "b": b}, [spec], tmp_path / "state")
    assert [each.point for each in report.differences] == ["reason"], report


# --- what is declared, refused and told -----------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["manifest:made mode", "manifest:*", "* mode", "whole/manifest:made mode", "whole/*"]
)
def test_a_declared_difference_is_told_and_does_not_count(ask, pattern):
    _, report = ask(tree=lambda tree: (tree / "made").chmod(0o600))
    declared = compare(
        report.accounts, {pattern: "its umask", "*mode": "x", "other *": "never met"}
    )
    assert declared.status == "equal"
    assert declared.unmet == ("other *",)
    (difference,) = declared.differences
    assert difference.declared == "its umask"
    text = "whole: manifest:made mode: a '0644', b '0600' (declared: its umask)"
    assert str(declared).splitlines() == [
        text,
        "declared, but not met: other *",
        f"equal: 1 evals, 1 of {declared.points} points differ, 1 as declared",
    ]


@pytest.mark.parametrize("pattern", ["manifest:made", "mode", "other/manifest:made mode"])
def test_a_declaration_of_something_else_does_not_count(ask, pattern):
    _, report = ask(tree=lambda tree: (tree / "made").chmod(0o600))
    declared = compare(report.accounts, {pattern: "its umask"})
    assert (declared.status, declared.unmet) == ("different", (pattern,))


def test_a_name_with_brackets_is_declared_as_it_is(ask, spec):
    spec = evolve(spec, expect={"files": [{"path": "made", "exists": True}]})
    _, report = ask(spec, tree=lambda tree: (tree / "made").unlink())
    declared = {"expectation:files[made].exists": "x", "verdict": "x", "*:made*": "x"}
    assert compare(report.accounts, declared).status == "equal"


def test_a_report_is_json(ask):
    _, report = ask(record={"code": 3})
    told = json.loads(json.dumps(report.as_json()))
    assert told["status"] == "different"
    assert told["points"] == report.points
    assert set(told["accounts"]["whole"]) == {"a", "b"}
    assert {
        "name": "whole",
        "point": "outcome.exit_code",
        "values": {"a": 0, "b": 3},
        "declared": None,
    } in told["differences"]


def test_nothing_is_started_if_a_backend_refuses_a_spec_or_there_is_nothing_to_compare(
    tmp_path, spec
):
    backends = {"a": Seeded(tmp_path / "a", free=True), "b": LocalBackend(tmp_path / "b")}
    limited = evolve(spec, name="limited", limits=Limits(pids=10))
    with pytest.raises(SpecError, match=r"limits\.pids: .*eval 'limited' on backend 'b'"):
        parity(backends, [spec, limited], tmp_path / "state")
    with pytest.raises(SpecError, match="got 0 evals on 2 backends"):
        parity(backends, [], tmp_path / "state")
    with pytest.raises(SpecError, match="got 1 evals on 1 backends"):
        parity({"a": backends["a"]}, [spec], tmp_path / "state")
    journal = Journal(tmp_path / "state" / "journal.db")
    assert journal.run_ids() == []
    journal.close()


def test_evals_of_one_name_are_told_apart(tmp_path, spec):
    specs = [spec, evolve(spec, check="echo $HOME")]
    backends = {name: LocalBackend(tmp_path / name) for name in "ab"}
    report = parity(backends, specs, tmp_path / "state")
    assert [each.name for each in report.differences] == ["whole#2"]
    named = numbered([("x", 1), ("x", 2), ("x#2", 3), ("x", 4), ("y", 5), ("x", 6)])
    assert named == {"x": 1, "x#2": 2, "x#2#2": 3, "x#3": 4, "y": 5, "x#4": 6}
