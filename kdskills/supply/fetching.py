"""Files of other machines: by HTTP, bounded and doubted, and from git, of which only objects are read.

Nothing of a repository is checked out, so hooks, filters, attributes, links and submodules of its author mean nothing.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import IO, Any, Final, NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from kdskills.errors import CallerMustAct, MissingExtra

MIB: Final = 1024 * 1024
FETCH_S: Final = 600.0
"""Seconds one source may take."""
SILENCE_S: Final = 30.0
"""Seconds a server may say nothing."""
MAX_REDIRECTS: Final = 5
MAX_NAMES: Final = 64 * MIB
"""Bytes of the names of a repository's files, or of its refs."""
MAX_PACK: Final = 1024 * MIB
"""Bytes of a file that git writes."""

Tell = Callable[[str, str, int, int], None]
"""Told what is done (`fetch`, `git`, `look`), with what, how much of it is done, and how much there is, 0 where unknown."""

COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_IPV6_GLOBAL: Final = ipaddress.ip_network("2000::/3")
_PERCENT = re.compile(rb"([A-Za-z][A-Za-z ]+):\s+(\d{1,3})%")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s?#]*@")


class SourceFailed(CallerMustAct, code="source_invalid"):
    """Where skills should come from is not understood, cannot be reached, or gives what cannot be used; codes are in
    `docs/reference/lock-file.md`.
    """


class SourceFile(NamedTuple):
    """One file of a source before it is read: its path, its mode with the bits of its kind, and its size."""

    raw: bytes
    mode: int
    size: int


def without_login(url: str) -> str:
    """Return a URL, or a text with some, without users and passwords."""
    return _CREDENTIALS.sub("", url)


class HttpFetch:
    """Downloads for one source, which a person named; what its host then names is doubted.

    Redirects and addresses in an index lead to https, and to no address of a private network, but for the source's own host.
    """

    def __init__(self, source: str, tell: Tell) -> None:
        self._source, self._tell = urlsplit(source), tell
        self._deadline = time.monotonic() + FETCH_S

    def get(self, url: str, limit: int) -> bytes:
        """Return what a URL gives, of at most *limit* bytes. Raises SourceFailed, its `status` 404 for what is not there."""
        return self.get_from(url, limit)[0]

    def get_from(self, url: str, limit: int) -> tuple[bytes, str]:
        """Return as `get`, and where it came from in the end."""
        data = bytearray()
        final = self.pieces_to(url, limit, data.extend)
        return bytes(data), final

    def pieces_to(self, url: str, limit: int, write: Callable[[bytes], object]) -> str:
        """Give what a URL gives to *write* in pieces, and return where it came from in the end. Raises SourceFailed."""
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise MissingExtra("downloading skills", "environments") from error
        try:
            with httpx.Client(follow_redirects=False, timeout=SILENCE_S) as client:
                for _ in range(MAX_REDIRECTS + 1):
                    self._check(url)
                    with client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response:
                        if response.has_redirect_location:
                            url = urljoin(url, response.headers["location"])
                            continue
                        if response.status_code != httpx.codes.OK:
                            raise _unreachable(url, f"it answers {response.status_code}", response.status_code)
                        self._take(response, url, limit, write)
                        return url
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            UnicodeError,
        ) as error:  # the last for a host with labels that are none
            raise _unreachable(url, f"{type(error).__name__}: {error}") from None
        raise _unreachable(url, f"it redirects more than {MAX_REDIRECTS} times")

    def _take(self, response: Any, url: str, limit: int, write: Callable[[bytes], object]) -> None:
        size, length = 0, response.headers.get("content-length", "")
        total = int(length) if length.isdecimal() and len(length) < 16 else 0
        too_large = SourceFailed(f"{without_login(url)} has more than {limit} bytes", code="source_too_large")
        if total > limit:
            raise too_large
        for piece in response.iter_raw(256 * 1024):
            size += len(piece)
            if size > limit:
                raise too_large
            if time.monotonic() > self._deadline:
                raise _unreachable(url, f"it took more than {FETCH_S:.0f} s")
            write(piece)
            self._tell("fetch", without_login(url), size, total)

    def _check(self, url: str) -> None:
        """Refuse an address that the source may not name. Raises SourceFailed."""
        try:
            split = urlsplit(url)
            asked_origin, source_origin = (_origin(each) for each in (split, self._source))
        except ValueError as error:
            raise _unreachable(url, str(error)) from None
        if asked_origin == source_origin:
            return
        if split.scheme != "https" or not split.hostname:
            raise _unreachable(url, "another host was named, and not by https")
        try:
            rows = socket.getaddrinfo(split.hostname, split.port or 443, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            raise _unreachable(url, getattr(error, "strerror", None) or "its name is not known") from None
        if not all(_is_public(str(row[4][0]).partition("%")[0]) for row in rows):
            raise _unreachable(url, "it was named by another host, and lies in a private network")


def _origin(split: SplitResult) -> tuple[str, str | None, int | None]:
    return split.scheme, split.hostname, split.port


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is that of this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _is_public(text: str) -> bool:
    """Whether an address is one of the internet, also where it stands for one of IPv4."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(address.packed[-4:]) if address in _NAT64 else address.sixtofour
        return _is_public(str(inner)) if inner is not None else address in _IPV6_GLOBAL and address.is_global
    return address.is_global and not address.is_multicast


def _unreachable(url: str, reason: str, status: int = 0) -> SourceFailed:
    return SourceFailed(
        f"{without_login(url)[:500]} cannot be fetched: {reason}", code="source_unreachable", status=status
    )


class GitRepository:
    """A repository elsewhere, of which one commit is fetched into an empty one below *scratch*; nothing is checked out."""

    def __init__(self, url: str, ref: str, scratch: Path, tell: Tell) -> None:
        self._url, self._ref, self._scratch, self._tell = url, ref, scratch, tell
        self._label = without_login(url)
        local = self._url.startswith("/")
        self._folder = scratch / "repository.git"
        inherited = ("PATH", "SSH_AUTH_SOCK", "SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO")
        proxies = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
        names = (*inherited, *proxies, *map(str.upper, proxies))
        self._env = {name: os.environ[name] for name in names if name in os.environ} | {
            "HOME": str(scratch),
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "true",
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            "GIT_ALLOW_PROTOCOL": "file" if local else "https:ssh",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_LFS_SKIP_SMUDGE": "1",
        }
        self._deadline = time.monotonic() + FETCH_S

    def fetch(self, commit: str = "") -> str:
        """Fetch a commit, or what the source's ref is now, without what came before it, and return its name.

        Raises SourceFailed: `source_unreachable`, or `source_empty` without such a ref.
        """
        self._git("init", "--quiet", "--bare", "--template=", str(self._folder))
        target = commit or self._resolve()
        words = ("fetch", "--depth=1", "--no-tags", "--no-recurse-submodules", "--no-auto-gc", "--progress")
        self._git(*words, "--", self._url, target)
        return self._git("rev-parse", "--verify", "--quiet", "FETCH_HEAD^{commit}").decode().strip()

    def is_rewritten(self, commit: str) -> bool:
        """Whether *commit* does not come before what the source's ref is now: its branch was rewritten, its tag moved.

        Fetches the history, without files where the other side can. Raises as `fetch`.
        """
        ref = self._resolve()
        if ref.startswith("refs/tags/") or COMMIT.fullmatch(ref):
            return True
        history = self._scratch / "history.git"
        self._git("init", "--quiet", "--bare", "--template=", str(history))
        self._folder = history
        self._git("fetch", "--filter=tree:0", "--no-tags", "--no-auto-gc", "--progress", "--", self._url, ref)
        try:
            self._git("merge-base", "--is-ancestor", commit, "FETCH_HEAD")
        except SourceFailed:
            return True
        return False

    def rows(self, commit: str, below: str) -> tuple[list[SourceFile], list[str]]:
        """Return the files of a commit, paths relative to the folder *below*, and the names of their objects."""
        tree = f"{commit}:{below}" if below else f"{commit}^{{tree}}"
        rows, objects = [], []
        for line in self._git("ls-tree", "-r", "-z", "-l", "--full-tree", tree, missing=below).split(b"\0"):
            if line:
                facts, _, path = line.partition(b"\t")
                mode, _, name, size = facts.split()
                rows.append(SourceFile(path, int(mode, 8), int(size) if size.isdigit() else 0))
                objects.append(name.decode())
        return rows, objects

    def contents(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the bytes of objects; a submodule, which is none of this repository, has none."""
        with self._start("cat-file", "--batch", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None  # as pipes were asked for
            assert process.stdout is not None
            try:
                for name in names:
                    process.stdin.write(f"{name}\n".encode())
                    process.stdin.flush()
                    head = process.stdout.readline().split()
                    data = b""
                    if len(head) == 3:
                        data = process.stdout.read(int(head[2]))
                        process.stdout.read(1)
                    yield data
            finally:
                process.stdin.close()
                _end(process)

    def _resolve(self) -> str:
        """Return the full name of the source's ref, or a commit's name as it is. Raises SourceFailed, `source_empty`."""
        ref = self._ref
        if ref.startswith("refs/"):
            return ref
        patterns = [f"refs/tags/{ref}", f"refs/heads/{ref}"] if ref else ["HEAD"]
        answer = self._git("ls-remote", "--", self._url, *patterns)
        names = {line.partition(b"\t")[2].decode("utf-8", "replace") for line in answer.splitlines()}
        matches = [pattern for pattern in patterns if pattern in names]
        if len(matches) == 2:
            message = f"{ref} is a tag and a branch of {self._label}: say refs/tags/{ref} or refs/heads/{ref}"
            raise SourceFailed(message)
        if matches:
            return matches[0]
        if COMMIT.fullmatch(ref):
            return ref
        lack = f"no branch or tag {ref}; of commits the full name is taken" if ref else "no commit"
        raise SourceFailed(f"{self._label} has {lack}", code="source_empty")

    def _start(
        self, *words: str, stdout: int | IO[bytes], stdin: int = DEVNULL, stderr: int = DEVNULL
    ) -> subprocess.Popen[bytes]:
        settings = ("core.hooksPath=/dev/null", "core.symlinks=false", "fetch.fsckObjects=true", "protocol.version=2")
        options = [word for setting in settings for word in ("-c", setting)]
        target = [] if words[0] in {"init", "ls-remote"} else [f"--git-dir={self._folder}"]
        try:
            process = subprocess.Popen(
                ["git", *options, *target, *words],
                env=self._env,
                cwd=self._scratch,
                start_new_session=True,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        except FileNotFoundError:
            raise SourceFailed("the program git is not there", code="source_unreachable", who="operator") from None
        with suppress(OSError, ValueError):  # it ended
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_PACK, MAX_PACK))
        return process

    def _git(self, *words: str, missing: str = "") -> bytes:
        """Run git to its end and return what it printed; *missing* is a folder that may not be there. Raises SourceFailed."""
        with tempfile.TemporaryFile(dir=self._scratch) as out:
            process = self._start(*words, stdout=out, stderr=subprocess.PIPE)
            timer = threading.Timer(max(self._deadline - time.monotonic(), 0.1), _end, [process])
            timer.start()
            try:
                words_of_git = self._follow(process)
            finally:
                timer.cancel()
                _end(process)
            if process.returncode != 0:
                if missing:
                    raise SourceFailed(f"{self._label} has no folder {missing}", code="source_empty")
                raise self._failure(process.returncode, words_of_git)
            if out.seek(0, os.SEEK_END) > MAX_NAMES:
                raise SourceFailed(f"{self._label} has too many names", code="source_too_large")
            out.seek(0)
            return out.read()

    def _follow(self, process: subprocess.Popen[bytes]) -> bytes:
        """Tell the progress that git writes, and return the end of all it wrote."""
        assert process.stderr is not None  # as a pipe was asked for
        words_of_git = b""
        while piece := os.read(process.stderr.fileno(), 4096):
            words_of_git = (words_of_git + piece)[-4096:]
            steps = _PERCENT.findall(piece)
            if steps:
                self._tell("git", steps[-1][0].decode(), int(steps[-1][1]), 100)
        process.stderr.close()
        process.wait()
        return words_of_git

    def _failure(self, code: int, words_of_git: bytes) -> SourceFailed:
        if code == -signal.SIGKILL or time.monotonic() > self._deadline:
            reason = f"git took more than {FETCH_S:.0f} s"
        else:
            lines = [line for line in re.split(r"[\r\n]+", words_of_git.decode("utf-8", "replace")) if "fatal:" in line]
            reason = without_login(" ".join(lines)[:500]) or f"git ended with {code}"
        return SourceFailed(f"{self._label} cannot be fetched: {reason}", code="source_unreachable")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End git and whatever it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
