"""What the engine needs of E2B's SDK, and one error for everything that can go wrong with it.

Nothing here judges a failure by words a program printed: whether a sandbox is gone is asked of the API.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from kdskills.errors import ExecRefused
from kdskills.models.redact import Redactor

if TYPE_CHECKING:
    from e2b import Sandbox

    from kdskills.execution.protocol import E2bOptions

ROOT: Final = "root"
REQUEST_S: Final = 60.0

Code = Literal["unauthorized", "rate_limited", "gone", "file_missing", "unreachable"]


class Trouble(Exception):
    """E2B could not do what was asked; the message is free of keys and tokens."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class Cloud:
    """Makes and finds sandboxes.

    Args:
        options: How to reach E2B.
        key: The API key; kept out of every message.

    Raises:
        ExecRefused: The SDK is not installed.
    """

    def __init__(self, options: E2bOptions, key: str) -> None:
        try:
            import e2b
        except ImportError:
            raise ExecRefused(
                "the engine e2b needs the package e2b: pip install 'kdskills[e2b]'", engine="e2b"
            ) from None
        self._sdk = e2b
        self._options = options
        self._redactor = Redactor([key])
        self._how: dict[str, Any] = {"api_key": key, "request_timeout": REQUEST_S}
        if options.api_url is not None:
            self._how["api_url"] = options.api_url
        if options.sandbox_url is not None:
            self._how["sandbox_url"] = options.sandbox_url

    def create(self, timeout_s: float, labels: Mapping[str, str]) -> Machine:
        """Make a sandbox that lives *timeout_s* seconds, without access to the internet. Raises Trouble."""
        with self.translated():
            return Machine(
                self,
                self._sdk.Sandbox.create(
                    template=self._options.template,
                    timeout=round(timeout_s),
                    metadata=dict(labels),
                    allow_internet_access=False,
                    **self._how,
                ),
            )

    def connect(self, sandbox: str, timeout_s: float) -> Machine:
        """Find a sandbox again. Raises Trouble, `gone` when it is not there any more."""
        with self.translated():
            return Machine(self, self._sdk.Sandbox.connect(sandbox, timeout=round(timeout_s), **self._how))

    def kill(self, sandbox: str) -> bool:
        """End a sandbox; False when it was gone already. Raises Trouble."""
        with self.translated():
            return bool(self._sdk.Sandbox.kill(sandbox, **self._how))

    def living(self, sandbox: str) -> bool:
        """Ask the API whether a sandbox is there. Raises Trouble when it does not say."""
        try:
            with self.translated():
                self._sdk.Sandbox.get_info(sandbox, **self._how)
        except Trouble as trouble:
            if trouble.code == "gone":
                return False
            raise
        return True

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turn whatever the SDK raises into Trouble."""
        try:
            yield
        except (Trouble, self._sdk.CommandExitException):
            raise
        except Exception as error:  # noqa: BLE001 - the SDK raises plain Exception, too; each becomes Trouble
            raise self._trouble(error) from None

    def _trouble(self, error: Exception) -> Trouble:
        sdk = self._sdk
        words = self._redactor.text(f"{type(error).__name__}: {error}")[:500]
        if isinstance(error, sdk.AuthenticationException):
            return Trouble("unauthorized", f"E2B refused the API key ({words})")
        if isinstance(error, sdk.RateLimitException):
            return Trouble("rate_limited", f"E2B's rate limit is reached; try again later ({words})")
        if isinstance(error, sdk.FileNotFoundException):
            return Trouble("file_missing", words)
        if isinstance(error, sdk.NotFoundException):
            return Trouble("gone", words)
        return Trouble("unreachable", words)

    @property
    def exit_exception(self) -> type[Any]:
        """The SDK's exception for commands that end with a code other than 0."""
        return self._sdk.CommandExitException


class Machine:
    """One sandbox. Every call may raise Trouble; `gone` is the API's own word, never read from a program's output."""

    def __init__(self, cloud: Cloud, sandbox: Sandbox) -> None:
        self._cloud = cloud
        self._sandbox = sandbox
        self.id: str = sandbox.sandbox_id

    def live_for(self, timeout_s: float) -> None:
        """Have the sandbox end after *timeout_s* seconds from now."""
        with self._cloud.translated():
            self._sandbox.set_timeout(round(timeout_s))

    def living(self) -> bool:
        """Ask the API whether the sandbox is there."""
        return self._cloud.living(self.id)

    def write(self, path: str, data: bytes) -> None:
        """Write a file as root."""
        with self._inside():
            self._sandbox.files.write(path, data, user=ROOT)

    def read(self, path: str) -> bytes:
        """Read a file as root; `file_missing` when it is not there."""
        with self._inside():
            return bytes(self._sandbox.files.read(path, format="bytes", user=ROOT))

    def run(self, command: str, timeout_s: float = REQUEST_S) -> tuple[int, str, str]:
        """Run a short command as root and return (exit code, stdout, stderr)."""
        with self._inside():
            try:
                result = self._sandbox.commands.run(command, user=ROOT, cwd="/", timeout=timeout_s)
            except self._cloud.exit_exception as ended:
                return ended.exit_code, ended.stdout, ended.stderr
            return result.exit_code, result.stdout, result.stderr

    def follow(
        self, command: str, timeout_s: float, started: Callable[[int], None], stdout: Callable[[str], None]
    ) -> tuple[int, str]:
        """Run a command as root to its end and return (exit code, stderr).

        Args:
            command: For bash.
            timeout_s: When the machine itself ends it.
            started: Told its process id.
            stdout: Given its output as it comes.
        """
        with self._inside():
            handle = self._sandbox.commands.run(command, background=True, user=ROOT, cwd="/", timeout=timeout_s)
            started(handle.pid)
            try:
                result = handle.wait(on_stdout=stdout)
            except self._cloud.exit_exception as ended:
                return ended.exit_code, ended.stderr
            return result.exit_code, result.stderr

    def end(self, pid: int) -> bool:
        """KILL a command; False when there is none of that id."""
        with self._inside():
            return bool(self._sandbox.commands.kill(pid))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Translate what goes wrong inside the sandbox; ask the API when the sandbox itself may be what is missing."""
        try:
            with self._cloud.translated():
                yield
        except Trouble as trouble:
            if trouble.code in {"unreachable", "gone"} and not self._cloud.living(self.id):
                raise Trouble("gone", f"the sandbox {self.id} is gone") from None
            raise
