"""Which route a path below a project is for: looked up, where trying every route in turn would cost each request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, NoMatchFound, Route
from starlette.types import Receive, Scope, Send

PREFIX = "/projects/{project}/"


class RoutesByPath(BaseRoute):
    """Stands before *routes* and finds those with no parameter but the project, such as the tools, by their path.

    It decides nothing: a route that was looked up still says itself whether it takes the request, and a path that is not
    known here is left to the routes behind.

    Args:
        routes: The routes of the service, which stay where they are.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes: defaultdict[str, list[Route]] = defaultdict(list)
        for route in routes:
            if isinstance(route, Route) and route.path.startswith(PREFIX):
                tail = route.path.removeprefix(PREFIX)
                if "{" not in tail:
                    self._routes[tail].append(route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return what the first route of this path says that takes the request, or else would with another method."""
        best: tuple[Match, Scope] = Match.NONE, {}
        if scope["type"] != "http":
            return best
        parts = str(scope["path"]).split("/", 3)
        for route in self._routes.get(parts[-1], ()) if len(parts) == 4 else ():
            match, child_scope = route.matches(scope)
            if match.value > best[0].value:
                best = match, {**child_scope, "route": route}
        return best

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the route answer that was looked up."""
        await scope["route"].handle(scope, receive, send)

    def url_path_for(self, name: str, /, **path_params: object) -> NoMatchFound:  # type: ignore[override]  # it never returns
        """Leave names to the routes behind. Raises NoMatchFound."""
        raise NoMatchFound(name, path_params)
