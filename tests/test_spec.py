"""A spec that cannot be meant is refused with its key; one that can is a value and has a digest."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from attrs import evolve, fields
from attrs.exceptions import FrozenInstanceError
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.clocks import latest_start_s
from orchestrator.core.errors import IllegalFactError, SpecError
from orchestrator.core.expect import Expect, FileExpectation, nearest, refuse_unknown
from orchestrator.core.spec import SHELLS_OWN, EvalSpec, Limits
from orchestrator.specfile import SpecFileError

NAN, INF = float("nan"), float("inf")
DIGEST = "0123456789abcdef" * 4


def spec(**changes):
    return EvalSpec(**{"name": "hello", "check": "true", **changes})


def answers(evidence):
    return evidence.sealed


# --- random specs ---------------------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
said = text.filter(str.strip)
commands = said | st.lists(said, min_size=1, max_size=3)
seconds = st.integers(1, 10**6) | st.floats(0.001, 1e6)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in SHELLS_OWN
)
parts = st.text("abc.-é ", min_size=1, max_size=4).filter(lambda part: part.strip(".") != "")
paths = st.lists(parts, min_size=1, max_size=2).map("/".join)
claims = st.fixed_dictionaries(
    {"path": paths},
    optional={
        "exists": st.just(value=True),
        "equals": text,
        "contains": text,
        "sha256": st.just(DIGEST),
        "unchanged": st.booleans(),
    },
).filter(lambda claim: len(claim) > 1)
texts = st.lists(text, min_size=1, max_size=2)
patterns = st.lists(st.sampled_from(["^a+$", "b|c", r"\d"]), min_size=1, max_size=2)
expectations = st.fixed_dictionaries(
    {},
    optional={
        "exit_code": st.integers(0, 255),
        "timed_out": st.booleans(),
        "stdout_equals": text,
        "stdout_contains": texts,
        "stdout_matches": patterns,
        "stderr_equals": text,
        "stderr_contains": texts,
        "stderr_matches": patterns,
        "files": st.lists(claims, min_size=1, max_size=2),
        "a function": st.just(answers),
    },
).filter(bool)
limits = st.fixed_dictionaries(
    {},
    optional={
        "output_bytes": st.integers(2, 2**40),
        "memory_bytes": st.integers(1, 2**40),
        "cpus": st.integers(1, 64) | st.floats(0.1, 64),
        "pids": st.integers(1, 2**20),
        "disk_bytes": st.integers(1, 2**40),
    },
)
keywords = st.fixed_dictionaries(
    {"name": said, "check": commands},
    optional={
        "workspace": st.none() | said,
        "files": st.dictionaries(st.text("abc", min_size=1), st.binary(max_size=4) | text),
        "setup": st.none() | commands,
        "setup_deadline_s": seconds,
        "deadline_s": seconds,
        "grace_s": seconds,
        "env": st.dictionaries(names, text, max_size=3),
        "image": st.none() | said,
        "limits": limits,
        "retain": st.sampled_from(["never", "unresolved"]),
        "tags": st.lists(text, max_size=2),
        "secrets": st.lists(st.sampled_from(["KEY", "TOKEN"]), max_size=2),
        "expect": st.none() | expectations,
    },
)
specs = keywords.map(lambda given: EvalSpec(**given))

# --- refusals -------------------------------------------------------------------------------------

SECONDS = "a number of seconds above 0"
TEXT = "text that is not empty and has no NUL"
WORDS = "a list of words without NUL, the program first"
COUNT = "a whole number above 0"
RELATIVE = "a relative path without `..`"
REFUSED = [
    *[("name", {"name": value}, TEXT) for value in ("", " \n", "a\0b", None, 3, b"x")],
    *[("check", {"check": value}, TEXT) for value in ("", "  ", "a\0b", None, 3, b"true")],
    *[("check", {"check": value}, WORDS) for value in ([], (), [""], ["a", "b\0"], ["a", 1], [1])],
    *[("setup", {"setup": value}, TEXT) for value in ("", "a\0b", 3, False)],
    *[("setup", {"setup": value}, WORDS) for value in ([], ["", "a"], [None])],
    *[("workspace", {"workspace": value}, TEXT) for value in ("", " ", "a\0b")],
    *[("image", {"image": value}, TEXT) for value in ("", "a\0b", 3)],
    *[
        (key, {key: value}, SECONDS)
        for key in ("deadline_s", "grace_s", "setup_deadline_s", "backstop_s")
        for value in (0, -1, NAN, INF, 1e9, 10**400, True, "5", b"5", [])
    ],
    *[(key, {key: None}, SECONDS) for key in ("deadline_s", "grace_s", "setup_deadline_s")],
    # Environment.
    ("env", {"env": None}, "a table of name = text"),
    ("env", {"env": [("A", "b")]}, "a table of name = text"),
    *[
        (f"env.{name}", {"env": {name: "x"}}, "letters, digits and _ as a shell can set them")
        for name in ("", "1A", "A-B", "A=B", "A B", "É", "A\n", "A\0", 3)
    ],
    *[
        (f"env.{name}", {"env": {name: "x"}}, "a name that a shell can set")
        for name in sorted(SHELLS_OWN)
    ],
    *[("env.A", {"env": {"A": value}}, "text without NUL") for value in (None, 3, b"x", "a\0b")],
    # Files.
    ("files", {"files": None}, "a table of path = content"),
    ("files", {"files": ["a"]}, "a table of path = content"),
    *[
        (f"files.{path}", {"files": {path: ""}}, RELATIVE)
        for path in ("/etc/passwd", "//a", "..", "../a", "a/../../b", "a\0", ".")
    ],
    ("files..", {"files": {"": ""}}, RELATIVE),
    *[
        ("files.a", {"files": {"a": value}}, "text or bytes")
        for value in (None, 3, bytearray(b"x"))
    ],
    ("files.a/b", {"files": {"a": "", "a/b": ""}}, "distinct paths"),
    ("files.a/b/c", {"files": {"a/b/c": "", "a": ""}}, "distinct paths"),
    # Limits.
    *[("limits", {"limits": value}, "a table") for value in (None, 3, [("pids", 1)])],
    *[
        (f"limits.{key}", {"limits": {key: value}}, COUNT)
        for key in ("memory_bytes", "pids", "disk_bytes")
        for value in (0, -1, 1.5, True, "1")
    ],
    *(
        ("limits.output_bytes", {"limits": {"output_bytes": value}}, "a whole number above 1")
        for value in (None, 0, 1, -1, True, 2.0, "2")
    ),
    *[
        ("limits.cpus", {"limits": {"cpus": value}}, "a number of processors above 0")
        for value in (0, -0.5, NAN, True, "1")
    ],
    ("limits.memory", {"limits": {"memory": 1}}, "'memory_bytes' (did you mean it?)"),
    # Retain and tags.
    *[
        ("retain", {"retain": value}, "'never' or 'unresolved'")
        for value in ("always", None, True, "")
    ],
    *[("secrets", {"secrets": value}, "a list of names") for value in (None, "KEY", [1], {"K": 1})],
    *[("secrets", {"secrets": [name]}, "names that") for name in ("", "a b", "1A", "PPID", "A=b")],
    ("secrets", {"secrets": ["KEY"], "env": {"KEY": "1"}}, "either of them"),
    *[("tags", {"tags": value}, "a list of text") for value in (None, "slow", [1], {"a": 1})],
    # Expectations.
    *[("expect", {"expect": value}, "a table") for value in (3, "exit_code", [0], answers)],
    ("expect", {"expect": {}}, "an expectation, or no table for exit_code = 0"),
    ("expect.exit_cod", {"expect": {"exit_cod": 0}}, "'exit_code' (did you mean it?)"),
    ("expect.predicates", {"expect": {"predicates": 1}}, "one of exit_code, files"),
    *[
        ("expect.exit_code", {"expect": {"exit_code": value}}, "a whole number from 0 to 255")
        for value in (-1, 256, 0.0, True, "0", None)
    ],
    *[
        ("expect.timed_out", {"expect": {"timed_out": value}}, "true or false")
        for value in (1, "true", None)
    ],
    *[
        (f"expect.{stream}_equals", {"expect": {f"{stream}_equals": value}}, "text")
        for stream in ("stdout", "stderr")
        for value in (None, 3, b"x", ["x"])
    ],
    *[
        (f"expect.{key}", {"expect": {key: value}}, "text or a list of text")
        for key in ("stdout_contains", "stdout_matches", "stderr_contains", "stderr_matches")
        for value in (None, 3, b"x", [], [3], ["a", None], {"a": 1})
    ],
    ("expect.stdout_matches", {"expect": {"stdout_matches": ["a", "("]}}, "a pattern ("),
    *[
        ("expect.files", {"expect": {"files": value}}, "a list of tables")
        for value in (None, 3, [], b"x")
    ],
    *[
        ("expect.files[0]", {"expect": {"files": value}}, "a table with a path")
        for value in ("a", [3], [None])
    ],
    *[
        (
            "expect.files[1].path",
            {"expect": {"files": [{"path": "a", "exists": True}, claim]}},
            path,
        )
        for claim, path in (
            ({"exists": True}, RELATIVE),
            ({"path": None, "exists": True}, RELATIVE),
            ({"path": "/a", "exists": True}, RELATIVE),
            ({"path": "../a", "exists": True}, RELATIVE),
            ({"path": "", "exists": True}, RELATIVE),
            ({"path": "a\0", "exists": True}, RELATIVE),
        )
    ],
    *[
        (f"expect.files[0].{key}", {"expect": {"files": {"path": "a", key: value}}}, expected)
        for key, value, expected in (
            ("exists", 1, "true or false"),
            ("exists", None, "true or false"),
            ("unchanged", "yes", "true or false"),
            ("equals", b"x", "text"),
            ("contains", 3, "text"),
            ("sha256", 3, "64 lower-case hex digits"),
            ("sha256", "ab", "64 lower-case hex digits"),
            ("sha256", DIGEST.upper(), "64 lower-case hex digits"),
            ("exist", True, "'exists' (did you mean it?)"),
        )
    ],
    ("expect.files[0]", {"expect": {"files": {"path": "a"}}}, "exists, equals, contains, …"),
    (
        "expect.files[0].exists",
        {"expect": {"files": {"path": "a", "exists": False, "equals": "x"}}},
        "only a path beside it",
    ),
]


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    REFUSED,
    ids=[f"{key!r}-{number}" for number, (key, _, _) in enumerate(REFUSED)],
)
def test_what_cannot_be_meant_is_refused_with_its_key_and_what_belongs_there(key, given, expected):
    with pytest.raises(SpecError) as refused:
        spec(**given)
    error = refused.value
    assert error.key == key
    assert error.expected.startswith(expected)
    assert str(error) == f"{error.key}: {error.problem}; expected {error.expected}"


def test_every_field_has_a_refusal():
    refused = {key.split(".")[0] for key, _, _ in REFUSED}
    assert refused == {field.name for field in fields(EvalSpec)}
    expected = {key.split(".")[1].split("[")[0] for key, _, _ in REFUSED if "expect." in key}
    assert expected >= {field.name for field in fields(Expect)}
    limited = {key.split(".")[1] for key, _, _ in REFUSED if key.startswith("limits.")}
    assert limited >= {field.name for field in fields(Limits)}
    files = {key.split("].")[1] for key, _, _ in REFUSED if "]." in key}
    assert files >= {field.name for field in fields(FileExpectation)}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"retain": []}, "retain"),
        ({"workspace": 3}, "workspace"),
        ({"workspace": b"x"}, "workspace"),
        ({"files": {3: ""}}, "files.3"),
        ({"files": {b"a": ""}}, "files.b'a'"),
        ({"files": {"a": "x", "./a": "y"}}, "files../a"),
        ({"files": {"a": "\ud800"}}, "files.a"),
        ({"name": "\ud800"}, "name"),
        ({"limits": {"cpus": INF}}, "limits.cpus"),
        ({"expect": {3: answers}}, "expect.3"),
    ],
    ids=repr,
)
def test_what_would_fail_later_is_refused_at_once(given, key):
    with pytest.raises(SpecError) as refused:
        spec(**given)
    assert refused.value.key == key


@pytest.mark.parametrize(
    "make",
    [
        Expect,
        lambda: Expect(exit_code="0"),
        lambda: Expect(stdout_contains=3),
        lambda: Expect(stdout_matches=("(",)),
        lambda: Expect(files=({"path": "/etc/passwd", "exists": True},)),
        lambda: Expect(predicates={"greets": "yes"}),
        lambda: FileExpectation(path="a"),
        lambda: FileExpectation(path="../a", exists=True),
        lambda: FileExpectation(path="a", exists=False, equals="x"),
        lambda: FileExpectation(path="a", sha256="ab"),
    ],
)
def test_expectations_built_by_hand_are_refused_as_those_from_a_table_are(make):
    with pytest.raises(SpecError):
        make()


def test_expectations_built_by_hand_are_those_from_a_table():
    assert Expect(stdout_contains="abc") == Expect.of({"stdout_contains": "abc"})
    assert Expect(files=[{"path": "./a", "exists": True}]) == Expect.of(
        {"files": {"path": "a", "exists": True}}
    )
    assert FileExpectation(path="./a//b", exists=True).path == "a/b"


# --- near misses ----------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_the_nearest_known_one():
    with pytest.raises(SpecError, match=r"^eval\.dedline_s: unknown key; expected 'deadline_s'"):
        refuse_unknown({"name": "x", "dedline_s": 1}, ["name", "deadline_s"], "eval.")
    refuse_unknown({"name": "x"}, iter(["name", "check"]))


def test_a_key_that_is_near_to_nothing_is_refused_with_all_known_ones():
    assert nearest("zzz", ["b", "a"]) == "one of a, b"


@given(name=st.text(max_size=12), known=st.lists(st.text(max_size=6), min_size=1))
def test_every_suggestion_is_a_known_key(name, known):
    found = nearest(name, known)
    assert found.startswith("one of ") or found in {f"{key!r} (did you mean it?)" for key in known}


# --- what can be meant ----------------------------------------------------------------------------


def test_a_spec_that_says_nothing_more_expects_exit_code_0():
    plain = spec()
    assert plain.expect == Expect(exit_code=0)
    assert (plain.deadline_s, plain.grace_s, plain.backstop) == (60, 2, 92)
    assert (plain.workspace, plain.setup, plain.image) == (None, None, None)
    assert plain.retain == "never"
    assert plain.limits == Limits(output_bytes=10 * 1024 * 1024)
    assert spec(expect=None) == plain


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"exit_code": 255}, {"exit_code": 255}),
        ({"timed_out": True}, {"timed_out": True}),
        ({"stdout_equals": ""}, {"stdout_equals": ""}),
        ({"stdout_contains": "abc"}, {"stdout_contains": ("abc",)}),
        ({"stderr_contains": ["a", "b"]}, {"stderr_contains": ("a", "b")}),
        ({"stderr_matches": ("^a",)}, {"stderr_matches": ("^a",)}),
        (
            {"files": {"path": "./a//b", "equals": ""}},
            {"files": (FileExpectation(path="a/b", equals=""),)},
        ),
        (
            {"files": FileExpectation(path="a", exists=True)},
            {"files": (FileExpectation(path="a", exists=True),)},
        ),
        (
            {"files": [{"path": "a", "exists": False}, {"path": "b", "unchanged": False}]},
            {
                "files": (
                    FileExpectation(path="a", exists=False),
                    FileExpectation(path="b", unchanged=False),
                )
            },
        ),
        (
            {"greets": answers, "exit_code": 0},
            {"predicates": {"greets": answers}, "exit_code": 0},
        ),
    ],
)
def test_expectations_may_be_given_in_every_form(given, meant):
    assert spec(expect=given).expect == Expect(**meant)
    assert spec(expect=Expect.of(given)).expect == Expect(**meant)


def test_a_function_may_have_any_name():
    assert dict(spec(expect={"no junk!": answers}).expect.predicates) == {"no junk!": answers}


def test_paths_words_and_limits_may_be_given_in_every_form():
    given = spec(
        workspace=Path("a") / "b",
        check=["python3", "hello.py"],
        setup=("make",),
        files={PurePosixPath("x/./y"): "é", "z": b"\xff"},
        limits={"pids": 3},
        tags=["slow"],
    )
    assert given.workspace == "a/b"
    assert (given.check, given.setup, given.tags) == (("python3", "hello.py"), ("make",), ("slow",))
    assert given.files == {"x/y": "é".encode(), "z": b"\xff"}
    assert given == evolve(given, limits=Limits(pids=3))


@given(spec=specs)
def test_what_a_spec_accepts_it_accepts_again(spec):
    assert evolve(spec) == spec
    assert EvalSpec(**{field.name: getattr(spec, field.name) for field in fields(EvalSpec)}) == spec


# --- the backstop ---------------------------------------------------------------------------------


@given(deadline_s=seconds, grace_s=seconds, backstop_s=seconds)
def test_a_backstop_leaves_room_for_deadline_and_grace_or_is_refused(
    deadline_s, grace_s, backstop_s
):
    given = {"deadline_s": deadline_s, "grace_s": grace_s, "backstop_s": backstop_s}
    if latest_start_s(**given) > 0:
        assert spec(**given).backstop == backstop_s
        assert backstop_s > deadline_s
    else:
        with pytest.raises(SpecError) as refused:
            spec(**given)
        assert refused.value.key == "backstop_s"
        assert refused.value.expected == f"more than {deadline_s + grace_s:g} s"


@given(deadline_s=seconds, grace_s=seconds)
def test_a_backstop_left_out_is_always_later_than_deadline_and_grace(deadline_s, grace_s):
    given = spec(deadline_s=deadline_s, grace_s=grace_s)
    assert latest_start_s(deadline_s, grace_s, given.backstop) == pytest.approx(30)


def test_a_backstop_that_leaves_no_room_says_how_much_it_needs():
    with pytest.raises(
        SpecError,
        match=r"^backstop_s: 62 s would cut a deadline of 60 s and a grace of 2 s; "
        r"expected more than 62 s$",
    ):
        spec(backstop_s=62)
    assert spec(backstop_s=62.5).backstop == 62.5


# --- immutability ---------------------------------------------------------------------------------


def test_a_spec_cannot_be_changed():
    given = spec(files={"a": ""}, env={"A": ""}, expect={"greets": answers})
    for field in fields(EvalSpec):
        with pytest.raises(FrozenInstanceError):
            setattr(given, field.name, None)
    for table in (given.files, given.env, given.expect.predicates):
        with pytest.raises(TypeError):
            table["b"] = b""


def test_changing_what_a_spec_was_made_of_does_not_change_the_spec():
    claim = {"path": "a", "exists": True}
    parts = {
        "check": ["true"],
        "setup": ["true"],
        "files": {"a": "x"},
        "env": {"A": "x"},
        "secrets": ["B"],
        "tags": ["slow"],
        "limits": {"pids": 3},
        "expect": {"stdout_contains": ["x"], "files": [claim], "greets": answers},
    }
    given = spec(**parts)
    digest, before = given.digest, repr(given)
    parts["check"].append("false")
    parts["setup"].clear()
    parts["files"]["b"] = "y"
    parts["env"]["A"] = "y"
    parts["tags"].append("fast")
    parts["limits"]["pids"] = 4
    parts["expect"]["stdout_contains"].append("y")
    parts["expect"]["files"].clear()
    parts["expect"]["later"] = answers
    claim["exists"] = False
    assert (given.digest, repr(given)) == (digest, before)


def test_changing_what_expectations_were_made_of_by_hand_does_not_change_them():
    predicates, contained = {"greets": answers}, ["x"]
    expect = Expect(stdout_contains=contained, predicates=predicates)
    predicates["later"] = answers
    contained.append("y")
    assert expect == Expect(stdout_contains=("x",), predicates={"greets": answers})


def test_a_spec_can_be_copied_and_sent_to_another_process():
    given = spec(files={"a": "x"}, env={"A": "x"}, expect={"greets": answers})
    assert copy.deepcopy(given) == given
    assert pickle.loads(pickle.dumps(given)) == given


# --- digests --------------------------------------------------------------------------------------


def retold(given):
    """Say the same in other words."""
    told = {**given}
    for key in ("files", "env", "limits", "expect"):
        if told.get(key):
            told[key] = dict(reversed(told[key].items()))
    for key in ("deadline_s", "grace_s", "setup_deadline_s"):
        if key in told:
            told[key] = float(told[key])
    for key in ("check", "setup", "tags"):
        if isinstance(told.get(key), list):
            told[key] = tuple(told[key])
    if "files" in told:
        told["files"] = {
            f"./{path}": content.encode() if isinstance(content, str) else content
            for path, content in told["files"].items()
        }
    if "cpus" in told.get("limits", {}):
        told["limits"] = {**told["limits"], "cpus": float(told["limits"]["cpus"])}
    return told


@given(given=keywords)
def test_equal_specs_have_equal_digests_however_they_are_told(given):
    one, other = EvalSpec(**given), EvalSpec(**retold(given))
    assert one == other
    assert one.digest == other.digest


@given(one=keywords, other=keywords, shared=st.data())
def test_unequal_specs_have_unequal_digests(one, other, shared):
    # Two random specs differ in everything; take most of one from the other.
    kept = shared.draw(st.sets(st.sampled_from(sorted(one)), max_size=2))
    changed = {**one, **{key: other[key] for key in kept if key in other}}
    first, second = EvalSpec(**one), EvalSpec(**changed)
    assert (first.digest == second.digest) == (first == second)


def test_every_field_counts():
    plain = spec()
    digests = {
        plain.digest,
        *(
            spec(**{key: value}).digest
            for key, value in {
                "name": "other",
                "check": "false",
                "workspace": "x",
                "files": {"a": "x"},
                "setup": "true",
                "setup_deadline_s": 1,
                "deadline_s": 1,
                "grace_s": 1,
                "backstop_s": 63,
                "env": {"A": "x"},
                "secrets": ["B"],
                "image": "busybox",
                "limits": {"pids": 1},
                "retain": "unresolved",
                "tags": ["x"],
                "expect": {"exit_code": 1},
            }.items()
        ),
    }
    assert len(digests) == 1 + len(fields(EvalSpec))


def test_text_and_words_and_bytes_that_look_alike_are_not_the_same():
    different = [
        spec(check="a"),
        spec(check=["a"]),
        spec(check="('a',)"),
        spec(files={"a": "x"}),
        spec(files={"a": b"x\0"}),
        spec(env={"a": "x"}),
        spec(expect={"stdout_equals": "a"}),
        spec(expect={"stdout_contains": "a"}),
        spec(expect={"stderr_contains": "a"}),
        spec(expect={"a": answers}),
        spec(expect={"a": answers, "b": answers}),
    ]
    assert len({each.digest for each in different}) == len(different)


def test_a_function_counts_by_its_name():
    def other(evidence):
        return not evidence.sealed

    one, two = spec(expect={"greets": answers}), spec(expect={"greets": other})
    assert one.digest == two.digest
    assert one != two


TOLD = """
from orchestrator import EvalSpec
print(EvalSpec(
    name="é", check=["a", "b"], files={"b": "x", "a": b"y"}, env={"B": "1", "A": "2"},
    limits={"pids": 3, "cpus": 1}, tags=["x", "y"], deadline_s=5,
    expect={"later": print, "greets": len, "files": {"path": "a", "exists": True}},
).digest)
"""


def test_a_spec_has_the_same_digest_in_every_process():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOLD],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "random")
    ]
    digests = {process.communicate()[0].strip() for process in processes}
    assert len(digests) == 1
    assert len(digests.pop()) == 64


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("check", {"check": "echo " + "x" * 140_000}),
        ("check", {"check": ["echo", "é" * 70_000]}),
        ("setup", {"check": "true", "setup": ": " + "x" * 131_072}),
        ("env.LONG", {"check": "true", "env": {"LONG": "x" * 131_072}}),
        ("check", {"check": "true", "env": {f"N{n}": "x" * 100_000 for n in range(11)}}),
    ],
)
def test_what_a_program_cannot_be_given_is_refused_and_not_scored_as_its_failure(key, said):
    """Linux refuses longer words with E2BIG, which a shell reports as exit 126."""
    with pytest.raises(SpecError, match=rf"^{key}: .*longer than a program can be given"):
        EvalSpec(name="x", **said)
    assert EvalSpec(name="x", check=": " + "x" * 131_000).check


@pytest.mark.parametrize(
    "error",
    [
        SpecError("key", "problem", "expected"),
        SpecFileError(Path("x.toml"), "[[eval]] number 1", SpecError("a", "b", "c")),
        IllegalFactError(run_id="r", state="NEW", fact="Scored", legal=["Uploaded"], why="so"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_can_be_sent_to_another_process(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


@pytest.mark.parametrize(
    "said",
    [
        {"check": "\ud800"},
        {"check": ["true", "\ud800"]},
        {"check": "true", "env": {"A": "\ud800"}},
        {"check": "true", "workspace": "\ud800"},
        {"check": "true", "files": {"\ud800": ""}},
    ],
)
def test_text_that_no_program_can_be_given_is_refused(said):
    with pytest.raises(SpecError):
        EvalSpec(name="x", **said)
    assert EvalSpec(name="x", check="printf \udcff")


def test_a_name_is_text_that_can_be_stored():
    """A program can be given the byte 0xff; a journal and a report cannot be told its name."""
    with pytest.raises(SpecError, match="UTF-8"):
        EvalSpec(name="\udcff", check="true")
