"""Spoilt folders, forged snapshots, floods of names: answers, in little time."""

import hashlib
import time

import pytest

from kdskills.errors import BadRequest
from kdskills.session.codes import not_found


async def test_a_folder_too_deep_is_an_answer(make, bundle):
    """A skill whose files cannot be hashed is `skill_unreadable`, and nothing is loaded."""
    folder = bundle.root / "skills" / "acme" / "sales"
    for _ in range(70):
        folder = folder / "a"
        folder.mkdir()
    (folder / "f").write_text("x")
    session = await make().create_session()
    reply = await session.call("skills.load", {"names": ["sales"]})
    assert (reply.ok, reply.error["code"]) == (False, "skill_unreadable")
    assert await session.active() == []


def test_a_flood_of_unknown_names_costs_little():
    """Near names are looked for where they can be, and time does not grow with the number asked."""
    pool = [f"{'abcdefghij' * 5}{number:04d}" for number in range(1_000)]
    for asked in (
        [f"{'jihgfedcba' * 5}{n:04d}" for n in range(64)],
        [f"{'abcdefghij' * 5}x{n:04d}" for n in range(64)],
    ):
        begun = time.monotonic()
        error = not_found(asked, pool)
        assert time.monotonic() - begun < 60
        assert error.details["names"] == asked
    assert len(error.details["near"]) == 5


@pytest.mark.parametrize(
    ("asked", "near"), [("sale", ["sales"]), ("chart", ["charts"]), ("Sales", ["sales"]), ("zzz", [])]
)
def test_near_names_are_found(asked, near):
    """A typo still finds what was meant."""
    assert not_found([asked], ["sales", "charts", "brief"]).details["near"] == near


async def test_a_snapshot_naming_a_skill_twice_restores_it_once(make):
    """A forged list makes no forged session."""
    runtime = make()
    session = await runtime.create_session(initial=["sales", "charts"])
    wire = (await runtime.snapshot(session.id)).to_json()
    wire["active"] *= 2
    restored = await runtime.restore(wire, session_id="again")
    assert [one.name for one in await restored.active()] == ["sales", "charts"]


async def test_a_body_that_is_no_skill_is_refused(make):
    """A text with its own digest that does not parse is no more trusted than one that does."""
    runtime = make()
    session = await runtime.create_session(initial=["sales", "charts"])
    wire = (await runtime.snapshot(session.id)).to_json()
    digest = "sha256:" + hashlib.sha256(b"garbage").hexdigest()
    wire["bodies"][digest] = "garbage"
    wire["active"][0]["digest"] = digest
    with pytest.raises(BadRequest) as caught:
        await runtime.restore(wire, session_id="again")
    assert caught.value.code == "snapshot_untrusted"


async def test_a_cap_below_one_is_no_snapshot(make):
    """Bounds hold for snapshots as for sessions."""
    runtime = make()
    wire = (await runtime.snapshot((await runtime.create_session()).id)).to_json()
    with pytest.raises(BadRequest, match="max_active") as caught:
        await runtime.restore({**wire, "max_active": 0}, session_id="again")
    assert caught.value.code == "snapshot_unsupported"
