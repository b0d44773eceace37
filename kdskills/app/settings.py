"""Settings of a Host: one documented model, read from `config.toml` and `KDSKILLS_*` variables."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kdskills.app.identity import Scope
from kdskills.bundle.descriptor import AuditPolicy, LockPolicy, SignaturePolicy, TrustPolicy
from kdskills.errors import OperatorMustAct, StrPath, path_argument
from kdskills.execution import EgressBounds, ExecutionOptions, IsolationLevel
from kdskills.execution.egress import checked_secret, host_rule, secret_header, secret_origin
from kdskills.execution.protocol import E2bOptions, KubernetesOptions
from kdskills.jobs.settings import FleetSettings, JobsSettings, sqlite_url, user_state_dir
from kdskills.models import ModelPrice

SYSTEM_CONFIG = Path("/etc/kdskills/config.toml")

#: Fields that widen what programs may do: a variable or a bundle must never set them.
FILE_ONLY = frozenset(
    {
        "allow_unisolated",
        "best_effort_limits",
        "sandbox_uid",
        "e2b_api_url",
        "e2b_sandbox_url",
        "kubernetes_config",
        "kubernetes_context",
        "kubernetes_image",
        "kubernetes_namespace",
        "kubernetes_runtime_class",
        "network",
        "network_secrets",
        "trust",
    }
)


PREFIX = "KDSKILLS_"

#: Variables that are no settings: of programs in a sandbox, of servers of skills, of clients, of this repository's tests and scripts.
OTHER_VARIABLES = frozenset(
    {
        *(
            "KDSKILLS_AXE_DIR",
            "KDSKILLS_CANARY",
            "KDSKILLS_CHAOS",
            "KDSKILLS_CODEX_DIR",
            "KDSKILLS_CONFORMANCE_LEAK",
            "KDSKILLS_MCP_DIR",
        ),
        *(
            "KDSKILLS_REQUIRE",
            "KDSKILLS_RUN",
            "KDSKILLS_SCREENSHOTS",
            "KDSKILLS_SECOND_CHANCE",
            "KDSKILLS_SERVICES_DIR",
            "KDSKILLS_SKILL_DIR",
        ),
        *("KDSKILLS_SKILLS_CLIENT_DIR", "KDSKILLS_TEST_WORKERS", "KDSKILLS_TOKEN", "KDSKILLS_TURN_DIR"),
    }
)
#: Beginnings of variables whose ends are up to the operator.
OTHER_PREFIXES = ("KDSKILLS_MCP_TOKEN_",)

#: What lists and tables look like in a variable, where the default is empty or would not help.
EXAMPLES = {"list": '["one", "two"]', "table": '{"name": "value"}'}


class SettingsInvalid(OperatorMustAct, code="settings_invalid"):
    """A settings file or variable is not understood; `details["errors"]` lists the fields."""


def user_config() -> Path | None:
    """Return `~/.config/kdskills/config.toml` of the account itself: `HOME` and XDG variables are not asked.

    A variable that moves this file could switch the wall off. None for a uid without an account,
    as containers have them.
    """
    with suppress(KeyError):
        return Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".config" / "kdskills" / "config.toml"
    return None


def config_files() -> tuple[Path, ...]:
    """Return where settings files may be, the strongest first."""
    user_file = user_config()
    return (SYSTEM_CONFIG,) if user_file is None else (user_file, SYSTEM_CONFIG)


def _checked_rule(text: str) -> str:
    host_rule(text)
    return text


def _checked_origin(text: str) -> str:
    secret_origin(text)
    return text


HostRuleText = Annotated[str, AfterValidator(_checked_rule)]
OriginText = Annotated[str, AfterValidator(_checked_origin)]
HeaderName = Annotated[str, AfterValidator(secret_header)]
HeaderSecret = Annotated[SecretStr, AfterValidator(checked_secret)]


class BusSettings(BaseModel):
    """Where the command bus is, who may call over it, and how much at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(
        default=None,
        description="Address of the bus that `kdskills serve` answers, too, such as `nats://127.0.0.1:4222`.",
    )
    version: str = Field(default="v1", pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Version in the subjects.")
    projects: tuple[str, ...] = Field(default=("local",), description="Projects that may call over the bus.")
    channels: dict[str, str] = Field(
        default_factory=lambda: {"*": "*"},
        description="Agent of each channel; `*` stands for every other channel, and as an agent for the channel's name.",
    )
    scopes: tuple[Scope, ...] = Field(
        default=("skills:read", "work:run", "work:read"), description="What callers over the bus may do."
    )
    person: bool = Field(default=False, description="Whether people start skills over the bus; else models do.")
    tools: tuple[str, ...] = Field(default=(), description="Ids of the tools that callers over the bus hold.")
    concurrency: int = Field(default=16, ge=1, le=1000, description="Commands that one gateway runs at the same time.")
    ack_wait_s: float = Field(
        default=30.0, ge=1, description="Seconds until a command nobody works on is delivered again."
    )
    max_deliver: int = Field(default=100, ge=1, description="How often a command is delivered before it is given up.")


class TrustSettings(BaseModel):
    """What is asked of every skill on this machine; a bundle's descriptor may only ask for more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lock: LockPolicy = Field(
        default="off",
        description="Skills that differ from `kdskills.lock` or are not in it: `off`, `warn` tells, `enforce` refuses them.",
    )
    signatures: SignaturePolicy = Field(
        default="off",
        description="Skills without a valid signature of somebody trusted: `off`, `warn` tells, `require` refuses them.",
    )
    signers: tuple[str, ...] = Field(
        default=(), description="Names of the anchors that may sign; empty means any of `kdskills trust list`."
    )
    audit: AuditPolicy = Field(
        default="off",
        description="Findings of the audit in skills that are added or uploaded: `off`, `warn` tells, `block-high` refuses.",
    )

    @property
    def policy(self) -> TrustPolicy:
        """The settings as the policy that descriptors state."""
        return TrustPolicy(**dict(self))


class TurnsSettings(BaseModel):
    """Turns: which are kept in the state folder, how many and how long, and who may start which in the background.

    Older ones go when a turn of their project ends.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: bool = Field(
        default=True,
        description="Whether transcripts and files of turns are kept in the state folder, for `kdskills turn list`.",
    )
    most: int = Field(default=5000, ge=0, description="Turns of a project that are kept; 0 for any number.")
    days: float = Field(default=30.0, ge=0, le=36_500, description="Days a turn is kept; 0 for ever.")
    mb: int = Field(
        default=2048, ge=0, description="MiB that the turns of a project may have together; 0 for any number."
    )
    models: tuple[str, ...] = Field(
        default=("replay",),
        description="Models that callers elsewhere may start turns with, each by its whole name, such as `openai:gpt-5`.",
    )
    running: int = Field(
        default=2, ge=0, le=256, description="Turns in the background that one process runs at a time."
    )


ProfileName = Literal["documents", "data", "web", "node"]


class Settings(BaseSettings):
    """What the operator decides. Strongest first: arguments, `KDSKILLS_*` variables, the user's file, the system's."""

    model_config = SettingsConfigDict(env_prefix="KDSKILLS_", env_nested_delimiter="__", extra="forbid", frozen=True)

    # `default=` is spelt out: by that word pyright knows that a setting may be left out.
    executor: str = Field(
        default="auto", description="Engine of scripts and generated code: `auto` or an engine's name."
    )
    min_isolation: Literal["none", "rlimit", "landlock", "namespace", "container", "kernel", "vm"] = Field(
        default="namespace", description="Weakest wall that is accepted."
    )
    allow_unisolated: bool = Field(
        default=False, description="Half of the double opt-in of the bare `subprocess` engine; settings files only."
    )
    best_effort_limits: tuple[str, ...] = Field(
        default=(), description="Limits that may go unenforced where an engine cannot hold them; settings files only."
    )
    sandbox_uid: int = Field(
        default=10001, ge=1, description="Dedicated uid of programs when kdskills runs as root; settings files only."
    )
    image_packages: tuple[str, ...] = Field(
        default=(), description="Further installed packages to copy into the sandbox image, with what they require."
    )
    image_profiles: tuple[ProfileName, ...] = Field(
        default=(), description="Kept lists of programs and packages that the sandbox image has, of what is installed."
    )
    environments: Literal["off", "locked", "ask", "auto"] = Field(
        default="ask",
        description="Packages of skills: `off` brings none; with `locked` programs get what `kdskills.lock` has and "
        "`kdskills env build` built; `ask` is as `locked`, but `kdskills run`, `demo` and `env build` at a terminal ask "
        "whether to bring what is missing; `auto` also finds and builds what a script declares when it first runs.",
    )
    environment_index: dict[str, str] = Field(
        default_factory=dict,
        description="Indexes of packages by name, the first to be asked first; empty means those that uv and pip of this machine use.",
    )
    environment_registry: str = Field(
        default="https://registry.npmjs.org/", description="Registry that packages of Node come from."
    )
    environment_cache_dir: Path | None = Field(
        default=None, description="Folder that environments are built in; unset: the cache."
    )
    environment_cache_mb: int = Field(
        default=20_000, ge=0, description="MiB that built environments may have together; 0 for any number."
    )
    pool: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Sandboxes the bubblewrap engine keeps ready ahead of time, each for one run.",
    )
    network: dict[str, tuple[HostRuleText, ...]] = Field(
        default_factory=dict,
        description="Hosts that programs of a skill may reach, by its namespace or full id, such as "
        '`{"public.fetch" = ["pypi.org", "*.example.net:443"]}`; settings files only.',
    )
    network_secrets: dict[str, dict[OriginText, dict[HeaderName, HeaderSecret]]] = Field(
        default_factory=dict,
        description="Headers that are put into requests of a skill's programs outside the sandbox, by its namespace or full id and "
        'by host, such as `{"public.fetch" = {"api.example.net" = {Authorization = "Bearer …"}}}`; settings files only.',
    )
    prices: dict[str, ModelPrice] = Field(
        default_factory=dict,
        description="What models cost, in US dollars for a million tokens, such as "
        '`{"openai:mine" = {input = 0.5, output = 2, cache_read = 0.1}}`; beside them, shipped prices of OpenAI and Anthropic hold.',
    )
    network_connections: int = Field(
        default=16, ge=1, le=256, description="Connections to granted hosts that a program has at one time."
    )
    network_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1,
        description="Bytes that a program may send to granted hosts and receive, in all.",
    )
    network_seconds: float = Field(
        default=300.0,
        gt=0,
        le=20 * 86_400,
        description="Seconds that a connection to a granted host may last, up to 20 days.",
    )
    e2b_api_key: SecretStr | None = Field(
        default=None, description="API key of E2B; empty means the variable `E2B_API_KEY`."
    )
    e2b_template: str = Field(default="base", description="Template that E2B sandboxes are made from.")
    e2b_idle_ttl_s: float = Field(
        default=300.0, gt=0, description="Seconds after which an unused E2B sandbox is ended."
    )
    e2b_hard_ttl_s: float = Field(default=3600.0, gt=0, description="Seconds after which an E2B sandbox is replaced.")
    e2b_api_url: str | None = Field(default=None, description="Address of E2B's API; settings files only.")
    e2b_sandbox_url: str | None = Field(default=None, description="Address of E2B's sandboxes; settings files only.")
    kubernetes_image: str | None = Field(
        default=None,
        description="Image of pods, by digest as in `registry/name@sha256:…`; settings files only.",
    )
    kubernetes_namespace: str = Field(
        default="kdskills-runs", description="Namespace that pods are made in; settings files only."
    )
    kubernetes_config: Path | None = Field(
        default=None,
        description="Kubeconfig file; empty means the cluster that kdskills runs in, else `KUBECONFIG` or `~/.kube/config`; settings files only.",
    )
    kubernetes_context: str | None = Field(
        default=None, description="Context of the kubeconfig; empty means its current one; settings files only."
    )
    kubernetes_runtime_class: str | None = Field(
        default=None,
        description="RuntimeClass of pods, such as one of gVisor or Kata Containers; settings files only.",
    )
    kubernetes_start_s: float = Field(
        default=120.0, gt=0, le=3600, description="Seconds that a pod may take to be scheduled, pulled and started."
    )
    model: str = Field(
        default="replay", description="Model of `kdskills run` and `demo`, such as `openai:gpt-5` or `replay`."
    )
    embedder: str | None = Field(
        default=None,
        description="What makes vectors of skills and questions, so that searches go by meaning, too, such as "
        "`openai:text-embedding-3-small` or `ollama:NAME`; empty means words only, and no text is sent anywhere.",
    )
    resolve_sources: bool = Field(
        default=False,
        description="Whether plugins may complete rows of sources, such as those with a DOI; they may ask a network for it.",
    )
    index_dir: Path | None = Field(
        default=None, description="Folder of the persisted skill index; empty means the user cache."
    )
    bundle: Path | None = Field(default=None, description="Bundle of project `local`, for callers who name none.")
    state_dir: Path = Field(
        default_factory=user_state_dir,
        description="Folder of durable state: runs, session folders, the default database.",
    )
    database_url: str | None = Field(
        default=None,
        description="Database of background work; empty means SQLite in the state folder, `postgresql://…` is shared.",
    )
    artifacts: str | None = Field(
        default=None,
        description="Where files that work leaves are kept: a folder, `s3://…`, `az://…` or `gs://…`; empty means the state folder.",
    )
    jobs: JobsSettings = Field(default_factory=JobsSettings, description="Background work: its intervals and limits.")
    fleet: FleetSettings = Field(
        default_factory=FleetSettings, description="Many hosts: how each serves what it has to the doors of the others."
    )
    turns: TurnsSettings = Field(
        default_factory=TurnsSettings, description="Turns: those that are kept, and those in the background."
    )
    codex_binary: str = Field(default="codex", description="Program of the Codex app-server, by name or path.")
    session_store: str | None = Field(
        default=None,
        description="Where conversation sessions of callers are kept, such as `sqlite:///sessions.db`; else memory.",
    )
    stdio_token: SecretStr | None = Field(
        default=None, description="Token that `kdskills mcp` acts with on standard input; empty means none."
    )
    listen: str = Field(
        default="127.0.0.1:8765", description="Address of the HTTP service; loopback unless tokens are used."
    )
    host_names: tuple[str, ...] = Field(
        default=(),
        description="Names clients and proxies reach the service by, beside those of loopback, the host it listens on and its address; requests for others are refused.",
    )
    console: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether the HTTP service has the console at /ui: `auto` only where it listens on loopback.",
    )
    bus: BusSettings = Field(default_factory=BusSettings, description="The command bus: who may call, and how.")
    requests_per_minute: int = Field(
        default=1200, ge=0, description="Requests a token may make in a minute; 0 for no limit."
    )
    body_limit: int = Field(default=24 * 1024 * 1024, ge=1024, description="Bytes the body of a request may have.")
    connections: int | None = Field(
        default=None,
        ge=1,
        description="Connections the HTTP service has at one time; empty means as many as its open files allow.",
    )
    header_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds a connection has for the head of a request before it is closed."
    )
    body_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds a body may stand still, or come slower than 1 KiB/s, before it is given up.",
    )
    drain_s: float = Field(
        default=20.0, ge=0, description="Seconds that running requests get when the service is stopped."
    )
    concurrent_work: int = Field(
        default=1000,
        ge=0,
        description="Tasks and jobs an agent may have at one time by a token without its own limit; 0 for any.",
    )
    collect_interval_s: float = Field(
        default=3600.0, gt=0, description="Seconds between two looks for skill versions nobody uses any longer."
    )
    collect_keep_days: float = Field(
        default=30.0, ge=0, description="Days a skill version stays after it was last the active one."
    )
    audit_keep_days: float = Field(
        default=0.0, ge=0, le=36_500, description="Days a row of the audit log stays; 0 for ever."
    )
    conversations_keep_days: float = Field(
        default=0.0,
        ge=0,
        le=36_500,
        description="Days a conversation in `session_store` stays after its last turn; 0 for ever.",
    )
    pulse_s: float = Field(default=15.0, gt=0, description="Seconds between two measurements of how the work stands.")
    skill_roots: tuple[str, ...] = Field(
        default=(), description="Further skill roots by URI, such as `mcp+https://host/mcp#label`; plugins open them."
    )
    trust: TrustSettings = Field(
        default_factory=TrustSettings, description="What is asked of skills: locks and signatures; settings files only."
    )
    plugins_blocked: tuple[str, ...] = Field(default=(), description="Dotted names of plugins that must not be loaded.")
    entry_points: bool = Field(default=True, description="Whether plugins of installed packages are loaded.")

    @model_validator(mode="after")
    def _one_store(self) -> Self:
        """Refuse to save sessions where no other host looks: without a name, each host has a store of its own."""
        if self.jobs.session_folders == "store" and self.artifacts is None:
            raise ValueError("jobs.session_folders is 'store': artifacts must name a store that all hosts share")
        return self

    @property
    def isolation(self) -> IsolationLevel:
        """`min_isolation` as a level."""
        return IsolationLevel[self.min_isolation.upper()]

    @property
    def work_database(self) -> str:
        """URL of the database of background work."""
        return self.database_url or sqlite_url(self.state_dir)

    def execution_options(self) -> ExecutionOptions:
        """Return what engines are built with."""
        return ExecutionOptions(
            sandbox_uid=self.sandbox_uid,
            best_effort=frozenset(self.best_effort_limits),
            allow_unisolated=self.allow_unisolated,
            image_packages=self.image_packages,
            image_profiles=self.image_profiles,
            pool=self.pool,
            egress=EgressBounds(self.network_connections, self.network_bytes, self.network_seconds),
            network_secrets=self.network_secrets,
            e2b=E2bOptions(**{field.name: getattr(self, f"e2b_{field.name}") for field in fields(E2bOptions)}),
            kubernetes=KubernetesOptions(
                **{field.name: getattr(self, f"kubernetes_{field.name}") for field in fields(KubernetesOptions)}
            ),
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments, then variables without the file-only fields; files are added by `load`."""
        return init_settings, _Variables(settings_cls)

    @classmethod
    def load(cls, *files: StrPath, **changes: object) -> Self:
        """Read the settings. Raises SettingsInvalid.

        Args:
            *files: Settings files, the strongest first; none given means the user's and the system's.
            **changes: Values that beat every file and variable.
        """
        chosen = tuple(path_argument(file, "files") for file in files) or config_files()
        try:
            merged: dict[str, Any] = {}
            for path in reversed(chosen):
                if path.is_file():
                    merged = _merged(merged, TomlConfigSettingsSource(cls, path)())
            merged = _merged(merged, _Variables(cls)())
            return cls(**(merged | changes))
        except ValidationError as error:
            raise _not_understood(error) from None
        except (OSError, ValueError) as error:
            raise SettingsInvalid(f"a settings file cannot be read: {error}") from None


def settings_line(settings: Settings) -> bytes:
    """Return *settings* as one line for a process of ours, secrets in clear."""
    return json.dumps(settings.model_dump(), default=_plain).encode()


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be told to another process")


def setting_rows(model: type[BaseModel] | None = None) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting as `field`, `table.field` or `table.table.field`, with what is known of it."""
    for name, field in (model or Settings).model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, BaseModel):
            yield from ((f"{name}.{inner}", part) for inner, part in setting_rows(table))
        else:
            yield name, field


def variable_of(name: str) -> str:
    """Return the variable of a setting: `bus.projects` is `KDSKILLS_BUS__PROJECTS`."""
    return PREFIX + name.replace(".", "__").upper()


def kind_of(field: FieldInfo) -> Literal["list", "table"] | None:
    """Return what a setting's variable holds as JSON; None for plain text and numbers."""
    origins = {get_origin(part) or part for part in (field.annotation, *get_args(field.annotation))}
    if dict in origins:  # of lists, too
        return "table"
    return "list" if origins & {tuple, list, set, frozenset} else None


def example_of(field: FieldInfo) -> str:
    """Return what the variable of a list or table looks like: the default where there is one."""
    kind = kind_of(field)
    default = field.get_default(call_default_factory=True, validated_data={})
    return json.dumps(default) if default and kind else EXAMPLES.get(kind or "", "")


@cache
def known_variables() -> frozenset[str]:
    """Return every name that a variable may have, beside those that begin as `OTHER_PREFIXES` do."""
    paths = [name.split(".") for name, _ in setting_rows()]
    tables = {variable_of(".".join(path[:depth])) for path in paths for depth in range(1, len(path))}
    return frozenset({variable_of(name) for name, _ in setting_rows()} | tables | OTHER_VARIABLES)


def _check_variables(environ: Mapping[str, str]) -> None:
    """Refuse variables of no setting, and lists and tables that are no JSON; say what must be instead, or where."""
    variables = {variable.upper() for variable in environ}
    forbidden = sorted(
        name
        for name in FILE_ONLY
        if variable_of(name) in variables or any(item.startswith(f"{variable_of(name)}__") for item in variables)
    )
    if forbidden:
        names = ", ".join(map(variable_of, forbidden))
        message = f"{names} cannot be set by a variable: write it into {' or '.join(map(str, config_files()))}"
        raise SettingsInvalid(message, errors=dict.fromkeys(forbidden, "settings file only"))
    fields = {variable_of(name): field for name, field in setting_rows()}
    tables = tuple(f"{name}__" for name, field in fields.items() if kind_of(field) == "table")
    problems = {}
    for name, value in environ.items():
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper.startswith(OTHER_PREFIXES) or upper.startswith(tables):
            continue
        if upper not in known_variables():
            matches = get_close_matches(upper, known_variables(), 1, 0.5)
            problems[name] = "there is no such setting" + (f"; the nearest name is {matches[0]}" if matches else "")
        elif upper in fields and (kind := kind_of(fields[upper])) and not _is_json(value, kind):
            problems[name] = f"must be a {kind} in JSON, such as {name}='{example_of(fields[upper])}'"
    if problems:
        words = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise SettingsInvalid(f"variables are not understood: {words}", errors=problems)


def _is_json(value: str, kind: str) -> bool:
    try:
        return isinstance(json.loads(value), dict if kind == "table" else list)
    except (ValueError, RecursionError):
        return False


def _not_understood(error: ValidationError) -> SettingsInvalid:
    """Return what is wrong with values, each under the name of the variable it came from, if it came from one."""
    problems = {}
    set_variables = {name.upper() for name in os.environ}
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        candidates = [variable_of(".".join(str(part) for part in item["loc"][:depth])) for depth in (2, 1)]
        variables = [candidate for candidate in candidates if candidate in set_variables]
        problems[variables[0] if variables else name] = item["msg"]
    words = "; ".join(f"{field}: {problem}" for field, problem in problems.items())
    return SettingsInvalid(f"settings are not understood: {words}", errors=problems)


def _merged(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    """Return both; tables that both have are merged in their turn, so that one variable does not hide a file's table."""
    merged = {
        name: _merged(weak[name], value)
        if isinstance(value, Mapping) and isinstance(weak.get(name), Mapping)
        else value
        for name, value in strong.items()
    }
    return {**weak, **merged}


class _Variables(EnvSettingsSource):
    """The variables; names of no setting are refused, and so are the fields that only a file may set."""

    def __call__(self) -> dict[str, Any]:
        _check_variables(os.environ)
        return super().__call__()
