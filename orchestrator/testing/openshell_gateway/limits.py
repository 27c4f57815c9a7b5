"""What the gateway refuses to be asked, with the codes and words of the real one."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REQUEST_BYTES: Final = 1024 * 1024
ARGUMENTS: Final = 1024
ARGUMENT_BYTES: Final = 32 * 1024
COMMAND_BYTES: Final = 256 * 1024
WORKDIR_BYTES: Final = 4096
NAME_BYTES: Final = 19
LABEL_BYTES: Final = 63
POLICY_BYTES: Final = 256 * 1024
ENVIRONMENT_ENTRIES: Final = 128
ENVIRONMENT_KEY_BYTES: Final = 256
ENVIRONMENT_VALUE_BYTES: Final = 8192
PAGE_SIZE: Final = 100
PAGE_SIZE_MOST: Final = 1000
RESERVED: Final = "OPENSHELL_"
RESERVED_EXCEPT: Final = {"OPENSHELL_PYFUNC_B64"}
"""What the SDK itself sends in the environment of an exec."""
WORKSPACE: Final = "default"
"""The only workspace that there is."""

_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SAFE = re.compile(r"[A-Za-z0-9./_-]+")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


class RefusedError(Exception):
    """A request fails.

    Attributes:
        code: name of the gRPC status.
        details: its message.
        reason: what a machine may read of it (`ErrorInfo.reason`), where there is such a thing.
    """

    def __init__(self, code: str, details: str, reason: str = "") -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details
        self.reason = reason


def invalid(details: str) -> RefusedError:
    """Give the refusal of a request that no gateway could serve."""
    return RefusedError("INVALID_ARGUMENT", details)


def not_found() -> RefusedError:
    """Give the answer to a request about a sandbox that is not there."""
    return RefusedError("NOT_FOUND", "sandbox not found")


def check_size(found: int) -> None:
    """Refuse a request that the gateway would not decode."""
    if found > REQUEST_BYTES:
        raise RefusedError(
            "OUT_OF_RANGE",
            f"Error, decoded message length too large: found {found} bytes, "
            f"the limit is: {REQUEST_BYTES} bytes",
        )


def check_scope(request: Any, *, all_of_them: bool = False) -> None:
    """Refuse a request for another workspace than the one that there is."""
    scope = request.workspace_scope
    if all_of_them and scope.HasField("all_workspaces"):
        return
    if not scope.workspace:
        raise invalid("workspace_scope.workspace is required")
    if scope.workspace != WORKSPACE:
        raise RefusedError("NOT_FOUND", f"workspace '{scope.workspace}' not found")


def check_name(name: str) -> None:
    """Refuse what is not a short label of DNS; an empty name is the gateway's to choose."""
    if len(name.encode()) > NAME_BYTES:
        raise invalid(f"name exceeds maximum length ({len(name.encode())} > {NAME_BYTES})")
    if re.search(r"[^a-z0-9-]", name):
        raise invalid("name must contain only lowercase alphanumeric characters or hyphens")
    if name.startswith("-") or name.endswith("-"):
        raise invalid("name must not start or end with a hyphen")
    if "--" in name:
        raise invalid("name must not contain consecutive hyphens")


def check_label(key: str, value: str) -> None:
    """Refuse what is not a label of Kubernetes."""
    prefix, slash, name = key.rpartition("/")
    if not _LABEL_NAME.fullmatch(name) or len(name) > LABEL_BYTES:
        raise invalid(f"label key name segment contains invalid characters: '{key}'")
    if slash and not _LABEL_PREFIX.fullmatch(prefix):
        raise invalid(f"label key prefix must be a DNS subdomain: '{key}'")
    if len(value) > LABEL_BYTES:
        raise invalid(f"label value exceeds {LABEL_BYTES} characters: '{value}'")
    if value and not _LABEL_NAME.fullmatch(value):
        raise invalid(
            "label value contains invalid characters (must be alphanumeric, '-', '_', or '.'): "
            f"'{value}'"
        )


def selector(text: str) -> dict[str, str]:
    """Read `key=value,key2=value2`; equality is all there is."""
    wanted = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise invalid(f"invalid label selector: expected 'key=value', got '{pair}'")
        check_label(key, value)
        wanted[key] = value
    return wanted


def _check_text(value: str, field: str, *, newlines: bool = False) -> None:
    if "\0" in value:
        raise invalid(f"{field} contains null bytes")
    if not newlines and ("\n" in value or "\r" in value):
        raise invalid(f"{field} contains newline or carriage return characters")


def _check_environment(entries: Mapping[str, str], field: str, allowed: set[str]) -> None:
    for key, value in entries.items():
        if not _ENV_KEY.fullmatch(key):
            raise invalid(f"{field} keys must match ^[A-Za-z_][A-Za-z0-9_]*$; got '{key}'")
        if key.startswith(RESERVED) and key not in allowed:
            raise invalid(f"{field} keys starting with {RESERVED} are reserved; got '{key}'")
        _check_text(value, f"{field} value for '{key}'")


def check_create(request: Any) -> None:
    """Refuse a sandbox that cannot be made."""
    if not request.HasField("spec"):
        raise invalid("spec is required")
    check_name(request.name)
    environment = request.spec.environment
    if len(environment) > ENVIRONMENT_ENTRIES:
        raise invalid(
            f"spec.environment exceeds maximum entries ({len(environment)} > {ENVIRONMENT_ENTRIES})"
        )
    for key, value in environment.items():
        for what, found, most in (
            ("key", len(key.encode()), ENVIRONMENT_KEY_BYTES),
            ("value", len(value.encode()), ENVIRONMENT_VALUE_BYTES),
        ):
            if found > most:
                raise invalid(f"spec.environment {what} exceeds maximum length ({found} > {most})")
    _check_environment(environment, "spec.environment", set())
    if request.spec.command and not request.spec.command[0]:
        raise invalid("spec.command[0] must not be empty")
    size = request.spec.policy.ByteSize()
    if size > POLICY_BYTES:
        raise invalid(f"policy serialized size exceeds maximum ({size} > {POLICY_BYTES})")
    for key, value in request.labels.items():
        check_label(key, value)


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise invalid("command is required")
    if len(command) > ARGUMENTS:
        raise invalid(f"command array exceeds {ARGUMENTS} argument limit")
    for index, argument in enumerate(command):
        if len(argument.encode()) > ARGUMENT_BYTES:
            raise invalid(f"command argument {index} exceeds {ARGUMENT_BYTES} byte limit")
        _check_text(argument, f"command argument {index}", newlines=True)


def check_exec(request: Any) -> None:
    """Refuse a command that cannot be executed."""
    if not request.sandbox:
        raise invalid("sandbox is required")
    _check_command(request.command)
    for key, value in request.environment.items():
        if len(value.encode()) > ARGUMENT_BYTES:
            raise invalid(f"environment value for '{key}' exceeds {ARGUMENT_BYTES} byte limit")
    _check_environment(request.environment, "environment", RESERVED_EXCEPT)
    if len(request.workdir.encode()) > WORKDIR_BYTES:
        raise invalid(f"workdir exceeds {WORKDIR_BYTES} byte limit")
    _check_text(request.workdir, "workdir")
    if request.execution_timeout.ToNanoseconds() < 0:
        raise invalid("execution_timeout must not be negative")
    if request.request_id and not _is_uuid(request.request_id):
        raise invalid("request_id must be a UUID")


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


def _quote(value: str) -> str:
    if _SAFE.fullmatch(value):
        return value
    return "'" + value.replace("'", "'\"'\"'") + "'"


def command_line(request: Any) -> str:
    """Assemble what the shell in the sandbox is given: `cd WORKDIR && KEY=VALUE... ARGUMENTS`."""
    words = [f"{key}={_quote(value)}" for key, value in sorted(request.environment.items())]
    words += [_quote(argument) for argument in request.command]
    line = " ".join(words)
    if request.workdir:
        line = f"cd {_quote(request.workdir)} && {line}"
    if len(line.encode()) > COMMAND_BYTES:
        raise invalid(
            "command construction failed: "
            f"assembled command string exceeds {COMMAND_BYTES} byte limit"
        )
    return line
