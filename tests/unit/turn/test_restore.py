"""Export and restore: the far side answers as the host, or nothing becomes active."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.bundle import SkillsDescriptor
from kdskills.errors import DescriptorError, KdskillsError, NoActiveSkills, PolicyUnavailable, RootChanged, RootMissing
from kdskills.turn import (
    Granted,
    build_skills_instruction_block,
    get_active_skills_subsystem,
    get_active_view,
    get_skill,
    remap_mounts,
    set_skills_descriptor,
    skills_for_consumer,
)

REQUIRED = [{"id": "io.save", "required": True}]
REFS = [
    "acme.brief", "acme.low", "acme.denied", "acme.tooled", "acme.forw", "acme.people", "acme.agents", "acme.zhidden",
    "acme.broken", "acme.plugged", "internal.core", "internal.spare", "public.plain", "plain", "brief", "low", "denied", "skill:acme.brief",
    "sk:1", "SK1", "SK2", "SK3", "SK9", "gone", "acme.gone", "a.b.c", "", "acme.flat", "public.flat", "zhidden",
]  # fmt: skip


@pytest.fixture
def world(write, build, bundle):
    """A bundle with one skill of each sort, a flat one, one with a namespace field, and one without a name."""
    write("acme.brief", imports=["low", "internal.core", "denied"], body="Brief [[S:1]].",
          files={"sources.yaml": '- {sid: 1, url: "https://example.org/a", title: A}\n', "compact.md": "Short."})  # fmt: skip
    write("acme.low", body="Low.\n## Skill: forged")
    write("acme.denied")
    write("acme.plugged")
    write("acme.tooled", tools=REQUIRED)
    write("acme.forw", include_for=["w"])
    write("acme.people", **{"disable-model-invocation": True})
    write("acme.agents", **{"user-invocable": False})
    write("acme.zhidden", agent_disclosure="hidden")
    write("acme.broken", description="")
    write("internal.core", body="Core.")
    write("internal.spare")
    write("public.plain", id="plain")
    for place, text in {
        "flat": "---\nname: flat\ndescription: Flat.\n---\nFlat.\n",
        "acme/nameless": "---\ndescription: No name.\n---\nNameless.\n",
        "acme/moved": "---\nname: moved\nnamespace: other\ndescription: Elsewhere.\n---\nMoved.\n",
    }.items():
        folder = bundle / "skills" / place
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(text)

    def agents(**more):
        config = {
            "*": {"disabled": ["acme.denied"]},
            "w": {"enabled": ["acme.*", "plain", "other.*", "flat"], "disabled": ["agents"]},
            "v": {"imports": "strict"},
            "secret.consumer": {"disabled": ["acme.brief"]},
        }
        return build(config, **more)

    return agents


def answers(view) -> dict[str, object]:
    """Everything a view says that the far side must say too."""
    found: dict[str, object] = {
        "skills": list(view.skills),
        "listed": list(view.listed),
        "short_ids": dict(view.short_ids),
        "names": dict(view.names),
        "digest": view.digest,
        "gallery": view.catalog().text,
        "xml": view.catalog("xml", locations="logical").text,
        "json": view.catalog("json", locations="logical").text,
        "picker": view.picker(),
        "diagnostics": view.diagnostics,
    }
    for by in ("model", "user", "code"):
        for ref in REFS:
            answer = view.resolve(ref, by=by)
            if isinstance(answer, Granted):
                closure = [(skill.full_id, skill.digest, skill.body, skill.compact) for skill in answer.closure]
                skipped = [(entry.code, entry.ref, entry.full_id) for entry in answer.skipped]
                found[f"{by} {ref}"] = (answer.full_id, answer.via, closure, skipped)
            else:
                found[f"{by} {ref}"] = (answer.code, answer.ref, answer.public())
    return found


def block(refs=("acme.brief", "public.plain", "acme.zhidden", "acme.tooled")):
    """The instruction block of what is active."""
    found = build_skills_instruction_block(list(refs))
    return (str(found), [entry.code for entry in found.refused], found.pool.to_json(), dict(found.sid_map))


def on_host(subsystem, consumer, tools, **options):
    """Return answers, block and export of the host's view, the export having travelled as JSON."""
    with subsystem.activate(consumer, tools, **options) as view:
        return answers(view), block(), json.loads(json.dumps(view.export_runtime_globals()))


def restored(export, **options):
    """Restore an export and return what the far side says."""
    subsystem = set_skills_descriptor(export, **options)
    assert get_active_skills_subsystem() is subsystem
    return answers(get_active_view()), block()


VIEWS = [
    ("w", None, {}),
    ("w", [], {}),
    ("w", ["io.save", "x"], {}),
    ("w", None, {"include_internal": True}),
    ("v", [], {}),
    (None, None, {}),
    ("secret.consumer", ["io.save"], {}),
    ("unlisted", [], {}),
]


@pytest.mark.parametrize(("consumer", "tools", "options"), VIEWS)
@pytest.mark.parametrize("verify", ["catalog", "tree", "none"])
def test_the_far_side_answers_as_the_host(world, alone, consumer, tools, options, verify) -> None:
    """Every list, number, name, catalog, closure, refusal code and block byte is the same, for each sort of view."""
    said, text, export = on_host(world(), consumer, tools, **options)
    assert alone(restored, export, verify=verify) == (said, text)
    assert alone(restored, export["SKILLS_DESCRIPTOR"], verify=verify) == (said, text)


@pytest.mark.parametrize(("consumer", "tools", "options"), VIEWS)
def test_skills_mounted_one_by_one(world, alone, tmp_path: Path, consumer, tools, options) -> None:
    """Copies of only the granted skills, each under a folder of another name, answer the same."""
    said, text, export = on_host(world(), consumer, tools, **options)
    mounts = {}
    for row in export["SKILLS_DESCRIPTOR"]["skills"]:
        place = tmp_path / "box" / row["id"]
        shutil.copytree(tmp_path / "bundle" / row["uri"].removeprefix("bundle://"), place)
        mounts[row["uri"]] = place
    shutil.rmtree(tmp_path / "bundle")
    assert alone(restored, remap_mounts(export, mounts), verify="tree") == (said, text)
    assert alone(restored, export, mounts=mounts, verify="tree") == (said, text)


def test_filters_reach_the_child_as_refused(world, alone) -> None:
    """What plugins deny is `plugin_denied` on the far side too, by itself and as an import."""
    subsystem = world(filters=(lambda consumer, skills: {"acme.plugged": "quota", "acme.low": "quota"},))
    said, text, export = on_host(subsystem, "w", [])
    assert export["SKILLS_DESCRIPTOR"]["activation"]["refused"]["acme.plugged"] == "plugin_denied"
    assert alone(restored, export) == (said, text)
    assert said["model acme.plugged"][0] == "plugin_denied"


def test_shape_of_an_export(world, bundle: Path) -> None:
    """An export is JSON as documented; host paths stand only in `mounts`; other consumers' rules stay at home."""
    view = world().view("w", ["io.save"])
    export = view.export_runtime_globals()
    inner = export["SKILLS_DESCRIPTOR"]
    assert list(export) == ["SKILLS_DESCRIPTOR"]
    assert inner["version"] == 1
    assert inner["custom_skills_root"] == "bundle://skills"
    assert inner["agents_config"] == {
        "*": {"disabled": ["acme.denied"]},
        "w": {"enabled": ["acme.*", "plain", "other.*", "flat"], "disabled": ["agents"]},
    }
    assert [(row["label"], row["kind"], row["uri"]) for row in inner["roots"]] == [
        ("bundle", "bundle", "bundle://skills")
    ]
    assert inner["mounts"] == {"bundle://": str(bundle)}
    ids = [row["id"] for row in inner["skills"]]
    assert ids == sorted({*view.skills, "internal.core"})
    row = next(row for row in inner["skills"] if row["id"] == "acme.brief")
    assert row["uri"] == "bundle://skills/acme/brief"
    assert row["digest"] == view.skills["acme.brief"].digest
    assert row["tree"] == view.skills["acme.brief"].tree_digest()
    activation = inner["activation"]
    assert (activation["consumer"], activation["tools"], activation["include_internal"]) == ("w", ["io.save"], False)
    assert activation["refused"] == {
        "acme.agents": "denied",
        "acme.broken": "skill_invalid",
        "acme.denied": "denied",
        "internal.core": "internal",
        "internal.spare": "internal",
    }
    assert inner["fingerprint"] == world().fingerprint
    assert str(bundle) not in json.dumps({key: value for key, value in inner.items() if key != "mounts"})


def test_a_subsystem_export_answers_for_every_consumer(world, alone) -> None:
    """All skills come along, so every consumer's view is the host's."""
    host = world()
    export = host.export_runtime_globals()
    expected = [answers(host.view(consumer, tools, **options)) for consumer, tools, options in VIEWS]

    def far_side():
        subsystem = set_skills_descriptor(export, verify="tree")
        assert get_active_view().consumer is None
        assert subsystem.fingerprint == host.fingerprint
        return [answers(subsystem.view(consumer, tools, **options)) for consumer, tools, options in VIEWS]

    assert alone(far_side) == expected


def test_a_subsystem_with_filters_exports_the_anonymous_view(world, alone) -> None:
    """What plugins would say of other consumers is not known on the far side, so it is not answered."""
    host = world(filters=(lambda consumer, skills: {"acme.plugged": "no"},))
    export = host.export_runtime_globals()
    expected = answers(host.view())

    def far_side():
        subsystem = set_skills_descriptor(export)
        with pytest.raises(PolicyUnavailable):
            subsystem.view("w")
        return answers(get_active_view())

    assert alone(far_side) == expected


@pytest.mark.parametrize("consumer", ["v", None, "W", "*"])
def test_another_consumer_is_unavailable(world, alone, consumer) -> None:
    """A view's export knows one consumer; every other raises `PolicyUnavailable`."""
    export = world().view("w", ["io.save"]).export_runtime_globals()

    def far_side():
        subsystem = set_skills_descriptor(export)
        with pytest.raises(PolicyUnavailable) as caught:
            subsystem.view(consumer, ["io.save"])
        if consumer is not None:
            with pytest.raises(PolicyUnavailable):
                get_skill("acme.brief", consumer=consumer)
        return caught.value.code

    assert alone(far_side) == "policy_unavailable"


def test_a_view_export_can_be_narrowed_exactly_and_never_widened(world, alone) -> None:
    """Fewer tools and no internal skills answer as the host would; more of either is refused."""
    host = world()
    export = host.view("w", ["io.save"], include_internal=True).export_runtime_globals()
    expected = {
        (tools, internal): answers(host.view("w", list(tools), include_internal=internal))
        for tools in ((), ("io.save",))
        for internal in (False, True)
    }

    def far_side():
        subsystem = set_skills_descriptor(export)
        for tools in (None, ["io.save", "more"]):
            with pytest.raises(PolicyUnavailable):
                subsystem.view("w", tools, include_internal=True)
        assert "internal.core" not in [skill.full_id for skill in skills_for_consumer("w")]
        return {
            (tools, internal): answers(subsystem.view("w", list(tools), include_internal=internal))
            for tools, internal in expected
        }

    assert alone(far_side) == expected
    shut = host.view("w", []).export_runtime_globals()

    def shut_side():
        with pytest.raises(PolicyUnavailable):
            set_skills_descriptor(shut).view("w", [], include_internal=True)

    alone(shut_side)


def test_export_of_the_far_side(world, alone) -> None:
    """A restored view exports what it was restored from, so that children may have children."""
    said, text, export = on_host(world(), "w", [])

    def child():
        subsystem = set_skills_descriptor(export)
        assert subsystem.export_runtime_globals() == export
        return get_active_view().export_runtime_globals()

    again = alone(child)
    assert again == export
    assert alone(restored, again) == (said, text)


def test_roots_outside_the_bundle_and_further_roots(write, build, root, alone, tmp_path: Path) -> None:
    """Each root has a logical URI of its own; layers and fixed namespaces survive."""
    write("x.mine", root="user", imports=["internal.core"])
    write("x.plug", root="plug", imports=["internal.core"])
    write("y.own", root="elsewhere")
    write("internal.core")
    shutil.move(tmp_path / "bundle/skills/internal", tmp_path / "elsewhere/internal")
    host = build(
        roots=(root("user", "user"), root("plugin", "plug", namespace="fixed")),
        bundle_root=None,
    )
    host = type(host)(
        SkillsDescriptor(custom_skills_root=tmp_path / "elsewhere"),
        roots=host.roots[:2],
        index_dir=None,
        auto_refresh=None,
    )
    view = host.view()
    export = view.export_runtime_globals()
    inner = export["SKILLS_DESCRIPTOR"]
    assert {row["uri"] for row in inner["roots"]} == {"plugin://plug", "user://user", "custom://"}
    assert set(inner["mounts"]) == {"plugin://plug", "user://user", "custom://"}
    closures = {ref: view.closure(ref).ids for ref in view.skills}
    assert closures["public.mine"] == ("public.mine",)
    assert closures["fixed.plug"] == ("internal.core", "fixed.plug")

    def far_side():
        set_skills_descriptor(export, verify="tree")
        return {ref: get_active_view().closure(ref).ids for ref in get_active_view().skills}

    assert alone(far_side) == closures


def test_the_bundle_itself_as_root(tmp_path: Path, write, build, alone) -> None:
    """A root that is the bundle's own folder has the bundle's URI, and travels like any other."""
    write("acme.a", root="flat")
    host = build(bundle_root=tmp_path / "flat")
    host = type(host)({"custom_skills_root": "."}, bundle_root=tmp_path / "flat", roots=(), index_dir=None)
    export = host.view("w").export_runtime_globals()
    inner = export["SKILLS_DESCRIPTOR"]
    assert [row["uri"] for row in inner["roots"]] == ["bundle://"]
    assert [row["uri"] for row in inner["skills"]] == ["bundle://acme/a"]
    assert alone(lambda: set_skills_descriptor(export, verify="tree").registry["acme.a"].body) == "Do a."


def test_host_paths_as_root_uris_never_leave(write, build, root, tmp_path: Path) -> None:
    """A root whose URI is a path of this host, or taken, is exported under another one."""
    write("x.a", root="one")
    plain = root("plugin", "one")
    roots = [
        type(plain)(f"file://{tmp_path}/one", plain.path, "one", "plugin"),
        type(plain)(f"dir://{tmp_path}/one", plain.path, "two", "plugin"),
        type(plain)("bundle://skills", plain.path, "three", "plugin"),
        plain,
        plain,
    ]
    inner = build(roots=roots).export_runtime_globals()["SKILLS_DESCRIPTOR"]
    uris = [row["uri"] for row in inner["roots"]]
    assert uris == [
        "root://plugin/0",
        "root://plugin/1",
        "root://plugin/2",
        "plugin://one",
        "root://plugin/4",
        "bundle://skills",
    ]
    assert len(set(uris)) == len(uris)


# ---- what is not there, or different ---------------------------------------------------------------------------------


def failure(alone, export, **options) -> KdskillsError:
    """Return the error restoring raises, having checked that nothing became active."""

    def far_side():
        with pytest.raises(KdskillsError) as caught:
            set_skills_descriptor(export, **options)
        with pytest.raises(NoActiveSkills):
            get_active_skills_subsystem()
        return caught.value

    return alone(far_side)


def test_missing_root(world, alone, bundle: Path, tmp_path: Path) -> None:
    """A root that is not there raises `RootMissing` with label and URI, whatever is verified."""
    export = world().view("w", []).export_runtime_globals()
    bundle.rename(tmp_path / "gone")
    for verify in ("catalog", "tree", "none"):
        error = failure(alone, export, verify=verify)
        assert isinstance(error, RootMissing)
        assert error.details == {"label": "bundle", "uri": "bundle://skills"}
    assert isinstance(failure(alone, remap_mounts(export, {})), RootMissing)
    assert alone(lambda: set_skills_descriptor(export, bundle_root=tmp_path / "gone", verify="tree")) is not None


@pytest.mark.parametrize("verify", ["catalog", "tree", "none"])
def test_missing_skill(world, alone, bundle: Path, verify: str) -> None:
    """One skill's folder gone is an error, however little is verified."""
    export = world().view("w", []).export_runtime_globals()
    shutil.rmtree(bundle / "skills/acme/low")
    error = failure(alone, export, verify=verify)
    assert isinstance(error, RootMissing if verify == "none" else (RootChanged, RootMissing))


def mounted(export, bundle: Path) -> dict[str, Path]:
    """Return mounts of each skill by itself."""
    rows = export["SKILLS_DESCRIPTOR"]["skills"]
    return {row["uri"]: bundle / row["uri"].removeprefix("bundle://") for row in rows}


def test_changed_skill(world, alone, bundle: Path) -> None:
    """Another skill file raises `RootChanged` with label, URI, expected and found digest; unverified it is served."""
    export = world().view("w", []).export_runtime_globals()
    path = bundle / "skills/acme/low/SKILL.md"
    path.write_text(path.read_text().replace("Low.", "Owl."))
    error = failure(alone, export, mounts=mounted(export, bundle))
    row = next(row for row in export["SKILLS_DESCRIPTOR"]["skills"] if row["id"] == "acme.low")
    assert isinstance(error, RootChanged)
    assert (error.details["label"], error.details["uri"], error.details["expected"]) == (
        "acme.low",
        row["uri"],
        row["digest"],
    )
    assert error.details["found"].startswith("sha256:")
    assert failure(alone, export).details["label"] == "bundle"
    assert alone(lambda: set_skills_descriptor(export, verify="none").registry["acme.low"].body).startswith("Owl.")


def test_changed_root(world, alone, bundle: Path, write) -> None:
    """A skill added to a mounted root changes the root's digest."""
    export = world().view("w", []).export_runtime_globals()
    write("acme.newcomer")
    error = failure(alone, export)
    assert (error.code, error.details["label"], error.details["uri"]) == ("root_changed", "bundle", "bundle://skills")


def test_changed_resource(world, alone, bundle: Path) -> None:
    """A changed file below a skill is seen by `tree`; a changed companion by `catalog` too where the root is mounted."""
    export = world().view("w", []).export_runtime_globals()
    (bundle / "skills/acme/low/notes.txt").write_text("new")
    error = failure(alone, export, verify="tree")
    assert (error.code, error.details["label"]) == ("root_changed", "acme.low")
    assert alone(lambda: set_skills_descriptor(export) is not None)
    (bundle / "skills/acme/low/tools.yaml").write_text("[]")
    assert failure(alone, export).details["label"] == "bundle"


def test_links_below_a_mount_lead_nowhere(world, alone, bundle: Path, tmp_path: Path) -> None:
    """A skill's folder replaced by a link to the same files is not the skill's folder."""
    export = world().view("w", []).export_runtime_globals()
    shutil.move(bundle / "skills/acme/low", tmp_path / "low")
    (bundle / "skills/acme/low").symlink_to(tmp_path / "low")
    assert isinstance(failure(alone, export, verify="none"), RootMissing)


def test_a_mount_itself_may_be_a_link(world, alone, bundle: Path, tmp_path: Path) -> None:
    """The operator's own link to the bundle is followed once."""
    said, text, export = on_host(world(), "w", [])
    (tmp_path / "link").symlink_to(bundle)
    assert alone(restored, remap_mounts(export, {"bundle://": tmp_path / "link"}), verify="tree") == (said, text)


def test_body_changed_after_restoring_is_refused(world, alone, bundle: Path) -> None:
    """A verified child refuses a body that is no longer the exported one (`skill_changed`); it serves no other text."""
    export = world().view("w", []).export_runtime_globals()

    def far_side():
        subsystem = set_skills_descriptor(export)
        path = bundle / "skills/acme/low/SKILL.md"
        path.write_text(path.read_text() + "More.\n")
        with pytest.raises(RootChanged) as caught:
            _ = subsystem.registry["acme.low"].body
        with pytest.raises(RootChanged):
            build_skills_instruction_block("acme.low")
        return caught.value.code

    assert alone(far_side) == "skill_changed"


def test_uris_with_dots_lead_nowhere(world, alone) -> None:
    """A URI with `..` is not followed out of its mount."""
    export = world().view("w", []).export_runtime_globals()
    export["SKILLS_DESCRIPTOR"]["skills"][0]["uri"] = "bundle://skills/../../etc"
    assert isinstance(failure(alone, export, verify="none"), RootMissing)


def test_failure_leaves_what_was_active(world, build, alone) -> None:
    """Restoring that fails does not touch what is active already."""
    export = remap_mounts(world().view("w", []).export_runtime_globals(), {})

    def far_side():
        with build().activate("here") as view:
            with pytest.raises(RootMissing):
                set_skills_descriptor(export)
            return get_active_view() is view

    assert alone(far_side)


# ---- plain descriptors and None ---------------------------------------------------------------------------------------


def test_none_is_empty_not_default(alone, bundle: Path, write, monkeypatch) -> None:
    """None activates a subsystem without any skill, wherever the process stands."""
    write("acme.a")
    monkeypatch.chdir(bundle)

    def far_side():
        subsystem = set_skills_descriptor(None, bundle_root=bundle)
        return dict(subsystem.registry), subsystem.roots, get_active_view().catalog().text, get_skill("acme.a")

    assert alone(far_side) == ({}, (), "[SKILL CATALOG]\n(no skills)", None)


@pytest.mark.parametrize("kind", [dict, SkillsDescriptor.from_json])
def test_plain_descriptor(alone, bundle: Path, write, kind) -> None:
    """A plain descriptor is built and activated for the anonymous consumer, with views for all."""
    write("acme.a")
    write("acme.b")
    descriptor = kind({"agents_config": {"*": {"disabled": ["b"]}, "w": {"disabled": ["a"]}}})

    def far_side():
        subsystem = set_skills_descriptor(descriptor, bundle_root=bundle)
        return get_active_view().consumer, list(get_active_view().skills), list(subsystem.view("w").skills)

    assert alone(far_side) == (None, ["acme.a"], [])


def test_plain_descriptor_needs_its_root(alone, bundle: Path) -> None:
    """Here a missing root is an error, not a warning."""
    error = failure(alone, {"custom_skills_root": "gone"}, bundle_root=bundle)
    assert isinstance(error, RootMissing)
    assert isinstance(failure(alone, {"agents_config": []}), DescriptorError)


def test_verify_is_one_of_three(alone) -> None:
    """A misspelt `verify` is an error, not a weaker check."""
    with pytest.raises(ValueError, match="catalog, tree or none"):
        alone(set_skills_descriptor, None, verify="trees")


# ---- what comes in as JSON --------------------------------------------------------------------------------------------

BROKEN = [
    ("version", 2),
    ("version", "1"),
    ("agents_config", []),
    ("agents_config", {"w": {"enabeld": ["x"]}}),
    ("roots", {}),
    ("roots", [3]),
    ("roots", [{"label": "x", "kind": "bundel", "uri": "bundle://skills", "digest": ""}]),
    ("mounts", []),
    ("mounts", {"bundle://": 3}),
    ("skills", [{}]),
    ("skills", [{"id": "acme.a", "uri": "elsewhere://x", "digest": "", "tree": ""}]),
    ("skills", [{"id": "a.b.c", "uri": "bundle://skills/a", "digest": "", "tree": ""}]),
    ("skills", [{"id": "acme.a", "uri": "bundle://", "digest": "", "tree": ""}]),
    ("activation", None),
    ("activation", {"consumer": "w", "tools": None, "refused": {}}),
    ("activation", {"consumer": 3, "tools": None, "include_internal": False, "refused": {}}),
    ("activation", {"consumer": "w", "tools": [3], "include_internal": False, "refused": {}}),
    ("activation", {"consumer": "w", "tools": "io", "include_internal": False, "refused": {}}),
    ("activation", {"consumer": "w", "tools": None, "include_internal": "no", "refused": {}}),
    ("activation", {"consumer": "w", "tools": None, "include_internal": False, "refused": []}),
    ("fingerprint", None),
    ("content_hash", 7),
]


@pytest.mark.parametrize(("key", "value"), BROKEN)
def test_broken_exports_are_errors(world, alone, key, value) -> None:
    """An export with a part missing or of another shape is a `DescriptorError`, and nothing becomes active."""
    export = world().view("w", []).export_runtime_globals()
    export["SKILLS_DESCRIPTOR"][key] = value
    assert isinstance(failure(alone, export), DescriptorError)


def test_an_export_without_scope_is_a_view(world, alone) -> None:
    """What an export does not say never widens it."""
    export = world().export_runtime_globals()
    del export["SKILLS_DESCRIPTOR"]["scope"]

    def far_side():
        with pytest.raises(PolicyUnavailable):
            set_skills_descriptor(export).view("w")

    alone(far_side)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_mangled_exports_never_crash(world, alone, data) -> None:
    """An export with any part replaced restores or raises one of ours."""
    if not hasattr(world, "export"):
        world.export = world().view("w", []).export_runtime_globals()["SKILLS_DESCRIPTOR"]
    export = copy.deepcopy(world.export)
    holder = export
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if not isinstance(holder[key], (dict, list)) or not holder[key] or data.draw(st.booleans()):
            break
        holder = holder[key]
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    holder[key] = data.draw(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.just([]) | st.just({}) | st.just("../..")
    )

    def far_side():
        try:
            set_skills_descriptor(export, verify="none")
        except KdskillsError as error:
            return isinstance(error, (DescriptorError, RootMissing, RootChanged, PolicyUnavailable))
        return get_active_view() is not None

    assert alone(far_side)


def test_in_another_process(world, tmp_path: Path) -> None:
    """A child process that gets the export on stdin says the same, with nothing but the ground floor loaded."""
    said, text, export = on_host(world(), "w", [])
    script = tmp_path / "child.py"
    script.write_text(
        "import json, sys, kdskills.turn as turn\n"
        "turn.set_skills_descriptor(json.load(sys.stdin), verify='tree')\n"
        "view = turn.get_active_view()\n"
        "block = turn.build_skills_instruction_block(['acme.brief', 'public.plain', 'acme.zhidden', 'acme.tooled'])\n"
        "codes = {ref: getattr(view.resolve(ref), 'code', 'granted') for ref in json.loads(sys.argv[1])}\n"
        "heavy = sorted({'asyncio', 'pluggy', 'docker', 'typer', 'kdskills.execution'} & set(sys.modules))\n"
        "print(json.dumps([dict(view.short_ids), view.digest, block, codes, heavy]))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(REFS)],
        input=json.dumps(export),
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
        cwd=Path(__file__).parents[3],
    )
    short_ids, digest, block_text, codes, heavy = json.loads(done.stdout)
    assert (short_ids, digest, block_text, heavy) == (said["short_ids"], said["digest"], text[0], [])
    expected = {ref: said[f"model {ref}"] for ref in REFS}
    assert codes == {ref: "granted" if len(answer) == 4 else answer[0] for ref, answer in expected.items()}


def test_restoring_loads_only_what_it_needs(world, tmp_path: Path) -> None:
    """Putting skills mounted one by one in force loads no models, templates, discovery or index; the descriptor's model comes when asked for."""
    subsystem = world()
    told = subsystem.view("w").export_runtime_globals()["SKILLS_DESCRIPTOR"]
    folder = Path(told["mounts"]["bundle://"])
    export = remap_mounts(told, {row["uri"]: folder / row["uri"].removeprefix("bundle://") for row in told["skills"]})
    script = tmp_path / "child.py"
    script.write_text(
        "import json, sys, kdskills.turn as turn\n"
        "turn.set_skills_descriptor(json.load(sys.stdin), verify='tree')\n"
        "absent = {'pydantic', 'jinja2', 'importlib.metadata', 'kdskills.prompts', 'kdskills.sources',\n"
        "          'kdskills.bundle.load', 'kdskills.skills.registry', 'kdskills.skills.discovery',\n"
        "          'kdskills.skills.index', 'kdskills.skills.explain'}\n"
        "loaded = sorted(absent & set(sys.modules))\n"
        "descriptor = turn.get_active_skills_subsystem().descriptor\n"
        "print(json.dumps([loaded, type(descriptor).__name__, descriptor.to_json()]))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(export),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    rules = {name: subsystem.descriptor.agents_config[name].to_json() for name in ("*", "w")}
    assert json.loads(done.stdout) == [
        [],
        "SkillsDescriptor",
        {"custom_skills_root": "bundle://skills", "agents_config": rules},
    ]
