"""Rules of `allowed-tools`: which commands they allow, held against what bash itself runs."""

import os
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.skills.tool_names import AllowedTool, allowed_tools, allows_command, simple_commands, tool_id

RULES = allowed_tools(
    [
        "Bash(git:*)",
        "Bash(npm run test:*)",
        "Bash(ls)",
        "Bash(python3 $SKILL_DIR/scripts/*.py *)",
        "Read(src/**),",
        "Edit",
    ]
)


def test_published_names_are_ids_here():
    """An id stays what it is."""
    names = ("Bash", "Read", "Write", "Edit", "Grep", "Glob", "exec.python")
    ids = ("exec.shell", "files.read", "react.write", "files.edit", "files.grep", "files.glob", "exec.python")
    assert tuple(map(tool_id, names)) == ids
    assert RULES[-2:] == (AllowedTool("files.read", "src/**"), AllowedTool("files.edit"))
    assert allowed_tools(["Bash(git:*", ")(", "Bash(a)b", ""]) == ()
    assert allowed_tools(["Bash(git:*),Read"]) == (AllowedTool("exec.shell", "git:*"), AllowedTool("files.read"))


@pytest.mark.parametrize(
    "command",
    [
        "git status",
        "git",
        "git log --format='%h; rm' | git apply && ls; git status &",
        "git status\ngit log\n",
        "'git' log",
        "gi\\t log",
        "git 2>&1 >/dev/null",
        "git diff *.txt {a,b} ~",
        "npm run test -- -x",
        "git # 'a comment\ngit log \\\n  --all  # another",
        "gi\\\nt log",
        'git commit -m "a && b"',
        "python3 $SKILL_DIR/scripts/a.py 1 2",
        'python3 "${SKILL_DIR}/scripts/a.py"',
    ],
)
def test_a_command_all_of_whose_programs_are_listed_is_allowed(command):
    """By words, whatever the quotes."""
    assert allows_command(RULES, command)


@pytest.mark.parametrize(
    "command",
    [
        "",
        "  ",
        ";",
        "rm x",
        "gitx",
        "git-evil",
        "git; rm x",
        "git && rm x",
        "git | sh",
        "git & rm x",
        "git\nrm x",
        "git || rm",
        "git |& sh",
        "git $(rm x)",
        "git `rm x`",
        'git "$(rm x)"',
        "git <(rm x)",
        "git > out",
        "git >> out",
        "git < in",
        "git 2> out",
        "git &> out",
        "git > /dev/null/../x",
        "git <<EOF\nx\nEOF",
        "git $HOME",
        "$X",
        "git ${SKILL_DIR:-x}",
        "git $SKILL_DIRECTORY",
        "PATH=. git",
        "git=1",
        "export PATH=.; git",
        "hash -p ./evil git; git",
        "printf -v PATH .; git",
        "python3 '$SKILL_DIR/scripts/a.py' 1",
        "python3 \\$SKILL_DIR/scripts/a.py 1",
        'python3 "\\$SKILL_DIR/scripts/a.py" 1',
        "python3 '\0SKILL_DIR/scripts/a.py' 1",
        "eval git",
        "exec git",
        "command git",
        ". git",
        "source git",
        "(git)",
        "{ git; }",
        "git() { rm; }; git",
        "if git; then git; fi",
        "! git",
        "time git",
        "# git",
        "git # x\nrm",
        "git \\\n; rm",
        "git\\\n# x\nrm",
        "$SKILL_DIR\\\nX git",
        "git $\\\n(rm)",
        "g*",
        "{git,rm}",
        "~/git",
        "git 'open",
        'git "open',
        "git \\",
        "git\u00a0status; rm",
        "git \x0b",
        "git \x00",
        "npm run test:unit",
        "npm run",
        "npm run {test,evil}",
        "ls -l",
        "ls *",
        "python3 $SKILL_DIR/scripts/../../work/a.py",
        "python3 $SKILL_DIR/scripts/a/b.py",
        "python3 $SKILL_DIR/scripts/*.py",
        "python3 -c x $SKILL_DIR/scripts/a.py",
        "git" + "|git" * 3 + "|sh",
    ],
)
def test_what_is_not_listed_or_not_understood_is_not_allowed(command):
    """Another program, another word, a substitution, a redirection to a file, a word of the language."""
    assert not allows_command(RULES, command)


def test_a_bare_name_allows_every_command():
    """Also such as are not understood; a rule without words allows none."""
    assert allows_command(allowed_tools(["Bash"]), "eval $(x) > y")
    assert allows_command(allowed_tools(["Bash(*)"]), "rm -r x")
    assert not allows_command(allowed_tools(["Bash(*)"]), "eval x")
    assert not allows_command(allowed_tools(["Bash()", "Read"]), "rm")
    assert not allows_command(allowed_tools(["Bash(a; b)"]), "a; b")


@pytest.mark.parametrize(
    "command",
    [
        "printf {-v,PATH} x; git",
        "printf -? x",
        "printf -vPATH x",
        "test -v 'a[$(evil)]'",
        "test ! -R 'a[$(evil)]'",
        "test {-v,'a[$(evil)]'}",
        "'[' -v 'a[$(evil)]' ]",
        "wait -np 'a[$(evil)]'",
    ],
)
def test_a_builtin_that_is_given_the_name_of_a_variable_is_never_allowed(command):
    """It would set PATH, or run what stands in the index of an array; other words of it are allowed."""
    rules = allowed_tools(["Bash(printf:*)", "Bash(test:*)", "Bash('[' *)", "Bash(wait:*)", "Bash(git)"])
    assert not allows_command(rules, command)
    assert allows_command(rules, "printf %s x; test -f a; '[' a = b ]; wait 1; git")


def test_long_commands_take_linear_time():
    """A command of 64 KiB is looked at at once, whatever it holds."""
    for text in ("git " * 16_000, "git|" * 16_000, '"' * 65_536, "\\" * 65_536, "'a'" * 20_000, "${SKILL_DIR}" * 5_000):
        simple_commands(text)


PIECES = st.sampled_from(
    [
        *(
            "git",
            "npm run test",
            "ls",
            "evil",
            "evil x",
            "'git'",
            '"evil"',
            "gi\\t",
            "ev\\il",
            "-x",
            "a=b",
            "PATH=.",
            "{",
            "}",
        ),
        *(
            " ",
            " ",
            " ",
            "\n",
            "\t",
            ";",
            "|",
            "||",
            "&",
            "&&",
            "|&",
            ";;",
            "!",
            "#",
            "(",
            ")",
            "$(evil)",
            "`evil`",
            "<(evil)",
        ),
        *(
            "'",
            '"',
            "\\",
            "\\\n",
            "$",
            "$SKILL_DIR",
            "${SKILL_DIR}",
            "$X",
            "*",
            "{git,evil}",
            "~",
            "$'evil'",
            "${X:-evil}",
        ),
        *(
            ">",
            "<",
            "2>&1",
            ">/dev/null",
            ">out",
            "<<E",
            "eval",
            "exec",
            "command",
            "builtin",
            "time",
            "if",
            "then",
            "fi",
        ),
        *(
            "export PATH=.",
            "printf -v X y",
            "hash -p evil git",
            "evil() {",
            "git() { evil; }",
            "trap evil EXIT",
            "alias git=evil",
        ),
        *(
            "[[ a ]]",
            "while",
            "do",
            "done",
            "\u00a0",
            "\r",
            "\x0b",
            "set -- evil",
            "$@",
            "coproc",
            "((1))",
            "$((1))",
            "case",
        ),
    ]
)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """A folder of programs that write their names down; `evil` is the one no rule lists."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in ("git", "npm", "ls", "evil"):
        program = folder / name
        program.write_text(f"#!/bin/bash\nprintf '%s\\n' {name} >> {folder}/ran\n")
        program.chmod(0o755)
    return folder


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(PIECES, min_size=1, max_size=9))
def test_a_command_that_bash_takes_to_an_unlisted_program_never_matches(stubs, pieces):
    """Bash is the judge: whatever matches runs listed programs alone."""
    command = "".join(pieces)
    if not allows_command(RULES, command):
        return
    ran = stubs / "ran"
    ran.unlink(missing_ok=True)
    env = {"PATH": str(stubs), "SKILL_DIR": "/skills/a.b", "LANG": "C.UTF-8"}
    subprocess.run(["/bin/bash", "-c", command], env=env, cwd=stubs, capture_output=True, timeout=20, check=False)
    assert not ran.exists() or "evil" not in ran.read_text().split()


@settings(max_examples=400, deadline=None)
@given(before=st.text(max_size=20), after=st.text(max_size=20), glue=st.sampled_from([";", "|", "&&", "||", "&", "\n"]))
def test_an_unlisted_program_in_command_position_never_matches(before, after, glue):
    """Whatever stands around it, but for quotes, and a backslash that joins the two lines to one."""
    assert (
        not allows_command(RULES, f"git {before}{os.linesep}evil{glue}{after}")
        or "'" in before + after
        or '"' in before
        or before.endswith("\\")
    )
