"""Settings of the whole test suite. No fixtures: each folder of tests makes its own things."""

import os
import shutil
import signal
import sys
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# A shell starts background jobs with SIGINT ignored, and child processes would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Commands must not find what the person who runs the tests has logged in to.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="papaya-config-")

# The tests start hundreds of processes. Without stored byte code each compiles the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A slow machine is not a failing property: how long an example takes is for `bench/` to judge.
# The default run tries the same examples each time, so that no change fails because of a property
# that it does not touch. `make soak` tries other examples (`--hypothesis-profile random`).
settings.register_profile(
    "random", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("papaya", parent=settings.get_profile("random"), derandomize=True)
settings.load_profile("papaya")

_MOST_WORKERS = 4  # a worker imports torch and grows to a gigabyte


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: two workers more than processors, because many tests wait for others.

    One more kept two processors busy for four fifths of the time.
    """
    return min((os.cpu_count() or 1) + 2, _MOST_WORKERS)


def pytest_sessionfinish() -> None:
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
    if (postgresql := sys.modules.get("tests.postgresql")) is not None:
        postgresql.end()
