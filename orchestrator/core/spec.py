"""What to run: an immutable value that says everything about an eval and nothing about a backend.

All validation of a spec is here, so that one written in Python and one read from a file are refused
for the same reasons in the same words. Every refusal is a `SpecError` that names the key.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import asdict, field, fields_dict, frozen

from .clocks import latest_start_s
from .errors import SpecError

if TYPE_CHECKING:
    from attrs import Attribute

Predicate = Callable[[Any], bool]
"""A named expectation in Python: evidence in, True or False out (`orchestrator.Evidence`)."""

ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
READ_ONLY_IN_SHELLS: Final = frozenset(
    {"BASHOPTS", "BASH_VERSINFO", "EUID", "GROUPS", "OPTIND", "PPID", "SHELLOPTS", "UID"}
)
"""Variables that some shell will not take a value for: the guest could not set them everywhere."""
SHA256: Final = re.compile(r"[0-9a-f]{64}")
BACKSTOP_SLACK_S: Final = 30.0
"""Default time beyond deadline and grace for the check to be started and its end to be seen."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known key was probably meant, as the words that belong in a `SpecError`."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1)
    return f"{close[0]!r} (did you mean it?)" if close else f"one of {', '.join(options)}"


def refuse_unknown(table: Mapping[str, Any], known: Iterable[str], where: str = "") -> None:
    """Refuse keys that are not known, with the nearest that is.

    Raises:
        SpecError: at the first unknown key.
    """
    known = tuple(known)
    for name in table:
        if name not in known:
            raise SpecError(f"{where}{name}", "unknown key", nearest(str(name), known))


def _refuse(attribute: Attribute[Any], value: object, expected: str, where: str = "") -> SpecError:
    return SpecError(f"{where}{attribute.name}", f"got {value!r}", expected)


def _number(instance: object, attribute: Attribute[Any], value: object) -> None:
    del instance
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:  # noqa: PLR2004
        raise _refuse(attribute, value, "a number of seconds above 0")


def _text(instance: object, attribute: Attribute[Any], value: object) -> None:
    del instance
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _refuse(attribute, value, "text that is not empty and has no NUL")


def _optional_text(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None:
        _text(instance, attribute, value)


def _command(instance: object, attribute: Attribute[Any], value: object) -> None:
    if isinstance(value, tuple):
        if value and value[0] and all(isinstance(word, str) and "\0" not in word for word in value):
            return
        raise _refuse(attribute, value, "a list of words without NUL, the program first")
    _text(instance, attribute, value)


def _freeze_command(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _freeze_path(value: Any) -> str | None:
    return value if value is None else str(value)


def _relative(path: str) -> bool:
    """Tell whether a path names an entry of the tree that it is relative to."""
    pure = PurePosixPath(path)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts


def _checked_files(instance: object, attribute: Attribute[Any], value: Mapping[Any, Any]) -> None:
    del instance
    for path, content in value.items():
        key = f"{attribute.name}.{path}"
        if not isinstance(path, str) or "\0" in path or not _relative(path):
            raise SpecError(key, "leads outside", "a relative path without `..`")
        if not isinstance(content, bytes):
            raise SpecError(key, f"got {type(content).__name__}", "text or bytes")
    for path in value:
        for parent in PurePosixPath(path).parents:
            if str(parent) in value:
                raise SpecError(f"{attribute.name}.{path}", f"{parent} is a file", "distinct paths")


def _freeze_files(value: Any) -> Mapping[str, bytes]:
    if not isinstance(value, Mapping):
        raise SpecError("files", f"got {value!r}", "a table of path = content")
    return MappingProxyType(
        {
            str(PurePosixPath(path)): text.encode() if isinstance(text, str) else text
            for path, text in value.items()
        }
    )


def _checked_env(instance: object, attribute: Attribute[Any], value: Mapping[Any, Any]) -> None:
    del instance
    for name, content in value.items():
        key = f"{attribute.name}.{name}"
        if not isinstance(name, str) or not ENV_NAME.fullmatch(name):
            raise SpecError(key, "not a name", "letters, digits and _ as a shell can set them")
        if name in READ_ONLY_IN_SHELLS:
            raise SpecError(key, "read-only in some shells", "a name that a shell can set")
        if not isinstance(content, str) or "\0" in content:
            raise SpecError(key, f"got {content!r}", "text without NUL")


def _freeze_env(value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise SpecError("env", f"got {value!r}", "a table of name = text")
    return MappingProxyType(dict(value))


def _freeze_tags(value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(tag, str) for tag in value):
        return tuple(value)
    raise SpecError("tags", f"got {value!r}", "a list of text")


def _optional_count(instance: object, attribute: Attribute[Any], value: object) -> None:
    del instance
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise _refuse(attribute, value, "a whole number above 0", "limits.")


def _optional_cpus(instance: object, attribute: Attribute[Any], value: object) -> None:
    del instance
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
    ):
        raise _refuse(attribute, value, "a number of processors above 0", "limits.")


@frozen(kw_only=True)
class Limits:
    """What the check may use. A backend that cannot enforce a limit that is set refuses the spec.

    Attributes:
        output_bytes: of each of stdout and stderr that are kept, first and last halves.
        memory_bytes: of memory; beyond it the outcome is `out_of_memory`.
        cpus: processors' worth of time.
        pids: processes and threads.
        disk_bytes: written to the sandbox.
    """

    output_bytes: int = field(default=10 * 1024 * 1024, validator=_optional_count)
    memory_bytes: int | None = field(default=None, validator=_optional_count)
    cpus: float | None = field(default=None, validator=_optional_cpus)
    pids: int | None = field(default=None, validator=_optional_count)
    disk_bytes: int | None = field(default=None, validator=_optional_count)

    def __attrs_post_init__(self) -> None:
        """Refuse a limit of None where there has to be one."""
        if self.output_bytes is None:
            raise SpecError("limits.output_bytes", "got None", "a whole number above 0")

    @classmethod
    def of(cls, value: object) -> Limits:
        """Take limits as they are, or from a table.

        Raises:
            SpecError: a key is unknown or a value is not one.
        """
        if isinstance(value, Limits):
            return value
        if not isinstance(value, Mapping):
            raise SpecError("limits", f"got {value!r}", "a table")
        refuse_unknown(value, fields_dict(cls), "limits.")
        return cls(**value)


@frozen(kw_only=True)
class FileExpectation:
    """What is expected of one path of the evidence. Each key that is given is an expectation.

    Attributes:
        path: relative to the workspace.
        exists: whether there is an entry at the path.
        equals: the file's whole content, as UTF-8 text.
        contains: text that the file has.
        sha256: hex digest of the file's content.
        unchanged: whether the check left kind, mode and content as they were.
    """

    path: str
    exists: bool | None = None
    equals: str | None = None
    contains: str | None = None
    sha256: str | None = None
    unchanged: bool | None = None

    @classmethod
    def of(cls, value: object, where: str) -> FileExpectation:
        """Take a table, refusing what cannot be meant.

        Raises:
            SpecError: a key is unknown, missing or has a value of another type.
        """
        if isinstance(value, FileExpectation):
            return value
        if not isinstance(value, Mapping):
            raise SpecError(where, f"got {value!r}", "a table with a path")
        refuse_unknown(value, fields_dict(cls), f"{where}.")
        path = value.get("path")
        if not isinstance(path, str) or "\0" in path or not _relative(path):
            raise SpecError(f"{where}.path", f"got {path!r}", "a relative path without `..`")
        for key, kind, expected in (
            ("exists", bool, "true or false"),
            ("equals", str, "text"),
            ("contains", str, "text"),
            ("sha256", str, "64 lower-case hex digits"),
            ("unchanged", bool, "true or false"),
        ):
            if not isinstance(value.get(key, kind()), kind):
                raise SpecError(f"{where}.{key}", f"got {value[key]!r}", expected)
        if "sha256" in value and not SHA256.fullmatch(value["sha256"]):
            raise SpecError(
                f"{where}.sha256", f"got {value['sha256']!r}", "64 lower-case hex digits"
            )
        if len(value) == 1:
            raise SpecError(where, "expects nothing of the file", "exists, equals, contains, …")
        if value.get("exists") is False and len(value) > 2:  # noqa: PLR2004
            raise SpecError(f"{where}.exists", "false beside other keys", "only a path beside it")
        return cls(**{**value, "path": str(PurePosixPath(path))})


@frozen(kw_only=True)
class Expect:
    """What is expected of a run; an expectation for each thing that is given.

    A check that exceeds its deadline fails, whatever else is expected, unless `timed_out` is given.

    Attributes:
        exit_code: of the check's own exit.
        timed_out: whether the check exceeds its deadline.
        stdout_equals, stderr_equals: the whole stream, as UTF-8 text.
        stdout_contains, stderr_contains: texts that the stream has.
        stdout_matches, stderr_matches: regular expressions that are found in it (`re.search`, with
            `^` and `$` at line ends).
        files: of paths of the evidence.
        predicates: named functions of the evidence that answer True or False.
    """

    exit_code: int | None = None
    timed_out: bool | None = None
    stdout_equals: str | None = None
    stdout_contains: tuple[str, ...] = ()
    stdout_matches: tuple[str, ...] = ()
    stderr_equals: str | None = None
    stderr_contains: tuple[str, ...] = ()
    stderr_matches: tuple[str, ...] = ()
    files: tuple[FileExpectation, ...] = ()
    predicates: Mapping[str, Predicate | None] = MappingProxyType({})
    """None in place of a function whose spec came back from a journal, which cannot hold code."""

    @classmethod
    def of(cls, value: object) -> Expect:
        """Take expectations from a mapping: known keys with plain values, any name with a function.

        Raises:
            SpecError: a key is unknown or a value is not one.
        """
        if isinstance(value, Expect):
            return value
        if value is None:
            return cls(exit_code=0)
        if not isinstance(value, Mapping):
            raise SpecError("expect", f"got {value!r}", "a table")
        if not value:
            raise SpecError("expect", "is empty", "an expectation, or no table for exit_code = 0")
        predicates = {name: test for name, test in value.items() if callable(test)}
        given = {name: test for name, test in value.items() if not callable(test)}
        known = [name for name in fields_dict(cls) if name != "predicates"]
        refuse_unknown(given, known, "expect.")
        return cls(
            **{name: cls._value(name, test) for name, test in given.items()},
            predicates=MappingProxyType(predicates),
        )

    @staticmethod
    def _value(name: str, value: object) -> Any:  # noqa: C901 - a case for each kind of key
        """Check one declared expectation and give it in the type of its field."""
        where = f"expect.{name}"
        if name == "exit_code":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:  # noqa: PLR2004
                raise SpecError(where, f"got {value!r}", "a whole number from 0 to 255")
            return value
        if name == "timed_out":
            if not isinstance(value, bool):
                raise SpecError(where, f"got {value!r}", "true or false")
            return value
        if name.endswith("_equals"):
            if not isinstance(value, str):
                raise SpecError(where, f"got {value!r}", "text")
            return value
        items = [value] if isinstance(value, str | Mapping | FileExpectation) else value
        if isinstance(items, bytes) or not isinstance(items, Sequence) or not items:
            kinds = "a list of tables" if name == "files" else "text or a list of text"
            raise SpecError(where, f"got {value!r}", kinds)
        if name == "files":
            return tuple(
                FileExpectation.of(item, f"{where}[{index}]") for index, item in enumerate(items)
            )
        for item in items:
            if not isinstance(item, str):
                raise SpecError(where, f"got {item!r}", "text or a list of text")
            if name.endswith("_matches"):
                try:
                    re.compile(item)
                except re.error as error:
                    raise SpecError(where, f"got {item!r}", f"a pattern ({error})") from None
        return tuple(items)


def _freeze_limits(value: Any) -> Limits:
    return Limits.of(value)


def _freeze_expect(value: Any) -> Expect:
    return Expect.of(value)


@frozen(kw_only=True)
class EvalSpec:
    """What to run. Equal specs have equal digests.

    Attributes: name: for people; need not be unique. check: the command whose outcome is measured:
        text for `/bin/sh -c`, or a list of words. workspace: path of the directory to run it over,
        None for an empty one. Never changed. files: content by path, laid over the workspace.
        setup: command to run before the check in the same sandbox, not counted as the check's.
        setup_deadline_s: sandbox-side limit on setup, seconds. deadline_s: sandbox-side limit on
        the check, seconds from the start of its process. grace_s: seconds between SIGTERM and
        SIGKILL after the deadline. backstop_s: client-side limit on waiting for the check, seconds;
        None for deadline, grace and
            30 s more. One that would cut into deadline and grace is refused.
        env: environment of check and setup, beside PATH, HOME and LANG.
        image: what the sandbox is made of, where the backend has images.
        limits: what the check may use.
        retain: "unresolved" keeps the sandbox of a run that cannot be scored, "never" keeps none.
        tags: words to find it by.
        expect: what is expected; nothing given means that the check exits with 0.

    Raises:
        SpecError: it says something that cannot be meant.
    """

    name: str = field(validator=_text)
    check: str | tuple[str, ...] = field(converter=_freeze_command, validator=_command)
    workspace: str | None = field(
        default=None,
        converter=_freeze_path,
        validator=_optional_text,
    )
    files: Mapping[str, bytes] = field(
        factory=dict, converter=_freeze_files, validator=_checked_files
    )
    setup: str | tuple[str, ...] | None = field(default=None, converter=_freeze_command)
    setup_deadline_s: float = field(default=300.0, validator=_number)
    deadline_s: float = field(default=60.0, validator=_number)
    grace_s: float = field(default=2.0, validator=_number)
    backstop_s: float | None = field(default=None)
    env: Mapping[str, str] = field(factory=dict, converter=_freeze_env, validator=_checked_env)
    image: str | None = field(default=None, validator=_optional_text)
    limits: Limits = field(factory=Limits, converter=_freeze_limits)
    retain: Literal["never", "unresolved"] = "never"
    tags: tuple[str, ...] = field(factory=tuple, converter=_freeze_tags)
    expect: Expect = field(default=None, converter=_freeze_expect)

    @setup.validator
    def _check_setup(self, attribute: Attribute[Any], value: object) -> None:
        if value is not None:
            _command(self, attribute, value)

    @backstop_s.validator
    def _check_backstop(self, attribute: Attribute[Any], value: float | None) -> None:
        if value is None:
            return
        _number(self, attribute, value)
        if latest_start_s(self.deadline_s, self.grace_s, value) <= 0:
            raise SpecError(
                attribute.name,
                f"{value:g} s would cut a deadline of {self.deadline_s:g} s "
                f"and a grace of {self.grace_s:g} s",
                f"more than {self.deadline_s + self.grace_s:g} s",
            )

    def __attrs_post_init__(self) -> None:
        """Check the one field that has no validator."""
        if self.retain not in {"never", "unresolved"}:
            raise SpecError("retain", f"got {self.retain!r}", "'never' or 'unresolved'")

    @property
    def backstop(self) -> float:
        """Seconds that the client waits for the check, the default filled in."""
        if self.backstop_s is None:
            return self.deadline_s + self.grace_s + BACKSTOP_SLACK_S
        return self.backstop_s

    @property
    def digest(self) -> str:
        """SHA-256 over everything the spec says, functions by their names; lower-case hex."""

        def plain(value: object) -> object:
            if isinstance(value, bytes):
                return {"sha256": hashlib.sha256(value).hexdigest()}
            return dict(value) if isinstance(value, Mapping) else repr(value)

        said = asdict(self, recurse=True, value_serializer=_without_code)
        text = json.dumps(said, sort_keys=True, default=plain)
        return hashlib.sha256(text.encode()).hexdigest()


def _without_code(instance: object, attribute: Attribute[Any] | None, value: object) -> object:
    """Put names in place of functions: two processes have to agree on a spec's digest."""
    del instance
    if attribute is not None and attribute.name == "predicates" and isinstance(value, Mapping):
        return sorted(value)
    return value
