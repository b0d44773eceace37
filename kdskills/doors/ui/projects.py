"""Projects: skills that were uploaded, what was found in each version, and which one is in use."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from starlette.datastructures import UploadFile

from kdskills.doors.ui.calls import ConsoleCall, ConsoleRoute, form_text
from kdskills.errors import BadRequest

if TYPE_CHECKING:
    from fastapi.responses import Response

ROWS: Final = 100


async def uploads(call: ConsoleCall) -> Response:
    """List the uploaded skills of the caller's project, and take another one."""
    answer = await call.ask("project_skills.list", cursor=call.query.get("cursor"), limit=ROWS)
    projects = (await call.ask("projects.list", limit=ROWS)).projects if call.may("projects.list") else ()
    return call.page("uploads.html.j2", "Projects", answer=answer, projects=projects)


async def upload(call: ConsoleCall) -> Response:
    """Take a skill's archive, in use for nobody yet, and show what was found in it."""
    call.require("project_skills.upload")
    form = await call.form(files=1)
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile) or not file.filename:
            raise BadRequest("choose an archive first", errors=[{"path": "/file", "problem": "missing"}])
        data = base64.b64encode(await file.read()).decode()
    finally:
        await form.close()
    report = await call.ask("project_skills.upload", data=data, activate=False)
    path = f"/ui/projects/{quote(report.skill, safe='')}/versions/{quote(report.version, safe='')}"
    return call.redirect(path, "It is stored, and in use for nobody until you activate it.")


async def uploaded(call: ConsoleCall) -> Response:
    """Show an uploaded skill and its versions."""
    name = call.segment("skill")
    state = await call.ask("project_skills.get", skill=name)
    versions = await call.ask("project_skills.versions", skill=name, cursor=call.query.get("cursor"), limit=ROWS)
    return call.page("uploaded.html.j2", name, state=state, versions=versions)


async def version(call: ConsoleCall) -> Response:
    """Show one version: its files, what was found in it, what differs from the one in use, and whom it changes."""
    name, version_hash = call.segment("skill"), call.segment("version")
    state = await call.ask("project_skills.get", skill=name)
    report = await call.ask("project_skills.inspect", skill=name, version=version_hash)
    difference = None
    if state.active is not None and state.active != version_hash:
        difference = await call.ask("project_skills.diff", skill=name, base=state.active, version=version_hash)
    title = f"{name} {version_hash[:16]}"
    values = {"state": state, "report": report, "difference": difference, "version_hash": version_hash}
    return call.page("version.html.j2", title, **values)


async def change(call: ConsoleCall) -> Response:
    """Activate a version, enable, disable or delete a skill."""
    name, form = call.segment("skill"), await call.form()
    here, action = f"/ui/projects/{quote(name, safe='')}", form_text(form, "action")
    if action == "activate":
        await call.ask("project_skills.activate", skill=name, version_hash=form_text(form, "version"))
        return call.redirect(here, "This version is in use now.")
    if action in {"enable", "disable"}:
        await call.ask("project_skills.patch", skill=name, enabled=action == "enable")
        return call.redirect(here, f"The skill is {action}d.")
    if action == "delete":
        await call.ask("project_skills.delete", skill=name)
        return call.redirect("/ui/projects", f"{name} is deleted.")
    raise BadRequest("a form of this page says what is to be done", errors=[{"path": "/action", "problem": "unknown"}])


ROUTES = (
    ConsoleRoute("/projects", uploads),
    ConsoleRoute("/projects", upload, "POST"),
    ConsoleRoute("/projects/{skill}", uploaded),
    ConsoleRoute("/projects/{skill}", change, "POST"),
    ConsoleRoute("/projects/{skill}/versions/{version}", version),
)
