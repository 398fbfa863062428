"""The container image: what its Containerfile says, and its file tree, started for real.

Building an image needs a registry. Instead, the tree is made of what is installed here: the
interpreter, the package, and exactly the distributions that the image installs. It is started as
the image is: by a user without rights, on a root file system that cannot be written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
LINES = (REPOSITORY / "deploy" / "Containerfile").read_text().splitlines()
_START_S = 300.0


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in LINES if line.startswith(f"{name} ")]


def test_it_runs_papaya_as_a_user_without_a_name() -> None:
    assert instructions("USER")[-1] == "10001:10001"
    assert instructions("ENTRYPOINT") == ['["papaya"]']


def test_everything_that_it_copies_exists_and_is_not_ignored() -> None:
    admitted = (REPOSITORY / ".containerignore").read_text().splitlines()
    copied = [line.split()[:-1] for line in instructions("COPY") if not line.startswith("--from")]
    for name in (name for names in copied for name in names):
        assert (REPOSITORY / name).exists()
        assert f"!{name}" in admitted


def installed() -> Iterator[str]:
    """The distributions of the image, by the extras that its Containerfile names."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", "\n".join(LINES))
    wanted = list(project["dependencies"])
    for extra in extras.split(","):
        wanted += project["optional-dependencies"][extra]
    found: set[str] = set()
    while wanted:
        needed = Requirement(wanted.pop())
        if needed.name in found or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        found.add(needed.name)
        wanted += distribution(needed.name).requires or ()
        yield needed.name


def packages() -> set[Path]:
    """The top-level files and folders of these distributions."""
    found = set()
    for name in installed():
        own = distribution(name)
        for file in own.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                found.add(Path(str(own.locate_file(file.parts[0]))))
    return found


# Mounts that end with the process. `$1` is the new root, the rest its command.
_SCRIPT = """
set -e
root=$1; shift
mount --bind / "$root"
mount -t tmpfs -o mode=755 none "$root/opt"
mkdir "$root/opt/python" "$root/opt/papaya"
mount --bind "$PYTHON" "$root/opt/python"
cp -r "$TREE/." "$root/opt/papaya"
mount -o remount,ro "$root/opt"
mount -t tmpfs -o mode=755 none "$root/var/lib"
mkdir "$root/var/lib/papaya"
chown 10001:10001 "$root/var/lib/papaya"
mount -t tmpfs -o mode=1777 none "$root/tmp"
mount --rbind /dev "$root/dev"
mount -o remount,bind,ro "$root"
cd /
exec "$ENTER" -c "$CODE" "$root" "$@"
"""


# Enters the new root and gives up all rights.
_ENTER = """
import os, sys
os.chroot(sys.argv[1])
os.chdir("/var/lib/papaya")
os.setgroups([])
os.setgid(10001)
os.setuid(10001)
environment = {"PYTHONPATH": "/opt/papaya", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
arguments = ["python3", "-S", "-m", "papaya", *sys.argv[2:]]
os.execve("/opt/python/bin/python3", arguments, environment)
"""


_no_caches = shutil.ignore_patterns("__pycache__", "tests")


def tree(folder: Path) -> Path:
    """The package, and its distributions: copied, because links would lead out of the root."""
    made = folder / "tree"
    shutil.copytree(REPOSITORY / "papaya", made / "papaya", ignore=_no_caches)
    for path in packages():
        if path.is_dir():
            shutil.copytree(path, made / path.name, ignore=_no_caches, dirs_exist_ok=True)
        else:
            shutil.copy(path, made / path.name)
    return made


def test_the_file_tree_starts_without_rights_on_a_read_only_root(tmp_path: Path) -> None:
    _skip_unless_possible()
    root = tmp_path / "root"
    root.mkdir()
    listeners = ("--devices", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _SCRIPT, "sh"]
    variables = {
        **os.environ,
        "PYTHON": sys.base_prefix,
        "TREE": str(tree(tmp_path)),
        "ENTER": sys.executable,
        "CODE": _ENTER,
    }
    with subprocess.Popen(
        [*command, str(root), "serve", "--format", "json", "--data", "data", *listeners],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            if not line:
                pytest.fail(process.stderr.read())
            status = Path(f"/proc/{process.pid}/status").read_text()
            url = f"http://{json.loads(line)['addresses']['admin']}/health"
            with urllib.request.urlopen(url, timeout=_START_S) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(_START_S) == 0, process.stderr.read()
        finally:
            process.kill()
    assert re.search(r"^Uid:\s+10001\s+10001\s+10001", status, re.MULTILINE)
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)


def _skip_unless_possible() -> None:
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can make a file tree of its own with unshare")
    probe = ["unshare", "--mount", "--propagation", "private", "true"]
    if subprocess.run(probe, capture_output=True, timeout=_START_S, check=False).returncode != 0:
        pytest.skip("this machine does not allow mount namespaces")
