"""What secure aggregation refuses, and why.

    SecureAggregationError
    ├── ParametersError    public parameters that are out of bounds or not in their one encoding
    ├── ChannelError       a key, a point or a sealed seed that is not what it should be
    ├── OfferRefused       the device will not seal: signature, expiry, policy, staleness
    ├── UpdateError        an update that cannot be encoded, or was sealed already
    └── Implausible        an unmasked sum that no honest clients can have made

The enclave measures this package, so it has its own small tree and imports nothing of the rest.
`reason` is a fixed word for counters and tests; the message has the values, never a secret.
"""

from __future__ import annotations


class SecureAggregationError(Exception):
    """Whatever this package refuses. Any other exception out of it is a bug."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ParametersError(SecureAggregationError):
    """Public parameters that nobody should agree to."""


class ChannelError(SecureAggregationError):
    """Bytes that are no key, no sealed seed, or not sealed for this offer."""


class OfferRefused(SecureAggregationError):
    """The device's own rules say no. Nothing was masked and nothing was sealed."""


class UpdateError(SecureAggregationError):
    """An update that cannot be encoded, or whose seed was sealed before."""


class Implausible(SecureAggregationError):
    """The sum is wrong: a seed did not match its vector, or a client sent nonsense."""
