"""Skills of bundles in Codex sessions, judged by what the model is shown and reads."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdskills import SkillsSubsystem, load_bundle
from kdskills.remote import CatalogError, RemoteSkillsFacade
from kdskills.remote.labmodel import texts_of, tool_outputs

NOTHING = SimpleNamespace(listed={}, digest="a view that grants nothing")


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


class TestRevoked:
    """What a view does not grant any more."""

    @pytest.mark.parametrize("arguments", [None, {}, {"part": "references/prices.md"}])
    def test_it_is_not_handled_as_an_unknown_skill_is_not(self, session, subsystem, arguments):
        """The dispatch of a revoked skill is that of one that never was: not handled, no success, the same words."""
        views = [subsystem.view("writer")]
        session.publish(views[0], renew=lambda: views[-1])
        views.append(SimpleNamespace(resolve=lambda _ref: None))
        revoked = session.dispatch_tool_call(tool="public.ship_order", arguments=arguments)
        session.unregister("public.ship_order")
        unknown = session.dispatch_tool_call(tool="public.ship_order", arguments=arguments)
        assert (revoked.handled, revoked.result, revoked.error, revoked.response_payload) == (
            unknown.handled,
            unknown.result,
            unknown.error,
            unknown.response_payload,
        )
        assert revoked.error == "no remote skill registered for public.ship_order"

    def test_a_view_that_cannot_be_had_grants_nothing(self, session, subsystem):
        """When the present view cannot be asked the call fails; nothing is read."""

        def away():
            raise OSError("the policy is away")

        session.publish(subsystem.view("writer"), renew=away)
        assert call(session, "public.ship_order") == (
            False,
            "remote skill public.ship_order failed: the policy is away",
        )

    def test_a_python_tool_does_not_run(self, session, subsystem):
        """The function of a revoked skill is not called, whatever it would have done."""
        runs, views = [], [subsystem.view("writer")]
        session.publish(views[0], python_tools={"track.parcel": lambda: runs.append(1)}, renew=lambda: views[-1])
        name = "public.ship_order__track_parcel"
        assert call(session, name) == (True, "null")
        views.append(SimpleNamespace(resolve=lambda _ref: None))
        assert session.dispatch_tool_call(tool=name).handled is False
        assert runs == [1]


class TestWhatTheProgramPutThere:
    """Functions of the program beside, and in place of, published skills."""

    def test_a_function_in_a_published_place_stays(self, session, subsystem):
        """A name the program took over is its own from then on: publishing another view does not drop it."""
        session.publish(subsystem.view("writer"))
        session.unregister("desk.tone")
        session.register("tone", lambda: "mine", namespace="desk")
        session.publish(NOTHING)
        assert call(session, "desk.tone") == (True, "mine")
        assert [skill.qualified_name for skill in session.list()] == ["desk.tone"]

    def test_publishing_over_a_function_says_so(self, session, subsystem):
        """A published skill in the place of a function is an overwriting, and is told as one."""
        session.register("tone", lambda: "mine", namespace="desk")
        session.publish(subsystem.view("writer"))
        assert call(session, "desk.tone") != (True, "mine")
        assert "remote_skill_overwritten" in [found.code for found in session.diagnostics]

    def test_cleared_in_between(self, session, subsystem):
        """After `clear` the same view can be published again, and is replaced as usual."""
        session.publish(subsystem.view("writer"))
        session.clear()
        session.publish(subsystem.view("writer"))
        session.publish(NOTHING)
        assert session.list() == []


def test_published_in_a_draft(subsystem):
    """What `register` publishes in a draft is published in the session: replaced and compared like anything published."""
    created = {"session": {"sessionId": "thread-1"}}
    client = SimpleNamespace(sessions=SimpleNamespace(create=lambda **_: created))
    facade = RemoteSkillsFacade(client)
    _, session = facade.create_session(register=lambda draft: draft.publish(subsystem.view("writer")) and None)
    assert {skill.name for skill in session.list()} == {"letter", "tone", "ship_order"}
    session.publish(NOTHING)
    assert session.list() == []
    facade.close()


class TestRoutes:
    """One session, one route at a time."""

    @pytest.fixture
    def owned(self, tmp_path):
        """A facade whose client owns its server, the roots the server has, and a switch that makes it refuse."""
        server = SimpleNamespace(roots=[], refusing=False)

        def request(method, extraRoots):  # noqa: N803 - the server's word
            if server.refusing:
                raise RuntimeError("no more roots")
            assert method == "skills/extraRoots/set"
            server.roots = extraRoots

        home = tmp_path / "home"
        home.mkdir()
        sessions = SimpleNamespace(delete=lambda session_id: {"status": "deleted"})
        client = SimpleNamespace(sessions=sessions, owned=True, codex_home=str(home), request=request)
        facade = RemoteSkillsFacade(client)
        yield facade, server, home
        facade.close()

    @staticmethod
    def folders(home):
        """Return the folders that were written for the server."""
        top = home / "kdskills-roots"
        return sorted(str(path) for path in top.iterdir()) if top.exists() else []

    def test_from_tools_to_roots(self, owned, subsystem):
        """The tools of the earlier call go; a function of the program stays."""
        facade, server, _ = owned
        session = facade.session("a")
        session.register("own", lambda: "mine")
        session.publish(subsystem.view("writer"))
        report = session.publish(subsystem.view("writer"), route="roots")
        assert ([skill.name for skill in session.list()], server.roots) == (["own"], [report.folder])

    def test_from_roots_to_tools(self, owned, subsystem):
        """The server lists the roots no more, their folder is gone, and another view may follow."""
        facade, server, home = owned
        session = facade.session("a")
        session.publish(subsystem.view("writer"), route="roots")
        session.publish(subsystem.view("writer"))
        assert (server.roots, self.folders(home)) == ([], [])
        facade.session("b").publish(subsystem.view("reader"))

    def test_the_roots_of_others_stay(self, owned, subsystem):
        """While another session has its roots the server keeps those, whoever published last."""
        facade, server, home = owned
        kept = facade.session("a").publish(subsystem.view("writer"), route="roots").folder
        gone = facade.session("b").publish(subsystem.view("writer"), route="roots").folder
        assert server.roots == [gone]
        facade.session("b").publish(subsystem.view("writer"))
        assert (server.roots, self.folders(home)) == ([kept], [kept])

    @pytest.mark.parametrize("delete", [True, False], ids=["deleted", "kept"])
    def test_closing_the_session(self, owned, subsystem, delete):
        """A closed session leaves no roots behind, neither at the server nor on the disk."""
        facade, server, home = owned
        facade.session("a").publish(subsystem.view("writer"), route="roots")
        facade.close_session("a", delete_session=delete)
        assert (server.roots, self.folders(home)) == ([], [])
        facade.session("b").publish(subsystem.view("reader"), route="roots")
        assert len(server.roots) == 1

    def test_a_server_that_refuses(self, owned, subsystem):
        """What the server was not given does not lie about, and the earlier roots stay in force."""
        facade, server, home = owned
        session = facade.session("a")
        first = session.publish(subsystem.view("writer"), route="roots").folder
        server.refusing = True
        with pytest.raises(RuntimeError):
            session.publish(subsystem.view("writer"), route="roots")
        assert (server.roots, self.folders(home)) == ([first], [first])
        report = facade.close_session("a", delete_session=True)
        assert report["deleted"] is True
        assert "session_cleanup_failed" in [found.code for found in session.diagnostics]

    def test_a_home_that_takes_no_files(self, owned, subsystem):
        """Where the skills cannot be written nothing is published, and the reason is told."""
        facade, server, home = owned
        (home / "kdskills-roots").write_text("in the way")
        with pytest.raises(CatalogError) as refused:
            facade.session("a").publish(subsystem.view("writer"), route="roots")
        assert (refused.value.details["rule"], server.roots) == ("roots_not_written", [])
        facade.session("b").publish(subsystem.view("reader"))

    def test_many_sessions_at_once(self, owned, subsystem):
        """Two views at the same moment: those of one view are published, the others refused, never both."""
        facade, server, _ = owned
        views = [subsystem.view("writer"), subsystem.view("reader")]
        done, refused = [], []

        def publish(number):
            try:
                facade.session(f"s{number}").publish(views[number % 2], route="roots")
                done.append(number % 2)
            except CatalogError as error:
                refused.append(error.details["rule"])

        threads = [threading.Thread(target=publish, args=(number,), daemon=True) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert (len(set(done)), len(done), refused) == (1, 4, ["roots_differ"] * 4)
        assert len(server.roots) == 1


async def test_roots_outlive_the_server_process(lab, subsystem):
    """On a server: one that was started anew lists the published roots again."""
    async with await lab.client() as client:
        _, session = await client.remote_skills.create_session(cwd=str(lab.home))
        await session.publish(subsystem.view("writer"), route="roots")
        await session.send_and_handle("!say one", timeout_seconds=60)
        await client.reconnect()
        _, other = await client.remote_skills.create_session(cwd=str(lab.home))
        await other.send_and_handle("!say two", timeout_seconds=60)
    texts = "\n".join(texts_of(lab.model.requests[-1], "developer") + texts_of(lab.model.requests[-1], "user"))
    assert ("Ship it" in texts, "Hidden away" in texts) == (True, False)
