"""Staged copies: what was checked is what is seen."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kdskills.errors import ExecRefused, RootChanged, RootMissing
from kdskills.execution.dirs import locked, private_dir
from kdskills.execution.request import EnvironmentMount, InputFile, Limits, SkillMount
from kdskills.execution.stage import check_environment, read_inputs, stage_skill
from kdskills.skills.safe_open import tree_digest


@pytest.fixture
def skill(tmp_path):
    """A small skill with a script, a dot file and a link."""
    root = tmp_path / "skill"
    (root / "scripts").mkdir(parents=True)
    (root / "SKILL.md").write_text("---\nname: x\n---\nbody")
    (root / "scripts/run.sh").write_text("echo hi")
    (root / "scripts/run.sh").chmod(0o700)
    (root / ".note").write_bytes(b"\0")
    (root / "link").symlink_to("/etc/passwd")
    return SkillMount("a.x", root, tree_digest(root))


def test_a_copy_has_the_same_digest_and_open_modes(skill, tmp_path):
    """The copy is the same tree, readable by everybody, writable by its owner only."""
    copy = stage_skill(skill, tmp_path / "cache")
    assert tree_digest(copy) == skill.tree
    assert copy.name == skill.tree.removeprefix("sha256:")
    assert oct((copy / "scripts/run.sh").stat().st_mode & 0o7777) == "0o755"
    assert oct((copy / "SKILL.md").stat().st_mode & 0o7777) == "0o644"
    assert (copy / "link").is_symlink()


@pytest.mark.parametrize(("passable", "mode"), [(False, "0o700"), (True, "0o711")])
def test_copies_are_not_open_to_other_users(skill: SkillMount, tmp_path: Path, passable: bool, mode: str) -> None:
    """Nobody else reads or lists copies, in a cache that was open to others either; a uid of a program's own may pass."""
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o755)
    copy = stage_skill(skill, cache, passable=passable)
    assert [oct(path.stat().st_mode & 0o777) for path in (cache, copy.parent)] == [mode, mode]
    stage_skill(skill, cache)
    assert oct(copy.parent.stat().st_mode & 0o777) == mode


def test_a_copy_is_made_once(skill, tmp_path):
    """The second call finds the first one's copy."""
    first = stage_skill(skill, tmp_path / "cache")
    inode = first.stat().st_ino
    assert stage_skill(skill, tmp_path / "cache") == first
    assert first.stat().st_ino == inode


def test_the_same_tree_elsewhere_uses_the_same_copy(skill, tmp_path):
    """Other times but the same bytes are the same skill."""
    first = stage_skill(skill, tmp_path / "cache")
    os.utime(skill.root / "SKILL.md", (1, 1))
    assert stage_skill(skill, tmp_path / "cache") == first


def test_a_copy_takes_the_times_it_was_compared_with(skill: SkillMount, tmp_path: Path) -> None:
    """A skill with other times costs its digest once, and an edit of the same size after that is refused all the same."""
    copy = stage_skill(skill, tmp_path / "cache")
    original = skill.root / "SKILL.md"
    os.utime(original, (1, 1))
    stage_skill(skill, tmp_path / "cache")
    assert (copy / "SKILL.md").stat().st_mtime_ns == original.stat().st_mtime_ns
    original.write_text(original.read_text().replace("body", "BODY"))
    with pytest.raises(RootChanged):
        stage_skill(skill, tmp_path / "cache")
    assert tree_digest(copy) == skill.tree


@pytest.mark.parametrize("change", ["edit", "same size", "add", "remove", "gone"])
def test_a_skill_changed_after_staging_is_refused(skill, tmp_path, change):
    """A copy from before does not hide that the skill itself is another one now."""
    stage_skill(skill, tmp_path / "cache")
    file = skill.root / "scripts/run.sh"
    match change:
        case "edit":
            file.write_text("echo forged")
        case "same size":
            file.write_text("echo ho")
        case "add":
            (skill.root / "new").write_text("")
        case "remove":
            file.unlink()
        case "gone":
            skill.root.rename(tmp_path / "elsewhere")
    with pytest.raises(RootMissing if change == "gone" else RootChanged):
        stage_skill(skill, tmp_path / "cache")


def test_a_changed_tree_is_refused(skill, tmp_path):
    """Files unlike the digest are never mounted, and no half copy stays."""
    (skill.root / "SKILL.md").write_text("forged")
    with pytest.raises(RootChanged) as caught:
        stage_skill(skill, tmp_path / "cache")
    assert caught.value.details["expected"] == skill.tree
    assert [path.name for path in (tmp_path / "cache/stage").iterdir()] == [".lock"]


def test_a_missing_tree_is_refused(tmp_path):
    """A skill that is not there is named."""
    with pytest.raises(RootMissing):
        stage_skill(SkillMount("a.x", tmp_path / "nowhere", "sha256:" + "0" * 64), tmp_path / "cache")


@pytest.mark.parametrize("tree", ["", "x", "sha256:../../etc", "sha256:" + "G" * 64])
def test_a_digest_is_no_path(skill, tmp_path, tree):
    """Only hex names become folders."""
    with pytest.raises(RootChanged):
        stage_skill(SkillMount(skill.id, skill.root, tree), tmp_path / "cache")


def test_special_files_are_refused(skill, tmp_path):
    """A FIFO in a skill does not hang staging."""
    os.mkfifo(skill.root / "pipe")
    with pytest.raises(RootChanged):
        stage_skill(SkillMount(skill.id, skill.root, tree_digest(skill.root)), tmp_path / "cache")


def test_copies_nobody_uses_are_removed(skill, tmp_path):
    """A copy unused for a week goes when the next skill is staged; a used one stays."""
    first = stage_skill(skill, tmp_path / "cache")
    other = tmp_path / "other"
    other.mkdir()
    (other / "SKILL.md").write_text("other")
    old = first.parent / ("f" * 64)
    old.mkdir()
    for path in (old, first):
        os.utime(path, (1, 1))
    stage_skill(skill, tmp_path / "cache")
    stage_skill(SkillMount("a.y", other, tree_digest(other)), tmp_path / "cache")
    assert (old.exists(), first.exists()) == (False, True)


def test_threads_stage_one_copy(skill, tmp_path):
    """Many at once agree on one copy."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(stage_skill(skill, tmp_path / "cache"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1


def test_inputs_come_by_value(tmp_path):
    """Bytes stay, files are read."""
    file = tmp_path / "data"
    file.write_bytes(b"file")
    given = (InputFile("a", b"bytes"), InputFile("b", file))
    assert read_inputs(given, Limits()) == [("a", b"bytes"), ("b", b"file")]


def test_inputs_through_links_are_refused(tmp_path):
    """Neither the file nor a folder on its way may be a link."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "dir").symlink_to("/etc")
    for path in (tmp_path / "link", tmp_path / "dir/passwd"):
        with pytest.raises(ExecRefused) as caught:
            read_inputs((InputFile("x", path),), Limits())
        assert caught.value.code == "bad_request"


def test_inputs_are_regular_and_bounded(tmp_path):
    """FIFOs, folders, missing and oversized files are refused at once."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(b"x" * 11)
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", tmp_path / "big"):
        with pytest.raises(ExecRefused):
            read_inputs((InputFile("x", path),), Limits(work_size=10))


def test_the_sum_of_inputs_is_bounded(tmp_path):
    """Each may fit while all together do not."""
    (tmp_path / "a").write_bytes(b"x" * 6)
    with pytest.raises(ExecRefused):
        read_inputs((InputFile("a", tmp_path / "a"), InputFile("b", tmp_path / "a")), Limits(work_size=10))


def test_a_swap_race_leaks_nothing(tmp_path):
    """A file swapped for a link to a secret, over and over, is read as itself or refused."""
    secret, honest, target = tmp_path / "secret", tmp_path / "honest", tmp_path / "data"
    secret.write_bytes(b"SECRET")
    honest.write_bytes(b"honest")
    target.write_bytes(b"honest")
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            (tmp_path / "l").symlink_to(secret)
            (tmp_path / "l").rename(target)
            os.link(honest, tmp_path / "h")
            (tmp_path / "h").rename(target)

    thread = threading.Thread(target=swap)
    thread.start()
    seen = set()
    try:
        for _ in range(1500):
            try:
                seen.add(read_inputs((InputFile("x", target),), Limits())[0][1])
            except ExecRefused:
                seen.add(b"refused")
    finally:
        stop.set()
        thread.join()
    assert seen <= {b"honest", b"refused"}
    assert b"honest" in seen


def test_a_folder_others_may_write_to_is_refused(tmp_path):
    """Staged trees are never trusted in a folder that is not ours alone."""
    top = tmp_path / "cache"
    top.mkdir()
    top.chmod(0o777)
    with pytest.raises(ExecRefused):
        private_dir(top)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(ExecRefused):
        private_dir(link)


def test_the_lock_is_not_taken_through_a_link(tmp_path):
    """A planted link is no lock file."""
    (tmp_path / ".lock").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / ".lock"):
        pass
    assert not Path(tmp_path / "other").exists()


@pytest.mark.parametrize("used", [True, False], ids=["used lately", "not used for long"])
@pytest.mark.parametrize("lost", ["scripts/run.sh", "link", ".note"])
def test_a_part_of_a_copy_is_no_copy(skill, tmp_path, lost, used):
    """What a removal that was cut off left behind is made anew, not mounted."""
    copy = stage_skill(skill, tmp_path / "cache")
    (copy / lost).unlink()
    if not used:
        os.utime(copy, (1, 1))
    assert stage_skill(skill, tmp_path / "cache") == copy
    assert tree_digest(copy) == skill.tree


def test_a_removal_takes_the_name_first(skill, tmp_path, monkeypatch):
    """A process that dies while it tidies leaves nothing that looks like a copy; the next one removes the rest."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "SKILL.md").write_text("other")
    copy = stage_skill(skill, tmp_path / "cache")
    os.utime(copy, (1, 1))
    with monkeypatch.context() as dying:
        dying.setattr("kdskills.execution.dirs.shutil.rmtree", lambda *_, **__: None)
        stage_skill(SkillMount("a.y", other, tree_digest(other)), tmp_path / "cache")
    assert not copy.exists()
    assert [path.name[:5] for path in copy.parent.iterdir() if path.name.startswith(".old")] == [".old-"]
    (other / "SKILL.md").write_text("another")
    stage_skill(SkillMount("a.y", other, tree_digest(other)), tmp_path / "cache")
    assert not [path for path in copy.parent.iterdir() if path.name.startswith((".old", ".new"))]


def test_copies_in_use_survive_tidying_beside_them(skill, tmp_path):
    """Threads that use an old copy while others tidy always get a whole one."""
    cache, wrong = tmp_path / "cache", []
    copy = stage_skill(skill, cache)

    def use():
        for _ in range(20):
            try:
                os.utime(copy, (1, 1))
            except FileNotFoundError:
                continue
            if tree_digest(stage_skill(skill, cache)) != skill.tree:
                wrong.append("half a copy")

    def tidy(number):
        root = tmp_path / f"other-{number}"
        root.mkdir()
        for turn in range(20):
            (root / "SKILL.md").write_text(f"{number} {turn}")
            stage_skill(SkillMount("a.y", root, tree_digest(root)), cache)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(use), *(threads.submit(tidy, number) for number in range(3))]:
            done.result()
    assert wrong == []


def test_a_lock_ends_with_its_holder_though_a_fork_has_it(tmp_path):
    """A process that another thread forked meanwhile does not keep what we let go."""
    place = tmp_path / "lock"
    with locked(place):
        ours = next(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if points_to(fd, place))
        forked = os.dup(ours)  # the same open file, as a fork has it
    try:
        fd = os.open(place, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    finally:
        os.close(forked)


def points_to(fd, place):
    """Whether the descriptor is of that file; one that is closed meanwhile is not."""
    try:
        return fd.readlink() == place
    except OSError:
        return False


@pytest.fixture
def environment(tmp_path):
    """Return the mount of an empty environment."""
    (tmp_path / "e").mkdir(mode=0o755)
    (tmp_path / "e").chmod(0o755)
    return EnvironmentMount("0" * 16, tmp_path / "e")


def test_a_used_environment_is_noted(environment):
    """Its time says when it was used last, so that the one used least recently can be told."""
    os.utime(environment.root, (1, 1))
    assert check_environment(environment) == environment.root
    assert environment.root.stat().st_mtime > 1


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o777, "nobody else may write"), (0o775, "nobody else may write"), (0o700, "closed"), (0o711, "closed")],
)
def test_an_environment_is_ours_to_write_and_everybodys_to_read(environment, mode, words):
    """Modes that let others change it, or keep programs out, are refused."""
    environment.root.chmod(mode)
    with pytest.raises(ExecRefused, match=words) as caught:
        check_environment(environment)
    assert (caught.value.code, caught.value.who) == ("bad_request", "caller")


def test_an_environment_is_a_folder(environment, tmp_path):
    """A file and a link to a sound one are refused; what is not there is for the operator to build here."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(environment.root)
    for name in ("file", "link"):
        with pytest.raises(ExecRefused, match=f"the environment {tmp_path}/{name} "):
            check_environment(EnvironmentMount("0" * 16, tmp_path / name))
    with pytest.raises(ExecRefused, match="kdskills env build") as caught:
        check_environment(EnvironmentMount("0" * 16, tmp_path / "missing"))
    assert (caught.value.code, caught.value.who) == ("environment_missing", "operator")


def test_programs_of_other_uids_must_reach_it(environment):
    """Where programs have a uid of their own, a closed folder above is named."""
    environment.root.parent.chmod(0o700)
    assert check_environment(environment) == environment.root
    with pytest.raises(ExecRefused, match=f"they cannot pass {environment.root.parent}"):
        check_environment(environment, passable=True)
