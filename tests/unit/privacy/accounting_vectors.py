"""Make accounting.json with Google's `dp-accounting`, which does not install beside our pins:

    pip install --no-deps --target DIR dp-accounting==0.6.0 absl-py attrs mpmath immutabledict
    PYTHONPATH=DIR python tests/unit/privacy/accounting_vectors.py

`exact` is its formula for one Gaussian mechanism with noise multiplier z / sqrt(P); `composed` is
its numerical composition of P mechanisms with z, an upper bound.
"""

import json
from pathlib import Path

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

MULTIPLIERS = (0.3, 0.5, 1.0, 2.0, 5.0, 20.0)
PARTICIPATIONS = (1, 2, 10, 100)
DELTAS = (1e-3, 1e-6, 1e-9, 1e-12)


def exact(z: float, count: int, delta: float) -> float:
    loss = GaussianPrivacyLoss(standard_deviation=z / count**0.5)
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if loss.get_delta_for_epsilon(middle) <= delta else (middle, high)
    return high


def composed(z: float, count: int, delta: float) -> float | None:
    if count / z**2 > 200 or delta < 1e-9:  # its grid would not fit into memory, or is too coarse
        return None
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_accounting.GaussianDpEvent(z), count)
    return float(accountant.get_epsilon(delta))


if __name__ == "__main__":
    rows = [
        {
            "noise_multiplier": z,
            "participations": count,
            "delta": delta,
            "exact": exact(z, count, delta),
            "composed": composed(z, count, delta),
        }
        for z in MULTIPLIERS
        for count in PARTICIPATIONS
        for delta in DELTAS
    ]
    path = Path(__file__).with_name("accounting.json")
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
