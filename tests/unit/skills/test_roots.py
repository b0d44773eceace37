"""Roots have an order, and those of other agents are used only where somebody trusts them."""

from pathlib import Path

import pytest

from kdskills.errors import BadRequest
from kdskills.skills.roots import SkillRoot, agent_skill_roots, order_roots


@pytest.fixture
def project(tmp_path):
    """A repository with skills at its top and in a folder, for two agents."""
    top = tmp_path / "repo"
    for folder in (".agents", ".claude", "sub/.agents"):
        (top / folder / "skills").mkdir(parents=True)
    (top / ".git").mkdir()
    (top / "sub" / "deep").mkdir()
    return top


def _uris(roots) -> list[str]:
    return [root.uri for root in roots]


def test_roots_are_ordered_by_kind_and_keep_their_order_within_one():
    """Builtin, plugin, user, project, bundle: the last one wins."""
    kinds = ["bundle", "user", "plugin", "project", "builtin", "plugin"]
    roots = [SkillRoot(f"x://{n}", Path("/x"), str(n), kind) for n, kind in enumerate(kinds)]
    assert [root.label for root in order_roots(roots)] == ["4", "2", "5", "1", "3", "0"]


def test_user_and_project_roots_fix_the_namespace():
    """Both kinds have `public` unless told otherwise; other kinds leave it to the layout."""
    named = SkillRoot("x://", Path("/x"), "x", "user", namespace="mine")
    plain = [SkillRoot("x://", Path("/x"), "x", kind) for kind in ("user", "project", "bundle", "plugin", "builtin")]
    assert named.fixed_namespace == "mine"
    assert [root.fixed_namespace for root in plain] == ["public", "public", None, None, None]


def test_trusted_roots_are_found_from_the_repository_top_down(project):
    """The nearest folder comes last and so wins; in one folder `.agents` comes before the clients."""
    found = agent_skill_roots(project / "sub" / "deep", clients=["claude"], trusted=[project, project / "sub"])
    assert _uris(found) == ["project://.agents/skills", "project://.claude/skills", "project://sub/.agents/skills"]
    assert found.diagnostics == ()
    assert {"project"} == {root.kind for root in found}


def test_nothing_is_scanned_unasked(project, tmp_path, monkeypatch):
    """Home and clients are looked at only when named."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".agents" / "skills").mkdir(parents=True)
    assert _uris(agent_skill_roots(project, trusted=[project])) == ["project://.agents/skills"]
    asked = agent_skill_roots(project, home=True, trusted=[project])
    assert _uris(asked) == ["user://.agents/skills", "project://.agents/skills"]


def test_untrusted_roots_contribute_nothing_and_are_named(project):
    """Without trust a root is left out with `root_untrusted`."""
    found = agent_skill_roots(project / "sub", trusted=[])
    assert found == []
    assert [(note.code, note.path) for note in found.diagnostics] == [
        ("root_untrusted", ".agents/skills"),
        ("root_untrusted", "sub/.agents/skills"),
    ]


def test_trust_in_one_folder_is_not_trust_in_those_below(project):
    """Trust in the top does not open what lies in a folder of it."""
    assert _uris(agent_skill_roots(project / "sub", trusted=[project])) == ["project://.agents/skills"]


def test_the_root_itself_can_be_trusted(project):
    """The canonical path of the very root is enough."""
    found = agent_skill_roots(project / "sub", trusted=[project / "sub/.agents/skills"])
    assert _uris(found) == ["project://sub/.agents/skills"]


def test_paths_are_compared_by_component(tmp_path):
    """Trust in /srv/a is no trust in /srv/ab."""
    (tmp_path / "ab" / ".agents" / "skills").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    assert agent_skill_roots(tmp_path / "ab", trusted=[tmp_path / "a"]) == []


def test_a_root_linked_to_elsewhere_needs_trust_in_where_it_leads(project, tmp_path):
    """Trust in a project is no trust in what one of its links names."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (project / ".codex").mkdir()
    (project / ".codex" / "skills").symlink_to(outside)
    assert len(agent_skill_roots(project, clients=["codex"], trusted=[project])) == 1
    both = agent_skill_roots(project, clients=["codex"], trusted=[project, outside])
    assert outside == both[-1].path


def test_a_file_in_the_project_cannot_grant_trust(project):
    """Nothing the project holds is read to decide."""
    (project / ".agents" / "trusted").write_text(str(project))
    (project / "trusted").write_text(str(project))
    assert agent_skill_roots(project, trusted=[]) == []


def test_outside_a_repository_only_the_start_is_looked_at(tmp_path):
    """Without a repository top the folders above are nobody's project."""
    (tmp_path / ".agents" / "skills").mkdir(parents=True)
    (tmp_path / "sub").mkdir()
    assert agent_skill_roots(tmp_path / "sub", trusted=[tmp_path]) == []


def test_a_worktree_file_marks_the_top_too(project):
    """`.git` may be a file."""
    (project / "sub" / ".git").write_text("gitdir: elsewhere\n")
    found = agent_skill_roots(project / "sub", trusted=[project, project / "sub"])
    assert _uris(found) == ["project://.agents/skills"]
    assert project / "sub/.agents/skills" == found[0].path


def test_home_that_is_the_project_counts_once(project):
    """A root found at home is not found again as a project's."""
    found = agent_skill_roots(project, home=project, trusted=[project])
    assert [root.kind for root in found] == ["user"]


@pytest.mark.parametrize("client", ["", "../x", "a/b", ".claude", "a b", "ä"])
def test_odd_clients_are_refused(project, client):
    """A client is a plain word, so that it cannot name a folder elsewhere."""
    with pytest.raises(BadRequest):
        agent_skill_roots(project, clients=[client], trusted=[])


def test_a_user_without_a_home_has_no_roots_there(project, monkeypatch):
    """A uid without an account asks for the skills at home and gets none, without an error."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(project)
    assert [root for root in agent_skill_roots(project, home=True, trusted=[]) if root.kind == "user"] == []
