"""Who calls over HTTP: the token says it, the path and two headers may only narrow it (spec service §2, §3)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Final

from fastapi import Header, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kdskills.app.authentication import Unauthenticated
from kdskills.app.identity import SCOPES, Identity
from kdskills.doors.web.limits import Limits
from kdskills.errors import BadRequest, NotFound

LABEL: Final = re.compile(r"[A-Za-z0-9._:-]{0,128}")
BEARER: Final = HTTPBearer(auto_error=False, description="A token made by `kdskills token create`.")


async def caller(
    request: Request,
    project: str,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)] = None,
    agent: Annotated[str | None, Header(alias="X-Agent-Id", max_length=128, description="Agent that calls.")] = None,
    alias: Annotated[
        str | None, Header(alias="X-Session-Alias", max_length=128, description="Tells an agent's conversations apart.")
    ] = None,
) -> Identity:
    """Return who calls.

    Raises:
        Unauthenticated: There is no token, or it is not known.
        NotFound: The token is for another project.
        BadRequest: A header is out of shape, or names another agent than the token's.
    """
    identity = await _authenticated(request, credentials)
    if identity.project != project:
        raise NotFound(f"there is no project {project!r}")
    identity = narrowed(identity, agent, alias)
    limits: Limits = request.app.state.limits
    limits.count(identity)
    return identity


async def _authenticated(request: Request, credentials: HTTPAuthorizationCredentials | None) -> Identity:
    state = request.app.state
    if credentials is None:
        if state.open_on_loopback:
            project = str(request.path_params.get("project", "local"))
            return Identity(project=project, scopes=SCOPES, door="http")
        raise Unauthenticated("send a token: Authorization: Bearer …")
    found: Identity | None = await state.host.tokens.authenticate(credentials.credentials)
    if found is None:
        raise Unauthenticated("this token is not known")
    return replace(found, door="http")


def narrowed(identity: Identity, agent: str | None, alias: str | None) -> Identity:
    """Return *identity* with what the headers say, which must fit what the token says."""
    for name, value in (("X-Agent-Id", agent), ("X-Session-Alias", alias)):
        if value is not None and not LABEL.fullmatch(value):
            raise BadRequest(
                f"{name} may hold letters, digits and ._:- only", errors=[{"path": name, "problem": "shape"}]
            )
    if agent and agent != identity.agent:
        if identity.agent not in {"", "local"} and not identity.may("admin"):
            raise BadRequest(f"the token is for the agent {identity.agent!r}", code="agent_not_yours")
        identity = replace(identity, agent=agent)
    return replace(identity, alias=alias or "")
