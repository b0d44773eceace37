"""The end of a turn: citations checked, files collected from its folder, plugins told, everything closed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.errors import BadRequest, Diagnostic, FileRefused, PluginFailed, StrPath, ToolCallRefused, path_argument
from kdskills.session.workspace import MAX_FILES, MAX_TOTAL, FolderWorkspace, clean_path, media_type
from kdskills.skills.private_files import make_folder
from kdskills.solver.bus import masked
from kdskills.solver.events import CitationIssue, TurnFile, TurnFinished, TurnResult
from kdskills.solver.history import TURN_PREFIX, add_to_conversation
from kdskills.solver.output import map_texts
from kdskills.sources import SourcesPool, find_citations, render_citations, rewrite_citations
from kdskills.sources.tokens import find_tokens

if TYPE_CHECKING:
    from kdskills.solver.turn import Turn


def issues_of(text: str, pool: SourcesPool) -> tuple[CitationIssue, ...]:
    """Return one issue for each sid of each citation that names no source; for a wholly unknown range, its first sid."""
    issues = []
    for citation in find_citations(text, known=pool):
        span = (citation.start, citation.end)
        sids = citation.sids or tuple(
            low for token in find_tokens(text[citation.start : citation.end]) for low, _ in token.items
        )
        issues += [CitationIssue(sid=sid, span=span) for sid in dict.fromkeys(sids) if sid not in pool]
    return tuple(issues)


def unknown_sids(text: str, pool: SourcesPool) -> tuple[int, ...]:
    """Return the sids *text* cites that name no source, each once."""
    return tuple(dict.fromkeys(issue.sid for issue in issues_of(text, pool)))


def drop_unknown(text: str, pool: SourcesPool) -> str:
    """Return *text* without citations that name no source; an untouched text stays as it is written."""
    if not unknown_sids(text, pool):
        return text
    return rewrite_citations(text, {sid: sid for sid in (*pool.rows, *pool.aliases)}).text


def rendered(text: str, pool: SourcesPool) -> str:
    """Return *text* with citations as links, those of no source as `[?7]`."""
    unknown: dict[tuple[int, int], list[int]] = {}
    for issue in issues_of(text, pool):
        unknown.setdefault(issue.span, []).append(issue.sid)
    known_sids = {(c.start, c.end): [sid for sid in c.sids if sid in pool] for c in find_citations(text, known=pool)}
    pieces, position = [], 0
    for start, end in sorted(unknown):
        sids = known_sids[(start, end)]
        token = f"[[S:{','.join(map(str, sids))}]]" if sids else ""
        marks = "".join(f"[?{sid}]" for sid in unknown[(start, end)])
        pieces.append(f"{text[position:start]}{token}{marks}")
        position = end
    return render_citations("".join([*pieces, text[position:]]), pool)


GivenFile = StrPath | tuple[str, bytes | StrPath]
"""A file of this host, which keeps its name; or a name in the turn's folder and bytes or a file."""


def open_workspace(
    turn_id: str, *, work_dir: Path | None, data: Path | None, files: Sequence[GivenFile]
) -> FolderWorkspace:
    """Make the folder of a turn, with *files* copied in and *data* seen read-only as `data/`.

    Raises BadRequest for a file that is missing, no regular file, named twice, or too large together with the others.
    """
    mounts = {"data": data} if data is not None and data.is_dir() else {}
    named_files = [_name_and_content(file) for file in files]
    names = [name for name, _ in named_files]
    for name in names:
        if names.count(name) > 1:
            raise _bad(name, "two files have this name")
        if name.partition("/")[0] in mounts:
            raise _bad(name, "data/ holds the bundle's own files")
    if len(named_files) > MAX_FILES:
        raise _bad(names[MAX_FILES], f"at most {MAX_FILES} files can be handed in")
    base = work_dir if work_dir is not None else Path(tempfile.gettempdir())
    make_folder(base)
    root = base / f"{TURN_PREFIX}{turn_id}"
    root.mkdir(mode=0o700)
    try:
        _copy(root, named_files)
    except BaseException:  # raised again: nothing half-copied stays
        shutil.rmtree(root)
        raise
    return FolderWorkspace(root, mounts=mounts, protected=names)


def _name_and_content(file: GivenFile) -> tuple[str, bytes | Path]:
    if isinstance(file, tuple):
        name, content = file
        try:
            return clean_path(name), content if isinstance(content, bytes) else path_argument(content, "file")
        except ToolCallRefused as error:
            raise _bad(name, error.message) from error
    path = path_argument(file, "file")
    return path.name, path


def _copy(root: Path, named_files: Sequence[tuple[str, bytes | Path]]) -> None:
    room = MAX_TOTAL
    for name, content in named_files:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path) and not content.is_file():
            raise _bad(name, f"there is no file {content}")
        room -= len(content) if isinstance(content, bytes) else content.stat().st_size
        if room < 0:
            raise _bad(name, f"the files handed in are larger than {MAX_TOTAL} bytes")
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copyfile(content, target)


def produced_files(workspace: FolderWorkspace) -> tuple[TurnFile, ...]:
    """Return the files a turn produced, by path; inputs and mounts are none of them."""
    files = []
    for entry in workspace.files():
        if entry.path in workspace.protected:
            continue
        try:
            data = workspace.read(entry.path, limit=MAX_TOTAL)
        except FileRefused:
            continue  # taken away between listing and reading
        files.append(
            TurnFile(
                path=entry.path,
                size=len(data),
                digest="sha256:" + hashlib.sha256(data).hexdigest(),
                media_type=media_type(entry.path),
                location=str(workspace.root / entry.path),
            )
        )
    return tuple(files)


def discard(workspace: FolderWorkspace) -> None:
    """Remove the folder of a turn that produced nothing: it holds copies only."""
    shutil.rmtree(workspace.root, ignore_errors=True)


def _bad(name: str, problem: str) -> BadRequest:
    return BadRequest(f"cannot hand in {name!r}: {problem}", errors=[{"path": "/files", "problem": problem}], file=name)


async def finish(turn: Turn) -> TurnResult:
    """End *turn*: build its result, tell plugins, emit the last event, close the bus.

    Cancelling does not interrupt it; it is raised when the turn has ended.
    """
    ending = asyncio.ensure_future(_finish(turn))
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    result = ending.result()
    if cancelled is not None:
        raise cancelled
    return result


async def _finish(turn: Turn) -> TurnResult:
    try:
        await turn.closing.aclose()
    except Exception as error:  # noqa: BLE001 - the turn ends whatever an engine does
        message = f"a command in the background was not ended as it should be: {type(error).__name__}"
        turn.bus.diagnose(Diagnostic("command_lost", "warning", message))
    result = await asyncio.to_thread(_result, turn)
    result = await add_to_conversation(turn, result, turn.parts.runtime.config.clock())
    tell_plugins(turn, "kdskills_turn_finished", lambda: turn.parts.wiring.turn_finished(turn, result))
    result = result.model_copy(update={"diagnostics": tuple(turn.bus.diagnostics)})
    result = masked(result, turn.bus.redactor)
    typed = turn.log.typed if result.output is not None else None
    turn.result = result if typed is None else result.model_copy(update={"output": typed.value})
    turn.bus.emit(TurnFinished, result=result)
    await turn.bus.aclose()
    return turn.result


def tell_plugins(turn: Turn, hook: str, tell: Callable[[], None]) -> None:
    """Tell plugins of the turn by a hook; one that fails is reported and cannot end the turn."""
    try:
        tell()
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        turn.bus.diagnose(plugin_diagnostic(error, hook))


def _result(turn: Turn) -> TurnResult:
    log, pool = turn.log, turn.pool
    drop = turn.parts.settings.on_unknown_sid == "drop"
    text = drop_unknown(log.text, pool) if drop else log.text
    citations = find_citations(text, known=pool)
    files: tuple[TurnFile, ...] = ()
    try:
        files = produced_files(turn.workspace)
    except FileRefused as error:  # what ran in the folder made it unreadable
        message = f"the files of the turn cannot be listed: {error.message}"
        turn.bus.diagnose(Diagnostic("files_lost", "warning", message))
    else:
        if not files:
            discard(turn.workspace)
    model, typed = turn.parts.model(turn.role), log.typed
    shown = None if typed is None else map_texts(typed.json, lambda words: rendered(words, pool))
    return TurnResult(
        turn_id=turn.id,
        session_id=turn.session_id,
        status=log.status,
        stop_reason=log.stop_reason,
        text=text,
        output=None if typed is None else typed.json,
        rendered=rendered(text, pool) if typed is None else json.dumps(shown, ensure_ascii=False),
        sources=tuple(row.to_json() for row in pool.rows.values()),
        cited=tuple(dict.fromkeys(sid for citation in citations for sid in citation.sids if sid in pool)),
        citation_issues=issues_of(text, pool),
        skills_used=tuple(log.skills.values()),
        files=files,
        steps=tuple(step for _, step in sorted(log.steps.items())),
        usage=log.tokens,
        duration_ms=log.duration_ms,
        model=model.name,
        replayed=model.replayed,
        context=tuple(log.context),
        agents=tuple(run for _, run in sorted(log.agents.items())),
        diagnostics=tuple(turn.bus.diagnostics),
    )


def plugin_diagnostic(error: Exception, ref: str) -> Diagnostic:
    """Return the diagnostic for a plugin that failed; it names other errors than ours by their class only."""
    words = error.message if isinstance(error, PluginFailed) else f"a plugin's {ref} failed: {type(error).__name__}"
    return Diagnostic(PluginFailed.code, "warning", words, ref=ref)
