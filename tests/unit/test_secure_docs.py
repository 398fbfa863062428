"""The pages on secure aggregation say what the code says, number by number."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from papaya.attestation.policy import DevicePolicy
from papaya.attestation.software import make_quote, root_certificate
from papaya.attestation.verify import MAX_COLLATERAL_BYTES, MAX_QUOTE_BYTES
from papaya.device.selectors import MAX_ANSWER_BYTES
from papaya.messages.participation import SecureOffer
from papaya.secagg.channel import SEALED_BYTES
from papaya.secagg.offer import OFFER_BYTES
from papaya.secagg.parameters import MAX_ENCODED_BYTES, SCHEME, PublicParameters
from papaya.tsa.errors import RefusalReason as TsaReason
from papaya.tsa.process import MAX_CONNECTIONS, platform_limits
from papaya.tsa.wire import MAX_REQUEST_BYTES, Operation
from tests.unit.test_docs import PROTOCOL, ROOT, one_line, text_of

SECURE = ROOT / "docs" / "secure-aggregation.md"
SECURE_SPEC = ROOT / "docs" / "spec" / "secure-aggregation.md"


def test_the_devices_policy_is_documented_field_by_field() -> None:
    assert column(SECURE, "field") == list(DevicePolicy.__struct_fields__)


def test_the_secure_specification_has_the_numbers_of_the_code() -> None:
    page = text_of(SECURE_SPEC)
    fields = [field.name for field in dataclasses.fields(PublicParameters)]
    assert sorted(column(SECURE_SPEC, "parameter")) == sorted(fields)
    for number in (*Operation, *TsaReason):
        assert re.search(rf"\| {number.value} \| `{number.name}`", page), number
    assert f"{OFFER_BYTES} bytes:" in page
    assert f"\n{SEALED_BYTES} bytes. Refused" in page
    assert f"Scheme `{SCHEME}`" in page


def test_both_pages_give_the_limits_of_the_code_for_an_offer() -> None:
    for page in (text_of(SECURE_SPEC), text_of(PROTOCOL)):
        for limit in (MAX_ENCODED_BYTES, MAX_QUOTE_BYTES, MAX_COLLATERAL_BYTES):
            assert f"{limit:,} bytes" in page, limit


def test_the_secure_specification_has_the_default_limits_of_a_tsa() -> None:
    page, limits = one_line(SECURE_SPEC), platform_limits()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limits.memory_bytes == memory_bytes // 2
    assert limits.offer_lifetime_s == 3600
    for phrase in (
        f"Default limits: {limits.tasks} tasks, half of the memory for sums",
        f"{limits.outstanding_offers:,} outstanding offers and {limits.open_groups} open groups",
        f"K + {limits.left_over_seeds:,} seeds per group, one hour per offer",
        f"one hour per offer, {MAX_CONNECTIONS} connections.",
    ):
        assert phrase in page, phrase
    assert MAX_REQUEST_BYTES == 2**20
    assert "A request has 1 to 2²⁰ bytes;" in page


def test_the_secure_specification_has_the_longest_answer_that_a_device_reads() -> None:
    page = one_line(SECURE_SPEC)
    assert f"A device reads answers of up to {MAX_ANSWER_BYTES >> 10} KiB, which holds both" in page
    in_base64 = 4 * (MAX_QUOTE_BYTES + MAX_COLLATERAL_BYTES) // 3
    assert in_base64 + MAX_ENCODED_BYTES < MAX_ANSWER_BYTES


def test_the_secure_specification_has_the_insecure_root_and_a_quote() -> None:
    page = text_of(SECURE_SPEC)
    root = root_certificate()
    assert root.public_bytes(serialization.Encoding.PEM).decode() in page
    der = root.public_bytes(serialization.Encoding.DER)
    assert hashlib.sha256(der).hexdigest() in page
    quote = make_quote(bytes(32), bytes(64))
    assert hashlib.sha256(quote).hexdigest() in page
    measured, said = bytes(range(32)), bytes(range(64))
    quote = make_quote(measured, said)
    assert (quote[112:144], quote[368:432]) == (measured, said)


def test_the_public_parameters_of_the_secure_specification_have_their_hash() -> None:
    page = text_of(SECURE_SPEC)
    [(encoded, digest)] = re.findall(r'^(\{"aggreg.*\})\nSHA-256: (\w+)$', page, re.MULTILINE)
    assert PublicParameters.decode(encoded.encode()).digest().hex() == digest


def test_the_protocols_page_has_every_field_of_an_offer() -> None:
    assert column(PROTOCOL, "of the offer") == list(SecureOffer.__struct_fields__)


def column(page: Path, heading: str) -> list[str]:
    """The names in the first column of the table that has this heading."""
    [table] = re.findall(
        rf"^ *\| {heading} \|.*?(?=\n\n|\Z)", text_of(page), re.MULTILINE | re.DOTALL
    )
    return re.findall(r"^ *\| `(\w+)` \|", table, re.MULTILINE)
