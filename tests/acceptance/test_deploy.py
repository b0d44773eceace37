"""What `deploy/` has is what the product has, and what its pages say was really done."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kdskills.app import Settings
from kdskills.app.settings import known_variables, setting_rows
from tests.conftest import HELM

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def commands(page: str) -> list[str]:
    """Return the lines of a how-to that begin with `$ `."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.needs("bubblewrap", "postgres", "nats")
@pytest.mark.xdist_group("postgres")
def test_a_newcomer_brings_up_two_hosts(tmp_path: Path) -> None:
    """Every command of the page works as it stands, one after the other: two hosts come up, share work, and end all of it."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    lines = commands("deploy.md")
    assert lines[0] == "deploy/try up try"
    assert lines[-1] == "deploy/try down try"
    mark = f"4711.{os.getpid()}"
    asked = '{"skill_name": "brief", "command": ["sleep", "\'$MARK\'"]}'
    sleeps = f"""kdskills tool skills.run_cmd_async -j '{asked}'
until grep -qsza "^$MARK$" /proc/[0-9]*/cmdline; do sleep 0.1; done
"""
    script = "set -euo pipefail\ntrap 'tail -n 20 try/*.log >&2; deploy/try down try' ERR\n" + "".join(
        f"printf '\\n%s\\n' '== {number}'\n{sleeps if line == lines[-1] else ''}{line}\n"
        for number, line in enumerate(lines)
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("KDSKILLS_", "AWS_"))}
    path = f"{Path(sys.executable).parent}:{variables['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**variables, "PATH": path, "COLUMNS": "200", "MARK": mark},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    told = dict(zip(lines, re.split(r"\n== \d+\n", "\n" + ran.stdout)[1:], strict=True))

    def said(beginning: str, number: int = 0) -> str:
        return [words for line, words in told.items() if line.startswith(beginning)][number]

    assert said("kdskills fleet").count("live") == 2
    assert '"status":"succeeded"' in said("curl -sS -H", 2)
    assert "event: end" in said("curl -sS -N")
    assert "takes nothing new" in said("kdskills drain")
    assert '"stdout":"still here\\n"' in said("curl -sS -H", 3)
    assert "takes work again" in said("kdskills undrain")
    assert not (tmp_path / "try").exists()
    assert subprocess.run(["pgrep", "-xf", f"sleep {mark}"]).returncode == 1
    path_without_room = {**variables, "PATH": path, "TMPDIR": str(tmp_path / "none")}
    failed = subprocess.run(
        [DEPLOY / "try", "up", tmp_path / "try"], env=path_without_room, capture_output=True, text=True
    )
    assert (failed.returncode, "removed" in failed.stderr) == (1, True)
    assert not (tmp_path / "try").exists()


def read(name: str) -> str:
    """Return a file of `deploy/`."""
    return (DEPLOY / name).read_text(encoding="utf-8")


def run(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that must not fail."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=120, **more)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


@cache
def command_exists(*words: str) -> None:
    """Ask a command of ours for its help, with the words a file of `deploy/` gives it."""
    run(Path(sys.executable).parent / "kdskills", *words, "--help")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `deploy/secrets` makes."""
    folder = tmp_path_factory.mktemp("made") / "secret"
    run(DEPLOY / "secrets", folder, "skills.example")
    return folder


def test_secrets_are_random_files_in_a_closed_folder(secret: Path, tmp_path: Path) -> None:
    """Settings load, no two folders share a password, and what is in use is never overwritten."""
    assert secret.stat().st_mode & 0o777 == 0o700
    settings = Settings.load(secret / "config.toml")
    assert settings.host_names == ("skills.example",)
    (password,) = re.findall('password: "(.*)"', (secret / "nats.conf").read_text())
    assert settings.bus.url == f"nats://kdskills:{password}@bus:4222"
    run(DEPLOY / "secrets", tmp_path / "other", "skills.example")
    for name in ("postgres-password", "store-password", "nats.conf"):
        assert (secret / name).read_text() != (tmp_path / "other" / name).read_text()
    again = subprocess.run([DEPLOY / "secrets", secret, "skills.example"], capture_output=True, text=True)
    assert (again.returncode, "not overwritten" in again.stderr) == (1, True)
    assert subprocess.run([DEPLOY / "secrets", tmp_path / "bad", "a;b"], capture_output=True).returncode == 2


@pytest.mark.needs("deploy")
def test_the_compose_file(secret: Path, tmp_path: Path) -> None:
    """docker-compose reads it; images of others are named by digest; ours have no root, no capability and real commands."""
    shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns("secret"))
    shutil.copytree(secret, tmp_path / "deploy" / "secret")
    assert "$$(cat" not in re.sub("MC_HOST_store=.*", "", read("compose.yaml"))  # passwords stand in no argv
    shown = run("docker-compose", "-f", "deploy/compose.yaml", "config", cwd=tmp_path)
    services = yaml.safe_load(shown.stdout)["services"]
    ours = {name: service for name, service in services.items() if service["image"].startswith("kdskills:")}
    assert set(ours) == {"tables", "worker-a", "worker-b", "door-a", "door-b"}
    for name, service in services.items():
        assert name in ours or re.search("@sha256:[0-9a-f]{64}$", service["image"])
        assert set(service.get("environment", {})).isdisjoint({"POSTGRES_PASSWORD", "MINIO_ROOT_PASSWORD"})
        assert ("ports" in service) == (name == "proxy")
    for name in ("worker-a", "worker-b"):  # each host is one of its own: doors must reach it by its name
        assert (ours[name]["hostname"], *ours[name]["networks"]) == (name, "inside")
        assert ours[name]["environment"]["KDSKILLS_FLEET__LISTEN"].partition(":")[0] == name  # which is what it tells
        assert "inside" in ours[name.replace("worker", "door")]["networks"]
    for service in ours.values():
        assert (service["cap_drop"], service["read_only"], service.get("user")) == (["ALL"], True, None)
        assert {"cap_add", "privileged"}.isdisjoint(service)
        assert service["secrets"] == [{"source": "config", "target": "/etc/kdskills/config.toml"}]
        assert {key for key in service["environment"] if key.startswith("KDSKILLS_")} <= known_variables()
        command_exists(*service.get("command", ["serve"]))
    shutil.rmtree(tmp_path / "deploy" / "secret")
    without = subprocess.run(
        ["docker-compose", "-f", "deploy/compose.yaml", "config", "-q"], cwd=tmp_path, capture_output=True
    )
    assert without.returncode != 0


@pytest.mark.needs("deploy")
def test_the_proxy(secret: Path, tmp_path: Path) -> None:
    """Nginx takes the file as it stands, but for the names of doors; its bounds are those of the settings."""
    text = read("proxy/kdskills.conf")
    here = text.replace("door-a:", "127.0.0.1:").replace("door-b:", "127.0.0.2:").replace("/run/secrets", str(secret))
    (tmp_path / "nginx.conf").write_text(f"events {{}}\npid {tmp_path}/pid;\nhttp {{\n{here}\n}}\n")
    run("nginx", "-t", "-p", tmp_path, "-c", tmp_path / "nginx.conf", "-e", tmp_path / "error.log")
    assert "non_idempotent" not in text
    settings = Settings()
    assert f"client_max_body_size {settings.body_limit // 2**20}m;" in text
    assert f"client_body_timeout {settings.body_timeout_s:.0f}s;" in text
    assert f"client_header_timeout {settings.header_timeout_s:.0f}s;" in text
    assert int(re.findall(r"proxy_read_timeout (\d+)s", text)[0]) > settings.jobs.watch_timeout_s


@pytest.mark.needs("deploy")
def test_the_proxy_carries_to_a_door(secret: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Over TLS a door answers to the name of its settings alone, and hears the client's address, not what the client says."""
    door, port = free_port(), free_port()
    conf = re.sub(r"door-[ab]:8765", f"127.0.0.1:{door}", read("proxy/kdskills.conf")).replace(
        "/run/secrets", str(secret)
    )
    conf = conf.replace("listen 8443", f"listen 127.0.0.1:{port}")
    (tmp_path / "nginx.conf").write_text(
        f"daemon off;\npid {tmp_path}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{conf}\n}}\n"
    )
    variables = os.environ | {
        "KDSKILLS_STATE_DIR": str(tmp_path / "state"),
        "KDSKILLS_HOST_NAMES": '["skills.example"]',
    }
    kdskills = Path(sys.executable).parent / "kdskills"
    archive = tmp_path / "brief.zip"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("brief/SKILL.md", "---\nname: brief\ndescription: Makes pages.\n---\nRead.\n")

    def ask(path: str, *words: object, name: str = "skills.example") -> str:
        to = ("--resolve", f"{name}:{port}:127.0.0.1", "--interface", "127.0.0.2", "--noproxy", "*")
        trusted = ("--cacert", secret / "tls.crt") if name == "skills.example" else ("--insecure",)
        retry = ("--retry", 60, "--retry-delay", 1, "--retry-all-errors")
        return run(
            "curl", "-sS", *to, *trusted, *words, *(retry if "-f" in words else ()), f"https://{name}:{port}{path}"
        ).stdout

    programs = [
        subprocess.Popen(
            [kdskills, "serve", "--listen", f"127.0.0.1:{door}"], env=variables, stderr=subprocess.DEVNULL
        ),
        subprocess.Popen(["nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf", "-e", tmp_path / "error.log"]),
    ]
    try:
        assert ask("/healthz", "-f") == '{"status":"ok"}'
        assert '"code":"host_refused"' in ask("/healthz", name="other.example")
        token = (tmp_path / "state" / "first-token").read_text().strip()
        headers = ("-H", f"Authorization: Bearer {token}", "-H", "X-Forwarded-For: 203.0.113.9")
        assert '"created":true' in ask("/projects/local/skills:upload", *headers, "-F", f"file=@{archive}")
        told = ask("/projects/local/tools/audit_log.list", *headers, "--json", "{}")
    finally:
        for program in reversed(programs):
            program.terminate()
            program.wait(60)
    assert "127.0.0.2" in told
    assert "203.0.113.9" not in told


def test_the_dockerfile() -> None:
    """Hadolint has nothing to say; the base is named by digest, the user is not root, health is asked, extras exist."""
    run(Path(sys.executable).parent / "hadolint", "--config", os.devnull, DEPLOY / "image" / "Dockerfile")
    text = read("image/Dockerfile")
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert text.count("FROM ${BASE}") == text.count("\nFROM ") == 2
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["10000:10000"]
    assert f":{Settings().listen.rpartition(':')[2]}/healthz" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)[0].split(",")) <= set(
        project["optional-dependencies"]
    )
    assert {"e2b", "kubernetes"} <= set(re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)[0].split(","))
    assert set(re.findall(r"KDSKILLS_\w+", text)) <= known_variables()
    assert f"kdskills:{project['version']}" in text
    assert f"kdskills:{project['version']}" in read("compose.yaml")
    assert f"appVersion: {project['version']}\n" in read("chart/Chart.yaml")


@pytest.mark.needs("deploy")
@pytest.mark.parametrize("unit", ["kdskills-serve.service", "kdskills-worker@.service"])
def test_the_units(unit: str, tmp_path: Path) -> None:
    """Systemd has nothing to say against a unit, its exposure is at most 3.0, its command is ours, and the wall can be made."""
    text = read(f"systemd/{unit}")
    assert "\nProtectHostname=" not in text
    assert re.search("^SystemCallFilter=.* sethostname ", text, re.MULTILINE)
    assert ("\nProtectProc=" in text) == ("worker" not in unit)
    (command,) = re.findall(r"^ExecStart=/opt/kdskills/bin/kdskills (.*)$", text, re.MULTILINE)
    command_exists(*command.replace("%i", "0").split())
    mine = tmp_path / unit
    mine.write_text(text.replace("/opt/kdskills/bin/kdskills", str(Path(sys.executable).parent / "kdskills")))
    told = run("systemd-analyze", "verify", mine)
    assert (told.stdout, told.stderr) == ("", "")
    run("systemd-analyze", "security", "--offline=true", "--threshold=30", mine)
    assert set(re.findall(r"KDSKILLS_\w+", text)) <= known_variables()


@pytest.mark.needs("deploy")
def test_units_are_installed_and_removed(tmp_path: Path) -> None:
    """What `install` puts into a root is what systemd's own tools take, and `--remove` leaves settings alone."""
    variables = os.environ | {"DESTDIR": str(tmp_path)}
    run(DEPLOY / "systemd" / "install", env=variables)
    config = tmp_path / "etc" / "kdskills" / "config.toml"
    assert config.stat().st_mode & 0o777 == 0o640
    assert Settings.load(config).state_dir == Path("/var/lib/kdskills/state")
    if os.geteuid() == 0:
        (tmp_path / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        run("systemd-sysusers", f"--root={tmp_path}", tmp_path / "usr/lib/sysusers.d/kdskills.conf")
        assert "kdskills:" in (tmp_path / "etc" / "passwd").read_text()
        run("systemd-tmpfiles", "--create", f"--root={tmp_path}", tmp_path / "usr/lib/tmpfiles.d/kdskills.conf")
        assert (tmp_path / "var" / "lib" / "kdskills").stat().st_mode & 0o777 == 0o700
    config.write_text(config.read_text() + "# mine\n")
    run(DEPLOY / "systemd" / "install", env=variables)
    assert config.read_text().endswith("# mine\n")
    run(DEPLOY / "systemd" / "install", "--remove", env=variables)
    assert [path.name for path in tmp_path.rglob("*kdskills*") if path.is_file()] == []
    assert config.exists()


CHART = (
    "--set",
    "image.repository=r.example/kdskills",
    "--set",
    f"image.digest=sha256:{'0' * 64}",
    "--set",
    "settingsSecret=s",
)


@pytest.mark.needs("deploy")
@pytest.mark.parametrize("landlock", [False, True])
def test_the_chart(landlock: bool) -> None:
    """Helm renders it, Kubernetes' schemas take every part, pods are as closed as the page says, and commands are ours."""
    more = ("--set", "ingress.enabled=true,ingress.host=skills.example,ingress.tlsSecret=t,storeSecret=o")
    bound = ("--set", "networkPolicy.to[0].ipBlock.cidr=10.0.0.0/8")
    words = (*CHART, *more, *bound, "--set", f"landlock={str(landlock).lower()},variables.AWS_REGION=us-east-1")
    parts = [part for part in yaml.safe_load_all(run(HELM, "template", "k", DEPLOY / "chart", *words).stdout) if part]
    for part in parts:
        kubernetes_validate.validate(part, "1.34", strict=True)
    kinds = sorted(part["kind"] for part in parts)
    assert kinds == [
        *("Deployment", "Ingress", "Job", "NetworkPolicy", "NetworkPolicy", "NetworkPolicy"),
        *("PodDisruptionBudget", "PodDisruptionBudget", "Service", "Service", "StatefulSet"),
    ]
    pods = [part["spec"]["template"]["spec"] for part in parts if "template" in part["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        closed, account = container["securityContext"], pod["securityContext"]
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        assert "serviceAccountName" not in pod
        assert (account.get("runAsNonRoot"), account["runAsUser"]) == ((None, 0) if landlock else (True, 10000))
        assert account["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (closed["allowPrivilegeEscalation"], closed["readOnlyRootFilesystem"]) == (False, True)
        assert (closed["capabilities"]["drop"], "add" in closed["capabilities"]) == (["ALL"], landlock)
        assert {row["name"] for row in container["env"] if row["name"].startswith("KDSKILLS_")} <= known_variables()
        command_exists(*container["args"])
    (ingress,) = (part for part in parts if part["kind"] == "Ingress")
    (again,) = re.findall("proxy_next_upstream (.*);", read("proxy/kdskills.conf"))
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-next-upstream"] == again
    policies = {part["metadata"]["name"]: part["spec"] for part in parts if part["kind"] == "NetworkPolicy"}
    (fleet,) = policies["k-workers"]["ingress"]
    assert [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in fleet["from"]] == ["doors"]
    listens = {row["name"]: row.get("value", "") for pod in pods for row in pod["containers"][0]["env"]}
    for name in ("LISTEN", "ADDRESS"):
        assert listens[f"KDSKILLS_FLEET__{name}"].endswith(f":{fleet['ports'][0]['port']}")
    assert policies["k"]["egress"][1]["to"] == [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    assert policies["k"]["egress"][2]["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "workers"
    for missing in range(1, len(CHART), 2):
        less = [word for index, word in enumerate(CHART) if index not in {missing - 1, missing}]
        refused = subprocess.run([HELM, "template", "k", DEPLOY / "chart", *less], capture_output=True, text=True)
        assert "is required" in refused.stderr


@pytest.mark.needs("deploy")
def test_the_chart_in_a_cluster_that_runs_pods_and_scrapes() -> None:
    """Doors and workers, and not the tables' job, get the account they are told; Prometheus brings a token, or nothing is made."""
    words = (*CHART, "--set", "serviceAccount.name=kdskills,serviceAccount.automount=true,serviceMonitor.enabled=true")
    command = [HELM, "template", "k", DEPLOY / "chart", *words]
    assert "tokenSecret is required" in subprocess.run(command, capture_output=True, text=True).stderr
    shown = run(*command, "--set", "serviceMonitor.tokenSecret=scrapes").stdout
    parts = [part for part in yaml.safe_load_all(shown) if part]
    accounts = {
        part["kind"]: (pod.get("serviceAccountName"), pod["automountServiceAccountToken"])
        for part in parts
        if "template" in part["spec"]
        for pod in [part["spec"]["template"]["spec"]]
    }
    runs = ("kdskills", True)
    assert accounts == {"Deployment": runs, "StatefulSet": runs, "Job": (None, False)}
    (monitor,) = (part for part in parts if part["kind"] == "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "scrapes", "key": "token"}}


PAGES = (
    "how-to/deploy.md",
    "how-to/run-behind-tls.md",
    "how-to/rotate-tokens.md",
    "how-to/upgrade.md",
    "how-to/runbook.md",
    "explanation/sizing.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_what_exists(page: str) -> None:
    """Settings, commands and codes that an operator reads are those of the product."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert set(re.findall(r"KDSKILLS_\w+", text)) <= known_variables()
    settings = {name for name, _ in setting_rows()}
    dotted = set(re.findall(r"`((?:jobs|bus|turns|trust)\.\w+)`", text))
    assert dotted <= settings
    reference = "".join(
        (ROOT / "docs" / "reference" / name).read_text()
        for name in ("errors.md", "http.md", "cli.md", "isolation.md", "work.md")
    )
    known = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", reference)) | settings | OTHER_WORDS
    assert set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text)) <= known
    for command in set(re.findall(r"\bkdskills ((?:db|jobs|token|bench) [a-z]+|[a-z]+(?:-[a-z]+)*)", text)) - {
        "serve",
        "worker",
    }:
        assert command.split()[0] in {"db", "jobs", "token", "bench"} or f"## `kdskills {command}" in reference, command
        if command.split()[0] in {"db", "jobs", "token"}:
            assert f"## `kdskills {command}`" in reference


OTHER_WORDS = {"max_connections", "pg_isready"}
"""Words of pages that are no setting, option or code of the reference."""
