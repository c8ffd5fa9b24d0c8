"""Certificates of our own authority."""

import datetime as dt

import pytest
from cryptography import x509

from nexrl.tls import OPERATOR, experiment_name, namespace_of
from nexrl_operator.authority import CERTIFICATE_DAYS, Issued, is_good, issue, names_of, new_ca, renew_at

NAME = experiment_name("team", "sort-digits")
NOW = dt.datetime.now(dt.UTC)


@pytest.fixture(scope="module")
def ca() -> Issued:
    return new_ca()


def test_a_certificate_names_its_experiment_and_its_services(ca: Issued) -> None:
    issued = issue(ca, ["pool.team.svc", NAME], NAME)
    assert names_of(issued.certificate) == [NAME, "pool.team.svc"]
    assert NAME == "sort-digits.team.experiment.nexrl.dev"
    assert namespace_of(NAME) == namespace_of(experiment_name("team", "with.dots")) == "team"


def test_the_longest_names_of_kubernetes_fit(ca: Issued) -> None:
    longest = experiment_name("n" * 63, "e" * 63)
    assert names_of(issue(ca, [], longest).certificate) == [longest]


def test_an_authority_signs_and_serves_nothing_and_a_certificate_signs_nothing(ca: Issued) -> None:
    for issued, is_authority in ((ca, True), (issue(ca, [], NAME), False)):
        extensions = x509.load_pem_x509_certificate(issued.certificate).extensions
        assert extensions.get_extension_for_class(x509.BasicConstraints).value.ca == is_authority
        assert extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign == is_authority


def test_a_certificate_is_renewed_when_a_third_of_its_life_is_left(ca: Issued) -> None:
    issued = issue(ca, [], NAME)
    left = x509.load_pem_x509_certificate(issued.certificate).not_valid_after_utc - renew_at(issued.certificate)
    assert left == pytest.approx(dt.timedelta(days=CERTIFICATE_DAYS / 3), abs=dt.timedelta(minutes=5))
    assert is_good(ca, issued, [NAME], NOW)
    assert not is_good(ca, issued, [NAME], renew_at(issued.certificate))


def test_a_certificate_that_is_not_what_is_wanted_is_not_good(ca: Issued) -> None:
    issued, another = issue(ca, [], NAME), issue(ca, [], OPERATOR)
    assert not is_good(new_ca(), issued, [NAME], NOW)
    assert not is_good(ca, another, [NAME], NOW)
    assert not is_good(ca, Issued(issued.certificate, another.key), [NAME], NOW)
    assert not is_good(ca, Issued(b"", b""), [NAME], NOW)
