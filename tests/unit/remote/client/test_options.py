"""What a child is started with."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import BadRequest
from kdskills.remote.client.server import ClientOptions, app_server_command, camel_keys, child_environment, toml

VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='a-_. "é', min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(VALUES)
def test_configuration_is_toml(value):
    """Every value reads back from TOML as it was."""
    assert tomllib.loads(f"x = {toml(value)}")["x"] == value


def test_what_toml_has_no_word_for_is_refused():
    """None and objects are no configuration."""
    for value in (None, object(), {1: None}):
        with pytest.raises(BadRequest):
            toml(value)


def test_the_command_line():
    """Overrides are `-c key=value` behind `app-server`."""
    config = {"model": "m", "model_providers.p": {"base_url": "http://x/v1", "requires_openai_auth": False}}
    assert app_server_command("codex", config, ["--listen", "ws://127.0.0.1:1"]) == [
        "codex",
        "app-server",
        "-c",
        'model="m"',
        "-c",
        'model_providers.p={base_url="http://x/v1",requires_openai_auth=false}',
        "--listen",
        "ws://127.0.0.1:1",
    ]
    assert app_server_command("codex", None) == ["codex", "app-server"]


def test_the_childs_environment_is_closed(tmp_path, monkeypatch):
    """`PATH`, `LANG` and the caller's variables pass; the home cannot be overridden, and no key of the user passes."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-user")
    monkeypatch.setenv("CODEX_HOME", "/home/user/.codex")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("PATH", "/bin")
    home = str(tmp_path)
    assert child_environment(tmp_path, {"MINE": "1", "HOME": "/elsewhere"}) == {
        "PATH": "/bin",
        "LANG": "C.UTF-8",
        "MINE": "1",
        "HOME": home,
        "CODEX_HOME": home,
    }


def test_keywords_become_the_servers():
    """snake_case becomes camelCase; camelCase stays."""
    assert camel_keys({"dynamic_tools": 1, "cwd": 2, "approvalPolicy": 3, "a_b_c": 4, "_x": 5}) == {
        "dynamicTools": 1,
        "cwd": 2,
        "approvalPolicy": 3,
        "aBC": 4,
        "_x": 5,
    }


@pytest.mark.parametrize("option", ["strategy", "dispatch", "unload"])
def test_unknown_words_of_options_are_refused(option):
    """A misspelt option is said at once, with the words known."""
    with pytest.raises(BadRequest, match=f"{option} is one of"):
        ClientOptions(**{option: "misspelt"})
