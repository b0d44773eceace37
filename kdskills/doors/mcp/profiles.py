"""Who a client of MCP is: what its profile, its token and the way in allow, and nothing beyond."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qs

from kdskills.app import Host
from kdskills.app.authentication import Unauthenticated
from kdskills.app.identity import PROFILES, Identity, Profile, own_client
from kdskills.errors import BadRequest, CallRefused


def profile_of(name: str) -> Profile:
    """Return the profile with this name.

    Raises:
        BadRequest: `profile_unknown`.
    """
    for profile in PROFILES:
        if name == profile:
            return profile
    raise BadRequest(f"profiles are {', '.join(PROFILES)}; not {name!r}", code="profile_unknown")


def profile_of_query(query: bytes, otherwise: Profile) -> Profile:
    """Return the profile that the query of an address names, as in `/mcp?profile=author`.

    Raises:
        BadRequest: `profile_unknown`, also for more than one.
    """
    names = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("profile")
    if names is None:
        return otherwise
    return profile_of(names[0] if len(names) == 1 else " and ".join(names))


def within(identity: Identity, profile: Profile) -> Identity:
    """Return a caller narrowed to a profile.

    Raises:
        CallRefused: `scope_missing`; the operator's profile needs a token with the scope `admin`. `not_in_profile`; the
            profile is wider than the one the caller is served.
    """
    if profile == "operator" and not (identity.token is not None and identity.may("admin")):
        raise CallRefused(
            "the profile operator needs a token with the scope admin; on standard input that is the setting stdio_token",
            code="scope_missing",
            scope="admin",
        )
    if PROFILES.index(profile) > PROFILES.index(identity.profile):
        raise CallRefused(
            f"without a token this service serves the profile {identity.profile!r}, not {profile!r}",
            code="not_in_profile",
            profile=profile,
        )
    return replace(identity, door="mcp", profile=profile)


async def client_identity(
    host: Host, profile: Profile, project: str, agent: str, tools: frozenset[str] | None
) -> Identity:
    """Return who the client on standard input is.

    Without a token it is a model's client of this account, for one project and agent; with one (setting `stdio_token`) it is
    the token's. An author's client and an operator's work on files of this machine.

    Args:
        host: Knows tokens and settings.
        profile: What is served.
        project: The project, without a token.
        agent: The agent, without a token.
        tools: Tools the client holds, without a token; None when that is not asked for.

    Raises:
        Unauthenticated: The token is not known.
        CallRefused: `scope_missing`, as `within`.
    """
    secret = host.settings.stdio_token
    if secret is None:
        return within(own_client(profile, project, agent, tools), profile)
    identity = await host.tokens.authenticate(secret.get_secret_value())
    if identity is None:
        raise Unauthenticated("the token of the setting stdio_token is not known")
    return within(replace(identity, local=profile != "skills"), profile)
