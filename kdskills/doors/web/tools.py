"""`POST /projects/{project}/tools/{operation}`: one route for each row of the table of operations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Depends, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response

from kdskills.app import Host
from kdskills.app.identity import Identity
from kdskills.app.operations import Context, Operation
from kdskills.app.operations.calling import misshapen, pointer, require_allowed
from kdskills.app.wire import json_text
from kdskills.doors.web.entrance import caller
from kdskills.doors.web.problems import PROBLEMS
from kdskills.errors import BadRequest, KdskillsError

KEY_SIZE: Final = 200

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=KEY_SIZE,
        description="Repeating a call gives its first answer.",
    ),
]


def host_of(request: Request) -> Host:
    """Return what operations run on."""
    host: Host = request.app.state.host
    return host


def tools_router(operations: Iterable[Operation]) -> APIRouter:
    """Return the routes of every one of *operations* that callers elsewhere may reach."""
    router = APIRouter()
    for operation in operations:
        if not operation.local:
            _add(router, operation)
    router.add_api_route(
        "/projects/{project}/tools/{operation}", _refused, methods=["POST"], include_in_schema=False, name="tools"
    )
    return router


async def _refused(request: Request, operation: str, identity: Annotated[Identity, Depends(caller)]) -> Response:
    """Let the table itself say why an operation without a route cannot be called, in the words of every door."""
    return await answer(request, operation, {}, identity)


def _add(router: APIRouter, operation: Operation) -> None:
    input_model, output_model = operation.input, operation.output

    async def permitted(identity: Annotated[Identity, Depends(caller)]) -> Identity:
        """Refuse who may not run it before anybody looks at the arguments, as every door does."""
        require_allowed(operation, identity)
        return identity

    async def endpoint(
        request: Request,
        identity: Annotated[Identity, Depends(permitted)],
        arguments: Any,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        return await answer(request, operation.name, await json_of(request), identity, idempotency_key)

    # FastAPI reads the body's model and the gate from annotations; they are known only here.
    endpoint.__annotations__["identity"] = Annotated[Identity, Depends(permitted)]
    endpoint.__annotations__["arguments"] = Annotated[input_model, Body(description=f"Arguments of {operation.name}.")]
    router.add_api_route(
        f"/projects/{{project}}/tools/{operation.name}",
        endpoint,
        methods=["POST"],
        name=operation.name,
        operation_id=operation.name,
        summary=operation.summary,
        response_model=output_model,
        responses=PROBLEMS,
        tags=[operation.name.partition(".")[0]],
    )


async def answer(
    request: Request, name: str, arguments: Mapping[str, Any], identity: Identity, key: str | None = None
) -> Response:
    """Run an operation and answer with its output."""
    context = Context(identity=identity, idempotency_key=key, request_id=request.state.request_id)
    output = await host_of(request).invoke(name, arguments, context)
    return Response(json_text(output), media_type="application/json")


async def json_of(request: Request) -> Mapping[str, Any]:
    """Return the body as the object it was checked to be."""
    body = json.loads(await request.body() or b"{}")
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", errors=[{"path": "/", "problem": "not an object"}])
    return body


def shape_error(error: RequestValidationError, operation: Operation | None, route: str) -> KdskillsError:
    """Return what FastAPI found wrong in the form every door gives it.

    Args:
        error: What it found.
        operation: What the route runs; None for routes that are no operation.
        route: What to call the route in words.
    """
    problems = [(pointer(item["loc"][1:]), str(item["msg"])) for item in error.errors()]
    if operation is not None:
        return misshapen(operation, problems)
    words = "; ".join(f"{path}: {problem}" for path, problem in problems)
    return BadRequest(f"{route}: {words}", errors=[{"path": path, "problem": text} for path, text in problems])
