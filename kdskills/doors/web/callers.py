"""Who calls over HTTP: the token says it, the path and two headers may only narrow it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Final

from fastapi import Header, Path, Query, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kdskills.app.identity import Identity
from kdskills.doors.web.entrance import IDENTITY
from kdskills.errors import BadRequest, CallRefused, NotFound

LABEL: Final = re.compile(r"[A-Za-z0-9._:-]{0,128}")
BEARER: Final = HTTPBearer(auto_error=False, description="A token made by `kdskills token create`.")

Project = Annotated[str, Path(description="The token's project.", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]

Limit = Annotated[int, Query(ge=1, le=500, description="How many at most.")]
Cursor = Annotated[str | None, Query(max_length=2048, description="`next_cursor` of the page before.")]


async def caller(
    request: Request,
    project: Project,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)] = None,
    agent: Annotated[str | None, Header(alias="X-Agent-Id", max_length=128, description="Agent that calls.")] = None,
    alias: Annotated[
        str | None, Header(alias="X-Session-Alias", max_length=128, description="Tells an agent's conversations apart.")
    ] = None,
) -> Identity:
    """Return who calls, as `Entrance` found out, narrowed by the headers.

    Raises:
        NotFound: The token is for another project.
        BadRequest: A header is out of shape.
        CallRefused: A header names another agent than the token's.
    """
    identity = request.scope[IDENTITY]
    assert isinstance(identity, Identity)
    if identity.project != project:
        raise NotFound(f"there is no project {project!r}")
    return narrowed(identity, agent, alias)


def narrowed(identity: Identity, agent: str | None, alias: str | None) -> Identity:
    """Return *identity* with what the headers say, which must fit what the token says."""
    for name, value in (("X-Agent-Id", agent), ("X-Session-Alias", alias)):
        if value is not None and not LABEL.fullmatch(value):
            raise BadRequest(
                f"{name} may hold letters, digits and ._:- only", errors=[{"path": name, "problem": "shape"}]
            )
    if agent and agent != identity.agent:
        if identity.token is not None and not identity.may("admin"):
            raise CallRefused(
                f"X-Agent-Id is not for this caller to say: the token is for the agent {identity.agent!r}",
                code="not_yours_to_say",
                argument="X-Agent-Id",
            )
        identity = replace(identity, agent=agent)
    return replace(identity, alias=alias or "")
