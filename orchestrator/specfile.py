"""Specs from TOML files: any number of `[[eval]]` tables, each an `EvalSpec`.

A file is taken whole or refused whole. A refusal names file, table, key, what was found and what
was expected, and suggests the nearest key that is known; what a value must be is `core/spec.py`'s
to say.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from attrs import fields_dict

from .core.errors import SpecError
from .core.expect import refuse_unknown
from .core.spec import EvalSpec
from .workspace import missing_directory

_KNOWN: Final = tuple(fields_dict(EvalSpec))
_REQUIRED: Final = ("name", "check")


class SpecFileError(SpecError):
    """A spec file says something that cannot be meant. Nothing has been started."""

    def __init__(self, file: Path, table: str, error: SpecError) -> None:
        """Say in which table of which file the error is."""
        super().__init__(error.key, error.problem, error.expected)
        self.file = file
        self.table = table
        self.error = error
        self.args = (": ".join(part for part in (str(file), table, str(error)) if part),)

    def __reduce__(self) -> tuple[object, ...]:
        """Let it be sent from one process to another."""
        return type(self), (self.file, self.table, self.error)


def load(file: str | Path) -> list[EvalSpec]:
    """Read the specs of a TOML file, in order. A workspace is relative to the file.

    Raises:
        SpecFileError: the file cannot be read, is not TOML, or has a table that is not a spec.
    """
    path = Path(file)
    table = ""
    try:
        document = _document(path)
        specs = []
        for number, entry in enumerate(document["eval"], 1):
            table = f"[[eval]] number {number}"
            if isinstance(entry.get("name"), str):
                table += f" ({entry['name']})"
            specs.append(_spec(entry, path.parent))
    except SpecError as error:
        raise SpecFileError(path, table, error) from None
    return specs


def _document(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SpecError("file", error.strerror or str(error), "a TOML file") from None
    except UnicodeDecodeError as error:
        raise SpecError("file", f"not UTF-8 at byte {error.start}", "a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError("file", f"not TOML: {error}", "a TOML file") from None
    refuse_unknown(document, ("eval",))
    evals = document.get("eval")
    if not isinstance(evals, list) or not evals or not all(isinstance(e, dict) for e in evals):
        raise SpecError("eval", "missing or not a list of tables", "one or more [[eval]] tables")
    return document


def _spec(entry: dict[str, Any], base: Path) -> EvalSpec:
    refuse_unknown(entry, _KNOWN)
    for key in _REQUIRED:
        if key not in entry:
            raise SpecError(key, "missing", "a name for people" if key == "name" else "a command")
    if isinstance(entry.get("workspace"), str) and entry["workspace"].strip():
        directory = str((base / entry["workspace"]).absolute())
        if problem := missing_directory(directory):
            raise SpecError("workspace", problem, "a directory, relative to the spec file")
        entry = {**entry, "workspace": directory}
    return EvalSpec(**entry)
