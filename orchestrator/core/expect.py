"""What is expected of a run, as values: which keys there are, and what each of them may be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from attrs import fields_dict, frozen

from .errors import SpecError

Predicate = Callable[[Any], bool]
"""A named expectation in Python: evidence in, True or False out (`orchestrator.Evidence`)."""

SHA256: Final = re.compile(r"[0-9a-f]{64}")


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


def encodes(value: str) -> bool:
    """Tell whether text can be given to the system: of surrogates, those of PEP 383 can."""
    return not any("\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" for c in value)


def inside(path: str) -> bool:
    """Tell whether a path names an entry of the tree that it is relative to."""
    pure = PurePosixPath(path)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts


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

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be meant, also where it was not read from a table."""
        said = {name: getattr(self, name) for name in fields_dict(type(self))}
        self._check({name: it for name, it in said.items() if it is not None}, "expect.files[]")
        object.__setattr__(self, "path", str(PurePosixPath(self.path)))

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
        cls._check(value, where)
        return cls(**value)

    @staticmethod
    def _check(value: Mapping[str, Any], where: str) -> None:
        path = value.get("path")
        if not isinstance(path, str) or "\0" in path or not inside(path):
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

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be meant, also where it was not read from a table."""
        said = {name: getattr(self, name) for name in fields_dict(type(self))}
        predicates = MappingProxyType(dict(said.pop("predicates")))
        for name, test in predicates.items():
            if not isinstance(name, str) or not (test is None or callable(test)):
                raise SpecError(f"expect.{name}", f"got {test!r}", "a name and a function")
        object.__setattr__(self, "predicates", predicates)
        given = {name: test for name, test in said.items() if test is not None and test != ()}
        if not given and not predicates:
            raise SpecError("expect", "is empty", "an expectation, or no table for exit_code = 0")
        for name, test in given.items():
            object.__setattr__(self, name, self._value(name, test))

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
