"""Secrets of granted hosts, the pure part: what settings may say, whose they are, and what masks hide."""

from __future__ import annotations

import datetime as dt
import os

import pytest
from pydantic import SecretStr

from kdskills.app import Settings
from kdskills.app.settings import SettingsInvalid
from kdskills.errors import ExecRefused
from kdskills.execution.egress import (
    SecretOrigin,
    checked_secret,
    host_secrets,
    parse_head,
    secret_header,
    secret_origin,
)
from kdskills.execution.egress_secrets import RunSecrets, SecretMask
from kdskills.execution.owner import reap_network_folders

SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("api.example.net", SecretOrigin("api.example.net", 443, tls=True)),
        ("https://API.example.net:8443", SecretOrigin("api.example.net", 8443, tls=True)),
        ("http://api.example.net", SecretOrigin("api.example.net", 80, tls=False)),
        ("http://api.example.net:8080", SecretOrigin("api.example.net", 8080, tls=False)),
    ],
)
def test_only_a_scheme_gives_a_secret_to_plain_requests(text, origin):
    """A host alone means TLS; a secret goes without only where the operator writes http://."""
    assert secret_origin(text) == origin


@pytest.mark.parametrize(
    "text", ["*.example.net", "api", "ftp://api.example.net", "https://api.example.net/x", "a@api.example.net", ""]
)
def test_secrets_are_for_one_host(text):
    """What names no single host is refused: stars, paths, users, short names."""
    with pytest.raises(ValueError, match="is no host such as"):
        secret_origin(text)


@pytest.mark.parametrize("name", ["Host", "content-length", "Connection", "X_Key", "Accept-Encoding", "A B", ""])
def test_headers_that_requests_hang_on_are_not_put_in(name):
    """Nobody frames a request by a secret."""
    with pytest.raises(ValueError, match="is no header"):
        secret_header(name)


@pytest.mark.parametrize("value", ["short", "hunter2\r\nX: y-hunter2", " hunter2-hunter2", "hunter2-\u00e9-hunter2"])
def test_values_are_checked_and_not_repeated(value):
    """A value that could break a head or that no mask can hide is refused, in words without it."""
    with pytest.raises(ValueError, match="a secret has") as caught:
        checked_secret(SecretStr(value))
    assert value.strip() not in str(caught.value)
    with pytest.raises(SettingsInvalid) as refused:
        Settings.load(os.devnull, network_secrets={"lab.fetch": {"api.example.net": {"Authorization": value}}})
    assert value.strip() not in str(refused.value) + repr(refused.value.details)


def test_no_variable_holds_secrets_of_hosts(monkeypatch):
    """Only settings files say which host gets what."""
    monkeypatch.setenv("KDSKILLS_NETWORK_SECRETS", "{}")
    with pytest.raises(SettingsInvalid, match="NETWORK_SECRETS cannot be set by a variable"):
        Settings.load(os.devnull)


def test_a_skill_has_its_own_secrets():
    """What is for a skill beats its namespace; others have none; two that disagree do not run together."""
    table = {
        "lab": {"api.example.net": {"authorization": SecretStr("namespace-secret")}},
        "lab.fetch": {"api.example.net": {"Authorization": SecretStr(SECRET)}},
    }
    origin = secret_origin("api.example.net")
    assert host_secrets(table, ["lab.fetch"]) == {origin: {"Authorization": SECRET}}
    assert host_secrets(table, ["lab.other"]) == {origin: {"Authorization": "namespace-secret"}}
    assert host_secrets(table, ["public.fetch"]) == {}
    with pytest.raises(ExecRefused) as caught:
        host_secrets(table, ["lab.fetch", "lab.other"])
    assert SECRET not in str(caught.value)


def test_what_the_program_sent_is_replaced():
    """A header of the name, in any spelling and number, is not passed on beside the secret."""
    head = parse_head(
        b"GET / HTTP/1.1\r\nHost: api.example.net\r\nx-api-key: a\r\nX_Api_Key: b\r\nX-API-KEY: c\r\n\r\n",
        ("api.example.net", 443),
    )
    sent = head.forwarded({"X-Api-Key": SECRET})
    assert sent == b"GET / HTTP/1.1\r\nHost: api.example.net\r\nX-Api-Key: hunter2-hunter2\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_masks_hide_what_comes_in_pieces(size):
    """A secret is starred wherever the answer is cut, with the word before it and without, and lengths stay."""
    text = b"ab Bearer hunter2-hunter2 hunter2-hunter2 hunter2-hunte Bea"
    mask = SecretMask([f"Bearer {SECRET}"])
    out = b"".join(mask.feed(text[at : at + size], last=False) for at in range(0, len(text), size))
    out += mask.feed(b"", last=True)
    assert out == b"ab " + b"*" * 22 + b" " + b"*" * 15 + b" hunter2-hunte Bea"


@pytest.mark.parametrize("size", [1, 8, 12, 1000])
def test_masks_hide_secrets_that_begin_or_overlap_another(size):
    """Whichever is whole first, no part of the others is passed on."""
    text = b"abcdefghijklm xxxxxabcdefghijklm abcdefgh abcdefg"
    mask = SecretMask(["abcdefgh", "abcdefghijklm", "xxxxxabc"])
    out = b"".join(mask.feed(text[at : at + size], last=False) for at in range(0, len(text), size))
    assert out + mask.feed(b"", last=True) == b"*" * 13 + b" " + b"*" * 18 + b" ******** abcdefg"


def test_certificates_hold_for_the_whole_run():
    """The longest ones, too."""
    from cryptography import x509

    secrets = RunSecrets({secret_origin("api.example.net"): {"Authorization": SECRET}}, 90 * 86_400)
    certificate = x509.load_pem_x509_certificate(b"-----BEGIN" + secrets.trust().rpartition(b"-----BEGIN")[2])
    left = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=90) < left < dt.timedelta(days=92)


def test_the_authority_is_for_its_hosts_alone():
    """What a program trusts may certify the hosts with secrets and no other, and two runs share no key."""
    from cryptography import x509

    first, second = (RunSecrets({secret_origin("api.example.net"): {"Authorization": SECRET}}) for _ in range(2))
    certificate = x509.load_pem_x509_certificate(b"-----BEGIN" + first.trust().rpartition(b"-----BEGIN")[2])
    constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert constraints.value.permitted_subtrees == [x509.DNSName("api.example.net")]
    assert first.trust() != second.trust()
    assert b"PRIVATE" not in first.trust()


def test_folders_of_dead_owners_go(monkeypatch, tmp_path):
    """Folders of runs that were killed are removed, those of living processes and of strange names stay."""
    from kdskills.execution.owner import leaf_name

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = leaf_name()
    namespace, pid, start, mark = name.split("-")
    dead = tmp_path / f"kdskills-network-{namespace}-{pid}-{int(start) + 1}-{mark}"
    others = [tmp_path / f"kdskills-network-{name}", tmp_path / "kdskills-network-notes", tmp_path / "kdskills-other"]
    for folder in (dead, *others):
        (folder / "open").mkdir(parents=True)
    (tmp_path / f"kdskills-network-{namespace}-{pid}-{int(start) + 2}-{mark}").symlink_to(others[2])
    assert reap_network_folders() == [f"folder {dead}"]
    assert not dead.exists()
    assert all(folder.is_dir() for folder in others)
