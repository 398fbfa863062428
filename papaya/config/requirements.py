"""What a device must declare to take part in a task."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from papaya.config.checks import Settings, require_numbers
from papaya.config.upload_bits import UploadBits
from papaya.config.versions import EngineVersion

Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Requirements(Settings, frozen=True):
    """What a device must declare to be compatible with a task.

    A device needs the task file (`module`), or, if the task has an `owner`, it has pinned that
    owner, who has signed a bundle: `bundle`, `program` and `frozen_file` are the keys of its blobs,
    `manifest` is the digest of what was signed, in hex. `engine_version` is the minimum version of
    the engine. `upload_bits`: in how many bits the device has to upload a number.
    """

    engine: str | None = None
    module: str | None = None
    min_memory_mb: int = 0
    labels: tuple[str, ...] = ()
    owner: str | None = None
    bundle: str | None = None
    program: str | None = None
    engine_version: EngineVersion | None = None
    manifest: Digest | None = None
    frozen_file: str | None = None
    upload_bits: UploadBits = 32

    def __post_init__(self) -> None:
        require_numbers(self, "requirements.")

    @property
    def blobs(self) -> tuple[str, ...]:
        """The keys of everything that a device fetches before it takes part."""
        return tuple(key for key in (self.bundle, self.program, self.frozen_file) if key)
