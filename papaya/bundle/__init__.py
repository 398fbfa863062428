"""Bundles: what an owner signs so that devices train a task that they have never seen.

    manifest    what is trained, on which examples, within which limits; signed by the owner
    lease       how long devices may start to train it; signed again and again, changes no digest
    archive     the program's files as one blob, named by its hash in the manifest
    owner       the owner's keys: signatures, successors, revocations

Everything here is bytes in and values out. A device verifies a signature before it parses anything
else of a bundle, and a hash before it parses a blob.
"""
