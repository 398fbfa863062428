"""Build the wheel `papaya-device`: what a device without torch needs, and nothing else.

    python -m tools.device_wheel [--output dist]

The wheel has the modules that `papaya-device` imports, found by following imports in the sources;
the shim, compiled here; and the three libraries of the ExecuTorch runtime with their licence,
copied from the installed `executorch` package, because the package itself is several times as large
and its Python part imports torch. It is for Linux on x86-64.

Refused: no executorch package of the right version, no C++ compiler, a module that would bring
servers, the simulator or torch along.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from papaya import __version__
from papaya.errors import OperatorError, PapayaError
from papaya.learning.executorch.shim import (
    RUNTIME_LIBRARIES,
    SHIM_NAME,
    build,
    executorch_package,
)

ROOT = Path(__file__).resolve().parents[1]
ROOTS = (
    "papaya.cli.device",
    "papaya.cli.client.client",  # `papaya.cli.main` imports commands by name
    "papaya.cli.client.setup",
    "papaya.device.fork_server",  # started as a program
)
# Imported inside functions that a device without torch does not call.
LEFT_OUT = (
    "papaya.learning.task",
    "papaya.learning.torch",
    "papaya.sim",
    "papaya.study.notebook",  # `papaya.simulate`, which nobody has on a device
)
FORBIDDEN = ("papaya.server", "papaya.http", "papaya.study", "papaya.tsa", "papaya.coordinator")
REQUIRES = ("aiohttp>=3.11", "cryptography>=44", "dcap-qvl>=0.7", "msgspec>=0.19", "numpy>=2.0")
TAG = "py3-none-linux_x86_64"
_TIME = (2020, 1, 1, 0, 0, 0)  # the same sources give the same bytes


def device_modules() -> dict[str, Path]:
    """The modules of the package, by name, and their files."""
    found: dict[str, Path] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name in found or path is None or _is_within(name, LEFT_OUT):
            continue
        if _is_within(name, FORBIDDEN):
            raise OperatorError(
                f"the device package would contain {name}", hint="import it inside a function"
            )
        found[name] = path
        waiting += _imports(path)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return dict(sorted(found.items()))


def _is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    for found in (path.with_suffix(".py"), path / "__init__.py"):
        if found.is_file():
            return found
    return None


def _imports(path: Path) -> Iterator[str]:
    """Every module of papaya that the file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("papaya"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("papaya"):
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def build_wheel(output: Path) -> Path:
    """Write the wheel into this folder and return its path."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise OperatorError(
            f"the device package is for Linux on x86-64, this is {platform.machine()}",
            hint="build it on such a machine",
        )
    files = {f"papaya/{p.relative_to(ROOT / 'papaya')}": p for p in device_modules().values()}
    with tempfile.TemporaryDirectory() as folder:
        for path in _native(Path(folder)):
            files[f"papaya/learning/executorch/lib/{path.name}"] = path
        output.mkdir(parents=True, exist_ok=True)
        wheel = output / f"papaya_device-{__version__}-{TAG}.whl"
        part = wheel.with_suffix(".part")
        _write(part, {name: path.read_bytes() for name, path in sorted(files.items())})
        part.replace(wheel)
    return wheel


def _native(folder: Path) -> list[Path]:
    """The shim and the runtime's libraries, which find each other in one folder."""
    package = executorch_package()
    build(folder / SHIM_NAME, package, os.environ.get("CXX", "c++"), runpath="$ORIGIN")
    for name in RUNTIME_LIBRARIES:
        shutil.copy(package / "lib" / f"lib{name}.so", folder)
    licence = next((f for f in distribution("executorch").files or () if f.name == "LICENSE"), None)
    if licence is None:
        raise OperatorError(
            "the executorch package has no LICENSE", hint="install it from PyPI again"
        )
    (folder / "LICENSE-executorch").write_bytes(licence.read_binary())
    return sorted(folder.iterdir())


def _write(wheel: Path, files: dict[str, bytes]) -> None:
    info = f"papaya_device-{__version__}.dist-info"
    requires = "".join(f"Requires-Dist: {name}\n" for name in REQUIRES)
    metadata = (
        f"Metadata-Version: 2.4\nName: papaya-device\nVersion: {__version__}\n"
        "Summary: A device of PAPAYA federated learning, without torch\n"
        f"License-Expression: Apache-2.0 AND BSD-3-Clause\nRequires-Python: >=3.11\n{requires}"
    )
    files |= {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: papaya\nRoot-Is-Purelib: false\nTag: {TAG}\n"
        ).encode(),
        f"{info}/entry_points.txt": (
            b"[console_scripts]\npapaya-device = papaya.cli.device:main\n"
        ),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    lines = [f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items()]
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheel papaya-device.")
    parser.add_argument("--output", type=Path, default=Path("dist"), metavar="DIR")
    try:
        wheel = build_wheel(parser.parse_args().output)
    except PapayaError as error:
        print(f"error: {error}\n\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
