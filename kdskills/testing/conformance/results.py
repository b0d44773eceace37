"""What a result says: exit codes, signals, streams, errors of generated code."""

from __future__ import annotations

from kdskills.errors import ExecRefused, RootChanged
from kdskills.execution import Executor, InputFile, IsolationLevel, Limits, ScriptCall, SkillMount
from kdskills.testing.conformance.common import Promise, program, run, same, sh
from kdskills.testing.conformance.skill import small_skill

BINARY = bytes(range(256)) * 40


async def success(executor: Executor) -> None:
    """Exit code 0 is `ok`; engine, level and limits are named."""
    result = await sh(executor, "echo out; echo err >&2")
    same(("ok", 0, None), (result.status, result.exit_code, result.signal), result)
    same((b"out\n", b"err\n"), (result.stdout.data, result.stderr.data), result)
    same((executor.name, executor.level), (result.engine, result.level), result)
    assert {"wall", "stdout", "stderr"} <= result.limits_enforced, result
    assert 0 <= result.duration_s < 30, result


async def exit_codes(executor: Executor) -> None:
    """A program's own exit code arrives, those wrappers use for their faults too."""
    for code in (1, 2, 42, 124, 125, 126, 127):
        result = await sh(executor, f"exit {code}")
        same(("nonzero", code, None), (result.status, result.exit_code, result.error), result)


async def death_by_signal(executor: Executor) -> None:
    """Death by signal n is exit code 128 + n, and `signal`."""
    for number in (6, 9, 15):
        result = await sh(executor, f"kill -{number} $$")
        same(("nonzero", 128 + number, number), (result.status, result.exit_code, result.signal), result)


async def missing_program(executor: Executor) -> None:
    """A program that is not there is no program's result: no exit code, stage `exec`."""
    result = await run(executor, argv=("no-such-program-anywhere",))
    same(("infra_error", None), (result.status, result.exit_code), result)
    assert result.error is not None, result
    same(("exec", "program_missing"), (result.error.stage, result.error.code), result)


async def exception_is_named(executor: Executor) -> None:
    """An exception of generated code is named with line numbers of its own file."""
    result = await run(executor, code=program("boom.py"))
    assert result.error is not None, result
    same(("nonzero", 1), (result.status, result.exit_code), result)
    same(
        ("program", "ValueError", "ValueError: boom"),
        (result.error.stage, result.error.exception, result.error.message),
        result,
    )
    trace = result.error.traceback or ""
    assert "line 8, in <module>" in trace, result
    assert "line 5, in inner" in trace, result
    assert "kdskills_runtime" not in trace, result


async def syntax_error(executor: Executor) -> None:
    """A program that does not compile is the program's fault, with its line."""
    result = await run(executor, code=program("broken.txt"))
    assert result.error is not None, result
    same(("nonzero", "SyntaxError"), (result.status, result.error.exception), result)
    assert "line 2" in (result.error.traceback or ""), result


async def system_exit(executor: Executor) -> None:
    """SystemExit gives its code and is no error."""
    result = await run(executor, code=program("exits.py"))
    same(("nonzero", 3, None), (result.status, result.exit_code, result.error), result)


async def value_and_globals(executor: Executor) -> None:
    """Globals arrive as given, a reported value comes back."""
    result = await run(executor, code=program("value.py"), globals={"GIVEN": ["ü", None, 1.5]})
    same({"given": ["ü", None, 1.5], "twice": 6}, result.value, result)


async def large_payload(executor: Executor) -> None:
    """A payload beyond what fits in an argument arrives."""
    given = ["x" * 1000] * 1000
    result = await run(executor, code=program("value.py"), globals={"GIVEN": given})
    assert result.value == {"given": given, "twice": 2000}, result.status


async def code_has_empty_stdin(executor: Executor) -> None:
    """The payload is not what generated code finds on standard input."""
    result = await run(executor, code=program("stdin.py"))
    same(b"''\n", result.stdout.data, result)


async def stdin_arrives(executor: Executor) -> None:
    """Standard input arrives byte for byte, and binary output comes back so."""
    result = await run(executor, argv=("cat",), stdin=BINARY)
    same((BINARY, len(BINARY), False), (result.stdout.data, result.stdout.total, result.stdout.truncated), result)


async def unread_stdin(executor: Executor) -> None:
    """A program that does not read its input is not held up, nor are we."""
    result = await run(executor, argv=("true",), stdin=b"x" * 4_000_000)
    same(("ok", 0), (result.status, result.exit_code), result)


async def flood(executor: Executor) -> None:
    """A flood is drained and counted; its tail is kept."""
    limits = Limits(stdout=1000, stderr=10)
    script = "head -c 30000000 /dev/zero; printf END; printf 0123456789abc >&2"
    result = await sh(executor, script, limits=limits)
    same((30_000_003, True, 1000), (result.stdout.total, result.stdout.truncated, len(result.stdout.data)), result)
    assert result.stdout.data.endswith(b"\0END"), result
    same((b"3456789abc", 13, True), (result.stderr.data, result.stderr.total, result.stderr.truncated), result)


async def script_of_a_skill(executor: Executor) -> None:
    """A skill's script runs with its arguments, by the interpreter asked for."""
    with small_skill() as (folder, tree):
        mount = SkillMount("public.small", folder, tree)
        for name, interpreter in (("say.sh", ("sh", "{path}")), ("say.py", None)):
            call = ScriptCall("public.small", f"scripts/{name}", ("a b", "$HOME", "/skills/public.small/x"))
            result = await run(executor, script=call, skills=(mount,), interpreter=interpreter)
            same(b"a b|$HOME|/skills/public.small/x\n", result.stdout.data, result)


async def folders_have_variables(executor: Executor) -> None:
    """Variables that name a skill's folder and the turn's lead a program there, wherever it sees them."""
    env = {"SKILL_DIR": "/skills/public.small", "KDSKILLS_SKILL_DIR": "/skills/public.small/scripts"}
    with small_skill() as (folder, tree):
        result = await sh(
            executor,
            'cat "$SKILL_DIR/SKILL.md" "$KDSKILLS_SKILL_DIR/say.sh" "$KDSKILLS_TURN_DIR/in.txt"',
            env={**env, "KDSKILLS_TURN_DIR": "/work"},
            skills=(SkillMount("public.small", folder, tree),),
            inputs=(InputFile("in.txt", b"in\n"),),
            workdir="sub",
        )
        files = [folder / "SKILL.md", folder / "scripts/say.sh"]
        same(b"".join(file.read_bytes() for file in files) + b"in\n", result.stdout.data, result)


async def skills_are_read_only(executor: Executor) -> None:
    """Skills are at /skills/<full id>, complete, and cannot be changed."""
    with small_skill() as (folder, tree):
        script = "cat SKILL.md && ! touch new && ! rm SKILL.md && ! sh -c 'echo x > SKILL.md'"
        mount = SkillMount("public.small", folder, tree)
        result = await sh(executor, f"{{ {script}; }} 2>/dev/null", skills=(mount,), workdir="/skills/public.small")
        same(("ok", (folder / "SKILL.md").read_bytes()), (result.status, result.stdout.data), result)


async def changed_skill(executor: Executor) -> None:
    """A skill whose files are not those that were checked never runs."""
    with small_skill() as (folder, tree):
        (folder / "SKILL.md").write_text("other", encoding="utf-8")
        wrong = "sha256:" + "0" * 64
        for root, digest in ((folder, tree[:-1] + ("0" if tree[-1] != "0" else "1")), (folder, wrong)):
            try:
                result = await run(executor, argv=("echo", "ran"), skills=(SkillMount("public.small", root, digest),))
            except (RootChanged, ExecRefused):
                continue
            same(("refused", b""), (result.status, result.stdout.data), result)


PROMISES = (
    Promise("success", "Asking for a run", success),
    Promise("exit_codes", "Asking for a run", exit_codes),
    Promise("death_by_signal", "Asking for a run", death_by_signal),
    Promise("missing_program", "Asking for a run", missing_program),
    Promise("exception_is_named", "Asking for a run", exception_is_named),
    Promise("syntax_error", "Asking for a run", syntax_error),
    Promise("system_exit", "Asking for a run", system_exit),
    Promise("value_and_globals", "What a result says", value_and_globals),
    Promise("large_payload", "What a result says", large_payload),
    Promise("code_has_empty_stdin", "What a result says", code_has_empty_stdin),
    Promise("stdin_arrives", "Limits", stdin_arrives),
    Promise("unread_stdin", "Ending", unread_stdin),
    Promise("flood", "Limits", flood),
    Promise("script_of_a_skill", "Asking for a run", script_of_a_skill),
    Promise("folders_have_variables", "Asking for a run", folders_have_variables),
    Promise("skills_are_read_only", "Limits", skills_are_read_only, IsolationLevel.LANDLOCK),
    Promise("changed_skill", "What a result says", changed_skill),
)
