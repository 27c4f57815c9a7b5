"""Workspaces that a daemon has: each an image, one layer on top of the image that was asked for.

A workspace is loaded once, as a layer, and every run of it starts from there. What arrives is
proven by the daemon itself: an image names its layers by the SHA-256 of their archives, and one
that does not match is refused. It is loaded, not committed from a container, because a commit cuts
times to whole seconds.

The names of such images say what is in them: the tree, the image below, the user and the place. A
daemon that cannot load a layer on top of what it has (some image stores cannot) is sent the
workspace for each run instead.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from attrs import define
from docker.errors import APIError, DockerException, ImageNotFound

from ... import archive
from ...core.evidence import Entry, EntryKind
from ...guest import scripts
from ...guest.account import Account

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import docker

    from ...core.evidence import Manifest

LABEL: Final = "orchestrator.workspace"
REPOSITORY: Final = "orchestrator-workspace"
WORTH_BYTES: Final = 1 << 20
"""A workspace of less is sent anew each time: that costs less than an image more."""
AT_ONCE: Final = 32
"""Workspaces that are kept on a daemon; the oldest goes first."""


@define(eq=False)
class Held:
    """A workspace in an image: what was sent, and how the storage shows it."""

    image: str
    manifest: Manifest
    account: Account


class Workspaces:
    """The workspaces of one daemon, as one backend uses them."""

    def __init__(self, client: Callable[[], docker.APIClient], workdir: str) -> None:
        """Use a daemon.

        Args:
            client: gives its client.
            workdir: path of the workspace in a sandbox.
        """
        self._client = client
        self._workdir = workdir
        self._held: dict[str, Held] = {}
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._refused = False

    def hold(
        self,
        manifest: Manifest,
        image: Mapping[str, Any],
        user: str,
        layer: Callable[[], Iterator[bytes]],
        size: Callable[[], int],
    ) -> Held | None:
        """Give a workspace that the daemon has, from now on if not before.

        Args:
            manifest: of the workspace.
            image: below it, as the daemon describes it.
            user: that the container runs as.
            layer: gives the layer as an archive.
            size: gives the size of that archive, bytes.

        Returns:
            None where it is not worth it, or the daemon cannot.
        """
        hidden = any(
            part.startswith(".wh.") for path in manifest.entries for part in path.split("/")
        )
        if self._refused or hidden or manifest.total_bytes < WORTH_BYTES:
            return None  # a name with `.wh.` means a deletion in a layer
        name = self._name(manifest, image["Id"], user)
        with self._locks[name]:
            with suppress(ImageNotFound):
                found = str(self._client().inspect_image(name)["Id"])
                known = self._held.get(name)
                if known is None or known.image != found:
                    self._held[name] = Held(found, manifest, Account(self._workdir))
                return self._held[name]
            try:
                self._make_room()
                self._load(name, image, size(), layer())
                found = str(self._client().inspect_image(name)["Id"])
            except DockerException:
                self._refused = True  # for as long as this lives; a run sends its own
                return None
            self._held[name] = Held(found, manifest, Account(self._workdir))
            return self._held[name]

    def _name(self, manifest: Manifest, image: str, user: str) -> str:
        said = [manifest.digest, image, user, self._workdir]
        said += [path.read_text("utf-8") for path in scripts().values()]
        return f"{REPOSITORY}:{hashlib.sha256(repr(said).encode()).hexdigest()[:32]}"

    def _load(self, name: str, image: Mapping[str, Any], size: int, layer: Iterator[bytes]) -> None:
        """Load an image of one more layer (Docker image specification v1.2)."""
        sent = archive.squeeze(_archive(name, image, size, layer))
        for line in self._client().load_image(sent, quiet=True):
            if "error" in line:
                raise APIError(f"{name}: {line['error']}")

    def _make_room(self) -> None:
        kept = sorted(self._images(), key=lambda each: int(each["Created"]))
        for image in kept[: -AT_ONCE + 1]:
            self._remove(image)

    def _images(self) -> list[dict[str, Any]]:
        """List those of this name: what somebody made of one has its label, and is not ours."""
        found: list[dict[str, Any]] = self._client().images(REPOSITORY, filters={"label": [LABEL]})
        return found

    def _remove(self, image: Mapping[str, Any]) -> None:
        for name in image["RepoTags"] or []:
            if name.startswith(f"{REPOSITORY}:"):
                with suppress(APIError):  # one that a container is made of stays
                    self._client().remove_image(name)

    def distrust(self, held: Held) -> None:
        """Have workspaces sent from now on: one did not come out as it went in."""
        self._refused = True
        for image in self._images():
            if image["Id"] == held.image:
                self._remove(image)

    def forget(self) -> int:
        """Remove them all from the daemon; give how many there were."""
        images = self._images()
        for image in images:
            self._remove(image)
        self._held.clear()
        return len(images)


def _archive(
    name: str, image: Mapping[str, Any], size: int, pieces: Iterator[bytes]
) -> Iterator[bytes]:
    """Give an archive of an image: its new layer first, for only then is its digest known.

    The layers below are named and not there: the daemon has them.
    """
    digest = hashlib.sha256()
    yield _header("layer.tar", size)
    for piece in pieces:
        digest.update(piece)
        yield piece
    yield archive.padding(size)
    below = image["RootFS"]["Layers"]
    config = {
        "created": datetime.now(UTC).isoformat(),
        "architecture": image["Architecture"],
        "os": image["Os"],
        "config": {**(image["Config"] or {}), "Labels": {LABEL: name.partition(":")[2]}},
        "rootfs": {"type": "layers", "diff_ids": [*below, f"sha256:{digest.hexdigest()}"]},
    }
    layers = [*(f"{number}.tar" for number in range(len(below))), "layer.tar"]
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": layers}]
    for path, value in (("config.json", config), ("manifest.json", manifest)):
        data = json.dumps(value).encode()
        yield _header(path, len(data)) + data + archive.padding(len(data))
    yield archive.END


def _header(path: str, size: int) -> bytes:
    return archive.header(Entry(path, EntryKind.FILE, 0o644, 0, size), path, (0, 0))
