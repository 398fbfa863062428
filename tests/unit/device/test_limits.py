"""A server's choices within the device's own limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.device.limits import CheckInPacing, DeviceLimits
from papaya.errors import ConfigError
from papaya.messages.participation import Alive, Joined, Retry, UploadGranted
from papaya.messages.selection import Rejected
from tests.unit.device.fake_selector import GRANTED, joined

LIMITS = DeviceLimits()
SECONDS = st.floats(0, 1e308) | st.just(float("inf")) | st.just(float("nan"))


@given(SECONDS, SECONDS)
def test_no_time_is_beyond_the_limits(one: float, other: float) -> None:
    offer = LIMITS.bounded(joined(heartbeat_s=one, training_timeout_s=other))
    assert isinstance(offer, Joined)
    assert LIMITS.min_heartbeat_s <= offer.heartbeat_s <= LIMITS.max_heartbeat_s
    assert 0 <= offer.training_timeout_s <= LIMITS.max_training_s
    granted = LIMITS.bounded(UploadGranted(b"", 1, 1, one))
    assert isinstance(granted, UploadGranted)
    assert 0 <= granted.upload_timeout_s <= LIMITS.max_upload_s
    retry = LIMITS.bounded(Retry("", one, other))
    assert isinstance(retry, Retry)
    assert 0 <= retry.after_s <= LIMITS.max_retry_after_s
    assert 0 <= retry.keep_s <= LIMITS.max_upload_s
    rejected = LIMITS.bounded(Rejected("", one, other))
    assert isinstance(rejected, Rejected)
    assert 0 <= rejected.retry_from_s <= LIMITS.max_rejected_s
    assert 0 <= rejected.retry_until_s <= LIMITS.max_rejected_s


def test_what_is_within_the_limits_is_obeyed_as_it_is() -> None:
    for answer in (joined(), GRANTED, Retry("r", 3.0), Rejected("r", 3.0, 9.0), Alive()):
        assert LIMITS.bounded(answer) == answer


@pytest.mark.parametrize("field", DeviceLimits.__struct_fields__)
def test_limits_without_sense_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        DeviceLimits(**{field: 0})


@pytest.mark.parametrize("field", CheckInPacing.__struct_fields__)
def test_a_pacing_without_sense_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        CheckInPacing(**{field: -1.0})
