"""`kdskills chat` and `kdskills run --session`: one conversation, line by line, and the next day."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.doors.cli.main import build_cli
from kdskills.errors import ModelFailed
from kdskills.hooks import hookimpl
from kdskills.models import ModelReply
from kdskills.testing import ScriptedModel

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(120)]

HELLO = str(Path(__file__).parents[2] / "bundles" / "hello")


class Listener(ScriptedModel):
    """A model that answers with all it was told."""

    async def reply(self, request):
        words = [message.text for message in request.messages if message.role == "user"]
        if words[-1] == "which skills?":
            return ModelReply("hello" if "<name>hello" in request.instructions else "none")
        if words[-1] == "break":
            raise ModelFailed("it is broken")
        return ModelReply(" then ".join(words))


class Listening:
    """A plugin with that model."""

    @hookimpl
    def kdskills_register_models(self, register):
        register("listener", lambda target: Listener([]))


def chat(folder: Path, *words: str, lines: str, store: bool = True):
    """Run a command over a state folder of its own."""
    url = f"sqlite:///{folder / 's.db'}" if store else None
    settings = Settings(state_dir=folder, executor="bubblewrap", model="listener:x", session_store=url)
    host = Host(settings, plugins=[Listening()], entry_points=False)
    return CliRunner().invoke(get_command(build_cli(host)), [*words], input=lines, obj=host)


@pytest.mark.parametrize("store", [True, False])
def test_lines_are_one_conversation(tmp_path, store):
    """Each line knows those before it, until a blank one; with a store the next command goes on, without it begins anew."""
    first = chat(tmp_path, "chat", HELLO, "--session", "c1", lines="one\ntwo\n\nthree\n", store=store)
    assert (first.exit_code, "one then two" in first.output, "three" in first.output) == (0, True, False)
    second = chat(tmp_path, "run", HELLO, "four", "--session", "c1", lines="", store=store)
    assert (second.exit_code, "one then two then four" in second.output) == (0, store)


def test_a_turn_that_fails_ends_with_its_code(tmp_path):
    """From a file or a pipe the first failure ends it; the conversation goes on as it was before."""
    broken = chat(tmp_path, "chat", HELLO, "--session", "c1", lines="one\nbreak\nthree\n")
    assert (broken.exit_code, "model_failed" in broken.output) == (4, True)
    again = chat(tmp_path, "chat", HELLO, "--session", "c1", lines="four\n")
    assert "one then four" in again.output


def test_a_conversation_of_somebody_else_is_refused(tmp_path):
    """A user's conversation is theirs."""
    chat(tmp_path, "chat", HELLO, "--session", "c1", "--user", "anna", lines="one\n")
    other = chat(tmp_path, "chat", HELLO, "--session", "c1", "--user", "otto", lines="two\n")
    assert (other.exit_code != 0, "conversation_foreign" in other.output) == (True, True)


def test_roles_of_the_user_hold(tmp_path):
    """`--role` puts the rules of its group in force, in a chat and what it says of skills, and in a single turn."""
    folder = tmp_path / "desk" / "skills" / "hello"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: hello\ndescription: Greets people.\n---\nGreet.\n")
    (tmp_path / "desk" / "skills_descriptor.yaml").write_text('agents_config: {"@interns": {disabled: ["*"]}}\n')
    desk, intern = str(tmp_path / "desk"), ("--user", "ada", "--role", "guests", "--role", "interns")
    assert "hello" in chat(tmp_path, "run", desk, "which skills?", lines="").output
    assert "none" in chat(tmp_path, "run", desk, "which skills?", *intern, lines="").output
    talk = chat(tmp_path, "chat", desk, *intern, lines="which skills?\n/why hello\n")
    assert ("none" in talk.output, "denied" in talk.output) == (True, True)
    nobody = chat(tmp_path, "run", desk, "which skills?", "--role", "interns", lines="")
    assert (nobody.exit_code != 0, "name the user" in nobody.output) == (True, True)
