"""Which hosts are granted, which addresses are refused, and heads of requests that are read in one way only."""

from __future__ import annotations

import ipaddress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest
from kdskills.execution.check import check_request
from kdskills.execution.egress import (
    BadAnswer,
    BadHead,
    RequestBody,
    ResponseHead,
    address_problem,
    asked_network,
    canonical_host,
    granted,
    host_rule,
    parse_head,
)


@pytest.mark.parametrize(
    ("rule", "host", "port", "reached"),
    [
        ("pypi.org", "pypi.org", 443, True),
        ("pypi.org", "pypi.org", 80, True),
        ("pypi.org", "pypi.org", 8080, False),
        ("pypi.org", "www.pypi.org", 443, False),
        ("PyPI.org.", "pypi.org", 443, True),
        ("pypi.org:8443", "pypi.org", 8443, True),
        ("pypi.org:8443", "pypi.org", 443, False),
        ("*.example.net", "a.example.net", 443, True),
        ("*.example.net", "a.b.example.net", 443, True),
        ("*.example.net", "example.net", 443, False),
        ("*.example.net", "xexample.net", 443, False),
        ("*.example.net:81", "a.example.net", 80, False),
        ("203.0.113.7", "203.0.113.7", 80, True),
        ("[2001:DB8::0:7]:80", "2001:db8::7", 80, True),
        ("xn--mnchen-3ya.example", "xn--mnchen-3ya.example", 443, True),
    ],
)
def test_rules_match_whole_labels(rule, host, port, reached):
    """A rule is a host, or all below a name, at the ports of the web or the one it names."""
    assert host_rule(rule).matches(host, port) is reached


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "*",
            "*.",
            "*.net",
            "localhost",
            "a..b",
            ".a.b",
            "a.b:",
            "a.b:0",
            "a.b:99999",
            "a.b:080",
            "a.b:x",
            "a b.c",
        ),
        *("münchen.example", "http://a.b", "a.b/c", "a@b.c", "*.*.a.b", "a.*.b", "*.203.0.113.7", "0x7f.1", "127.1"),
        *(
            "017700000001.0",
            "1.2.3",
            "1.2.3.4.5",
            "[::1",
            "[fe80::1%lo]",
            "::1",
            "-a.b",
            "a-.b",
            f"{'a' * 64}.b",
            "a.b\n",
        ),
    ],
)
def test_what_is_no_rule_is_refused(text):
    """Anything else than a rule is an error of the settings, and a request with it is refused."""
    with pytest.raises(ValueError, match="is no rule such as"):
        host_rule(text)
    with pytest.raises(ExecRefused) as caught:
        check_request(ExecRequest(argv=("true",), network=(text,)))
    assert caught.value.code == "bad_request"


@pytest.mark.parametrize(
    "address",
    [
        *(
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "127.9.9.9",
            "169.254.169.254",
            "172.31.255.255",
            "192.168.0.1",
        ),
        *("100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1"),
        *("255.255.255.255", "::", "::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::7f00:1", "64:ff9b::808:808"),
        *(
            "64:ff9b:1::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2002:7f00:1::",
            "2001::1",
            "100::1",
        ),
        *("2001:10::1", "fe80::1%eth0", "2600::1%eth0", "no address", "8.8.8.8 ", "010.0.0.1"),
    ],
)
def test_addresses_that_are_nobodys_business(address):
    """Private, local, shared, reserved and metadata addresses are refused, and IPv4 in every disguise of IPv6."""
    assert address_problem(address) is not None


@pytest.mark.parametrize("address", ["8.8.8.8", "203.0.113.1", "151.101.0.223", "2600::1", "2a04:4e42::223"])
def test_public_addresses_pass(address):
    """Addresses of the public Internet are reached."""
    assert address_problem(address) is None


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_no_address_the_standard_library_calls_private_passes(address):
    """Whatever Python's own table calls local in any way is refused, documentation's addresses aside, which lead nowhere."""
    documentation = ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")
    if any(
        address in network for network in map(ipaddress.ip_network, documentation) if network.version == address.version
    ):
        return
    local = address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
    if local or address.is_reserved or address.is_unspecified:
        assert address_problem(str(address)) is not None


def request(*lines: str) -> bytes:
    """Return a head."""
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_a_head_is_rewritten_for_the_server():
    """What is about the link is left out, the target becomes a path, and the connection ends with the answer."""
    head = parse_head(
        request(
            "POST http://Example.NET.:81/a?b=c HTTP/1.1", "Host: example.net:81", "Accept: x", "Proxy-Connection: keep-alive",
            "Proxy-Authorization: Basic x", "Connection: keep-alive, X-Mine", "X-Mine: 1", "Upgrade: h2c", "Content-Length: 3",
        )
    )  # fmt: skip
    assert (head.method, head.host, head.port, head.size) == ("POST", "example.net", 81, 3)
    assert head.forwarded({}) == request(
        "POST /a?b=c HTTP/1.1", "Host: example.net:81", "Accept: x", "Content-Length: 3", "Connection: close"
    )


def test_a_tunnel_names_host_and_port():
    """CONNECT is read as host and port, with or without the port in its header Host."""
    for host in ("example.net:443", "example.net", "EXAMPLE.net"):
        head = parse_head(request("CONNECT example.net:443 HTTP/1.1", f"Host: {host}"))
        assert (head.method, head.host, head.port, head.path) == ("CONNECT", "example.net", 443, "")
    assert parse_head(request("CONNECT example.net:8443 HTTP/1.0")).port == 8443


@given(st.binary(max_size=400), st.integers(0, 200), st.integers(0, 30))
def test_a_damaged_head_is_refused_or_means_the_same(noise, at, cut):
    """Whatever bytes stand in a head: it is refused, or it is for a host it names itself, in lines of its own."""
    whole = request("GET http://example.net/x HTTP/1.1", "Host: example.net", "X: y")
    data = whole[:at] + noise + whole[at + cut :]
    try:
        head = parse_head(data)
    except BadHead:
        return
    assert canonical_host(f"[{head.host}]" if ":" in head.host else head.host) == head.host
    lines = head.forwarded({})[:-4].split(b"\r\n")
    assert not any(b"\r" in line or b"\n" in line or b"\0" in line for line in lines)
    assert [line[:5].lower() for line in lines].count(b"host:") == 1


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.data())
def test_a_chunked_body_ends_where_it_ends(pieces, data):
    """However a body arrives in pieces, exactly its chunks are passed on, and nothing that follows."""
    wire = b"".join(b"%X\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    stream, body, out = wire + b"GET http://other.example/ HTTP/1.1\r\n\r\n", RequestBody(None), b""
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        out += body.feed(stream[:size])
        stream = stream[size:]
    assert body.complete
    assert out.lower() == wire.lower()


@given(st.binary(max_size=200))
def test_a_body_of_a_length_has_that_length(noise):
    """Of a body with a length so many bytes are passed on and no more."""
    body = RequestBody(10)
    assert body.feed(noise) == noise[:10]
    assert body.complete is (len(noise) >= 10)


@given(st.binary(max_size=200))
def test_chunks_are_well_formed_or_refused(noise):
    """Bytes that are no chunks are refused, or wait for their end; nothing else is raised."""
    body = RequestBody(None)
    try:
        body.feed(noise)
    except BadHead:
        return
    assert not body.complete or b"0\r\n\r\n" in noise


def test_an_answer_says_that_it_is_the_last():
    """The head of the final answer is rewritten, in whatever pieces it comes; what is no answer is refused."""
    wire = b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nConnection: keep-alive\r\nKeep-Alive: 5\r\nA: b\r\n\r\nbody\r\n\r\n"
    answer = ResponseHead()
    out = b"".join(answer.feed(wire[at : at + 1]) for at in range(len(wire)))
    assert out.endswith(b"HTTP/1.1 200 OK\r\nA: b\r\nConnection: close\r\n\r\nbody\r\n\r\n")
    for noise in (b"SSH-2.0-x\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000):
        with pytest.raises(BadAnswer):
            ResponseHead().feed(noise)


def test_grants_are_by_namespace_and_full_id():
    """A program gets what its skills' namespaces and full ids are granted, and nothing by a part of a name."""
    grants = {"public": ["a.example"], "public.fetch": ["b.example", "a.example"], "fetch": ["c.example"]}
    assert granted(grants, ["public.fetch"]) == ("a.example", "b.example")
    assert granted(grants, ["public.other"]) == ("a.example",)
    assert granted(grants, ["mine.fetch"]) == "none"
    assert granted(grants, []) == "none"


@pytest.mark.parametrize(
    ("metadata", "asked"),
    [
        ({}, ()),
        ({"kdskills.network": "pypi.org, *.example.net"}, ("pypi.org", "*.example.net")),
        ({"kdskills": {"network": ["pypi.org"]}}, ("pypi.org",)),
        ({"kdskills": {"pin": True}}, ()),
        ({"kdskills": "text"}, ()),
    ],
)
def test_a_skill_asks_in_its_metadata(metadata, asked):
    """Both spellings of metadata are read; whatever else stands there asks for nothing."""
    assert asked_network(SimpleNamespace(metadata=metadata).metadata) == asked
