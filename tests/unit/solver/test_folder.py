"""Turn folders and the relay of session events."""

import json

import pytest

from kdskills.errors import BadRequest
from kdskills.models import Redactor
from kdskills.session import SessionEvent
from kdskills.solver.bus import EventBus, Reader
from kdskills.solver.events import EVENT_TYPES
from kdskills.solver.finish import discard, open_workspace, produced_files
from kdskills.solver.react import relay_to


def test_a_folder_has_the_turns_name_and_nobody_elses_eyes(tmp_path):
    """0700, named after the turn, inputs inside."""
    workspace = open_workspace("t1", work_dir=tmp_path, data=None, files=[("a/b.txt", b"1")])
    assert (workspace.root.name, workspace.root.stat().st_mode & 0o777) == ("kdskills-turn-t1", 0o700)
    assert ((workspace.root / "a/b.txt").read_bytes(), sorted(workspace.protected)) == (b"1", ["a/b.txt"])


def test_what_was_put_there_beside_the_inputs_is_produced(tmp_path):
    """Links and pipes are no files; inputs and mounts are not listed."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "x.csv").write_text("1")
    workspace = open_workspace("t1", work_dir=tmp_path, data=data, files=[("in.txt", b"1")])
    (workspace.root / "out").mkdir()
    (workspace.root / "out" / "r.svg").write_text("<svg/>")
    (workspace.root / "link").symlink_to("/etc/hostname")
    assert [(file.path, file.media_type, file.size) for file in produced_files(workspace)] == [
        ("out/r.svg", "image/svg+xml", 6)
    ]
    discard(workspace)
    assert not workspace.root.exists()
    assert (data / "x.csv").exists()


@pytest.mark.parametrize("name", ["/abs", "../up", "a\\b", "", "C:x", "a/../b"])
def test_names_that_lead_elsewhere_are_refused_and_leave_nothing(tmp_path, name):
    """Nothing is made when a file cannot be handed in."""
    with pytest.raises(BadRequest):
        open_workspace("t1", work_dir=tmp_path / "w", data=None, files=[(name, b"1")])
    assert not (tmp_path / "w").exists() or list((tmp_path / "w").iterdir()) == []


def test_too_many_files_are_refused(tmp_path):
    """A turn takes 256 files."""
    with pytest.raises(BadRequest, match="256"):
        open_workspace("t1", work_dir=tmp_path, data=None, files=[(f"{n}", b"") for n in range(257)])


EVENTS = [
    ("skill.loaded", {"id": "a.b", "digest": "d", "by": "model"}, {"skill": "a.b", "name": "a.b", "by": "model"}),
    ("skill.unloaded", {"id": "a.b"}, {"skill": "a.b"}),
    ("skill.stale", {"id": "a.b"}, {"skill": "a.b"}),
    ("skill.pruned", {"id": "a.b", "code": "denied"}, {"skill": "a.b"}),
    ("skill.refused", {"ref": "x", "code": "denied"}, {"ref": "x", "code": "denied", "reason": ""}),
    ("catalog.truncated", {"shown": 1, "total": 2, "level": 4}, {"level": 4}),
    ("approval.requested", {"skill": "a.b", "path": "scripts/x", "env_names": []}, {"path": "scripts/x"}),
    ("approval.decided", {"skill": None, "path": None, "allowed": True, "remember": "call"}, {"allowed": True}),
    ("script.started", {"skill": "a.b", "path": "p", "engine": "e"}, {"engine": "e"}),
    (
        "script.finished",
        {"skill": "a.b", "path": "p", "engine": "e", "status": "ok", "exit_code": 0, "duration_ms": 1, "files": []}
        | {"level": "vm", "limits": ["wall", "cpu"]},
        {"level": "vm", "limits": ("cpu", "wall"), "exit_code": 0},
    ),
]


@pytest.mark.parametrize(("kind", "data", "fields"), EVENTS, ids=[row[0] for row in EVENTS])
async def test_what_a_session_tells_becomes_an_event_of_the_turn(kind, data, fields):
    """Every kind of session event has its own type."""
    reader = Reader()
    bus = EventBus("t", "s", redactor=Redactor())
    bus.reader(reader)
    relay_to(bus)(SessionEvent(kind, "s", data))
    event = await reader.get()
    assert event.type == kind
    assert event.model_dump().items() >= fields.items()
    assert type(event) in EVENT_TYPES
    assert json.loads(event.model_dump_json())["seq"] == 1


async def test_other_things_a_session_tells_become_diagnostics():
    """Nothing is lost."""
    bus = EventBus("t", "s", redactor=Redactor())
    relay_to(bus)(SessionEvent("diagnostic", "s", {"code": "body_lost", "id": "a.b"}))
    assert [(found.code, found.ref) for found in bus.diagnostics] == [("body_lost", "a.b")]
