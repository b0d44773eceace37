"""Secrets that exceptions carry, and words that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.dispatch.payloads import NAMES_OF_SECRETS, redact, secret_values

NOTHING: dict[str, str] = {}
SECRET = "hunter2-Zx9"
KEY_BLOCK = f"-----BEGIN RSA PRIVATE KEY-----\nMIIE{SECRET}\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET}",
        f"password: {SECRET}",
        f"PASSWORD = {SECRET} at host",
        f"db_password='{SECRET}'",
        f'{{"password": "{SECRET}", "user": "bob"}}',
        f"{{'client_secret': '{SECRET}'}}",
        f'{{\\"api_key\\": \\"{SECRET}\\"}}',
        f"api-key={SECRET}",
        f"x-api-key: {SECRET}",
        f"?access_token={SECRET}&page=1",
        f"the token is {SECRET}",
        f"secret[{SECRET}]".replace("[", "=").replace("]", ""),
        f"environ['SECRET_KEY'] = {SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"'Authorization': 'Basic {SECRET}'",
        f"Authorization: Digest username=bob, response={SECRET}",
        f"authorization={SECRET}",
        f"Cookie: theme=dark; sid={SECRET}; lang=en",
        f"Set-Cookie: sid={SECRET}; HttpOnly",
        f"sent header Bearer {SECRET}",
        f"bearer  {SECRET}",
        f"postgresql://bob:{SECRET}@db/x",
        f"https://{SECRET}@host/path",
        f"cannot read {KEY_BLOCK} today",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET} and cut off",
        f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY-----",
        f'password="a {SECRET}"',
        f'password="a \\" {SECRET}"',
        f"key => {SECRET}",
        f'password="cut off {SECRET}',
        f"token='cut off {SECRET}",
        f"password=***{SECRET}",
    ],
)
def test_secrets_are_masked(text: str) -> None:
    """Values after names of secrets, bearer tokens, credentials in URLs and key blocks are gone; a mask tells so."""
    said = redact(text, NOTHING)
    assert SECRET not in said
    assert "***" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("password=abc; retry", "password=***; retry"),
        ('{"password": "abc", "user": "bob"}', '{"password": "***", "user": "bob"}'),
        ("a token: abc, then", "a token: ***, then"),
        ("postgresql://bob:abc@db/x", "postgresql://***@db/x"),
        ("Authorization: Bearer abcdef\nnext line", "Authorization: ***\nnext line"),
    ],
)
def test_only_the_value_is_masked(text: str, expected: str) -> None:
    """What is around a secret stays readable."""
    assert redact(text, NOTHING) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "KeyError: 'order'",
        "no such file: data.csv",
        "the monkey ate it",
        "division by zero",
        "https://host/path?page=1",
        "mail bob@example.com",
        "keyboard not found",
        "turn 7: bearer of news",
    ],
)
def test_ordinary_words_stay(text: str) -> None:
    """A message without secrets is told as it was."""
    assert redact(text, NOTHING) == text


def test_values_of_the_environment_are_masked_anywhere() -> None:
    """The value of a variable whose name says secret is masked wherever it stands; others, and short ones, are not."""
    environment = {"DB_PASSWORD": "correct-horse", "API_KEY": "abc", "SHELL": "/bin/bash", "MY_TOKEN": "line\nbreak"}
    said = redact('x correct-horse y abc /bin/bash "line\\nbreak"', environment)
    assert said == 'x *** y abc /bin/bash "***"'


def test_home_is_told_as_a_tilde() -> None:
    """The path of this user's home names the user; neighbours of like names are not it."""
    environment = {"HOME": "/root-of/bob"}
    assert redact("/root-of/bob/x, /root-of/bob, /root-of/bobby/y", environment) == "~/x, ~, /root-of/bobby/y"


@pytest.mark.parametrize("home", ["", "/", "//"])
def test_no_home_changes_nothing(home: str) -> None:
    """Where the home is the root, paths stay as they are."""
    assert redact("/etc/x", {"HOME": home}) == "/etc/x"


def test_the_environment_of_this_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without other words the variables are this process's own, as they are now."""
    monkeypatch.setenv("DEPLOY_TOKEN", SECRET)
    assert redact(f"said {SECRET}") == "said ***"


@pytest.mark.parametrize("word", NAMES_OF_SECRETS.split("|"))
def test_every_name_of_the_spec(word: str) -> None:
    """Each name, in any case, between any separators."""
    for text in (f"{word}={SECRET}", f"{word.upper()}: {SECRET}", f'"{word}" : "{SECRET}"', f"my_{word} = {SECRET}"):
        assert SECRET not in redact(text, NOTHING)
    assert secret_values({f"MY_{word.upper()}": "long enough"}) == ["long enough"]


@given(st.text(alphabet="abc=:/@'\"\\ \n-", max_size=60))
def test_any_text_is_redacted_once_for_all(text: str) -> None:
    """Redacting again changes nothing more, and nothing breaks it."""
    once = redact(f"password {text} token {text}", NOTHING)
    assert redact(once, NOTHING) == once


@pytest.mark.parametrize(
    "unit", ["password=", "://", "-----BEGIN A PRIVATE KEY-----", "Cookie: ", '"key": "\\', "a" * 50 + "-"]
)
def test_long_texts_are_redacted_soon(unit: str) -> None:
    """A hostile message of a megabyte is read in time that grows with its length, not with its square."""
    assert redact(unit * (1_000_000 // len(unit)), NOTHING)
