"""Checkpoints: one text per tree, and as many witnesses as the policy demands."""

from __future__ import annotations

import base64
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.verifiable_log.checkpoint import (
    Checkpoint,
    LogPolicy,
    open_checkpoint,
    open_remembered,
    sign_checkpoint,
)
from papaya.verifiable_log.errors import LogError, SignatureError
from papaya.verifiable_log.note import SignerKey, signed_note
from tests.unit.verifiable_log.builders import KEY, NOW, POLICY, WITNESSES

CHECKPOINT = Checkpoint(KEY.name, 3, bytes(range(32)))
KEYS = tuple(witness.verifier for witness in WITNESSES)
TWO_OF_THREE = LogPolicy(KEY.verifier, KEYS, 2)


def witnessed(*witnesses: SignerKey, at: int = NOW) -> bytes:
    lines = [key.signature_line(CHECKPOINT.text, at) for key in (KEY, *witnesses)]
    return signed_note(CHECKPOINT.text, lines)


def test_a_signed_checkpoint_opens() -> None:
    assert open_checkpoint(sign_checkpoint(CHECKPOINT, KEY), POLICY, NOW) == CHECKPOINT


def test_the_text_is_as_specified() -> None:
    encoded = base64.b64encode(bytes(range(32))).decode()
    assert CHECKPOINT.text == f"example.org/tsa-log\n3\n{encoded}\n"


@given(size=st.integers(0, 2**63 - 1), root=st.binary(min_size=32, max_size=32))
def test_text_and_checkpoint_are_the_same_thing(size: int, root: bytes) -> None:
    checkpoint = Checkpoint("log", size, root)
    assert Checkpoint.parse(checkpoint.text) == checkpoint


def test_extension_lines_are_allowed() -> None:
    assert Checkpoint.parse(f"{CHECKPOINT.text}an extension\n") == CHECKPOINT


ROOT = base64.b64encode(bytes(32)).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "log\n",
        f"log\n3\n{ROOT}",
        f"\n3\n{ROOT}\n",
        f"log\n\n{ROOT}\n",
        f"log\n03\n{ROOT}\n",
        f"log\n-3\n{ROOT}\n",
        f"log\n+3\n{ROOT}\n",
        f"log\n3 \n{ROOT}\n",
        f"log\n٣\n{ROOT}\n",
        f"log\n1_0\n{ROOT}\n",
        f"log\n{2**63}\n{ROOT}\n",
        f"log\n{'9' * 5000}\n{ROOT}\n",
        "log\n3\nAAAA\n",
        f"log\n3\n{ROOT[:-1]}\n",
        f"log\n3\n{ROOT}\n\nextension\n",
    ],
)
def test_malformed_checkpoints_are_refused(text: str) -> None:
    with pytest.raises(LogError):
        Checkpoint.parse(text)


def test_another_logs_checkpoint_is_refused_even_if_our_log_signed_it() -> None:
    other = Checkpoint("example.org/another", 3, bytes(32))
    with pytest.raises(LogError, match="this is a checkpoint of"):
        open_checkpoint(sign_checkpoint(other, KEY), POLICY, NOW)


def test_enough_witnesses_are_enough() -> None:
    assert open_checkpoint(witnessed(*WITNESSES[:2]), TWO_OF_THREE, NOW) == CHECKPOINT
    assert open_checkpoint(witnessed(*WITNESSES), TWO_OF_THREE, NOW) == CHECKPOINT


def test_too_few_witnesses_are_too_few() -> None:
    with pytest.raises(SignatureError, match=r"only 1 valid .* 2 of 3 witnesses are required"):
        open_checkpoint(witnessed(WITNESSES[0]), TWO_OF_THREE, NOW)


def test_one_witness_twice_is_one_witness() -> None:
    note = witnessed(WITNESSES[0], WITNESSES[0])
    with pytest.raises(SignatureError, match="only 1 valid"):
        open_checkpoint(note, TWO_OF_THREE, NOW)


def test_witnesses_without_the_log_are_nothing() -> None:
    lines = [key.signature_line(CHECKPOINT.text, NOW) for key in WITNESSES]
    with pytest.raises(SignatureError, match="has not signed"):
        open_checkpoint(signed_note(CHECKPOINT.text, lines), TWO_OF_THREE, NOW)


def test_if_the_log_s_key_has_not_signed_the_error_names_the_ids_of_the_keys() -> None:
    """The key in the policy may be the wrong one: the witnesses may have signed nevertheless."""
    other = LogPolicy(SignerKey(KEY.name, b"o" * 32).verifier, KEYS, 2)
    ids = [key.key_id.hex() for key in (KEY.verifier, *KEYS[:2], other.key)]
    named = f"its signature lines name the keys {', '.join(ids[:3])}, but not {ids[3]}"
    with pytest.raises(SignatureError, match=f"has not signed this checkpoint: {named}"):
        open_checkpoint(witnessed(*WITNESSES[:2]), other, NOW)


def test_old_cosignatures_do_not_count() -> None:
    fresh = LogPolicy(KEY.verifier, KEYS, 2, max_cosignature_age_s=3600)
    note = witnessed(*WITNESSES)
    assert open_checkpoint(note, fresh, NOW + 3600) == CHECKPOINT
    with pytest.raises(SignatureError, match="only 0 valid"):
        open_checkpoint(note, fresh, NOW + 3601)


def test_a_cosignature_counts_for_a_week_unless_the_policy_says_otherwise() -> None:
    """Otherwise a log could show somebody the same old checkpoint for ever."""
    note, week_s = witnessed(*WITNESSES), 7 * 24 * 3600
    assert open_checkpoint(note, TWO_OF_THREE, NOW + week_s) == CHECKPOINT
    with pytest.raises(SignatureError, match=r"only 0 valid .* 3 are too old"):
        open_checkpoint(note, TWO_OF_THREE, NOW + week_s + 1)
    any_age = LogPolicy(KEY.verifier, KEYS, 2, max_cosignature_age_s=math.inf)
    assert open_checkpoint(note, any_age, NOW + 1000 * week_s) == CHECKPOINT


@pytest.mark.parametrize("age_s", [0.0, -1.0, math.nan])
def test_a_maximum_age_that_no_cosignature_can_have_is_refused(age_s: float) -> None:
    with pytest.raises(LogError, match="maximum age"):
        LogPolicy(KEY.verifier, KEYS, 2, max_cosignature_age_s=age_s)


def test_cosignatures_from_the_future_do_not_count() -> None:
    note = witnessed(*WITNESSES, at=NOW + 301)
    with pytest.raises(SignatureError, match="only 0 valid"):
        open_checkpoint(note, TWO_OF_THREE, NOW)
    assert open_checkpoint(note, TWO_OF_THREE, NOW + 1) == CHECKPOINT


def test_a_remembered_checkpoint_had_its_witnesses_then() -> None:
    assert open_remembered(sign_checkpoint(CHECKPOINT, KEY), TWO_OF_THREE) == CHECKPOINT
    with pytest.raises(SignatureError):
        open_remembered(sign_checkpoint(CHECKPOINT, SignerKey("x", bytes(32))), TWO_OF_THREE)


@pytest.mark.parametrize(
    ("key", "witnesses", "quorum", "problem"),
    [
        (KEYS[0], (), 0, "not of a log"),
        (KEY.verifier, (KEY.verifier,), 1, "not of a witness"),
        (KEY.verifier, KEYS, 4, "the quorum is"),
        (KEY.verifier, KEYS, -1, "the quorum is"),
        (KEY.verifier, KEYS, 0, "the quorum is 0"),
        (
            KEY.verifier,
            (KEYS[0], SignerKey("alias", WITNESSES[0].seed, 4).verifier),
            1,
            "the same key",
        ),
    ],
)
def test_policies_that_contradict_themselves_are_refused(
    key: object, witnesses: object, quorum: int, problem: str
) -> None:
    with pytest.raises(LogError, match=problem):
        LogPolicy(key, witnesses, quorum)  # type: ignore[arg-type]
