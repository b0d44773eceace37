"""One user's skills and rules over a subsystem: what they add, and everything they cannot change."""

import threading
from dataclasses import replace

import pytest

from kdskills.errors import BadRequest, DescriptorError, PolicyUnavailable
from kdskills.skills import SkillRoot
from kdskills.turn import SkillsSubsystem, remap_mounts, set_skills_descriptor
from kdskills.turn import overlays as overlays_module
from kdskills.turn.view import build_view

AGENTS = {
    "*": {"disabled": ["secret"]},
    "writer": {"enabled": ["acme.*"], "disabled": ["acme.old"]},
    "@editors": {"enabled": ["public.style"], "disabled": ["acme.draft"]},
    "@guests": {"enabled": ["acme.brief"], "imports": "strict"},
    "@banned": {"enabled": False},
}


def write(folder, name, description="Does things.", body="Text.", **fields):
    """Write a skill and return the folder of its root."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{key.replace('_', '-')}: {value}\n" for key, value in fields.items())
    front = f"---\nname: {target.name}\ndescription: {description}\n{lines}---\n"
    (target / "SKILL.md").write_text(front + body)
    return folder


@pytest.fixture
def base(tmp_path):
    """A subsystem with rules for groups."""
    root = tmp_path / "bundle" / "skills"
    for name in ("acme/brief", "acme/old", "acme/draft", "acme/secret", "style", "zeta/last", "internal/core"):
        write(root, name)
    return SkillsSubsystem({"agents_config": AGENTS}, bundle_root=tmp_path / "bundle", roots=(), index_dir=None)


@pytest.fixture
def own(tmp_path):
    """A root with two skills of a user, one of which is shadowed by nothing."""
    folder = tmp_path / "own"
    write(folder, "notes", "Keeps notes of the day.", "My notes.")
    write(folder, "secret")
    return SkillRoot("x://", folder, "ada", "user")


def ids(view):
    """Return the full ids of a view."""
    return list(view.skills)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ((), ["acme.brief", "acme.draft"]),
        (("nobody", "@editors", "Editors"), ["acme.brief", "acme.draft"]),
        (("editors",), ["acme.brief", "public.style"]),
        (("editors", "guests"), ["acme.brief", "public.style"]),
        (("banned", "editors"), []),
    ],
)
def test_rules_of_a_group_hold_for_users_with_that_role(base, groups, expected):
    """Allow-lists join that of the consumer, denials of any group win, and `enabled: false` leaves nothing; names match exactly."""
    view = base.overlay(groups=groups).view("writer")
    assert ids(view) == expected
    assert ids(base.view("writer")) == ["acme.brief", "acme.draft"]


def test_a_group_narrows_a_consumer_without_rules(base):
    """An allow-list of a group is one also where the consumer has none, and the strictest imports hold."""
    assert ids(base.overlay(groups=["guests"]).view("other")) == ["acme.brief"]
    assert base.overlay(groups=["guests"]).view("other").rules.imports == "strict"


def test_a_refusal_names_the_group(base):
    """`explain` says which rule of which group decided."""
    view = base.overlay(groups=["editors"]).view("writer")
    assert view.resolve("acme.draft").details["source"] == "agents_config.@editors.disabled"
    assert "agents_config.@editors.enabled" in str(view.explain("zeta.last"))


def test_no_consumer_is_a_group(base):
    """A consumer that calls itself like a group has no rules of its own."""
    assert ids(base.view("@editors")) == ids(base.view("other"))


@pytest.mark.parametrize("key", ["@", "@ editors", "@editors ", "@ed*"])
def test_a_malformed_group_is_refused(key):
    """A typo must not lose a denial."""
    with pytest.raises(DescriptorError):
        SkillsSubsystem({"agents_config": {key: {"disabled": ["x"]}}}, roots=(), index_dir=None)


def test_an_overlay_adds_skills_and_changes_no_answer_about_others(base, own):
    """The snapshot below is the same object, and every other skill is answered as without it."""
    before = base.snapshot
    rules = {"enabled": ["user.*"]}
    view = base.overlay([own], rules).view("writer")
    assert ids(view) == ["acme.brief", "acme.draft", "user.notes"]
    assert base.snapshot is before
    assert ids(base.view("writer")) == ["acme.brief", "acme.draft"]
    assert view.resolve("user.notes").skill.body == "My notes."
    assert view.codes["user.secret"] == "denied"


@pytest.mark.parametrize("consumer", ["writer", "other", None])
@pytest.mark.parametrize("groups", [(), ("editors",), ("guests",)])
def test_a_view_is_what_building_it_whole_gives(base, own, tmp_path, consumer, groups):
    """Skills, numbers, names, codes and what is listed are those of a view that asks about every skill."""
    further = replace(own, path=write(tmp_path / "team", "aaa", imports="acme.brief"), namespace="aaa")
    for rules in (None, {"enabled": ["user.*"]}, {"disabled": ["acme.*"]}):
        view = base.overlay([own, further], rules, groups=groups).view(consumer)
        whole = build_view(view.state, view.rules)
        for part in ("skills", "listed", "short_ids", "codes", "names"):
            assert dict(getattr(view, part)) == dict(getattr(whole, part)), part
        assert list(view.skills) == list(whole.skills)
        assert list(view.short_ids.values()) == list(view.listed)


@pytest.mark.parametrize(
    "rules",
    [
        {"enabled": ["*"], "disabled": []},
        {"enabled": ["secret", "acme.secret", "acme.old", "user.secret"]},
        {"enabled": True, "disabled": False},
    ],
)
def test_rules_lift_no_denial(base, own, rules):
    """Whatever an overlay allows, what the descriptor denies stays denied, by every group, too."""
    view = base.overlay([own], rules, groups=["editors"]).view("writer")
    for denied in ("acme.secret", "acme.old", "acme.draft", "user.secret"):
        assert view.resolve(denied, by="code").code == "denied"
    assert view.resolve("internal.core", by="code").code == "internal"
    assert ids(base.overlay([own], rules, groups=["banned"]).view("writer")) == []


@pytest.mark.parametrize("rules", [{"writer": {"enabled": ["*"]}}, {"enable": ["x"]}, {"enabled": ["SK1"]}, ["x"]])
def test_rules_that_are_not_understood_are_refused(base, rules):
    """An overlay has rules for every consumer, and none that could be lost."""
    with pytest.raises(DescriptorError):
        base.overlay(rules=rules)


def test_a_skill_below_is_never_replaced(base, tmp_path):
    """A user's skill with the id of another, or of one that is refused, is left out and told; bare names stay as they were."""
    write(tmp_path / "bundle" / "skills", "acme/broken").joinpath("acme/broken/SKILL.md").write_text("nothing")
    base.refresh()
    root = write(write(write(tmp_path / "own", "brief", body="Evil."), "broken"), "style", body="Evil.")
    evil = SkillRoot("x://", root, "eve", "bundle", namespace="acme")
    overlay = base.overlay([evil], {"enabled": ["*"]})
    view = overlay.view("writer")
    assert view.resolve("acme.brief").skill.body == "Text."
    assert view.resolve("acme.broken").code == "skill_invalid"
    assert {finding.ref for finding in overlay.findings if finding.code == "overlay_shadows"} == {
        "acme.brief",
        "acme.broken",
    }
    assert (view.names["brief"], view.names["style"], view.names["acme.style"]) == (
        "acme.brief",
        "public.style",
        "acme.style",
    )


def test_nothing_below_imports_what_a_user_brings(base, tmp_path):
    """A skill that imports an id nobody has does not get a user's text, nor is its sibling replaced by one."""
    write(tmp_path / "bundle" / "skills", "acme/asks", imports="[helper, user.notes]")
    write(tmp_path / "bundle" / "skills", "helper")
    base.refresh()
    roots = [
        SkillRoot("x://", write(tmp_path / "a", "notes"), "a", "user"),
        SkillRoot("x://", write(tmp_path / "b", "helper"), "b", "user", namespace="acme"),
    ]
    grant = base.overlay(roots).view("other").resolve("acme.asks")
    assert [skill.full_id for skill in grant.closure] == ["public.helper", "acme.asks"]


def test_what_a_user_brings_imports_what_is_granted_by_itself(base, tmp_path):
    """No private import opens a skill that is not enabled, denied or internal."""
    root = write(tmp_path / "own", "notes", imports="[zeta.last, internal.core, acme.secret, acme.brief]")
    overlay = base.overlay([SkillRoot("x://", root, "ada", "bundle")], {"enabled": ["user.*"]})
    grant = overlay.view("writer").resolve("user.notes")
    assert [skill.full_id for skill in grant.closure] == ["acme.brief", "user.notes"]
    assert {refused.code for refused in grant.skipped} == {"not_enabled", "internal", "denied"}


def test_overlays_of_two_users_know_nothing_of_each_other(base, tmp_path):
    """Two users' skills of one id, in views, catalogs and searches at once, each with its own text; then one over the other."""
    users = ("ada", "bob")
    roots = {
        name: SkillRoot("x://", write(tmp_path / name, "notes", f"Notes of {name}.", f"Of {name}."), name, "user")
        for name in users
    }
    overlays = {name: base.overlay([root]) for name, root in roots.items()}
    for _ in range(2):
        for name, other in (users, reversed(users)):
            view = overlays[name].view("other")
            found = view.search(f"notes of {name}").hits
            assert [hit.description for hit in found[:1]] == [f"Notes of {name}."]
            text = str(view.catalog("xml")) + view.resolve("user.notes").skill.body + str(found)
            assert f"Of {name}." in text
            assert f"of {other}" not in text.lower()
    assert len({overlay.view("other").digest for overlay in overlays.values()}) == 2
    assert not base.view("other").search("notes of ada").hits
    both = overlays["ada"].overlay([roots["bob"]])
    assert both.view("other").resolve("user.notes").skill.body == "Of ada."
    assert [finding.code for finding in both.findings] == ["overlay_shadows"]
    assert both.lies_over(base)


def test_search_ranks_both_as_one(base, tmp_path):
    """Scores are those of an index that holds all skills, and pages and counts hold."""
    folder = write(write(tmp_path / "own", "ledger", "Books the payments of a day."), "till", "Counts payments.")
    whole = SkillsSubsystem(
        {"agents_config": AGENTS},
        bundle_root=tmp_path / "bundle",
        roots=[SkillRoot("u://", folder, "u", "user", namespace="user")],
        index_dir=None,
    )
    view = base.overlay([SkillRoot("u://", folder, "u", "user")]).view("other")
    for query in ("payments of the day", "does things", "counts", "nothing of it"):
        ours, theirs = view.search(query), whole.view("other").search(query)
        assert [(hit.full_id, hit.score, hit.why) for hit in ours.hits] == [
            (hit.full_id, hit.score, hit.why) for hit in theirs.hits
        ]
        assert ours.total == theirs.total


def test_a_broken_root_costs_its_own_skills(base, own, monkeypatch):
    """A root that raises, lists nonsense, is missing or never answers is told; the others and the bundle's skills stay."""
    monkeypatch.setattr(overlays_module, "READ_SECONDS", 0.2)
    hanging = threading.Event()

    def fails():
        raise SystemError("password of the database")

    def hangs():
        hanging.wait()

    roots = [
        SkillRoot("x://", own.path, "raises", "user", fill=fails),
        SkillRoot("x://", own.path, "hangs", "user", fill=hangs),
        SkillRoot("x://", own.path / "none", "missing", "user"),
        SkillRoot.of_entries("odd", lambda: {"../x": {"SKILL.md": "x"}, "y": 7}),
        own,
    ]
    overlay = base.overlay(roots)
    try:
        assert "user.notes" in ids(overlay.view("other"))
        assert "acme.brief" in ids(overlay.view("other"))
        codes = [finding.code for finding in overlay.findings]
        assert codes[:2] == ["overlay_unreadable", "overlay_unreadable"]
        assert {"root_missing", "entry_invalid"} <= set(codes)
        assert "password" not in str(overlay.findings)
    finally:
        hanging.set()


def test_a_root_of_a_user_is_bounded(base, tmp_path, monkeypatch):
    """Of more skills than a user may bring the rest is left out, and it is told."""
    monkeypatch.setattr(overlays_module, "MAX_SKILLS", 2)
    for number in range(4):
        write(tmp_path / "own", f"s{number}")
    overlay = base.overlay([SkillRoot("x://", tmp_path / "own", "ada", "user")])
    assert [full_id for full_id in ids(overlay.view("other")) if full_id.startswith("user.")] == ["user.s0", "user.s1"]
    assert "scan_limit" in {finding.code for finding in overlay.findings}


@pytest.mark.parametrize(
    "make", [lambda own: ["x"], lambda own: [replace(own, namespace="internal")], lambda own: [None]]
)
def test_a_root_that_cannot_be_used_is_refused(base, own, make):
    """What is no root, and the namespace of the bundle's own, before anything is read."""
    with pytest.raises(BadRequest):
        base.overlay(make(own))


def test_an_overlay_follows_its_roots_and_what_lies_below(base, own, tmp_path):
    """A skill added to either is there after a refresh; a view that was taken stays as it was."""
    overlay = base.overlay([own])
    view = overlay.view("other")
    write(own.path, "more")
    write(tmp_path / "bundle" / "skills", "acme/new")
    overlay.refresh()
    assert {"user.more", "acme.new"} <= overlay.view("other").skills.keys()
    assert "user.more" not in view.skills
    assert overlay.view("other") is overlay.view("other")


def test_filters_of_plugins_are_asked_about_a_users_skills(tmp_path, own):
    """What a plugin hides stays hidden when a user brings it."""
    root = write(tmp_path / "b" / "skills", "brief")
    base = SkillsSubsystem(
        bundle_root=root.parent,
        roots=(),
        index_dir=None,
        filters=[lambda consumer, skills: {skill.full_id: "no" for skill in skills if skill.id == "notes"}],
    )
    view = base.overlay([own]).view("other")
    assert view.resolve("user.notes").code == "plugin_denied"
    assert "user.secret" in view.skills


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("consumer", ["writer", None])
def test_an_export_answers_the_same_and_names_no_group(base, own, consumer, whole):
    """The far side has the user's skills, numbers, names and refusals, whoever asked; groups stand nowhere in it."""
    overlay = base.overlay([own], {"enabled": ["user.*"], "disabled": ["zeta.*"]}, groups=["editors"])
    view = overlay.view(consumer)
    exported = (overlay if whole else view).export_runtime_globals()
    assert "editors" not in str(exported)
    assert "enabled" in str(exported["SKILLS_DESCRIPTOR"]["activation"]["rules"])
    far = set_skills_descriptor(remap_mounts(exported, exported["SKILLS_DESCRIPTOR"]["mounts"]), verify="tree")
    there = far.view(consumer)
    for part in ("skills", "listed"):
        assert list(getattr(there, part)) == list(getattr(view, part))
    assert (dict(there.names), dict(there.short_ids)) == (dict(view.names), dict(view.short_ids))
    for ref in (
        "acme.secret",
        "acme.old",
        "acme.draft",
        "zeta.last",
        "user.secret",
        "public.style",
        "user.notes",
        "notes",
    ):
        ours, theirs = view.resolve(ref, by="code"), there.resolve(ref, by="code")
        assert getattr(ours, "code", "granted") == getattr(theirs, "code", "granted"), ref
    assert there.resolve("user.notes").skill.body == "My notes."
    with pytest.raises(PolicyUnavailable):
        far.overlay([own])
