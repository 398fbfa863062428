"""Device classes: what the advertised tasks require, and which devices have it.

Paper: the Selector "summarizes current client availability for the Coordinator".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container

from papaya.config.versions import is_at_least, version_number
from papaya.messages.control import Advertised
from papaya.messages.selection import Capabilities, CheckIn, DeviceClass, Lack, refused

_UNSIGNED = ("trust_policy", "frozen", "engine_version", "upload_bits")
_MAX_CACHED_CLASSES = 64


class Distinctions:
    """Sorts devices into classes (paper: "summarizes current client availability").

    Only properties that some advertised task requires are kept. So the number of classes, and with
    it the length of reports, depends on the tasks and not on what devices say about themselves.
    """

    def __init__(self, advertised: tuple[Advertised, ...] = ()) -> None:
        wanted = [offer.requirements for offer in advertised]
        self._tasks = frozenset(offer.task for offer in advertised)
        self._engines = frozenset(need.engine for need in wanted)
        versions = {need.engine_version for need in wanted if need.engine_version}
        self._engine_versions = sorted(versions, key=version_number)
        self._modules = frozenset(need.module for need in wanted)
        self._owners = frozenset(need.owner for need in wanted)
        candidates = [(o.task, o.candidate.requirements) for o in advertised if o.candidate]
        self._bundles = frozenset(
            refused(task, needs.bundle)
            for task, needs in [*((o.task, o.requirements) for o in advertised), *candidates]
            if needs.bundle
        )
        self._labels = frozenset(label for need in wanted for label in need.labels)
        self._has_secure = any(offer.is_secure for offer in advertised)
        self._has_few_bits = any(need.upload_bits < 32 for need in wanted)
        self._memory_mb = sorted({0} | {need.min_memory_mb for need in wanted})
        self._cache: dict[tuple[Capabilities, tuple[str, ...]], DeviceClass] = {}

    def class_of(self, check_in: CheckIn) -> DeviceClass:
        """Equal for devices that no advertised task distinguishes."""
        description = (check_in.capabilities, check_in.excluded)
        found = self._cache.get(description)
        if found is None:
            if len(self._cache) >= _MAX_CACHED_CLASSES:
                self._cache.clear()
            found = self._cache[description] = self._classify(check_in)
        return found

    def _classify(self, check_in: CheckIn) -> DeviceClass:
        device = check_in.capabilities
        enough = bisect_right(self._memory_mb, device.memory_mb) - 1
        reached = [v for v in self._engine_versions if is_at_least(device.engine_version, v)]
        capabilities = Capabilities(
            engine=device.engine if device.engine in self._engines else "",
            modules=_known(device.modules, self._modules),
            memory_mb=self._memory_mb[enough],
            labels=_known(device.labels, self._labels),
            owners=_known(device.owners, self._owners),
            trust_policy=device.trust_policy or not self._has_secure,
            engine_version=reached[-1] if reached else "",
            upload_bits=next(b for b in (8, 16, 32) if device.upload_bits <= b)
            if self._has_few_bits
            else 32,
        )
        excluded = _known(check_in.excluded, self._tasks | self._bundles)
        return DeviceClass(capabilities, excluded)


def _known(names: tuple[str, ...], known: Container[str | None]) -> tuple[str, ...]:
    """Each of them once: devices that repeat a name are not of another class."""
    return tuple(sorted(name for name in dict.fromkeys(names) if name in known))


def lacks_for(offer: Advertised, device: DeviceClass, *, is_wanting: bool) -> list[Lack]:
    """What keeps a device out of this task, if it has pinned the owner. Without an owner: the one
    thing that a device with the task's file lacks. Leaves out what the device excludes.
    """
    needs, declared = offer.requirements, device.capabilities
    if offer.task in device.excluded or (
        needs.bundle and refused(offer.task, needs.bundle) in device.excluded
    ):
        return []
    if needs.owner is None:
        file = (needs.module or "").partition(".")[0]
        has_file = not file or any(module.partition(".")[0] == file for module in declared.modules)
        may_know = is_wanting and has_file
    else:
        may_know = needs.owner in declared.owners
    if not may_know:
        return []
    found: list[tuple[str, str]] = []
    if needs.engine not in (None, declared.engine):
        found.append(("engine", needs.engine or ""))
    elif not is_at_least(declared.engine_version, needs.engine_version):
        found.append(("engine_version", f"{needs.engine} ≥ {needs.engine_version}"))
    if needs.min_memory_mb > declared.memory_mb:
        found.append(("memory", str(needs.min_memory_mb)))
    if needs.upload_bits < declared.upload_bits:
        found.append(("upload_bits", str(needs.upload_bits)))
    found += [("label", label) for label in needs.labels if label not in declared.labels]
    if offer.is_secure and not declared.trust_policy:
        found.append(("trust_policy", ""))
    if needs.owner is None and needs.module is not None and needs.module not in declared.modules:
        found.append(("frozen", ""))
    if needs.owner is None and (len(found) != 1 or found[0][0] not in _UNSIGNED):
        return []
    if not found and not is_wanting:
        found.append(("no_demand", ""))
    return [Lack(offer.task, code, need) for code, need in found]
