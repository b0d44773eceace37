"""Tokens: shown once, kept as a hash, bound to a project and an agent, ended at once."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.app import Host, Settings, tokens
from kdskills.app.identity import LOCAL, NO_POWER, SCOPES, Identity, TokenLimits, wider
from kdskills.app.operations import Context
from kdskills.app.tokens import TOKEN, Tokens
from kdskills.errors import BadRequest, CallRefused, NotFound
from tests.project_rows import audit


@pytest.fixture
async def host(tmp_path):
    """A Host with a state folder of its own."""
    made = Host(Settings(state_dir=tmp_path / "state", bundle=None), entry_points=False)
    yield made
    await made.storage.aclose()


def elsewhere(**facts) -> Context:
    """Return the context of an administrator of project `acme`."""
    told = {"project": "acme", "agent": "op", "scopes": frozenset({"admin"}), "door": "http", "token": "t0"}
    return Context(identity=Identity(**{**told, **facts}))


async def test_a_token_says_who_calls(host) -> None:
    """Project, agent, scopes and tools come from the token, and nothing else does."""
    token, text = await host.tokens.create(
        "acme", "writer", ["skills:read", "work:run"], allowed_tools=["skills.list"], label="ci", who="op"
    )
    assert await host.tokens.authenticate(text) == Identity(
        project="acme",
        agent="writer",
        scopes=frozenset({"skills:read", "work:run"}),
        allowed_tools=frozenset({"skills.list"}),
        token=token.id,
    )
    assert [found.id for found in await host.tokens.list("acme")] == [token.id]
    assert await host.tokens.list("other") == []


async def test_no_secret_is_kept(host) -> None:
    """Neither the text nor the secret stands anywhere in the database, its journal or an audit row."""
    _, text = await host.tokens.create("acme", "writer", ["admin"], who="op")
    secret = TOKEN.fullmatch(text)[2]
    kept = b"".join(place.read_bytes() for place in host.settings.state_dir.iterdir() if place.is_file())
    assert secret.encode() not in kept
    assert text not in str(await audit(host.projects, "acme"))
    assert text not in repr(await host.tokens.list())


async def test_tokens_are_long_and_differ(host) -> None:
    """Each has 256 random bits, and the form is fixed."""
    texts = {(await host.tokens.create("acme", "a", ["admin"], who="op"))[1] for _ in range(5)}
    assert len(texts) == 5
    assert all(re.fullmatch(r"kd_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", text) for text in texts)


async def test_anything_else_is_nobody(host) -> None:
    """Wrong secrets, ids, cuts, additions and noise authenticate nobody, and none raises."""
    one, text = await host.tokens.create("acme", "a", ["admin"], who="op")
    _, other = await host.tokens.create("acme", "b", ["admin"], who="op")
    mixed = f"kd_{one.id}_{TOKEN.fullmatch(other)[2]}"
    noise = ["", " ", "kd__", text[:-1], text + "x", text + "\n", " " + text, text.upper(), mixed, "ä" * 50, "\x00"]
    noise += [f"kd_{'0' * 16}_{'A' * 43}", f"Bearer {text}", "x" * 100_000, text.replace("kd_", "kd_ ")]
    assert [await host.tokens.authenticate(word) for word in noise] == [None] * len(noise)
    assert await host.tokens.authenticate(text) is not None


async def test_an_unknown_id_is_compared_too(host, monkeypatch) -> None:
    """Every look-up compares two hashes in constant time, whether the id is known or not."""
    _, text = await host.tokens.create("acme", "a", ["admin"], who="op")
    compared = []
    real = tokens.hmac.compare_digest
    monkeypatch.setattr(tokens.hmac, "compare_digest", lambda a, b: (compared.append((len(a), len(b))), real(a, b))[1])
    for word in (text, text[:-1] + ("A" if text[-1] != "A" else "B"), f"kd_{'0' * 16}_{'A' * 43}", "noise"):
        await host.tokens.authenticate(word)
    assert compared == [(64, 64)] * 4


async def test_revoked_and_expired_tokens_open_nothing(host) -> None:
    """A token ends when it is revoked, or when its time is over; both at once for the next request."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    await host.projects.projects()
    made = Tokens(host.storage.database, clock=lambda: now)
    token, text = await made.create("acme", "a", ["admin"], expires_at=now + timedelta(days=1), who="op")
    assert await made.authenticate(text) is not None
    now += timedelta(days=1)
    assert await made.authenticate(text) is None
    now -= timedelta(days=1)
    ended = await made.revoke(token.id, who="op")
    assert (ended.revoked_at, await made.authenticate(text)) == (now, None)
    now += timedelta(hours=1)
    assert (await made.revoke(token.id, who="op")).revoked_at == ended.revoked_at
    assert [row.action for row in await audit(host.projects, "acme")] == ["token.revoke", "token.create"]


async def test_revoking_stays_within_a_project(host) -> None:
    """Another project's token is not found, whether it is there or not."""
    token, text = await host.tokens.create("other", "a", ["admin"], who="op")
    for word in (token.id, "0" * 16, "", "%"):
        with pytest.raises(NotFound):
            await host.tokens.revoke(word, project="acme", who="op")
    assert await host.tokens.authenticate(text) is not None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"project": "A"}, "project_invalid"),
        ({"agent": ""}, "agent_invalid"),
        ({"agent": "a b"}, "agent_invalid"),
        ({"agent": "a\n"}, "agent_invalid"),
        ({"scopes": []}, "scope_unknown"),
        ({"scopes": ["skills:read", "root"]}, "scope_unknown"),
        ({"limits": TokenLimits(requests_per_minute=0)}, "bad_request"),
        ({"limits": TokenLimits(concurrent_work=-1)}, "bad_request"),
    ],
)
async def test_what_is_not_understood_makes_no_token(host, changes, code) -> None:
    """Unknown scopes, odd names and limits below one are refused."""
    told = {"project": "acme", "agent": "a", "scopes": ["admin"]} | changes
    with pytest.raises(BadRequest) as caught:
        await host.tokens.create(told.pop("project"), told.pop("agent"), told.pop("scopes"), who="op", **told)
    assert (caught.value.code, await host.tokens.list()) == (code, [])


async def test_limits_come_back(host) -> None:
    """The limits of a token are what was said."""
    limits = TokenLimits(60, 2, 1000)
    _, text = await host.tokens.create("acme", "a", ["admin"], limits=limits, who="op")
    assert (await host.tokens.authenticate(text)).limits == limits


async def test_a_token_makes_its_project_known(host) -> None:
    """A project with a token answers with no skills, instead of asking for a bundle."""
    await host.tokens.create("acme", "writer", ["skills:read"], who="op")
    assert list((await host.project_skills("acme")).subsystem.registry) == []


async def test_an_administrator_elsewhere_stays_within_the_project(host) -> None:
    """Tokens of other projects are neither made, listed nor revoked from elsewhere."""
    other = await host.call("tokens.create", project="other", agent="a", scopes=["admin"])
    arguments = {"project": "other", "agent": "a", "scopes": ["admin"]}
    for name, told in (("tokens.create", arguments), ("tokens.list", {"project": "other"})):
        with pytest.raises(NotFound):
            await host.invoke(name, told, elsewhere())
    with pytest.raises(NotFound):
        await host.invoke("tokens.revoke", {"id": other.id}, elsewhere())
    mine = await host.invoke("tokens.create", {"agent": "a", "scopes": ["skills:read"]}, elsewhere())
    assert (mine.project, mine.created_by) == ("acme", "http:token:t0")
    listed = await host.invoke("tokens.list", {}, elsewhere())
    assert [token.id for token in listed.tokens] == [mine.id]
    assert {token.id for token in (await host.call("tokens.list")).tokens} == {mine.id, other.id}
    assert (await host.call("tokens.revoke", id=other.id)).revoked_at is not None


async def test_a_token_makes_no_wider_token(host) -> None:
    """A caller bound to some tools cannot make a token that may run others."""
    bound = elsewhere(allowed_tools=frozenset({"tokens.create", "skills.list"}))
    for allowed in (None, ["skills.show"], ["skills.list", "skills.show"]):
        given = {"agent": "a", "scopes": ["admin"], "allowed_tools": allowed}
        with pytest.raises(CallRefused) as caught:
            await host.invoke("tokens.create", given, bound)
        assert caught.value.code == "tool_not_allowed"
    made = await host.invoke(
        "tokens.create", {"agent": "a", "scopes": ["skills:read"], "allowed_tools": ["skills.list"]}, bound
    )
    assert made.allowed_tools == ("skills.list",)


@pytest.mark.parametrize("scope", sorted(SCOPES - {"admin"}))
async def test_only_administrators_have_tokens(host, scope) -> None:
    """No other scope makes, lists or ends tokens."""
    for name in ("tokens.create", "tokens.list", "tokens.revoke"):
        with pytest.raises(CallRefused) as caught:
            await host.invoke(name, {}, elsewhere(scopes=frozenset({scope})))
        assert caught.value.code == "scope_missing"


async def test_expiry_is_counted_in_days(host) -> None:
    """A token with days to live ends by itself."""
    made = await host.call("tokens.create", agent="a", scopes=["admin"], expires_in_days=0.5)
    assert timedelta(hours=11) < made.expires_at - made.created_at <= timedelta(hours=12, minutes=1)
    assert (await host.tokens.authenticate(made.token)).project == "local"


async def test_the_file_is_a_plain_database(host) -> None:
    """The table is what the migration says, with the hash in it."""
    _, text = await host.tokens.create("acme", "a", ["admin"], who="op")
    with sqlite3.connect(host.settings.state_dir / "work.db") as link:
        rows = link.execute("SELECT secret_hash, agent FROM kd_tokens").fetchall()
    link.close()
    assert rows == [(tokens._hash(TOKEN.fullmatch(text)[2]), "a")]


@given(st.text(max_size=200))
def test_the_form_of_tokens_is_strict(text) -> None:
    """Whatever matches has exactly its two parts, of which nothing can be part of a path or query."""
    parts = TOKEN.fullmatch(text)
    assert parts is None or f"kd_{parts[1]}_{parts[2]}" == text


# ---- never wider than its maker ---------------------------------------------------------------------------------

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = st.frozensets(st.sampled_from(["a.one", "a.two", "a.three"]))
LIMIT = st.none() | st.integers(1, 3)
IDENTITIES = st.builds(
    Identity,
    project=st.sampled_from(["acme", "other"]),
    agent=st.sampled_from(["local", "writer"]),
    scopes=st.frozensets(st.sampled_from(sorted(SCOPES))),
    allowed_tools=st.none() | NAMES,
    token=st.just("t0"),
    limits=st.builds(TokenLimits, LIMIT, LIMIT, LIMIT),
    person=st.booleans(),
    tools=NAMES,
    expires_at=st.none() | st.integers(0, 3).map(lambda days: NOW + timedelta(days=days)),
)
#: A change that widens each field of an identity which bounds what a caller may do.
WIDENED = {
    "project": {"project": "other"},
    "scopes": {"scopes": SCOPES},
    "allowed_tools": {"allowed_tools": None},
    "local": {"local": True},
    "limits": {"limits": TokenLimits()},
    "person": {"person": True},
    "tools": {"tools": frozenset({"a.one", "b.one"})},
    "expires_at": {"expires_at": None},
}
BOUNDED = Identity(
    project="acme",
    scopes=frozenset({"skills:read"}),
    allowed_tools=frozenset({"skills.list"}),
    token="t0",
    limits=TokenLimits(1, 1, 1),
    tools=frozenset({"a.one"}),
    expires_at=NOW,
)


def test_every_field_that_gives_power_is_compared() -> None:
    """A new field of a caller is either no power or has a change here that widens it, and `wider` sees each."""
    assert {field.name for field in fields(Identity)} == NO_POWER | set(WIDENED)
    assert wider(BOUNDED, BOUNDED) == ()
    assert {name for name, change in WIDENED.items() if not wider(replace(BOUNDED, **change), BOUNDED)} == set()
    for limit in fields(TokenLimits):
        more = replace(BOUNDED, limits=replace(BOUNDED.limits, **{limit.name: 2}))
        assert wider(more, BOUNDED) == (limit.name,)


@given(IDENTITIES, IDENTITIES, IDENTITIES)
def test_width_is_an_order(one, two, three) -> None:
    """Nobody is wider than himself, and tokens of tokens are bounded by the first maker."""
    assert wider(one, one) == ()
    if not wider(two, one) and not wider(three, two):
        assert wider(three, one) == ()


@given(IDENTITIES, IDENTITIES)
def test_what_is_not_wider_may_no_more(maker, new) -> None:
    """A token that passes may use no scope, operation, tool, time or amount its maker may not."""
    if wider(new, maker):
        return
    assert all(maker.may(scope) for scope in SCOPES if new.may(scope))
    assert maker.allowed_tools is None or (new.allowed_tools is not None and new.allowed_tools <= maker.allowed_tools)
    assert new.tools <= maker.tools
    assert maker.person or not new.person
    assert maker.expires_at is None or (new.expires_at is not None and new.expires_at <= maker.expires_at)
    for limit in fields(TokenLimits):
        most, least = getattr(maker.limits, limit.name), getattr(new.limits, limit.name)
        assert most is None or (least is not None and least <= most)


async def test_a_bounded_administrator_makes_bounded_tokens(host) -> None:
    """A token of an administrator that ends, is limited, or is a model's makes none that is not."""
    _, text = await host.tokens.create(
        "acme",
        "op",
        ["admin"],
        limits=TokenLimits(60, 2, 1000),
        expires_at=datetime.now(UTC) + timedelta(days=2),
        tools=["web.search"],
        who="op",
    )
    context = Context(identity=replace(await host.tokens.authenticate(text), door="http"))
    same = {
        "agent": "writer",
        "scopes": ["skills:read"],
        "requests_per_minute": 60,
        "concurrent_work": 2,
        "body_bytes": 1000,
        "expires_in_days": 1,
        "tools": ["web.search"],
    }
    made = await host.invoke("tokens.create", same, context)
    assert (made.tools, made.person, made.requests_per_minute) == (("web.search",), False, 60)
    for name, value in {
        "requests_per_minute": None,
        "concurrent_work": 3,
        "body_bytes": None,
        "expires_in_days": None,
        "person": True,
        "tools": ["web.search", "exec.python"],
    }.items():
        with pytest.raises(CallRefused) as caught:
            await host.invoke("tokens.create", same | {name: value}, context)
        assert caught.value.code == "token_wider"
        assert caught.value.details["fields"] == [{"expires_in_days": "expires_at"}.get(name, name)]
    assert len(await host.tokens.list("acme")) == 2


async def test_who_starts_and_what_is_held_stand_in_the_token(host) -> None:
    """A person's token and the tools of its holder come back with the caller; unsaid means a model without tools."""
    _, text = await host.tokens.create("acme", "ann", ["skills:read"], person=True, tools=["web.search"], who="op")
    _, plain = await host.tokens.create("acme", "bot", ["skills:read"], who="op")
    person, model = await host.tokens.authenticate(text), await host.tokens.authenticate(plain)
    assert (person.starter, person.held_tools >= {"web.search", "skills.load"}) == ("user", True)
    assert (model.starter, model.held_tools) == ("model", {"skills.load", "skills.unload", "skills.read"})
    assert LOCAL.held_tools is None
