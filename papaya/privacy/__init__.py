"""Differential privacy: what participations cost (docs/privacy.md)."""
