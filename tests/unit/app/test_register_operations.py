"""Operations of plugins: offered at every door, never over shipped or reserved names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL, SCOPES, Identity
from kdskills.app.operations import OPERATIONS, Context, Input, Operation, Output
from kdskills.errors import CallRefused, NameTaken, PluginInvalid
from kdskills.hooks import hookimpl


class Greeting(Output):
    """A word."""

    word: str


async def greet(host, given, context):
    """Say who asked."""
    return Greeting(word=f"hello {context.identity.agent}")


GREET = Operation("acme.greet", "Greet the caller.", Input, Greeting, (), greet)


def plugin(name, operation=GREET):
    """Return a plugin that registers *operation* under *name*."""

    class Plugin:
        @hookimpl
        def kdskills_register_operations(self, register):
            register(name, operation)

    return Plugin()


def host_with(*plugins):
    """Return a Host with plugins."""
    return Host(Settings(bundle=None), plugins=plugins, entry_points=False)


async def test_kdskills_register_operations():
    """An operation of a plugin is in the table of its Host, and of no other; it runs as every other one."""
    host = host_with(plugin("acme.greet"))
    assert set(host.operations) == {*OPERATIONS, "acme.greet"}
    assert await host.invoke("acme.greet", {}, Context(identity=LOCAL)) == Greeting(word="hello local")
    assert set(host_with().operations) == set(OPERATIONS)


@pytest.mark.parametrize("name", ["skills.mine", "kd.mine", "tasks.list", "tokens.create", "skills.run_cmd"])
def test_shipped_and_reserved_names_are_refused(name):
    """Nothing comes over what callers know, or over names kept for later."""
    with pytest.raises(NameTaken) as refused:
        host_with(plugin(name, replace(GREET, name=name)))
    assert refused.value.code == "name_reserved"


@pytest.mark.parametrize(
    "name", ["greet", "Acme.greet", "acme.", "acme/greet.x", "a.b.c.d.e", "acme greet.x", "acme.*"]
)
def test_names_have_a_grammar(name):
    """A name must be one that every door can carry."""
    with pytest.raises(PluginInvalid):
        host_with(plugin(name, replace(GREET, name=name)))


def test_a_name_is_the_operations_own():
    """Registered under one name and known by another, it would be refused at one door and run at the next."""
    with pytest.raises(PluginInvalid):
        host_with(plugin("acme.other"))


def test_two_plugins_cannot_have_one_name():
    """The second is refused, whichever came first."""
    with pytest.raises(NameTaken) as refused:
        host_with(plugin("acme.greet"), plugin("acme.greet"))
    assert refused.value.code == "name_taken"


async def test_the_gate_holds_for_plugins_too():
    """Scopes and lists of tools are asked for every operation alike."""
    host = host_with(plugin("acme.greet", replace(GREET, scope="admin")))
    with pytest.raises(CallRefused) as refused:
        await host.invoke("acme.greet", {}, Context(identity=Identity(scopes=frozenset({"skills:read"}))))
    assert refused.value.code == "scope_missing"
    some = Identity(scopes=SCOPES, allowed_tools=frozenset({"skills.list"}))
    with pytest.raises(CallRefused) as refused:
        await host.invoke("acme.greet", {}, Context(identity=some))
    assert refused.value.code == "tool_not_allowed"


@pytest.mark.parametrize("name", sorted(OPERATIONS))
async def test_the_console_calls_what_it_may(name):
    """Pages of the console are refused every operation that was not opened to them, whoever looks at them."""
    identity = Identity(scopes=SCOPES, local=True, door="console")
    host = host_with()
    if OPERATIONS[name].ui_allowed:
        assert name in host.operations
        return
    with pytest.raises(CallRefused) as refused:
        await host.invoke(name, {}, Context(identity=identity))
    assert refused.value.code == "ui_not_allowed"


async def test_plugins_open_their_operations_to_the_console():
    """An operation says itself whether pages may call it; unsaid means no."""
    page = Identity(scopes=SCOPES, door="console")
    shut, opened = host_with(plugin("acme.greet")), host_with(plugin("acme.greet", replace(GREET, ui_allowed=True)))
    with pytest.raises(CallRefused):
        await shut.invoke("acme.greet", {}, Context(identity=page))
    assert await opened.invoke("acme.greet", {}, Context(identity=page)) == Greeting(word="hello local")


def test_no_operation_that_changes_the_set_up_is_open_to_pages():
    """A page that was tricked cannot change the set-up; tokens are an administrator's to make there, by a form of the session."""
    opened = {name for name, operation in OPERATIONS.items() if operation.ui_allowed}
    assert not opened & {"projects.create", "db.upgrade", "image.build", "new", "trust.add", "mcp.accept"}
    assert {OPERATIONS[name].scope for name in opened if name.startswith("tokens.")} == {"admin"}
    assert opened >= {"project_skills.upload", "project_skills.activate", "skills.task_cancel", "skills.task_logs"}
