"""The skills of a Host's own bundle, asked for by many at once."""

import asyncio
import threading

import pytest

from kdskills.app import Host, Settings
from kdskills.app.host import ProjectSkills
from kdskills.errors import BadRequest, BundleError


@pytest.fixture
def bundle(tmp_path):
    """A bundle with one skill."""
    folder = tmp_path / "bundle/skills/lab/notes"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: notes\ndescription: Takes notes.\n---\nWrite it down.\n")
    (tmp_path / "bundle/skills_descriptor.py").write_text('CUSTOM_SKILLS_ROOT = "skills"\nAGENTS_CONFIG = {}\n')
    return tmp_path / "bundle"


async def test_many_that_ask_first_get_one(bundle):
    """The bundle is loaded once, however many ask for it at the same time."""
    host = Host(Settings(bundle=bundle), entry_points=False)
    found = await asyncio.gather(*(host.project_skills("local") for _ in range(20)))
    assert {id(one) for one in found} == {id(found[0])}
    assert [str(name) for name in found[0].subsystem.registry] == ["lab.notes"]


async def test_others_are_served_while_a_bundle_is_looked_through(bundle, monkeypatch):
    """A root that takes its time holds up who asks for its skills, and nobody else on the event loop."""
    host = Host(Settings(bundle=bundle), entry_points=False)
    looking, go = threading.Event(), threading.Event()
    made = Host.subsystem

    def slowly(self, *words, **options):
        looking.set()
        assert go.wait(60)
        return made(self, *words, **options)

    monkeypatch.setattr(Host, "subsystem", slowly)
    asked = asyncio.create_task(host.project_skills("local"))
    assert await asyncio.to_thread(looking.wait, 60)
    assert not asked.done()  # this very line ran meanwhile
    go.set()
    assert isinstance(await asked, ProjectSkills)


async def test_changes_are_seen_by_the_next_who_asks(bundle):
    """New skills, and another descriptor, are there without a restart."""
    host = Host(Settings(bundle=bundle), entry_points=False)
    first = await host.project_skills("local")
    more = bundle / "skills/lab/more"
    more.mkdir()
    (more / "SKILL.md").write_text("---\nname: more\ndescription: More.\n---\nMore.\n")
    again = await host.project_skills("local")
    assert again is first
    assert sorted(str(name) for name in again.subsystem.registry) == ["lab.more", "lab.notes"]
    (bundle / "skills_descriptor.py").write_text('CUSTOM_SKILLS_ROOT = "none"\nAGENTS_CONFIG = {}  # another length\n')
    assert list((await host.project_skills("local")).subsystem.registry) == []


async def test_a_bundle_that_cannot_be_loaded_says_so_each_time(bundle):
    """A failure is kept for nobody: once it is mended the skills are there."""
    host = Host(Settings(bundle=bundle), entry_points=False)
    text = (bundle / "skills_descriptor.py").read_text()
    (bundle / "skills_descriptor.py").write_text("CUSTOM_SKILLS_ROOT = (\n")
    for _ in range(2):
        with pytest.raises(BundleError):
            await host.project_skills("local")
    (bundle / "skills_descriptor.py").write_text(text)
    assert len(list((await host.project_skills("local")).subsystem.registry)) == 1
    with pytest.raises(BadRequest) as refused:
        await host.project_skills("elsewhere")
    assert refused.value.code == "no_bundle"


def test_threads_share_what_a_host_makes_once(bundle):
    """Subsystems made by several threads at once have one template environment."""
    host = Host(Settings(bundle=bundle), entry_points=False)
    loaded, at_once, seen = host.bundle(bundle), threading.Barrier(6), []

    def make():
        at_once.wait(60)
        host.subsystem(loaded)
        seen.append(id(host.templates))

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(seen), len(set(seen))) == (6, 1)
