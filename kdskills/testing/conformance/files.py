"""What goes in and what comes out: environment, arguments, inputs, outputs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from kdskills.errors import ExecRefused
from kdskills.execution import Executor, InputFile, IsolationLevel, Limits
from kdskills.testing.conformance.common import Promise, ask, program, run, same, sh

HOOKS = (
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PYTHONSTARTUP",
    "PYTHONPATH",
    "BASH_ENV",
    "ENV",
    "NODE_OPTIONS",
    "DOCKER_HOST",
)
VALUES = {
    "PLAIN": "x",
    "EMPTY": "",
    "LINES": "a\nb",
    "QUOTES": "'\"$(id)`id`\\",
    "NOT_ASCII": "ü €",
}


async def environment_is_exact(executor: Executor) -> None:
    """Variables arrive byte for byte, and none of the host's with them."""
    os.environ["KDSKILLS_CONFORMANCE_LEAK"] = "leak"
    try:
        result = await run(executor, code=program("see.py"), env=VALUES)
    finally:
        del os.environ["KDSKILLS_CONFORMANCE_LEAK"]
    assert isinstance(result.value, dict), result
    env = result.value["env"]
    same(VALUES, {name: env.get(name) for name in VALUES}, result)
    allowed = {*VALUES, "PATH", "HOME", "LANG", "TMPDIR", "PWD", "HOSTNAME", "LC_CTYPE", "KDSKILLS_RUN"}
    if executor.level < IsolationLevel.NAMESPACE:
        allowed.add("LD_LIBRARY_PATH")  # of the prepared tree, where nothing can show it as /usr/lib
    same(set(), set(env) - allowed, result)


async def hooks_are_refused(executor: Executor) -> None:
    """Variables that steer loaders and interpreters are refused by name, and names must be names."""
    for name in (*HOOKS, "A-B", "1A", "", "A=B"):
        await refused(executor, f"env {name}", argv=("true",), env={name: "x"})


async def arguments_are_exact(executor: Executor) -> None:
    """No shell stands between the caller and the program."""
    words = ("a b", "$HOME", "`id`", "*", "'\"", "\n", "", "-n", "ü", "--", ";true")
    result = await run(executor, argv=("printf", "[%s]", *words))
    same("".join(f"[{word}]" for word in words), result.stdout.text, result)


async def bad_requests_are_refused(executor: Executor) -> None:
    """Paths, globs, sizes and shapes are checked before anything runs."""
    requests: dict[str, dict[str, Any]] = {
        "nothing": {},
        "two programs": {"argv": ("true",), "code": "pass"},
        "empty argv": {"argv": ()},
        "input above": {"argv": ("true",), "inputs": (InputFile("../x", b""),)},
        "input absolute": {"argv": ("true",), "inputs": (InputFile("/etc/x", b""),)},
        "output above": {"argv": ("true",), "outputs": ("../*",)},
        "output absolute": {"argv": ("true",), "outputs": ("/etc/passwd",)},
        "workdir above": {"argv": ("true",), "workdir": "../.."},
        "long argument": {"argv": ("true", "x" * 131072)},
        "much stdin": {"argv": ("cat",), "stdin": bytes(9 * 1024 * 1024)},
        "long wall": {"argv": ("true",), "limits": Limits(wall_s=601)},
        "odd global": {"code": "pass", "globals": {"not a name": 1}},
        "odd value": {"code": "pass", "globals": {"x": object()}},
    }
    for name, request in requests.items():
        await refused(executor, name, **request)


async def inputs_are_copies(executor: Executor) -> None:
    """Inputs are there, may be changed inside, and the host's files stay as they were."""
    with tempfile.TemporaryDirectory() as top:
        source = Path(top).resolve() / "in.txt"
        source.write_bytes(b"host")
        inputs = (InputFile("a/b/in.txt", source), InputFile("bytes.bin", bytes(range(256))))
        script = "cat a/b/in.txt bytes.bin && echo changed > a/b/in.txt && rm bytes.bin"
        result = await sh(executor, script, inputs=inputs)
        same(("ok", b"host" + bytes(range(256))), (result.status, result.stdout.data), result)
        same(b"host", source.read_bytes(), result)


async def linked_inputs_are_refused(executor: Executor) -> None:
    """A host file reached through a link, a folder, a FIFO and a missing file are refused, and nothing hangs."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top).resolve()
        (folder / "real").mkdir()
        (folder / "real" / "f").write_bytes(b"x")
        (folder / "link").symlink_to(folder / "real" / "f")
        (folder / "linked").symlink_to(folder / "real")
        os.mkfifo(folder / "fifo")
        for name in ("link", "linked/f", "fifo", "real", "missing"):
            await refused(executor, name, argv=("true",), inputs=(InputFile("x", folder / name),))


async def outputs_are_plain_files(executor: Executor) -> None:
    """Regular files come back with their bytes; links, FIFOs and linked folders are named and not opened."""
    result = await run(executor, code=program("outputs.py"), outputs=("*.txt", "folder/passwd", "real/**", "absent"))
    found = {item.path: item.content for item in result.artifacts}
    same({"good.txt": b"good", "setuid.txt": b"mode", "real/inner.bin": bytes(range(256))}, found, result)
    assert all(item.mode & ~0o755 == 0 for item in result.artifacts), result
    errors = {item.path for item in result.artifact_errors}
    assert {"link.txt", "fifo.txt"} <= errors, result
    assert "absent" in errors, result
    assert b"root:" not in b"".join(found.values()), result


async def output_names_are_plain(executor: Executor) -> None:
    """A file whose name a terminal would obey, that reads otherwise than written, or that is no text, is not collected.

    It is named as `bad_name`, escaped; names of any script are kept as they are.
    """
    good = ("ü €.txt", "שלום.txt", "a b.txt")
    result = await run(executor, code=program("names.py"), outputs=("**",))
    same({*good}, {item.path for item in result.artifacts}, result)
    bad = {item.path: item.code for item in result.artifact_errors if item.path != "**"}
    escaped = ("back\\slash", "c1\\x85", "d\\x1b/inner", "esc\\x1b[2J", "line\\nbreak", "no\\xff", "turn\\u202etxt.exe")
    names = (name if name.endswith(".exe") else f"{name}.txt" for name in escaped)
    same(dict.fromkeys(names, "bad_name"), bad, result)


async def output_caps_hold(executor: Executor) -> None:
    """More or larger outputs than allowed are named, not collected."""
    limits = Limits(output_files=2, output_size=1000)
    script = "for n in 1 2 3; do echo $n > $n.txt; done; head -c 2000 /dev/zero > big.bin"
    result = await sh(executor, script, outputs=("*.txt", "big.bin"), limits=limits)
    same(2, len(result.artifacts), result)
    assert {"too_many", "too_large"} & {item.code for item in result.artifact_errors}, result
    assert sum(item.size for item in result.artifacts) <= 1000, result


async def sparse_output(executor: Executor) -> None:
    """A sparse file larger than the caps costs neither memory nor time."""
    result = await sh(
        executor,
        "truncate -s 40G sparse || truncate -s 60M sparse",
        outputs=("sparse",),
        limits=Limits(output_size=1000),
    )
    same((), result.artifacts, result)


async def runs_leave_nothing_to_each_other(executor: Executor) -> None:
    """A new run finds an empty workdir and temporary folder."""
    first = await sh(executor, 'echo secret > left; echo secret > "$TMPDIR/left"; echo s > /dev/shm/left; :')
    same("ok", first.status, first)
    second = await sh(executor, 'ls -A; ls -A "$TMPDIR"')
    same(b"", second.stdout.data, second)


async def shared_memory_is_not_shared(executor: Executor) -> None:
    """Shared memory of one run is not there in the next."""
    await sh(executor, "echo secret > /dev/shm/left")
    result = await sh(executor, "ls -A /dev/shm")
    same(b"", result.stdout.data, result)


async def workdir_is_made(executor: Executor) -> None:
    """A program starts in the workdir asked for."""
    result = await sh(executor, "pwd", workdir="sub/dir")
    assert result.stdout.data.endswith(b"/sub/dir\n"), result


async def refused(executor: Executor, name: str, *, refusal: str = "bad_request", **request: Any) -> None:
    """Assert that a request is refused by this code, *refusal*, and nothing runs."""
    try:
        result = await executor.run(ask(executor, **request))
    except ExecRefused as error:
        assert error.code == refusal, f"{name}: {error.code}"
        return
    raise AssertionError(f"{name} was run: {result!r}")


PROMISES = (
    Promise("environment_is_exact", "Asking for a run", environment_is_exact),
    Promise("hooks_are_refused", "Asking for a run", hooks_are_refused),
    Promise("arguments_are_exact", "Asking for a run", arguments_are_exact),
    Promise("bad_requests_are_refused", "Asking for a run", bad_requests_are_refused),
    Promise("inputs_are_copies", "Asking for a run", inputs_are_copies),
    Promise("linked_inputs_are_refused", "Asking for a run", linked_inputs_are_refused),
    Promise("outputs_are_plain_files", "Asking for a run", outputs_are_plain_files),
    Promise("output_names_are_plain", "Asking for a run", output_names_are_plain),
    Promise("output_caps_hold", "Asking for a run", output_caps_hold),
    Promise("sparse_output", "Asking for a run", sparse_output),
    Promise("runs_leave_nothing_to_each_other", "Asking for a run", runs_leave_nothing_to_each_other),
    Promise("shared_memory_is_not_shared", "Asking for a run", shared_memory_is_not_shared, IsolationLevel.NAMESPACE),
    Promise("workdir_is_made", "Asking for a run", workdir_is_made),
)
