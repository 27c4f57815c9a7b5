"""The twin of the vault: its own proofs, over dictionaries in place of directories."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..core.errors import (
    EvidenceIncompleteError,
    VaultError,
)
from ..core.evidence import Changes, Manifest, Receipt
from ..evidence import Evidence
from ..vault import Vault, VaultIntake
from .faults import Way

if TYPE_CHECKING:
    from ..core.verdict import Outcome
    from .simulate import World


class SimulatedVault(Vault):
    """The vault with its proofs, over dictionaries in place of directories."""

    def __init__(self, world: World) -> None:
        """Begin empty."""
        self.path = Path("simulated")
        self._world = world
        self._contents: dict[str, bytes] = {}
        self._manifests: dict[str, Manifest] = {}
        self.records: dict[str, dict[str, Evidence]] = {}

    def _check_disk(self) -> None:
        if self._world.disturbance("vault") is Way.DISK_FULL:
            raise VaultError("vault: No space left on device")

    def has(self, digest: str, size: int | None = None) -> bool:
        """Tell whether content is here."""
        del size
        return digest in self._contents

    def content(self, digest: str) -> bytes:
        """Give content."""
        if digest not in self._contents:
            raise EvidenceIncompleteError(f"{digest} was not kept")
        return self._contents[digest]

    def keep(self, stream: BinaryIO, *, flush: bool) -> tuple[int, str]:
        """Keep content."""
        del flush
        self._check_disk()
        data = stream.read()
        digest = hashlib.sha256(data).hexdigest()
        self._contents[digest] = data
        return len(data), digest

    def keep_manifest(self, manifest: Manifest) -> str:
        """Keep a manifest."""
        digest = manifest.digest
        self._manifests[digest] = manifest
        return digest

    def manifest(self, digest: str) -> Manifest:
        """Give a manifest."""
        return self._manifests[digest]

    def _record(self, intake: VaultIntake, manifest: Manifest, *, sealed: bool) -> Receipt:
        self._check_disk()
        changes = Changes.between(intake.baseline, manifest)
        record = f"record of {intake.run_id}, sealed={sealed}"
        self.records.setdefault(intake.run_id, {})[record] = Evidence(
            run_id=intake.run_id,
            sealed=sealed,
            outcome=None,
            manifest=manifest,
            baseline=intake.baseline,
            path=self.path,
            outputs=dict(intake.outputs),
            vault=self,
        )
        return Receipt.for_tree(
            intake.run_id, intake.baseline, manifest, changes, sealed=sealed, record=record
        )

    def evidence(self, receipt: Receipt, outcome: Outcome | None) -> Evidence:
        """Give evidence."""
        kept = self.records[receipt.run_id][receipt.record]
        return Evidence(
            run_id=kept.run_id,
            sealed=kept.sealed,
            outcome=outcome,
            manifest=kept.manifest,
            baseline=kept.baseline,
            path=kept.path,
            outputs=dict(kept._outputs),  # noqa: SLF001 - the twin of what reads a record back
            vault=self,
        )
