"""Program of `test_egress.py`: two networks of their own, servers of one under public-looking addresses, and attempts of sandboxes in the other.

`near` is where the engine and its proxy are; all it can reach is `far`, which has every address and name there is here. Nothing
outside is ever a target: both are made by `unshare --net`, and that is checked first. Prints JSON: the answer to each attempt, and
who was reached in the end.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

PUBLIC, OTHER, PUBLIC6, NEAR = "203.0.113.10", "203.0.113.20", "2001:db8:113::10", "203.0.113.1"
FORBIDDEN = [
    *("10.0.0.5", "172.16.0.5", "192.168.1.1", "169.254.169.254", "100.100.100.200", "168.63.129.16", "198.18.0.5"),
    *("192.0.0.192", "240.0.0.5"),
]
FORBIDDEN6 = ["fd00:ec2::254", "64:ff9b::a00:5", "2002:a00:5::1", "2001::5"]
NAMES = {
    "www.example.net": [PUBLIC],
    "a.b.wild.example": [PUBLIC],
    "wild.example": [OTHER],
    "other.example": [OTHER],
    "six.example.net": [PUBLIC6],
    "mixed.example.net": ["10.0.0.5", PUBLIC],
    "api.example.net": [PUBLIC],
    "untrusted.example.net": [PUBLIC],
    "misnamed.example.net": [PUBLIC],
    "loop.example.net": ["127.0.0.1"],
    "loop6.example.net": ["::1"],
    "zero.example.net": ["0.0.0.0"],
    "mapped.example.net": ["::ffff:10.0.0.5"],
    "host.example.net": [NEAR],
    **{f"f{number}.example.net": [address] for number, address in enumerate((*FORBIDDEN, *FORBIDDEN6))},
}
LITERALS = (
    "10.0.0.5",
    "127.0.0.1",
    "169.254.169.254",
    "[::1]",
    "[::ffff:a00:5]",
    "[64:ff9b::a00:5]",
    "[2002:a00:5::1]",
)
"""Addresses that are granted by themselves, and may not be reached all the same."""
GRANTED = (*LITERALS, "www.example.net", "*.wild.example", "rebind.example.net", "other.example:8080", *(
    name for name in NAMES if name.endswith(".example.net") and name != "www.example.net"
))  # fmt: skip


def request(
    target: str, host: str | None = None, *lines: str, method: str = "GET", body: str = "", version: str = "1.1"
) -> bytes:
    """Return a request as bytes; the header Host is that of the target unless told."""
    host = target.removeprefix("http://").partition("/")[0] if host is None else host
    return "\r\n".join(
        [f"{method} {target} HTTP/{version}", *([f"Host: {host}"] if host else []), *lines, "", body]
    ).encode("latin-1")


def connect(target: str, *lines: str) -> bytes:
    """Return a CONNECT to *target*, and a request within the tunnel."""
    return request(target, target, *lines, method="CONNECT") + b"GET /tunnel HTTP/1.0\r\n\r\n"


W = "http://www.example.net"
ATTEMPTS: dict[str, bytes] = {
    # names that are not granted, or look as if
    "other_host": request("http://other.example/"),
    "parent_of_wildcard": request("http://wild.example/"),
    "longer_name": request("http://www.example.net.other.example/"),
    "glued_name": request("http://notwild.example/"),
    "glued_wildcard": request("http://xwild.example/"),
    "user_in_target": request("http://www.example.net@other.example/", "other.example"),
    "user_after": request("http://other.example#@www.example.net/", "www.example.net"),
    "backslash": request("http://other.example\\@www.example.net/", "www.example.net"),
    "user_in_host": request(W + "/", "user@www.example.net"),
    "user_in_both": request("http://user:word@www.example.net/", "user:word@www.example.net"),
    "fragment": request(W + "/ok#x", "www.example.net"),
    "fragment_of_host": request(W + "#/other.example", "www.example.net"),
    "connect_with_path": connect("www.example.net:443/x"),
    "connect_with_scheme": connect("https://www.example.net:443"),
    "connect_with_user": connect("user@www.example.net:443"),
    "percent_in_host": request("http://www%2eexample.net/"),
    "two_dots": request("http://www.example.net../"),
    "localhost": request("http://localhost/"),
    "metadata_name": request("http://metadata.google.internal/computeMetadata/v1/", None, "Metadata-Flavor: Google"),
    "metadata_short_name": request("http://instance-data/latest/"),
    "punycode": request("http://xn--www-example-net-yf1b.example/"),
    "look_alike": b"GET http://www.ex\xd0\xb0mple.net/ HTTP/1.1\r\nHost: www.example.net\r\n\r\n",
    "soft_hyphen": b"GET http://www\xc2\xad.example.net/ HTTP/1.1\r\nHost: www.example.net\r\n\r\n",
    "wide_dot": b"GET http://other\xef\xbc\x8eexample/ HTTP/1.1\r\nHost: www.example.net\r\n\r\n",
    "nul_in_host": request("http://www.example.net\0.other.example/"),
    "tab_in_target": request("http://www.example.net\t.other.example/"),
    "semicolon": request("http://www.example.net;.other.example/"),
    "question": request("http://other.example?.www.example.net/", "other.example"),
    "question_and_user": request(W + "?@other.example/", "www.example.net"),
    "four_slashes": request("http:////other.example/", "other.example"),
    "one_slash": request("http:/other.example/", "other.example"),
    "name_in_brackets": request("http://[www.example.net]/"),
    "no_host_in_header": request(W + "/", "", "Host: "),
    "port_in_header": request(W + "/", "www.example.net:8080"),
    "bare_name": request("http://www/"),
    "empty_host": request("http:///x", "www.example.net"),
    "connect_other": connect("other.example:443"),
    # ports
    "port_8080": request(f"{W}:8080/"),
    "port_22": connect("www.example.net:22"),
    "port_53": connect("www.example.net:53"),
    "port_zero": connect("www.example.net:0"),
    "port_spelled": connect("www.example.net:0443"),
    "port_too_big": connect("www.example.net:65979"),
    "port_none": connect("www.example.net"),
    "port_empty": request("http://www.example.net:/", "www.example.net"),
    "port_signed": connect("www.example.net:+80"),
    "port_hex": connect("www.example.net:0x50"),
    "two_ports": connect("www.example.net:8080:80"),
    "smtp": connect("www.example.net:25"),
    "default_port_of_a_rule": request("http://other.example:443/"),
    # addresses, in every spelling
    "address": request(f"http://{OTHER}/"),
    "granted_by_address": request(f"http://{PUBLIC}/"),
    "private": request("http://10.0.0.5/"),
    "metadata": request("http://169.254.169.254/latest/meta-data/"),
    "loopback": connect("127.0.0.1:80"),
    "decimal": request("http://167772165/"),
    "octal": request("http://012.0.0.5/"),
    "hex": request("http://0xa000005/"),
    "octal_parts": request("http://012.00.00.05/"),
    "octal_dotless": request("http://01200000005/"),
    "zeros": request("http://010.000.000.005/"),
    "beyond": request("http://4462739461/"),
    "last_dot_of_address": request("http://10.0.0.5./"),
    "address_in_brackets": request("http://[10.0.0.5]/"),
    "shared": request("http://100.100.100.200/latest/meta-data/"),
    "multicast": connect("224.0.0.1:80"),
    "broadcast": connect("255.255.255.255:80"),
    "hex_parts": request("http://0xa.0x0.0x0.0x5/"),
    "short": request("http://10.5/"),
    "unspecified": connect("0.0.0.0:80"),
    "ipv6_loopback": connect("[::1]:80"),
    "ipv6_mapped": connect("[::ffff:10.0.0.5]:80"),
    "ipv6_nat64": connect("[64:ff9b::a00:5]:80"),
    "ipv6_compatible": connect("[::10.0.0.5]:80"),
    "ipv6_6to4": connect("[2002:a00:5::1]:80"),
    "ipv6_teredo": connect("[2001::5]:80"),
    "ipv6_nat64_local": connect("[64:ff9b:1::a00:5]:80"),
    "ipv6_metadata": connect("[fd00:ec2::254]:80"),
    "ipv6_mapped_dotted": request("http://[::ffff:169.254.169.254]/"),
    "ipv6_long": connect("[0:0:0:0:0:0:0:1]:80"),
    "ipv6_zone": connect("[fe80::1%lo]:80"),
    "ipv6_zone_global": connect("[2001:db8:113::10%25near]:80"),
    "ipv6_bare": connect("::1:80"),
    "wide_digits": b"GET http://\xef\xbc\x91\xef\xbc\x90.0.0.5/ HTTP/1.1\r\nHost: 10.0.0.5\r\n\r\n",
    # granted names that lead where nobody may go
    **{f"name_of_{NAMES[name][0]}": request(f"http://{name}/") for name in NAMES if NAMES[name][0] in (*FORBIDDEN, *FORBIDDEN6)},
    "name_of_loopback": request("http://loop.example.net/"),
    "name_of_loopback6": connect("loop6.example.net:80"),
    "name_of_unspecified": request("http://zero.example.net/"),
    "name_of_mapped": connect("mapped.example.net:80"),
    "name_of_this_host": request("http://host.example.net/"),
    "unknown_name": request("http://nowhere.wild.example/"),
    # one request read in two ways
    "both_lengths": request(W + "/", None, "Content-Length: 4", "Transfer-Encoding: chunked", method="POST", body="0\r\n\r\n"),
    "two_lengths": request(W + "/", None, "Content-Length: 4", "Content-Length: 5", method="POST", body="abcd"),
    "hex_length": request(W + "/", None, "Content-Length: 0x4", method="POST", body="abcd"),
    "list_of_lengths": request(W + "/", None, "Content-Length: 4, 4", method="POST", body="abcd"),
    "two_codings": request(W + "/", None, *["Transfer-Encoding: chunked"] * 2, method="POST", body="0\r\n\r\n"),
    "list_of_codings": request(W + "/", None, "Transfer-Encoding: gzip, chunked", method="POST", body="0\r\n\r\n"),
    "coding_after_control": request(W + "/", None, "Transfer-Encoding: \x0bchunked", method="POST", body="0\r\n\r\n"),
    "connect_with_body": connect("www.example.net:443", "Content-Length: 3"),
    "connect_with_chunks": connect("www.example.net:443", "Transfer-Encoding: chunked"),
    "connection_names_length": request(W + "/", None, "Connection: Content-Length", "Content-Length: 4", method="POST", body="abcd"),
    "trailers": request(W + "/sink", None, "Transfer-Encoding: chunked", method="POST", body="0\r\nHost: other.example\r\n\r\n"),
    "chunk_lines_by_lf": request(W + "/sink", None, "Transfer-Encoding: chunked", method="POST", body="3\nabc\n0\n\n"),
    "negative_chunk": request(W + "/sink", None, "Transfer-Encoding: chunked", method="POST", body="-1\r\nabc\r\n0\r\n\r\n"),
    "chunk_longer_than_told": request(W + "/sink", None, "Transfer-Encoding: chunked", method="POST", body="2\r\nabc\r\n0\r\n\r\n"),
    "signed_length": request(W + "/", None, "Content-Length: +4", method="POST", body="abcd"),
    "odd_coding": request(W + "/", None, "Transfer-Encoding: xchunked", method="POST", body="0\r\n\r\n"),
    "coding_of_1_0": request(W + "/", None, "Transfer-Encoding: chunked", method="POST", body="0\r\n\r\n", version="1.0"),
    "two_hosts": request(W + "/", None, "Host: other.example"),
    "other_host_header": request(W + "/", "other.example"),
    "no_host": request(W + "/", ""),
    "bare_lf": request(W + "/").replace(b"\r\n", b"\n"),
    "bare_cr": request(W + "/", None, "X: a\rHost: other.example"),
    "lf_in_header": request(W + "/", None, "X: a\nHost: other.example"),
    "nul": request(W + "/", None, "X: a\0b"),
    "folded": request(W + "/", None, "X: a", " Host: other.example"),
    "space_before_colon": request(W + "/", None, "Content-Length : 4", method="POST", body="abcd"),
    "connection_names_host": request(W + "/", None, "Connection: close, Host"),
    "trace": request(W + "/", method="TRACE"),
    "made_up_method": request(W + "/", method="GETT"),
    "origin_form": request("/", "www.example.net"),
    "https_target": request("https://www.example.net/", "www.example.net"),
    "ftp_target": request("ftp://www.example.net/", "www.example.net"),
    "spaces": request(f"{W}/ HTTP/1.1\r\nX: y"[: len(W) + 1] + " x", "www.example.net"),
    "http_0_9": b"GET http://www.example.net/\r\n\r\n",
    "http_2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "socks": b"\x05\x01\x00\x05\x01\x00\x03\x0fwww.example.net\x00\x50\r\n\r\n",
    "huge_head": request(W + "/", None, *(f"X-{number}: {'y' * 500}" for number in range(60))),
    "many_headers": request(W + "/", None, *(f"X-{number}: y" for number in range(200))),
    "bad_chunk": request(W + "/sink", None, "Transfer-Encoding: chunked", method="POST", body="zz\r\nabc\r\n0\r\n\r\n"),
    "chunk_extension": request(W + "/sink", None, "Transfer-Encoding: chunked", method="POST", body="3;x=y\r\nabc\r\n0\r\n\r\n"),
}  # fmt: skip
"""What must reach nothing, as bytes sent to the proxy."""

PASSED: dict[str, bytes] = {
    "plain": request(W + "/ok"),
    "upper_case": request("http://WWW.Example.NET/ok"),
    "last_dot": request("http://www.example.net./ok"),
    "wildcard": request("http://a.b.wild.example/ok"),
    "tunnel": connect("www.example.net:443"),
    "ipv6": request("http://six.example.net/ok"),
    "granted_port": request("http://other.example:8080/ok"),
    "mixed": request("http://mixed.example.net/ok"),
    "body": request(W + "/echo", None, "Content-Length: 5", method="POST", body="12345"),
    "chunks": request(
        W + "/echo", None, "Transfer-Encoding: chunked", method="POST", body="3\r\n123\r\n2\r\n45\r\n0\r\n\r\n"
    ),
    "no_port_in_host": request("www.example.net:443", "www.example.net", method="CONNECT") + b"GET /x HTTP/1.0\r\n\r\n",
    "upgrade": request(
        W + "/ok", None, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"
    ),
    "websocket": request(W + "/ok", None, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    "proxy_words": request(
        W + "/ok", None, "Proxy-Authorization: Basic eDp5", "Proxy-Connection: keep-alive", "TE: trailers"
    ),
    "pipelined": request(W + "/ok") + request("http://other.example/") + request(W + "/second"),
}
"""What is granted."""

PROGRAM = """
import base64, json, os, socket, sys, time
import kdskills_runtime

def send(data):
    try:
        with socket.create_connection(("127.0.0.1", 3128), timeout=20) as link:
            link.sendall(data)
            answer = b""
            while piece := link.recv(65536):
                answer += piece
        return answer.decode("latin-1")
    except OSError as error:
        return "OSError " + str(error)

answers = {name: send(base64.b64decode(data)) for name, data in ATTEMPTS.items()}

import urllib.request, urllib.error
def opened(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.read().decode()
    except (OSError, ValueError) as error:
        return "refused " + str(error)
answers["redirect"] = opened("http://www.example.net/redirect?http://other.example/")
answers["redirect_private"] = opened("http://www.example.net/redirect?http://10.0.0.5/")
answers["redirect_granted"] = opened("http://www.example.net/redirect?http://a.b.wild.example/ok")
first = opened("http://rebind.example.net/ok")
answers["rebind"] = json.dumps([first, *(opened("http://rebind.example.net/ok") for _ in range(5))])

def direct(family, kind, address, data=b""):
    try:
        with socket.socket(family, kind) as link:
            link.settimeout(2)
            link.connect(address)
            link.send(data or b"GET / HTTP/1.0\\r\\n\\r\\n")
            return "REACHED " + repr(link.recv(100))
    except OSError as error:
        return "OSError " + str(error)
inet, inet6, stream, datagram = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
answers["direct"] = direct(inet, stream, ("203.0.113.10", 80))
answers["direct_ipv6"] = direct(inet6, stream, ("2001:db8:113::10", 80))
answers["direct_host"] = direct(inet, stream, ("203.0.113.1", 80))
answers["direct_udp"] = direct(inet, datagram, ("203.0.113.10", 443), b"x")
answers["direct_metadata"] = direct(inet, stream, ("169.254.169.254", 80))
answers["raw"] = direct(inet, socket.SOCK_RAW, ("203.0.113.10", 0), b"x")
answers["packet"] = direct(socket.AF_PACKET, socket.SOCK_RAW, ("lo", 0), b"x" * 60)
answers["helper_by_udp"] = direct(inet, datagram, ("127.0.0.1", 3128), b"GET http://www.example.net/ HTTP/1.0\\r\\n\\r\\n")
def through(proxy):
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": proxy} if proxy else {}))
        return "REACHED" + opener.open("http://www.example.net/ok", timeout=20).read().decode()
    except OSError as error:
        return "OSError " + str(error)
answers["no_proxy"], answers["other_proxy"] = through(""), through("http://203.0.113.10:80")
answers["proxy_of_host"] = through("http://203.0.113.1:80")
answers["direct_dns"] = direct(inet, datagram, ("203.0.113.53", 53), b"x" * 20)
answers["loopback_of_host"] = direct(inet, stream, ("127.0.0.1", 80))
for name, path in (("unix_abstract", "\\0kdskills-near"), ("unix_path", UNIX_PATH)):
    answers[name] = direct(socket.AF_UNIX, stream, path)
try:
    answers["resolver"] = "REACHED " + repr(socket.getaddrinfo("www.example.net", 80))
except OSError as error:
    answers["resolver"] = "OSError " + str(error)
def helper_answers(pid):
    try:
        return "REACHED" + repr([os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")])
    except OSError as error:
        return "OSError " + str(error)
others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())]
answers["helpers"] = str(len(others))
answers["helper_descriptors"] = " ".join(map(helper_answers, others))
def opened_for(pid, what):
    try:
        with open(f"/proc/{pid}/{what}", "rb+", buffering=0) as file:
            return "REACHED" + repr(file.read(1))
    except OSError as error:
        return "OSError " + str(error)
answers["helper_memory"] = " ".join(opened_for(pid, "mem") for pid in others)
own = []
for fd in range(3, 1024):
    try:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            own.append(fd)
    except OSError:
        pass
answers["own_descriptors"] = "REACHED" + repr(own) if own else "none"
kdskills_runtime.report(answers)
"""


BOUNDED = """
import http.client, socket, time, urllib.request
import kdskills_runtime

def opened(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return len(answer.read())
    except http.client.IncompleteRead as error:
        return "cut after " + str(len(error.partial))
    except OSError as error:
        return str(error)

with socket.create_connection(("127.0.0.1", 3128), timeout=20) as idle:
    idle.sendall(b"CONNECT www.example.net:443 HTTP/1.1\\r\\nHost: www.example.net:443\\r\\n\\r\\n")
    head, began = idle.recv(1000).decode(), time.monotonic()
    rest = idle.recv(1000)
    idle_s = time.monotonic() - began
kdskills_runtime.report([head, len(rest), idle_s, opened("http://www.example.net/big"), opened("http://www.example.net/ok")])
"""
"""Goes to the bounds of `SMALL`: an idle tunnel, a large answer, and what comes after it."""
SMALL = {"size": 300_000, "seconds": 1.0}


class FarServers:
    """Listens at every address of this network and tells of whoever comes."""

    def __init__(self) -> None:
        self.rebinds = 0

    def serve(self) -> None:
        """Listen, and say so."""
        for port in (80, 443, 8080, 22, 53):
            server = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
            threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        dns.bind(("203.0.113.53", 53))
        print("ready", flush=True)  # noqa: T201
        while True:
            data, peer = dns.recvfrom(2048)
            dns.sendto(self._resolved(data, peer[0]), peer)

    def _accept(self, server: socket.socket) -> None:
        while True:
            link, peer = server.accept()
            threading.Thread(target=self._answer, args=(link, peer[0]), daemon=True).start()

    def _answer(self, link: socket.socket, peer: str) -> None:
        address, port = link.getsockname()[:2]
        link.settimeout(10)
        data = b""
        try:
            while b"\r\n\r\n" not in data:
                data += link.recv(65536) or b"\r\n\r\n"
            head, _, body = data.partition(b"\r\n\r\n")
            path = [*head.split(b" "), b""][1].decode("latin-1")
            ending = b"0\r\n\r\n" if b"chunked" in head else b"12345"
            while path == "/echo" and not body.endswith(ending):
                body += link.recv(65536)
            told = {
                "address": address.removeprefix("::ffff:"),
                "port": port,
                "head": data.decode("latin-1"),
                "peer": peer,
            }
            print(json.dumps(told), flush=True)  # noqa: T201
            if path.startswith("/redirect?"):
                link.sendall(f"HTTP/1.1 302 Found\r\nLocation: {path[10:]}\r\nContent-Length: 0\r\n\r\n".encode())
            else:
                text = b"REACHED " + address.encode() + b" " + (body if path == "/echo" else b"")
                text += b"x" * 2_000_000 if path == "/big" else b""
                link.sendall(
                    b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(text) + text
                )
        except OSError as error:
            told = {"address": address.removeprefix("::ffff:"), "port": port, "head": str(error), "peer": peer}
            print(json.dumps(told), flush=True)  # noqa: T201
        finally:
            link.close()

    def _resolved(self, query: bytes, peer: str) -> bytes:
        """Return the answer to one question; `rebind.example.net` moves to a private address after its first answer."""
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += query[at] + 1
        name, kind = ".".join(labels).lower(), struct.unpack(">H", query[at + 1 : at + 3])[0]
        addresses = NAMES.get(name, [])
        if name == "rebind.example.net" and kind == 1:
            self.rebinds += 1
            addresses = [PUBLIC] if self.rebinds == 1 else ["10.0.0.5"]
        print(json.dumps({"name": name, "peer": peer}), flush=True)  # noqa: T201
        family = socket.AF_INET6 if kind == 28 else socket.AF_INET
        packed = (
            [socket.inet_pton(family, item) for item in addresses if (":" in item) == (kind == 28)]
            if kind in {1, 28}
            else []
        )
        known = name in NAMES or name == "rebind.example.net"
        head = query[:2] + struct.pack(">HHHHH", 0x8180 if known else 0x8183, 1, len(packed), 0, 0)
        rows = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 0, len(item)) + item for item in packed)
        return head + query[12 : at + 5] + rows


def shell(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True)


def check_alone() -> None:
    """Refuse to go on in a network that leads anywhere."""
    names = sorted(name for _, name in socket.if_nameindex())
    if names != ["lo"] and not all(
        name in {"lo", "tunl0", "sit0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
        for name in names
    ):
        sys.exit(f"this is no network of its own: {names}")


def link_up(far: int) -> None:
    """Join this network to that of process *far*, which gets every address but two."""
    inside = ["nsenter", "--net", "--target", str(far)]
    shell("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(far))
    for prefix, name in (([], "near"), (inside, "far")):
        shell(*prefix, "ip", "link", "set", "lo", "up")
        shell(*prefix, "ip", "link", "set", name, "up")
    shell("ip", "addr", "add", f"{NEAR}/24", "dev", "near")
    shell("ip", "addr", "add", "2001:db8:113::1/64", "dev", "near", "nodad")
    for address in (PUBLIC, OTHER, "203.0.113.53"):
        shell(*inside, "ip", "addr", "add", f"{address}/24", "dev", "far")
    for address in FORBIDDEN[:-1]:
        shell(*inside, "ip", "addr", "add", f"{address}/32", "dev", "far")
    shell(*inside, "ip", "addr", "add", f"{PUBLIC6}/64", "dev", "far", "nodad")
    for address in FORBIDDEN6:
        shell(*inside, "ip", "addr", "add", f"{address}/128", "dev", "far", "nodad")
        shell("ip", "route", "add", f"{address}/128", "dev", "near")
    shell("ip", "route", "add", "default", "dev", "near")


@contextmanager
def two_networks(program: Sequence[str]) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Make the networks, with *program* in the far one, which says `alone`, is told `go` and says `ready`; give a folder, and it."""
    check_alone()
    far = subprocess.Popen(["unshare", "--net", *program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert far.stdout is not None
    assert far.stdin is not None
    folder = Path(tempfile.mkdtemp(prefix="kdskills-egress-"))
    try:
        assert far.stdout.readline() == "alone\n"
        link_up(far.pid)
        far.stdin.write("go\n")
        far.stdin.flush()
        assert far.stdout.readline() == "ready\n"
        for name, text in (
            ("resolv.conf", "nameserver 203.0.113.53\nsearch other.example\n"),
            ("nsswitch.conf", "hosts: files dns\n"),
            ("hosts", ""),
        ):
            (folder / name).write_text(text, encoding="ascii")
            shell("mount", "--bind", str(folder / name), f"/etc/{name}")
        yield folder, far
    finally:  # it would outlive us, and hold our streams
        far.kill()
        shutil.rmtree(folder)


def near(engine_name: str) -> None:
    """Make the networks, run the attempts in a sandbox, print what came of it."""
    with two_networks([sys.executable, __file__, "far"]) as (folder, far):
        for port in (80, 443):
            socket.create_server((NEAR, port)), socket.create_server(("127.0.0.1", port))
        sockets = []
        for where in ("\0kdskills-near", str(folder / "socket")):
            sockets.append(socket.socket(socket.AF_UNIX))
            sockets[-1].bind(where)
            sockets[-1].listen()
        results = asyncio.run(run_attempts(engine_name, str(folder / "socket")))
    visits = [json.loads(line) for line in far.stdout or ()]
    json.dump(results | {"visits": visits}, sys.stdout)


FETCH = """
import urllib.request
try:
    print(urllib.request.urlopen("http://www.example.net/skill", timeout=20).read().decode())
except OSError as error:
    print("failed", error)
"""


def write_skills(bundle: Path, script: str) -> None:
    """Write two skills with one *script*."""
    for name in ("fetch", "other"):
        scripts = bundle / "skills/lab" / name / "scripts"
        scripts.mkdir(parents=True)
        (scripts / "fetch.py").write_text(script)
        (scripts.parent / "SKILL.md").write_text(f"---\nname: {name}\ndescription: Fetches.\n---\nFetch it.\n")


async def run_skills(engine_name: str) -> dict[str, str]:
    """Run the same script of a skill that is granted a host, and of one that is not, and return what each printed."""
    from kdskills.app import Host, Settings
    from kdskills.app.identity import SCOPES, Identity
    from kdskills.app.operations import Context

    printed = {}
    with tempfile.TemporaryDirectory(prefix="kdskills-egress-") as top:
        write_skills(Path(top, "bundle"), FETCH)
        grants = {"lab.fetch": ("www.example.net",)}
        settings = Settings(
            bundle=Path(top, "bundle"), state_dir=Path(top, "state"), executor=engine_name, network=grants
        )
        host = Host(settings, entry_points=False)
        context = Context(identity=Identity(agent="writer", scopes=SCOPES, door="http"))
        for name in ("fetch", "other"):
            await host.invoke("skills.load", {"names": [name]}, context)
            answer = await host.invoke("skills.run_script", {"path": "scripts/fetch.py", "skill": name}, context)
            printed[name] = answer.result["stdout"].strip()
    return printed


async def run_attempts(engine_name: str, unix_path: str) -> dict[str, object]:
    """Run all attempts in one sandbox and return their answers, and the rows of the result."""
    from kdskills.execution import EgressBounds, ExecRequest, ExecutionOptions, Limits

    if engine_name == "docker":
        from kdskills.builtin.executors.docker import DockerExecutor as Engine
    else:
        from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor as Engine
    engine = Engine(ExecutionOptions(pool=int(engine_name == "pool")))
    attempts = {name: base64.b64encode(data).decode() for name, data in (ATTEMPTS | PASSED).items()}
    request_ = ExecRequest(
        code=PROGRAM,
        globals={"ATTEMPTS": attempts, "UNIX_PATH": unix_path},
        network=GRANTED,
        limits=Limits(wall_s=120, memory=512 * 1024 * 1024),
    )
    if engine_name == "pool":
        await engine.run(replace(request_, code="pass", globals={}))
        while engine.lacking():  # noqa: ASYNC110 - another thread fills the pool
            await asyncio.sleep(0.01)
    result = await engine.run(request_)
    if result.value is None:
        sys.exit(f"{result.status}: {result.error} {result.stderr.text}")
    rows = [(row.host, row.port, row.outcome, row.address) for row in result.connections]
    if hasattr(engine, "close"):
        engine.close()
    small = Engine(ExecutionOptions(egress=EgressBounds(**SMALL)))
    bounded = await small.run(replace(request_, code=BOUNDED, globals={}))
    told = [(row.outcome, row.received) for row in bounded.connections]
    skills = await run_skills("docker" if engine_name == "docker" else "bubblewrap")
    answers = {"answers": result.value, "rows": rows, "limits": sorted(result.limits_enforced)}
    return answers | {"bounded": bounded.value, "bounded_rows": told, "skills": skills}


if __name__ == "__main__":
    if sys.argv[1] == "far":
        check_alone()
        print("alone", flush=True)  # noqa: T201
        sys.stdin.readline()
        FarServers().serve()
    else:
        near(sys.argv[1])
