"""What a request's environment is to its program: packages it finds, cannot change, and nobody else sees."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kdskills.execution import EnvironmentMount, Executor, IsolationLevel, Limits
from kdskills.testing.conformance.common import Promise, program, run, same, sh
from kdskills.testing.conformance.files import refused
from kdskills.testing.conformance.packages import BIG, PLANTED, small_environment

SEE = 'echo "$PYTHONPATH|$NODE_PATH|$PATH"'


def seen_at(executor: Executor, mount: EnvironmentMount) -> str:
    """Return where a program sees the environment: engines without mounts of their own show the host's folder."""
    return f"/env/{mount.digest}" if executor.level >= IsolationLevel.NAMESPACE else str(mount.root)


async def packages_are_found(executor: Executor) -> None:
    """A program imports the environment's modules, and finds its programs before all others and its Node modules."""
    with small_environment() as mount:
        script = f'{SEE}; say-packed "a b"; say-python; python3 -c "import packed; print(packed.__file__)"'
        result = await sh(executor, f"{script}; cat $NODE_PATH/packed/index.js", environment=mount)
        top, lines = seen_at(executor, mount), result.stdout.text.splitlines()
        same(("ok", 5), (result.status, len(lines)), result)
        assert lines[0].startswith(f"{top}/python|{top}/node_modules|{top}/bin:/"), result
        expected = ["said a b", "packed", f"{top}/python/packed.py", "module.exports = 'packed'"]
        same(expected, lines[1:], result)
        by_name = await run(executor, argv=("say-packed", "b"), environment=mount)
        same(b"said b\n", by_name.stdout.data, by_name)


async def variables_of_the_request_win(executor: Executor) -> None:
    """A request's own PATH stands; folders that an environment lacks are named in no variable."""
    with small_environment() as mount:
        own = await sh(executor, SEE, environment=mount, env={"PATH": "/usr/bin:/bin"})
        assert own.stdout.text.endswith("|/usr/bin:/bin\n"), own
    with small_environment(lean=True) as mount:
        lacking = await sh(executor, SEE, environment=mount)
        python, node, path = lacking.stdout.text.split("|")
        same((f"{seen_at(executor, mount)}/python", ""), (python, node), lacking)
        assert mount.digest not in path, lacking


async def generated_code_finds_packages(executor: Executor) -> None:
    """Generated code and what it starts find the packages; nothing was imported from there before it began."""
    with small_environment() as mount:
        result = await run(executor, code=program("packed.py"), environment=mount)
        top = seen_at(executor, mount)
        assert isinstance(result.value, dict), result
        variables = result.value.pop("variables")
        children = ["said x\n", "packed\n", f"{top}/python/packed.py\n"]
        expected = {"name": "packed", "packed": f"{top}/python/packed.py", "foreign": [], "children": children}
        same(expected, result.value, result)
        assert variables["PATH"].startswith(f"{top}/bin:/"), result
        same((f"{top}/python", f"{top}/node_modules"), (variables["PYTHONPATH"], variables["NODE_PATH"]), result)


async def planted_modules_do_not_run(executor: Executor) -> None:
    """Modules of an environment by the names of the interpreter's own, or of ours, are not imported by what starts and reports
    generated code, nor by programs that are no Python.
    """
    with small_environment(shadows=PLANTED) as mount:
        code = await run(executor, code=program("planted.py"), environment=mount)
        same(
            ("nonzero", 1, "ZeroDivisionError"),
            (code.status, code.exit_code, code.error and code.error.exception),
            code,
        )
        assert isinstance(code.value, dict), code
        folder = f"{seen_at(executor, mount)}/python"
        same([folder], code.value["packages"], code)
        same([], [file for file in code.value["at_start"] if file.startswith(folder)], code)
        plain = await run(executor, argv=("sh", "-c", "echo plain"), environment=mount)
        same(("ok", b"plain\n"), (plain.status, plain.stdout.data), plain)
        for result in (code, plain):
            assert b"PLANTED" not in result.stdout.data + result.stderr.data, result


async def environment_is_read_only(executor: Executor) -> None:
    """Nothing in an environment can be changed, added, removed or given another mode, whatever modes its files have."""
    with small_environment() as mount:
        for path in mount.root.rglob("*"):
            path.chmod(path.stat().st_mode | 0o222)  # the wall holds, not their modes
        tries = (
            *("touch $PYTHONPATH/new", "rm $PYTHONPATH/packed.py", "echo x >> $PYTHONPATH/packed.py"),
            *("chmod 777 $PYTHONPATH/packed.py", "mv $PYTHONPATH $PYTHONPATH.old", "mkdir $PYTHONPATH/../new"),
        )
        before = {path: path.stat().st_mode for path in mount.root.rglob("*")}
        script = "; ".join(f"sh -c '{words}' 2>/dev/null && echo 'did {words}'" for words in tries)
        result = await sh(executor, f"{script}; cat $PYTHONPATH/packed.py", environment=mount)
        same(b"NAME = 'packed'\n", result.stdout.data, result)
        same(before, {path: path.stat().st_mode for path in mount.root.rglob("*")}, result)


async def environment_is_of_one_run(executor: Executor) -> None:
    """The next run without it finds neither packages nor variables."""
    see = f"{SEE}; python3 -c 'import packed' 2>/dev/null && echo imported; say-packed 2>/dev/null; ls -A /env 2>/dev/null"
    before = await sh(executor, see)
    with small_environment() as mount:
        for request in ({"argv": ("say-packed",)}, {"code": "import packed"}):
            same("ok", (result := await run(executor, environment=mount, **request)).status, result)
        after = await sh(executor, see)
        same(before.stdout.data, after.stdout.data, after)
        assert after.stdout.text.startswith("||/"), after
        result = await run(executor, code=program("without.py"))
        same(b"None None\n", result.stdout.data, result)


async def other_environments_are_hidden(executor: Executor) -> None:
    """A program sees its own environment and no other, whether it knows where it lies or not."""
    with small_environment() as mount, small_environment(name="other") as other:
        same("ok", (result := await run(executor, argv=("say-packed",), environment=other)).status, result)
        read = f"cat /env/{other.digest}/python/packed.py {other.root}/python/packed.py 2>/dev/null; ls -A /env 2>/dev/null"
        result = await sh(executor, read, environment=mount)
        seen = f"{mount.digest}\n" if executor.level >= IsolationLevel.NAMESPACE else ""
        same(seen.encode(), result.stdout.data, result)


async def environment_takes_no_memory(executor: Executor) -> None:
    """Files of an environment count neither towards memory nor towards the workdir's size."""
    with small_environment(big=True) as mount:
        limits = Limits(memory=36 * 1024 * 1024, work_size=1024 * 1024, tmp_size=1024 * 1024)
        result = await sh(executor, "cat $PYTHONPATH/big | wc -c", environment=mount, limits=limits)
        same(("ok", BIG), (result.status, int(result.stdout.data or 0)), result)


async def bad_environments_are_refused(executor: Executor) -> None:
    """What is no folder of ours that others can only read, or has no digest for a name, is refused before anything runs; so is
    what is not on this machine, by a code of its own.
    """
    with small_environment() as mount, tempfile.TemporaryDirectory() as top:
        odd = Path(top).resolve()
        (odd / "link").symlink_to(mount.root)
        (odd / "file").write_bytes(b"")
        for name, mode in (("open", 0o777), ("group", 0o775), ("closed", 0o700), ("a:b", 0o755), ("line\n", 0o755)):
            (odd / name).mkdir()
            (odd / name).chmod(mode)
        if os.geteuid() == 0:
            (odd / "theirs").mkdir()
            os.chown(odd / "theirs", 1234, 1234)
        roots = (*odd.iterdir(), Path("relative"), mount.root / ".." / mount.root.name)
        mounts = [EnvironmentMount(mount.digest, root) for root in roots]
        digests = ("", "abc", "g" * 16, "A" * 16, "0" * 65, "../../../../../etc", "0" * 15 + "/", "0" * 16 + "\n")
        for bad in (*mounts, *(EnvironmentMount(digest, mount.root) for digest in digests)):
            await refused(executor, repr(bad), argv=("true",), environment=bad)
        unbuilt = EnvironmentMount(mount.digest, odd / "missing")
        await refused(
            executor, "one that is not here", refusal="environment_missing", argv=("true",), environment=unbuilt
        )


PROMISES = (
    Promise("packages_are_found", "Environments", packages_are_found),
    Promise("variables_of_the_request_win", "Environments", variables_of_the_request_win),
    Promise("generated_code_finds_packages", "Environments", generated_code_finds_packages),
    Promise("planted_modules_do_not_run", "Environments", planted_modules_do_not_run),
    Promise("environment_is_read_only", "Environments", environment_is_read_only, IsolationLevel.LANDLOCK),
    Promise("environment_is_of_one_run", "Environments", environment_is_of_one_run),
    Promise("other_environments_are_hidden", "Environments", other_environments_are_hidden, IsolationLevel.LANDLOCK),
    Promise("environment_takes_no_memory", "Environments", environment_takes_no_memory),
    Promise("bad_environments_are_refused", "Environments", bad_environments_are_refused),
)
