"""Work: tasks, jobs and services, their logs as they grow, what they left, and the hosts that run them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from kdskills.doors.ui.calls import ConsoleCall, ConsoleRoute, download, form_text
from kdskills.doors.ui.drawing import graph
from kdskills.errors import BadRequest, KdskillsError, NotFound

if TYPE_CHECKING:
    from fastapi.responses import Response

ROWS: Final = 50
LOG_PIECE: Final = 24 * 1024
"""Bytes of a log that a page shows at first, from its end, and that it asks for at a time."""
OVER: Final = frozenset({"succeeded", "failed", "canceled"})
STEP_KINDS: Final = {"succeeded": "good", "failed": "bad", "running": "here", "starting": "here"}


async def tasks(call: ConsoleCall) -> Response:
    """List tasks, the newest first."""
    answer = await call.ask("tasks.list", steps=False, limit=ROWS, **_filters(call))
    return call.page("work.html.j2", "Tasks", answer=answer, kind="tasks")


async def jobs(call: ConsoleCall) -> Response:
    """List jobs, the newest first."""
    answer = await call.ask("jobs.list", limit=ROWS, **_filters(call))
    return call.page("work.html.j2", "Jobs", answer=answer, kind="jobs")


def _filters(call: ConsoleCall) -> dict[str, str | None]:
    query = call.query
    return {"status": query.get("status"), "skill_name": query.get("skill"), "cursor": query.get("cursor")}


async def task(call: ConsoleCall) -> Response:
    """Show a task or service: how it stands, what it printed, what it left."""
    task_id = call.segment("task")
    snapshot = await call.ask("skills.task_status", task_id=task_id, tail_bytes=0)
    logs = {stream: await _log(call, task_id, stream, -LOG_PIECE) for stream in ("stdout", "stderr")}
    return call.page("task.html.j2", f"Task {task_id}", task=snapshot, logs=logs, over=snapshot.status in OVER)


async def _log(call: ConsoleCall, task_id: str, stream: str, offset: int) -> dict[str, Any]:
    """Return a piece of a log as the page shows it; one that cannot be read here says why."""
    facts: dict[str, Any] = {"task_id": task_id, "stream": stream, "error": None, "piece": None}
    try:
        facts["piece"] = await call.ask(
            "skills.task_logs", task_id=task_id, stream=stream, offset=offset, limit=LOG_PIECE
        )
    except KdskillsError as error:
        facts["error"] = error
    return facts


async def log(call: ConsoleCall) -> Response:
    """Answer with what a log has more than a page shows already; the page asks again until the task has ended."""
    offset = call.number("offset") or 0
    piece = await _log(call, call.segment("task"), call.segment("stream"), offset)
    return call.fragment("log.html.j2", log=piece)


async def job(call: ConsoleCall) -> Response:
    """Show a job: its steps as they wait for one another, and how each stands."""
    snapshot = await call.ask("skills.job_status", job_id=call.segment("job"), tail_bytes=2048)
    needs = {step.name: tuple(getattr(step, "needs", ())) for step in snapshot.steps}
    if not any(needs.values()):  # steps without needs run in their order
        names = [step.name for step in snapshot.steps]
        needs = {name: (names[place - 1],) if place else () for place, name in enumerate(names)}
    edges: dict[str, list[str]] = {name: [] for name in needs}
    for name, before in needs.items():
        for each in before:
            edges.setdefault(each, []).append(name)
    kinds = {step.name: STEP_KINDS.get(step.status, "") for step in snapshot.steps}
    label = "; ".join(f"{step.name}: {step.status}" for step in snapshot.steps)
    drawing = graph(edges, label, kinds=kinds)
    title = f"Job {snapshot.job_id}"
    return call.page("job.html.j2", title, job=snapshot, drawing=drawing, over=snapshot.status in OVER)


async def begin(call: ConsoleCall) -> Response:
    """Offer to run a command of a skill."""
    call.require("skills.run_cmd_async")
    return call.page("begin.html.j2", "Run a command", skill=call.query.get("skill", ""))


async def start(call: ConsoleCall) -> Response:
    """Start a command of a skill in the background."""
    form = await call.form()
    outputs = [line.strip() for line in form_text(form, "outputs").splitlines() if line.strip()]
    answer = await call.ask(
        "skills.run_cmd_async",
        skill_name=form_text(form, "skill").strip(),
        command=form_text(form, "command"),
        session_id=form_text(form, "session").strip() or None,
        workdir=form_text(form, "workdir").strip() or None,
        outputs=outputs,
    )
    return call.redirect(f"/ui/work/tasks/{quote(answer.task_id, safe='')}", "It is started.")


def _work_named(call: ConsoleCall) -> tuple[str, str, str]:
    """Return what a path names: `tasks` or `jobs`, the word for one of them, and its id. Raises NotFound."""
    kind, singular = call.segment("kind"), {"tasks": "task", "jobs": "job"}.get(call.segment("kind"))
    if singular is None:
        raise NotFound(f"there is no page at {call.request.url.path}")
    return kind, singular, call.segment("id")


async def cancel(call: ConsoleCall) -> Response:
    """End a task or job."""
    kind, singular, work_id = _work_named(call)
    answer = await call.ask(
        f"skills.{singular}_cancel", **{f"{singular}_id": work_id, "reason": "ended from the console"}
    )
    words = "It is ended." if answer.canceled else f"It is {answer.status}."
    return call.redirect(f"/ui/work/{quote(kind)}/{quote(work_id, safe='')}", words)


async def again(call: ConsoleCall) -> Response:
    """Start what a task or job ran once more, through the same gate."""
    kind, singular, work_id = _work_named(call)
    answer = await call.ask(f"{kind}.again", **{f"{singular}_id": work_id})
    new_id = str(getattr(answer, f"{singular}_id"))
    return call.redirect(f"/ui/work/{quote(kind)}/{quote(new_id, safe='')}", f"It runs again, as this {singular}.")


async def artifact(call: ConsoleCall) -> Response:
    """Give a file that work left, as bytes to keep."""
    return await download(call, "artifacts.get", artifact_id=call.segment("artifact"))


async def fleet(call: ConsoleCall) -> Response:
    """Show hosts, workers and leases, and what waits."""
    return call.page("fleet.html.j2", "Hosts", answer=await call.ask("fleet.show"))


async def drain(call: ConsoleCall) -> Response:
    """Have a host take nothing new, or let it take work again."""
    form = await call.form()
    action = form_text(form, "action")
    if action not in {"drain", "undrain"}:
        raise BadRequest(
            "a form of this page says what is to be done", errors=[{"path": "/action", "problem": "unknown"}]
        )
    answer = await call.ask(f"fleet.{action}", host=form_text(form, "host"))
    words = "takes nothing new; what runs there goes on to its end" if answer.drained else "takes work again"
    return call.redirect("/ui/work/hosts", f"{answer.name or answer.host} {words}.")


ROUTES = (
    ConsoleRoute("/work", tasks),
    ConsoleRoute("/work/jobs", jobs),
    ConsoleRoute("/work/new", begin),
    ConsoleRoute("/work/new", start, "POST"),
    ConsoleRoute("/work/hosts", fleet),
    ConsoleRoute("/work/hosts", drain, "POST"),
    ConsoleRoute("/work/tasks/{task}", task),
    ConsoleRoute("/work/tasks/{task}/log/{stream}", log),
    ConsoleRoute("/work/jobs/{job}", job),
    ConsoleRoute("/work/artifacts/{artifact}", artifact),
    ConsoleRoute("/work/{kind}/{id}/cancel", cancel, "POST"),
    ConsoleRoute("/work/{kind}/{id}/again", again, "POST"),
)
