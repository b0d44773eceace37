"""Program of `test_egress_secrets.py`: hosts with certificates of an authority of the test's own, and programs whose requests get secrets.

`python -m tests.integration.egress_secrets_world ENGINE` in a network of its own, as `egress_world` says. Prints JSON.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.integration.egress_world import FarServers, check_alone, two_networks, write_skills

SECRET = "planted-" + "4f1c9be07a62d85"
HOSTS = ("api.example.net", "www.example.net", "other.example", "misnamed.example.net", "untrusted.example.net")
GRANTED = ("*.example.net", "other.example")
SECRETS = {
    "lab.fetch": {
        "api.example.net": {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET},
        "untrusted.example.net": {"Authorization": f"Bearer {SECRET}"},
        "misnamed.example.net": {"Authorization": f"Bearer {SECRET}"},
        "http://www.example.net": {"X-Api-Key": SECRET},
    }
}

PROGRAM = r"""
import http.client, json, os, re, socket, ssl, subprocess, sys, urllib.error, urllib.request
import kdskills_runtime

API = "https://api.example.net"
WRONG = {"Authorization": "Bearer placeholder", "X_Api_Key": "mine", "x-api-key": "mine"}

def opened(url, headers=(), data=None):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, dict(headers)), timeout=20) as answer:
            return answer.read().decode() + str(answer.headers)
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code} " + error.read().decode()
    except OSError as error:
        return "OSError " + str(error)

def tunnel(port=443, host="api.example.net"):
    link = socket.create_connection(("127.0.0.1", 3128), timeout=20)
    link.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    head = b""
    while b"\r\n\r\n" not in head and (piece := link.recv(1)):
        head += piece
    return link, head

def said(data, alpn=(), name="api.example.net"):
    try:
        link, head = tunnel()
        context = ssl.create_default_context()
        if alpn:
            context.set_alpn_protocols(alpn)
        with context.wrap_socket(link, server_hostname=name) as tls:
            tls.sendall(data)
            answer = b""
            while piece := tls.recv(65536):
                answer += piece
            return answer.decode("latin-1")
    except OSError as error:
        return "OSError " + str(error)

def plain_in_tunnel():
    link, head = tunnel()
    with link:
        link.sendall(b"GET /echo HTTP/1.1\r\nHost: api.example.net\r\n\r\n")
        link.settimeout(20)
        answer = b""
        while piece := link.recv(65536):
            answer += piece
        return answer.decode("latin-1")

def issuer(host):
    link, _ = tunnel(host=host)
    with ssl.create_default_context().wrap_socket(link, server_hostname=host) as tls:
        return str(dict(row[0] for row in tls.getpeercert()["issuer"])["commonName"])

def get(path="/echo", host="Host: api.example.net\r\n", method="GET", more="", body="", version="1.1"):
    return f"{method} {path} HTTP/{version}\r\n{host}{more}\r\n{body}".encode("latin-1")

answers = {
    "urllib": opened(API + "/echo", WRONG),
    "post": opened(API + "/echo", data=b"x" * 70_000)[-400:],
    "split": opened(API + "/split"), "header": opened(API + "/header"), "token": opened(API + "/token"),
    "memory": opened(API + "/memory"),
    "gzip": opened(API + "/gzip", {"Accept-Encoding": "gzip"}),
    "redirect": opened(API + "/redirect"),
    "plain_explicit": opened("http://www.example.net/echo"), "plain_of_tls": opened("http://api.example.net/echo"),
    "tls_of_plain": opened("https://www.example.net/echo"),
    "no_secret": opened("https://other.example/echo"),
    "issuer_api": issuer("api.example.net"), "issuer_other": issuer("other.example"),
    "untrusted": opened("https://untrusted.example.net/echo"), "misnamed": opened("https://misnamed.example.net/echo"),
    "other_port": tunnel(8443)[1].decode(),
    "plain_in_tunnel": plain_in_tunnel(),
    "other_name": said(get(), name="other.example"),
    "h2_only": said(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ["h2"]),
    "inside": said(get()),
    "inside_dropped": said(get(more="Connection: close, Authorization\r\nAuthorization: mine\r\nAuthorization: twice\r\n")),
    "pipelined": said(get() + get("/second", "Host: other.example\r\n")),
    "REFUSED_host": said(get(host="Host: other.example\r\n")),
    "REFUSED_port": said(get(host="Host: api.example.net:80\r\n")),
    "REFUSED_two_hosts": said(get(more="Host: other.example\r\n")),
    "REFUSED_no_host": said(get(host="")),
    "REFUSED_absolute": said(get("https://api.example.net/echo")),
    "REFUSED_absolute_other": said(get("http://other.example/echo")),
    "REFUSED_connect": said(get("other.example:443", method="CONNECT")),
    "REFUSED_trace": said(get(method="TRACE")),
    "REFUSED_preface": said(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "REFUSED_lengths": said(get(method="POST", more="Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", body="0\r\n\r\n")),
    "REFUSED_lf": said(get().replace(b"\r\n", b"\n")),
    "REFUSED_folded": said(get(more="X: a\r\n Authorization: b\r\n")),
    "REFUSED_fragment": said(get("/echo#x")),
    "REFUSED_connection_host": said(get(more="Connection: Host\r\n")),
    "REFUSED_chunk": said(get(method="POST", more="Transfer-Encoding: chunked\r\n", body="zz\r\nabc\r\n0\r\n\r\n")),
    "REFUSED_huge": said(get(more="".join(f"X-{n}: {'y' * 500}\r\n" for n in range(60)))),
}
import requests
session = requests.Session()
answers["requests"] = session.get(API + "/echo", headers=WRONG, timeout=20).text
answers["requests_again"] = session.get(API + "/echo", timeout=20).text
if CURL:
    done = subprocess.run(["/work/lib/ld.so", "--library-path", "/work/lib", "/work/lib/curl", "-sS", "--max-time", "20", API + "/echo"],
                          capture_output=True, text=True)
    answers["curl"] = done.stdout + done.stderr

PATTERN = re.compile(b"plan" + b"ted-[0-9a-f]{15}")
traces = []
def seek(name, data):
    if PATTERN.search(data):
        traces.append(name)
def seek_memory(pid):
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                first, last = (int(word, 16) for word in line.split()[0].split("-"))
                if line.split()[1].startswith("r") and "[v" not in line:
                    memory.seek(first)
                    try:
                        seek(f"memory of {pid}: {line}", memory.read(last - first))
                    except OSError:
                        pass
        return True
    except OSError:
        return False
looked = {"files": 0, "memories": sum(map(seek_memory, filter(str.isdigit, os.listdir("/proc"))))}
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                seek(f"/proc/{pid}/{name}", file.read())
        except OSError:
            pass
for top, folders, names in os.walk("/"):
    if top == "/":
        folders[:] = [name for name in folders if name not in ("proc", "sys", "dev", "usr", "lib", "lib64")]
    for name in names:
        try:
            with open(os.path.join(top, name), "rb") as file:
                seek(os.path.join(top, name), file.read())
            looked["files"] += 1
        except OSError:
            pass
seek("variables", repr(dict(os.environ)).encode())
answers["traces"], answers["looked"] = traces, looked
answers["variables"] = {name: value for name, value in os.environ.items() if "CERT" in name or "CA_" in name or "CAINFO" in name}
answers["private_keys"] = [name for name in os.listdir("/run/trust") if b"PRIVATE" in open("/run/trust/" + name, "rb").read()]
kdskills_runtime.report(answers)
"""

FORMS = r"""
import urllib.request
import kdskills_runtime
def opened(path):
    with urllib.request.urlopen("https://api.example.net" + path, timeout=20) as answer:
        return answer.read().decode()
kdskills_runtime.report({path: opened("/" + path) for path in ("chunked", "reversed")})
"""
"""Asks a host for the secret in forms no mask knows."""

FETCH = """
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("https://api.example.net/echo", timeout=20).read().decode())
except OSError as error:
    print("failed", error)
"""


def write_certificates(folder: Path) -> None:
    """Write the test's authority, and a key and certificate for each host; one is misnamed, one of another authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    now = dt.datetime.now(dt.UTC)

    def certificate(host: str, issuer: str, signer: Any, key: Any, *, ca: bool) -> x509.Certificate:
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (host, issuer)]
        builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(days=1))
        builder = builder.not_valid_after(now + dt.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return builder.sign(signer, hashes.SHA256())

    authorities = {}
    for name in ("trusted", "stranger"):
        key = ec.generate_private_key(ec.SECP256R1())
        authorities[name] = key
        (folder / f"{name}.pem").write_bytes(certificate(name, name, key, key, ca=True).public_bytes(Encoding.PEM))
    for host in HOSTS:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = "stranger" if host.startswith("untrusted") else "trusted"
        name = "somebody.example" if host.startswith("misnamed") else host
        made = certificate(name, issuer, authorities[issuer], key, ca=False)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / host).write_bytes(private + made.public_bytes(Encoding.PEM))


def sandbox_memories() -> dict[str, Any]:
    """Return how many processes beside a helper could be read from here, and which of them hold the secret: a core dump would."""
    names, holders = [], []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if "0100007F:0C38" in (folder / "net/tcp").read_text():
                held = any(SECRET.encode() in piece for piece in memory_of(folder))
                names.append((folder / "comm").read_text().strip())
                holders += [names[-1]] * held
    return {"processes": len(names), "holders": holders}


def memory_of(folder: Path) -> Iterator[bytes]:
    """Yield what a process has in memory."""
    with (folder / "mem").open("rb", 0) as memory:
        for line in (folder / "maps").read_text().splitlines():
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            with suppress(OSError, OverflowError, ValueError):
                memory.seek(first)
                yield memory.read(last - first)


class SecretServers(FarServers):
    """Hosts that tell the program everything it sent, in several forms; port 443 is TLS."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.contexts = {}
        for host in HOSTS:
            self.contexts[host] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.contexts[host].load_cert_chain(folder / host)
            self.contexts[host].set_alpn_protocols(["h2", "http/1.1"])
        self.contexts["api.example.net"].sni_callback = self._chosen

    def _chosen(self, link: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        link.context = self.contexts[name or "api.example.net"]

    def _answer(self, link: socket.socket, peer: str) -> None:
        address, port = link.getsockname()[:2]
        told: dict[str, Any] = {"address": address.removeprefix("::ffff:"), "port": port, "peer": peer}
        link.settimeout(20)
        try:
            if port == 443:
                link = self.contexts["api.example.net"].wrap_socket(link, server_side=True)
                told["protocol"] = link.selected_alpn_protocol()  # type: ignore[attr-defined]
            data = b""
            while b"\r\n\r\n" not in data:
                data += link.recv(65536) or b"\r\n\r\n"
            told["head"] = data.partition(b"\r\n\r\n")[0].decode("latin-1")
            self._echo(link, data)
        except (OSError, IndexError) as error:  # a client that only looked
            told["broken"] = str(error)
        finally:
            print(json.dumps(told), flush=True)  # noqa: T201
            link.close()

    @staticmethod
    def _echo(link: socket.socket, data: bytes) -> None:
        path = data.split(b" ")[1].decode("latin-1")
        head, _, body = data.partition(b"\r\n\r\n")
        sizes = [
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        ]
        while sizes and len(body) < sizes[0]:
            body += link.recv(65536)
        secret = next(
            (line.partition(b": ")[2] for line in head.split(b"\r\n") if line.startswith(b"Authorization")), b""
        )
        text, more = b"REACHED\n" + head + b"\n", b""
        if path == "/header":
            text, more = b"REACHED", b"X-Echo: " + secret + b"\r\n"
        if path == "/token":
            text = json.dumps({"token": secret.decode().removeprefix("Bearer ")}).encode()
        if path == "/memory":
            text = json.dumps(sandbox_memories()).encode()
        if path == "/reversed":
            text = secret[::-1]
        if path == "/gzip" and b"Encoding: gzip" in head:
            text = b"PACKED"
        if path == "/redirect":
            link.sendall(b"HTTP/1.1 302 Found\r\nLocation: https://other.example/echo\r\nContent-Length: 0\r\n\r\n")
            return
        if path == "/chunked":
            link.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in (secret[:12], secret[12:], b""):
                link.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            return
        answer = b"HTTP/1.1 200 OK\r\n" + more + b"Content-Length: %d\r\n\r\n" % len(text) + text
        size = 7 if path == "/split" else len(answer)
        for at in range(0, len(answer), size):
            link.sendall(answer[at : at + size])


def curl_files() -> list[Any]:
    """Return the host's curl, its loader and its libraries as inputs; none where there is no curl."""
    from kdskills.execution import InputFile

    curl = shutil.which("curl")
    if curl is None:
        return []
    lines = subprocess.run(["ldd", curl], capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [word for line in lines for word in line.split() if word.startswith("/")]
    files = {Path(path).name: Path(path).resolve() for path in paths}
    loader = next(name for name in files if name.startswith("ld-"))
    files["ld.so"], files["curl"] = files.pop(loader), Path(curl).resolve()
    return [InputFile(f"lib/{name}", path, name in {"curl", "ld.so"}) for name, path in files.items()]


def holds_secret(folder: Path) -> bool:
    """Return whether any file below *folder* holds the secret."""
    return any(SECRET.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def run_work(host: Any) -> dict[str, str]:
    """Run the script as a task of each skill, and as a step of a job and as a service of the one with secrets."""
    from kdskills.app.operations import Context

    async def call(name: str, **arguments: Any) -> Any:
        return await asyncio.wait_for(host.invoke(f"skills.{name}", arguments, Context()), 100)

    command = "python3 scripts/fetch.py"
    printed = {}
    for name in ("lab.fetch", "lab.other"):
        printed[name] = (await call("run_cmd", skill_name=name, command=command)).stdout
    skill = {"skill_name": "lab.fetch", "session_id": "s"}
    job = await call("start_job", steps=[{"name": "fetch", "command": command}], **skill)
    printed["job"] = (await call("job_watch", job_id=job.job_id)).steps[0].stdout_tail
    service = await call("run_service", command=command, **skill | {"session_id": "t"})
    printed["service"] = (await call("task_watch", task_id=service.task_id)).stdout_tail
    return printed


async def run_skills(engine_name: str) -> dict[str, Any]:
    """Run one script of a skill with secrets and of one without, and return what each printed and everything that was told."""
    from kdskills.app import Host, Settings
    from kdskills.app.identity import SCOPES, Identity
    from kdskills.app.operations import Context
    from kdskills.app.work import WORKER_LOG
    from kdskills.jobs.queue import slot_taken

    printed: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kdskills-egress-") as top:
        write_skills(Path(top, "bundle"), FETCH)
        settings = Settings(
            bundle=Path(top, "bundle"), state_dir=Path(top, "state"), executor=engine_name,
            network={"lab": ("api.example.net",)}, network_secrets=SECRETS, jobs={"idle_s": 1.0},
        )  # fmt: skip
        host = Host(settings, entry_points=False)
        context = Context(identity=Identity(agent="writer", scopes=SCOPES, door="http"))
        for name in ("fetch", "other"):
            await host.invoke("skills.load", {"names": [name]}, context)
            answer = await host.invoke("skills.run_script", {"path": "scripts/fetch.py", "skill": name}, context)
            printed[name] = answer.result["stdout"].strip()
        printed["work"] = await run_work(host)
        await host.work.aclose()
        while slot_taken(settings.state_dir, 0):  # noqa: ASYNC110 - another process ends when it is idle
            await asyncio.sleep(0.05)
        lines = (settings.state_dir / WORKER_LOG).read_text().splitlines()
        rows = [json.loads(line) for line in lines if '"script.connection"' in line]
        printed["work_rows"] = [row for row in rows if row["event"] == "script.connection"]
        printed["state"] = holds_secret(Path(top))
        printed["settings"] = repr(settings) + repr(settings.execution_options())
    return printed


async def run_programs(engine_name: str) -> dict[str, Any]:
    """Run the programs, and return their answers and rows."""
    from pydantic import SecretStr

    from kdskills.execution import ExecRequest, ExecutionOptions, Limits

    if engine_name == "docker":
        from kdskills.builtin.executors.docker import DockerExecutor as Engine
    else:
        from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor as Engine
    secrets = {
        skill: {host: {name: SecretStr(value) for name, value in headers.items()} for host, headers in hosts.items()}
        for skill, hosts in SECRETS.items()
    }
    packages = ("requests", "urllib3", "idna", "certifi", "charset-normalizer")
    options = ExecutionOptions(pool=int(engine_name == "pool"), image_packages=packages, network_secrets=secrets)
    engine = Engine(options)
    curl = curl_files()
    request = ExecRequest(
        code=PROGRAM, globals={"CURL": bool(curl)}, network=GRANTED, network_skills=("lab.fetch",), inputs=tuple(curl),
        limits=Limits(wall_s=120, memory=768 * 1024 * 1024),
    )  # fmt: skip
    result = await engine.run(request)
    if result.value is None:
        sys.exit(f"{result.status}: {result.error} {result.stderr.text}")
    forms = await engine.run(replace(request, code=FORMS, inputs=()))
    nobody = await engine.run(replace(request, code=FORMS, inputs=(), network_skills=()))
    if hasattr(engine, "close"):
        engine.close()
    skills = await run_skills("docker" if engine_name == "docker" else "bubblewrap")
    return {
        "answers": result.value,
        "rows": [asdict(row) for row in result.connections],
        "forms": forms.value,
        "nobody": nobody.error and nobody.error.message,
        "skills": skills,
        "curl": bool(curl),
    }


if __name__ == "__main__":
    if sys.argv[1] == "far":
        check_alone()
        print("alone", flush=True)  # noqa: T201
        sys.stdin.readline()
        SecretServers(Path(sys.argv[2])).serve()
    else:
        certificates = Path(tempfile.mkdtemp(prefix="kdskills-egress-"))
        try:
            write_certificates(certificates)
            os.environ["SSL_CERT_FILE"] = str(certificates / "trusted.pem")
            logging.basicConfig(filename=certificates / "log", level=logging.DEBUG)
            module = [sys.executable, "-m", "tests.integration.egress_secrets_world", "far", str(certificates)]
            with two_networks(module) as (_, far):
                results = asyncio.run(run_programs(sys.argv[1]))
            folders = Path(tempfile.gettempdir()).glob(f"kdskills-network-*-{os.getpid()}-*")
            results["leftovers"] = [path.name for path in folders]
            results["log"] = (certificates / "log").read_text()
            results["visits"] = [json.loads(line) for line in far.stdout or ()]
            json.dump(results, sys.stdout)
        finally:
            shutil.rmtree(certificates)
