"""Papaya: practical, private and scalable federated learning, asynchronous and synchronous.

An open implementation of PAPAYA (Huba et al., MLSys 2022). `docs/glossary.md` maps each noun
of the paper to the file that holds it.
"""

__version__ = "0.5.0.dev0"
