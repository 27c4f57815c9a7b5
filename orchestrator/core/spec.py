"""What to run: an immutable value that says everything about an eval and nothing about a backend.

All validation of a spec is here, so that one written in Python and one read from a file are refused
for the same reasons in the same words. Every refusal is a `SpecError` that names the key.
"""

from __future__ import annotations

import copyreg
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import asdict, field, fields_dict, frozen

from .clocks import latest_start_s
from .errors import SpecError
from .expect import Expect, encodes, inside, refuse_unknown

if TYPE_CHECKING:
    from attrs import Attribute

ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SHELLS_OWN: Final = frozenset(
    {
        "_",
        "BASHOPTS",
        "BASHPID",
        "BASH_ALIASES",
        "BASH_ARGC",
        "BASH_ARGV",
        "BASH_CMDS",
        "BASH_COMMAND",
        "BASH_COMPAT",
        "BASH_LINENO",
        "BASH_SOURCE",
        "BASH_SUBSHELL",
        "BASH_VERSINFO",
        "BASH_XTRACEFD",
        "DIRSTACK",
        "EPOCHREALTIME",
        "EPOCHSECONDS",
        "EUID",
        "FUNCNAME",
        "GROUPS",
        "HISTCMD",
        "LINENO",
        "OPTIND",
        "PIPESTATUS",
        "PPID",
        "RANDOM",
        "SECONDS",
        "SHELLOPTS",
        "SRANDOM",
        "UID",
    }
)
"""Variables that some shell keeps for itself: the guest could not set them everywhere."""
WORD_BYTES: Final = 128 * 1024
"""What Linux takes of one argument or variable (MAX_ARG_STRLEN), its end included (execve(2))."""
ALL_BYTES: Final = 1024 * 1024
"""What is taken of all of them together: half of what Linux takes with a stack of 8 MiB."""
BACKSTOP_SLACK_S: Final = 30.0
"""Default time beyond deadline and grace for the check to be started and its end to be seen."""


def _view(table: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(table)


# Specs are sent to other processes, and Python has no way of its own to send a read-only view.
copyreg.pickle(MappingProxyType, lambda view: (_view, (dict(view),)))


def _refuse(attribute: Attribute[Any], value: object, expected: str, where: str = "") -> SpecError:
    return SpecError(f"{where}{attribute.name}", f"got {value!r}", expected)


def _number(instance: object, attribute: Attribute[Any], value: object) -> None:
    del instance
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:  # noqa: PLR2004
        raise _refuse(attribute, value, "a number of seconds above 0")


def _real(value: Any) -> Any:
    """Give a whole number as the float it equals, so that equal specs have one digest."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and abs(value) < 1e9 else value  # noqa: PLR2004


def _utf8(value: str) -> bool:
    """Tell whether text can be stored as UTF-8: lone surrogates cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _name(instance: object, attribute: Attribute[Any], value: object) -> None:
    _text(instance, attribute, value)
    if isinstance(value, str) and not _utf8(value):
        raise _refuse(attribute, value, "text that UTF-8 can hold")


def _text(instance: object, attribute: Attribute[Any], value: object) -> None:
    del instance
    if not isinstance(value, str) or not value.strip() or "\0" in value or not encodes(value):
        raise _refuse(attribute, value, "text that is not empty and has no NUL")


def _optional_text(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None:
        _text(instance, attribute, value)


def _size(words: Iterable[str]) -> int:
    return sum(len(word.encode("utf-8", "surrogateescape")) + 1 for word in words)


def _command(instance: object, attribute: Attribute[Any], value: object) -> None:
    words = value if isinstance(value, tuple) else (value,)
    if any(isinstance(word, str) and not encodes(word) for word in words):
        raise _refuse(attribute, value, "words that a program can be given")
    if any(isinstance(word, str) and _size([word]) > WORD_BYTES for word in words):
        raise SpecError(attribute.name, "a word is longer than a program can be given", "< 128 KiB")
    if isinstance(value, tuple):
        if value and value[0] and all(isinstance(word, str) and "\0" not in word for word in value):
            return
        raise _refuse(attribute, value, "a list of words without NUL, the program first")
    _text(instance, attribute, value)


def _freeze_command(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _freeze_path(value: Any) -> Any:
    return str(value) if isinstance(value, PurePosixPath) else value


def _checked_files(instance: object, attribute: Attribute[Any], value: Mapping[Any, Any]) -> None:
    del instance
    for path, content in value.items():
        key = f"{attribute.name}.{path}"
        if "\0" in path or not encodes(path) or not inside(path):
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
    files: dict[str, Any] = {}
    for given, content in value.items():
        if not isinstance(given, str | PurePosixPath):
            raise SpecError(f"files.{given}", "not a path", "a relative path without `..`")
        path = str(PurePosixPath(given))
        if path in files:
            raise SpecError(f"files.{given}", f"{path} is given twice", "distinct paths")
        if isinstance(content, str) and not _utf8(content):
            raise SpecError(f"files.{given}", "text that UTF-8 cannot hold", "text or bytes")
        files[path] = content.encode() if isinstance(content, str) else content
    return MappingProxyType(files)


def _checked_env(instance: object, attribute: Attribute[Any], value: Mapping[Any, Any]) -> None:
    del instance
    for name, content in value.items():
        key = f"{attribute.name}.{name}"
        if not isinstance(name, str) or not ENV_NAME.fullmatch(name):
            raise SpecError(key, "not a name", "letters, digits and _ as a shell can set them")
        if name in SHELLS_OWN:
            raise SpecError(
                key, "some shells keep it for themselves", "a name that a shell can set"
            )
        if not isinstance(content, str) or "\0" in content or not encodes(content):
            raise SpecError(key, f"got {content!r}", "text without NUL")
        if _size([f"{name}={content}"]) > WORD_BYTES:
            raise SpecError(key, "longer than a program can be given", "less than 128 KiB")


def _freeze_env(value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise SpecError("env", f"got {value!r}", "a table of name = text")
    return MappingProxyType(dict(value))


def _freeze_tags(value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(tag, str) for tag in value):
        return tuple(value)
    raise SpecError("tags", f"got {value!r}", "a list of text")


def _checked_secrets(instance: object, attribute: Attribute[Any], value: tuple[str, ...]) -> None:
    del instance
    for name in value:
        if not ENV_NAME.fullmatch(name) or name in SHELLS_OWN:
            raise SpecError(attribute.name, f"got {name!r}", "names that a shell can set")


def _freeze_secrets(value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(dict.fromkeys(value))
    raise SpecError("secrets", "not a list of names", "a list of names of variables")


def _optional_count(instance: object, attribute: Attribute[Any], value: object) -> None:
    del instance
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise _refuse(attribute, value, "a whole number above 0", "limits.")


def _halves(instance: object, attribute: Attribute[Any], value: object) -> None:
    del instance
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:  # noqa: PLR2004 - of each
        raise _refuse(attribute, value, "a whole number above 1", "limits.")


def _optional_cpus(instance: object, attribute: Attribute[Any], value: object) -> None:
    del instance
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6  # noqa: PLR2004
    ):
        raise _refuse(attribute, value, "a number of processors above 0", "limits.")


@frozen(kw_only=True)
class Limits:
    """What the check may use. A backend that cannot enforce a limit that is set refuses the spec.

    Attributes:
        output_bytes: kept of each of stdout and stderr: half from the start, half from the end.
        memory_bytes: of memory; beyond it the outcome is `out_of_memory`.
        cpus: processors' worth of time.
        pids: processes and threads.
        disk_bytes: written to the sandbox.
    """

    output_bytes: int = field(default=10 * 1024 * 1024, validator=_halves)
    memory_bytes: int | None = field(default=None, validator=_optional_count)
    cpus: float | None = field(default=None, converter=_real, validator=_optional_cpus)
    pids: int | None = field(default=None, validator=_optional_count)
    disk_bytes: int | None = field(default=None, validator=_optional_count)

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


def _freeze_limits(value: Any) -> Limits:
    return Limits.of(value)


def _freeze_expect(value: Any) -> Expect:
    return Expect.of(value)


@frozen(kw_only=True)
class EvalSpec:
    """What to run. Equal specs have equal digests.

    Attributes:
        name: for people; need not be unique.
        check: the command whose outcome is measured: text for `/bin/sh -c`, or a list of words.
        workspace: path of the directory to run it over, None for an empty one. Never changed.
        files: content by path, laid over the workspace.
        setup: command to run before the check in the same sandbox, not counted as the check's.
        setup_deadline_s: sandbox-side limit on setup, seconds.
        deadline_s: sandbox-side limit on the check, seconds from the start of its process.
        grace_s: seconds between SIGTERM and SIGKILL after the deadline.
        backstop_s: client-side limit on waiting for the check, seconds; None for deadline, grace
            and 30 s more. One that would cut into deadline and grace is refused.
        env: environment of check and setup, beside PATH, HOME and LANG.
        secrets: names of variables that check and setup get besides, with the values that they have
            for the runner when it starts them. No journal, report or argument list has the values;
            what a program prints is another matter.
        image: what the sandbox is made of, where the backend has images.
        limits: what the check may use.
        retain: "unresolved" keeps the sandbox of a run that cannot be scored, "never" keeps none.
        tags: words to find it by.
        expect: what is expected; nothing given means that the check exits with 0.

    Raises:
        SpecError: it says something that cannot be meant.
    """

    name: str = field(validator=_name)
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
    setup_deadline_s: float = field(default=300.0, converter=_real, validator=_number)
    deadline_s: float = field(default=60.0, converter=_real, validator=_number)
    grace_s: float = field(default=2.0, converter=_real, validator=_number)
    backstop_s: float | None = field(default=None, converter=_real)
    env: Mapping[str, str] = field(factory=dict, converter=_freeze_env, validator=_checked_env)
    secrets: tuple[str, ...] = field(
        factory=tuple, converter=_freeze_secrets, validator=_checked_secrets
    )
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
        """Check what no field can by itself."""
        if self.retain not in ("never", "unresolved"):
            raise SpecError("retain", f"got {self.retain!r}", "'never' or 'unresolved'")
        for name in self.secrets:
            if name in self.env:
                raise SpecError("secrets", f"env sets {name} too", "either of them")
        environment = _size(f"{name}={value}" for name, value in self.env.items())
        for key in ("check", "setup"):
            command = getattr(self, key) or ()
            if environment + _size([command] if isinstance(command, str) else command) > ALL_BYTES:
                raise SpecError(key, "with env, longer than a program can be given", "< 1 MiB")

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
