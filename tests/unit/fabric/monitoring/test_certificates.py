"""The metric of the life of certificates."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry
from support.certificates import write_certificate

from duplane.fabric.monitoring.certificates import life_left, observe_certificates


@pytest.fixture
def leaf(tmp_path: Path) -> x509.Certificate:
    chain, _ = write_certificate(tmp_path, "edge")
    return x509.load_pem_x509_certificate(chain.read_bytes())


def test_life_that_is_left_is_a_share_which_falls_below_zero(leaf: x509.Certificate) -> None:
    begin, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    assert life_left(leaf, begin) == 1.0
    assert life_left(leaf, begin + (end - begin) / 4) == pytest.approx(0.75)
    assert life_left(leaf, end) == 0.0
    assert life_left(leaf, end + timedelta(days=1)) < 0.0


def test_each_use_has_its_certificate_and_plaintext_never_ends(leaf: x509.Certificate) -> None:
    registry = CollectorRegistry()
    observe_certificates(registry, {"clients": lambda: leaf, "fabric": lambda: None})
    name = "duplane_certificate_life_ratio"
    assert registry.get_sample_value(name, {"use": "clients"}) == pytest.approx(0.5, abs=0.1)
    assert registry.get_sample_value(name, {"use": "fabric"}) == math.inf
