"""The backends by name, as the command line and the pytest plugin make them.

What a backend needs is loaded when it is made: a machine without Docker has no use for its SDK.
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from attrs import frozen

from .core.errors import SpecError
from .core.expect import nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ports import Backend


class BackendName(StrEnum):
    """The backends there are."""

    LOCAL = "local"
    DOCKER = "docker"
    OPENSHELL = "openshell"


@frozen(kw_only=True)
class Options:
    """What backends are made with; each takes what concerns it.

    Attributes:
        sandboxes: directory for the local backend's; None for its own choice.
        image: for specs that name none.
        endpoint: of the OpenShell gateway; None for what the environment says.
        progress: told what is being waited for before a run can begin.
    """

    sandboxes: Path | None = None
    image: str | None = None
    endpoint: str | None = None
    progress: Callable[[str], None] | None = None


def make(name: BackendName | str, options: Options | None = None) -> Backend:
    """Make a backend.

    Raises:
        SpecError: there is none of that name, or it cannot be made here.
    """
    options = options or Options()
    try:
        chosen = BackendName(name)
    except ValueError:
        raise SpecError("backend", f"got {name!r}", nearest(name, BackendName)) from None
    try:
        return _made(chosen, options)
    except ModuleNotFoundError as error:
        expected = f"pip install 'eval-orchestrator[{chosen}]'"
        raise SpecError("backend", str(error), expected) from error


def _made(name: BackendName, options: Options) -> Backend:
    match name:
        case BackendName.LOCAL:
            from .backends.local import LocalBackend  # noqa: PLC0415 - see above

            return LocalBackend(options.sandboxes)
        case BackendName.DOCKER:
            from .backends.docker import DockerBackend  # noqa: PLC0415

            return DockerBackend(options.image, progress=options.progress)
        case BackendName.OPENSHELL:
            from .backends.openshell import OpenShellBackend  # noqa: PLC0415

            return OpenShellBackend(options.image, endpoint=options.endpoint)
        case _:
            assert_never(name)


def place_of_sandboxes(state_dir: Path) -> Path:
    """Give the place of a state's local sandboxes: what was begun there is looked for there.

    It is noted in the state directory, which is made if it is not there, so that another TMPDIR
    later does not lose them.
    """
    from .backends.local import LocalBackend  # noqa: PLC0415 - see above

    state_dir.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), (state_dir / ".gitignore").open("x") as ignore:
        ignore.write("*\n")  # one that is there is somebody's own
    note = state_dir / "sandboxes"
    if not note.exists():
        draft = note.with_name(f".sandboxes.{os.getpid()}")
        draft.write_bytes(os.fsencode(LocalBackend().root))
        with suppress(FileExistsError):
            note.hardlink_to(draft)
        draft.unlink()
    return Path(os.fsdecode(note.read_bytes()))
