"""Skills of bundles in Codex sessions, judged by what the model is shown and reads (spec remote §5)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kdskills import SkillsSubsystem, load_bundle
from kdskills.remote import CatalogError, RemoteSkillsFacade
from kdskills.remote.labmodel import texts_of, tool_outputs


def write(path: Path, text: str) -> None:
    """Write a file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


@pytest.fixture
def bundle(tmp_path):
    """A bundle of four skills; the consumer `writer` may use three, one of which imports another."""
    root = tmp_path / "bundle"
    config = {"writer": {"enabled": ["*", "desk.*"], "disabled": ["public.secret"]}}
    write(root / "skills_descriptor.py", f'CUSTOM_SKILLS_ROOT = "skills"\nAGENTS_CONFIG = {config!r}\n')
    skills = root / "skills"
    write(skills / "public/ship-order/SKILL.md", "---\nname: ship-order\ndescription: Ship it\n---\nShip with care.\n")
    write(skills / "public/ship-order/references/prices.md", "One parcel costs 4 EUR.\n")
    write(
        skills / "public/ship-order/tools.yaml",
        "tools:\n  - id: track.parcel\n    role: helper\n    why: To follow it\n",
    )
    write(skills / "public/secret/SKILL.md", "---\nname: secret\ndescription: Hidden away\n---\nThe secret text.\n")
    tone = "---\nname: tone\ndescription: Tone of letters\n---\nBe friendly.\n"
    letter = "---\nname: letter\ndescription: Letters\nimports: [desk.tone]\n---\nWrite a letter.\n"
    write(skills / "desk/tone/SKILL.md", tone)
    write(skills / "desk/letter/SKILL.md", letter)
    return root


@pytest.fixture
def subsystem(bundle):
    """The bundle's skills."""
    return SkillsSubsystem(load_bundle(bundle).descriptor, bundle_root=bundle, index_dir=None, auto_refresh=0.0)


@pytest.fixture
def session():
    """A session of a client that is never asked."""
    client = SimpleNamespace(sessions=SimpleNamespace())
    facade = RemoteSkillsFacade(client)
    yield facade.session("thread-1")
    facade.close()


def call(session, tool: str, arguments: object = None) -> tuple[bool, str]:
    """Run a call for the program."""
    done = session.dispatch_tool_call(tool=tool, arguments=arguments)
    return done.response_payload["success"], done.response_payload["contentItems"][0]["text"]


class TestTools:
    """Route `tools`."""

    def test_names_and_the_table_back(self, session, subsystem):
        """`ns.skill-id` is tool `skill_id` of namespace `ns`; only granted skills are published."""
        report = session.publish(subsystem.view("writer"))
        assert dict(report.names) == {
            "desk.letter": "desk.letter",
            "desk.tone": "desk.tone",
            "public.ship_order": "public.ship-order",
        }
        assert [(tool["namespace"], tool["name"]) for tool in session.dynamic_tools()] == [
            ("desk", "letter"),
            ("desk", "tone"),
            ("public", "ship_order"),
        ]
        assert (report.route, report.folder, report.digest) == ("tools", None, subsystem.view("writer").digest)
        assert [one.ref for one in report.skills] == ["desk.letter", "desk.tone", "public.ship-order"]

    def test_texts_and_references(self, session, subsystem):
        """A call returns the text with what it imports, a part one reference; strange parts are refused."""
        session.publish(subsystem.view("writer"))
        handled, text = call(session, "desk.letter")
        assert (handled, text.index("Be friendly.") < text.index("Write a letter.")) == (True, True)
        assert call(session, "public.ship_order", {"part": "references/prices.md"}) == (
            True,
            "One parcel costs 4 EUR.\n",
        )
        for part in ("../secret/SKILL.md", "/etc/passwd", "references/none.md", "references"):
            handled, text = call(session, "public.ship_order", {"part": part})
            assert (handled, "root:" in text, "secret text" in text) == (False, False, False)

    def test_links_are_not_followed(self, session, subsystem, bundle):
        """A reference that is a link out of the skill is refused."""
        link = bundle / "skills/public/ship-order/references/link.md"
        link.symlink_to(bundle / "skills/public/secret/SKILL.md")
        session.publish(subsystem.view("writer"))
        handled, text = call(session, "public.ship_order", {"part": "references/link.md"})
        assert (handled, "secret text" in text) == (False, False)

    def test_a_revoked_skill_is_unknown(self, session, subsystem):
        """The policy is asked at each call: what was revoked answers as what was never there."""
        views = [subsystem.view("writer")]
        session.publish(views[0], renew=lambda: views[-1])
        assert call(session, "public.ship_order")[0] is True
        views.append(subsystem.view("writer", tools=frozenset()))
        assert call(session, "public.ship_order")[0] is True  # nothing it needs is required
        views.append(SimpleNamespace(resolve=lambda _ref: None))
        assert call(session, "public.ship_order") == (False, "no remote skill registered for public.ship_order")
        unknown = session.dispatch_tool_call(tool="public.nothing")
        assert unknown.response_payload["contentItems"][0]["text"] == "no remote skill registered for public.nothing"

    def test_python_tools(self, session, subsystem):
        """Python tools a skill names become `skill__tool`, with their own schema, behind the same gate."""

        def track(number: int) -> str:
            """Find a parcel."""
            return f"parcel {number} is in Bonn"

        views = [subsystem.view("writer")]
        report = session.publish(
            views[0], python_tools={"track.parcel": track, "unused": print}, renew=lambda: views[-1]
        )
        assert "public.ship_order__track_parcel" in report.names
        [tool] = [one for one in session.dynamic_tools() if one["name"] == "ship_order__track_parcel"]
        assert tool["inputSchema"]["required"] == ["number"]
        assert tool["description"] == "To follow it"
        assert call(session, "public.ship_order__track_parcel", {"number": 7}) == (True, "parcel 7 is in Bonn")
        views.append(SimpleNamespace(resolve=lambda _ref: None))
        handled, text = call(session, "public.ship_order__track_parcel", {"number": 7})
        assert (handled, text) == (False, "no remote skill registered for public.ship_order__track_parcel")

    def test_publishing_again_replaces(self, session, subsystem):
        """What an earlier call published goes; what the program registered itself stays."""
        session.register("own", lambda: "mine")
        session.publish(subsystem.view("writer"))
        session.publish(subsystem.view("nobody", include_internal=False))
        session.publish(subsystem.view("writer"))
        assert {skill.name for skill in session.list()} == {"own", "letter", "tone", "ship_order"}

    def test_collisions_publish_nothing(self, session, subsystem, bundle):
        """Skills that would have one name are refused, and nothing is published."""
        text = "---\nname: ship_order\ndescription: Other\n---\nOther.\n"
        write(bundle / "skills/public/ship_order/SKILL.md", text)
        subsystem.refresh()
        view = subsystem.view("writer")
        if "public.ship_order" not in view.listed:
            pytest.skip("ids with underscores are refused where skills are parsed")
        with pytest.raises(CatalogError) as refused:
            session.publish(view)
        assert (refused.value.details["rule"], session.list()) == ("published_twice", [])

    def test_a_neighbour_of_the_same_folded_name(self, session, subsystem):
        """A skill of the program whose folded name would be the same stops publishing before its first change."""
        session.register("public__ship_order", lambda: "mine")
        with pytest.raises(CatalogError):
            session.publish(subsystem.view("writer"))
        assert [skill.name for skill in session.list()] == ["public__ship_order"]

    def test_unknown_routes(self, session, subsystem):
        """There are two routes."""
        with pytest.raises(ValueError, match="tools or roots"):
            session.publish(subsystem.view("writer"), route="both")


class TestRoots:
    """Route `roots`."""

    def test_only_on_an_owned_server(self, session, subsystem):
        """A server that is not this client's own is given no roots."""
        with pytest.raises(CatalogError) as refused:
            session.publish(subsystem.view("writer"), route="roots")
        assert refused.value.details["rule"] == "roots_not_owned"

    @pytest.fixture
    def owned(self, tmp_path):
        """A facade whose client owns its server, and what was asked of it."""
        asked: list[tuple[str, list[str]]] = []
        client = SimpleNamespace(
            sessions=SimpleNamespace(),
            owned=True,
            codex_home=str(tmp_path),
            request=lambda method, extraRoots: asked.append((method, extraRoots)),  # noqa: N803 - the server's word
        )
        facade = RemoteSkillsFacade(client)
        yield facade, asked
        facade.close()

    def test_what_is_written(self, owned, subsystem):
        """Granted skills only, imports resolved, front-matter names alike, files of the skill beside, private to us."""
        facade, asked = owned
        report = facade.session("a").publish(subsystem.view("writer"), route="roots")
        assert asked == [("skills/extraRoots/set", [report.folder])]
        top = Path(report.folder)
        files = sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())
        assert files == [
            "desk-letter/SKILL.md",
            "desk-tone/SKILL.md",
            "ship-order/SKILL.md",
            "ship-order/references/prices.md",
            "ship-order/tools.yaml",
        ]
        letter = (top / "desk-letter/SKILL.md").read_text()
        assert letter.startswith("---\nname: desk-letter\ndescription: Letters\n---\n")
        assert letter.index("Be friendly.") < letter.index("Write a letter.")
        assert (top.parent.stat().st_mode & 0o777, top.stat().st_mode & 0o777) == (0o700, 0o700)

    def test_publishing_again_replaces(self, owned, subsystem):
        """A second call gives the server a new folder and removes the old one."""
        facade, asked = owned
        session = facade.session("a")
        folders = [session.publish(subsystem.view("writer"), route="roots").folder for _ in range(2)]
        assert [Path(folder).exists() for folder in folders] == [False, True]
        assert [roots for _, roots in asked] == [[folder] for folder in folders]

    def test_sessions_must_agree(self, owned, subsystem):
        """Roots are seen by every session: two views on one server are refused, whichever comes first."""
        facade, asked = owned
        facade.session("a").publish(subsystem.view("writer"), route="roots")
        facade.session("b").publish(subsystem.view("writer"), route="roots")
        for route in ("roots", "tools"):
            with pytest.raises(CatalogError) as refused:
                facade.session("c").publish(subsystem.view("reader"), route=route)
            assert refused.value.details["rule"] == "roots_differ"
        assert len(asked) == 2

    def test_tools_first_then_roots(self, owned, subsystem):
        """A session with other skills as tools stops roots, too."""
        facade, asked = owned
        facade.session("a").publish(subsystem.view("reader"))
        with pytest.raises(CatalogError):
            facade.session("b").publish(subsystem.view("writer"), route="roots")
        assert asked == []

    def test_names_that_do_not_fit(self, owned, subsystem, bundle):
        """A folder name over 64 characters, and one that two skills would have, is refused."""
        facade, asked = owned
        long = "x" * 62
        write(bundle / f"skills/desk/{long}/SKILL.md", f"---\nname: {long}\ndescription: Long\n---\nLong.\n")
        subsystem.refresh()
        with pytest.raises(CatalogError) as refused:
            facade.session("a").publish(subsystem.view("writer"), route="roots")
        assert refused.value.details["rule"] == "root_name_long"
        (bundle / f"skills/desk/{long}").rename(bundle / "gone")
        write(bundle / "skills/public/desk-tone/SKILL.md", "---\nname: desk-tone\ndescription: Twin\n---\nTwin.\n")
        subsystem.refresh()
        with pytest.raises(CatalogError) as refused:
            facade.session("a").publish(subsystem.view("writer"), route="roots")
        assert (refused.value.details["rule"], asked) == ("published_twice", [])


async def test_tools_reach_the_model(lab, subsystem):
    """On a server: the model sees the published tools, calls one, and reads the skill's text; the receipt names it."""
    async with await lab.client() as client:
        created, session = await client.remote_skills.create_session(cwd=str(lab.home))
        await session.publish(subsystem.view("writer"))
        done = await session.send_and_handle("!call public.ship_order {}", timeout_seconds=60)
        receipt = session.receipt(done.turn_id)
    assert lab.shown() == ["desk.letter", "desk.tone", "public.ship_order"]
    [read] = tool_outputs(lab.model.requests[-1]).values()
    assert "Ship with care." in read
    assert [skill.ref for skill in receipt.skills] == ["desk.letter", "desk.tone", "public.ship-order"]
    assert created["session"]["sessionId"] == session.session_id


async def test_roots_reach_the_model(lab, subsystem):
    """On a server: the model reads names and descriptions of the granted skills, and none of the others."""
    async with await lab.client() as client:
        _, session = await client.remote_skills.create_session(cwd=str(lab.home))
        await session.publish(subsystem.view("writer"), route="roots")
        await session.send_and_handle("!say done", timeout_seconds=60)
    texts = "\n".join(texts_of(lab.model.requests[-1], "developer") + texts_of(lab.model.requests[-1], "user"))
    assert ("Ship it" in texts, "Tone of letters" in texts, "Hidden away" in texts) == (True, True, False)
