"""What a Landlock run is made of: rights by kernel, rules, filter, uids, the order."""

from __future__ import annotations

import errno
import json
import os
import struct
from pathlib import Path

import pytest

from kdskills.errors import ExecRefused
from kdskills.execution import landlock as orders
from kdskills.execution import seccomp
from kdskills.execution.check import check_request
from kdskills.execution.landlock import GUARD_SLACK, Wall, build_order, environment
from kdskills.execution.local_tree import RunFolder, host_argv, host_path_of
from kdskills.execution.request import EnvironmentMount, ExecRequest, Limits, ScriptCall, SkillMount
from kdskills.execution.rootfs import Rootfs
from kdskills.execution.seccomp import ALLOW, AUDIT_ARCH, ERRNO, assemble


@pytest.fixture
def tree(tmp_path):
    """A prepared tree with two libraries, a loader and a program; one library is also the host's."""
    for name in ("usr/lib/x", "usr/lib64", "usr/bin", "usr/local/bin"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    for name in ("usr/lib/x/libown.so.1", "usr/lib64/ld-linux.so.2", "usr/bin/sh"):
        (tmp_path / "tree" / name).write_bytes(b"")
    return tmp_path / "tree"


@pytest.fixture
def folder(tmp_path):
    """A run's folders."""
    return RunFolder.make(tmp_path, ExecRequest(argv=("true",)))


@pytest.mark.parametrize(
    ("version", "fs", "net", "scoped", "size"),
    [(1, 13, 0, 0, 8), (2, 14, 0, 0, 8), (3, 15, 0, 0, 8), (4, 15, 3, 0, 16), (5, 16, 3, 0, 16), (6, 16, 3, 3, 24), (9, 16, 3, 3, 24)],
)  # fmt: skip
def test_each_version_takes_away_what_it_knows(version, fs, net, scoped, size):
    """Masks and the structure's length follow the kernel's documented interface; newer versions keep what is known."""
    handled = orders.handled(version)
    assert (handled.fs, handled.net, handled.scoped) == ((1 << fs) - 1, net, scoped)
    assert handled.attr() == struct.pack("<QQQ", handled.fs, net, scoped)[:size]


def test_the_kernel_is_asked_for_its_version():
    """A version comes with no reason, and no version with one."""
    version, why = orders.landlock_version()
    assert (version > 0) == (why == "")


@pytest.mark.parametrize("version", [1, 2, 3, 5, 7])
def test_rules_fit_the_kernel_and_what_is_there(tree, folder, version):
    """No rule has a right the version lacks, no file one for folders, and what is not there has no rule."""
    rules = orders.path_rules(tree, [tree / "absent"], folder, version)
    known = orders.handled(version).fs
    by_path = dict(rules)
    assert by_path[str(tree)] == orders.LOOK
    assert by_path[str(folder.control)] == orders.READ
    assert by_path[str(folder.work)] == by_path[str(folder.tmp)] == orders.WRITE & known
    assert str(tree / "absent") not in by_path
    for path, access in by_path.items():
        assert access & ~known == 0
        assert Path(path).is_dir() or access & (orders.READ_DIR | orders.REFER | orders.MAKE_REG) == 0


def test_nothing_but_the_runs_own_folders_can_be_written(tree, folder):
    """Write rights exist below the run's folders and on harmless devices only, and devices cannot be made anywhere."""
    rules = orders.path_rules(tree, [], folder, 7)
    writable = {path for path, access in rules if access & (orders.WRITE & ~orders.LOOK)}
    assert writable == {str(folder.work), str(folder.tmp), *orders.DEVICES}
    assert all(access & (orders.MAKE_CHAR | orders.MAKE_BLOCK | orders.MAKE_SOCK) == 0 for _, access in rules)


def test_no_folder_of_the_hosts_own_data_is_open(tree, folder):
    """Of the host there are single files and the processor's folder; never /, /etc, /proc, /usr or a home."""
    rules = orders.path_rules(tree, [], folder, 7)
    folders = {path for path, _ in rules if Path(path).is_dir()}
    assert folders - {str(tree), str(folder.control), str(folder.work), str(folder.tmp)} == {"/sys/devices/system/cpu"}
    assert "net" not in (*orders.PROC_FILES, *orders.PROC_FOLDERS)


def test_libraries_are_found_where_the_tree_has_them(tree):
    """Folders of shared libraries are relative to the tree."""
    assert orders.library_folders(tree) == ["usr/lib/x", "usr/lib64"]


def call(arch, name, *args, version=7):
    """Interpret the filter for one call."""
    rules = seccomp.landlock_rules(version)
    number = next((rule.number(arch) for rule in rules if rule.name == name), 45 if arch == "aarch64" else 76)
    data = struct.pack("<IIQ6Q", number, AUDIT_ARCH[arch], 0, *(*args, *[0] * (6 - len(args))))
    program, at, value = assemble(arch, rules), 0, 0
    while True:
        step = program[at]
        at += 1
        match step.code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, step.k)
            case 0x06:
                return step.k
            case _:
                hit = {0x15: value == step.k, 0x35: value >= step.k, 0x45: bool(value & step.k)}[step.code]
                at += step.jt if hit else step.jf


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_no_socket_but_connected_pairs(arch):
    """No family of socket can be made; of pairs only UNIX streams, whatever their flags."""
    assert {call(arch, "socket", family) for family in range(64)} == {ERRNO | errno.EACCES}
    for name in ("connect", "bind", "listen", "accept", "accept4"):
        assert call(arch, name) == ERRNO | errno.EACCES
    for flags in (0, 0x800, 0x80000, 0x80800):
        assert call(arch, "socketpair", 1, 1 | flags) == ALLOW
        assert call(arch, "socketpair", 1, 2 | flags) == ERRNO | errno.EACCES
        assert call(arch, "socketpair", 30, 1 | flags) == ERRNO | errno.EACCES
        assert call(arch, "socketpair", 1, 5 | flags) == ERRNO | errno.EACCES


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
@pytest.mark.parametrize("rule", seccomp.SHARED, ids=lambda rule: rule.name)
def test_what_namespaces_divide_elsewhere_is_refused(arch, rule):
    """System V objects, message queues and watches are refused."""
    assert call(arch, rule.name) == ERRNO | errno.EPERM


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_old_kernels_get_truncate_refused_instead(arch):
    """Before version 3 Landlock does not know truncation, so the call itself is refused."""
    assert call(arch, "truncate", version=2) == ERRNO | errno.EPERM
    assert call(arch, "truncate", version=3) == ALLOW


def test_the_shared_table_stays_in_force():
    """Every rule of the shared table but sockets' is in the filter unchanged."""
    from kdskills.execution.seccomp import RULES

    kept = set(seccomp.landlock_rules(7))
    assert {rule.name for rule in RULES if rule not in kept} == {"socket", "socketpair"}


def test_one_uid_a_run(tmp_path):
    """Two leases at a time are two uids; a uid that was given back is leased again; none is an account's."""
    pool = orders.Uids(31000, tmp_path / "uids")
    one, two = pool.lease(), pool.lease()
    assert one.uid != two.uid
    assert {one.uid, two.uid} <= set(pool.all)
    assert 31000 not in pool.all
    one.close()
    assert pool.take(two.uid) is None
    again = pool.lease()
    assert again.uid == one.uid
    two.close()
    again.close()


@pytest.mark.parametrize("base", [-1, 0, 65000, 70000])
def test_uids_that_cannot_be_are_refused(tmp_path, base):
    """Root, and numbers beyond what containers map, are no base."""
    with pytest.raises(ExecRefused) as caught:
        orders.Uids(base, tmp_path / "uids").lease()
    assert caught.value.code == "running_as_root"


def test_accounts_and_running_uids_are_left_out(tmp_path, monkeypatch):
    """A uid somebody has, by account or by a process, is never leased."""
    pool = orders.Uids(31000, tmp_path / "uids")
    first, second, third = list(pool.all)[:3]
    monkeypatch.setattr(orders, "_has_account", lambda uid: uid == first)
    monkeypatch.setattr(orders, "running_uids", lambda: {second})
    lease = pool.lease()
    assert lease.uid == third
    lease.close()


def test_running_uids_hold_ours():
    """Our own uid is seen running, with this process under it."""
    assert os.getuid() in orders.running_uids()
    assert os.getpid() in orders.processes_of(os.getuid())


def order_of(tree, folder, request, cgroups=(), keep=()):
    """Build an order for a request and read it back."""
    wall = Wall(Rootfs(tree, "abc", "/entry.py"), 7, b"\x01\x02")
    return json.loads(build_order(wall, check_request(request), folder, {}, keep, 12345, cgroups))


def test_the_order_says_everything(tree, folder):
    """Program, identity, bounds, wall and guard stand in the order; without a cgroup memory is bounded per process."""
    limits = Limits(pids=9, memory=1 << 26, work_size=100, tmp_size=200)
    order = order_of(tree, folder, ExecRequest(argv=("echo", "ü"), env={"A": "b"}, limits=limits, workdir="sub"))
    rules = [list(rule) for rule in orders.path_rules(tree, [], folder, 7)]
    assert (order["argv"], order["uid"], order["keep"], order["rules"]) == (["echo", "ü"], 12345, [], rules)
    code = order_of(tree, folder, ExecRequest(code="1"), keep=[7, 8])
    entry = [f"{tree}/usr/local/bin/python3", "-I", f"{tree}/entry.py", "--payload-fd", "7", "--report-fd", "8"]
    assert (code["keep"], code["argv"]) == ([7, 8], entry)
    assert (order["cwd"], order["env"]["A"], order["seccomp"]) == (str(folder.work / "sub"), "b", "0102")
    assert (order["limits"]["nproc"], order["limits"]["as"], order["limits"]["core"]) == ([9, 9], [1 << 26] * 2, [0, 0])
    assert order["guard"] == [[str(folder.work), 100 + GUARD_SLACK], [str(folder.tmp), 200 + GUARD_SLACK]]
    assert bytes.fromhex(order["ruleset"]) == orders.handled(7).attr()
    assert "as" not in order_of(tree, folder, ExecRequest(argv=("true",)), cgroups=["/c/cgroup.procs"])["limits"]


def test_variables_are_the_trees_and_the_callers(tree, folder):
    """Nothing of this process's environment travels; a caller's value wins over ours."""
    plan = check_request(ExecRequest(argv=("true",), env={"HOME": "/else", "RAW": "\udcff"}))
    env = environment(tree, plan, folder, {})
    assert set(env) == {"PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "RAW"}
    assert (env["HOME"], env["RAW"]) == ("/else", "\udcff")
    assert all(part.startswith(str(tree)) for part in env["PATH"].split(":"))


def test_folders_have_this_hosts_paths(tree, folder):
    """Variables that name a mounted skill's folder or the turn's lead there; any other value stays as it is."""
    env = {
        "SKILL_DIR": "/skills/a.b/x",
        "KDSKILLS_SKILL_DIR": "/skills/c.d",
        "KDSKILLS_TURN_DIR": "/work",
        "OTHER": "/work",
    }
    plan = check_request(ExecRequest(argv=("true",), env=env))
    variables = environment(tree, plan, folder, {"a.b": tree / "staged"})
    assert {name: variables[name] for name in env} == {
        "SKILL_DIR": f"{tree}/staged/x",
        "KDSKILLS_SKILL_DIR": "/skills/c.d",
        "KDSKILLS_TURN_DIR": str(folder.work),
        "OTHER": "/work",
    }


def test_an_environment_is_read_where_it_lies(tree, folder):
    """It has a rule to read and execute, and stands first in the program's path."""
    environment_mount = EnvironmentMount("0" * 16, tree.parent / "packages")
    (environment_mount.root / "bin").mkdir(parents=True)
    order = order_of(tree, folder, ExecRequest(argv=("true",), environment=environment_mount))
    assert [str(environment_mount.root), orders.LOOK] in order["rules"]
    assert order["env"]["PATH"].startswith(f"{environment_mount.root}/bin:{tree}/usr/local/bin:")
    assert "PYTHONPATH" not in order["env"]


def test_places_of_this_host(tmp_path):
    """A script's path becomes the staged one; the caller's own arguments stay, whatever they look like."""
    script = ScriptCall("public.x", "scripts/a.py", ("/skills/public.x/scripts/a.py",))
    request = ExecRequest(script=script, skills=(SkillMount("public.x", tmp_path, "sha256:" + "0" * 64),))
    plan = check_request(request)
    skill_folders = {"public.x": Path("/stage/1")}
    assert host_argv(plan, skill_folders) == ("python3", "/stage/1/scripts/a.py", "/skills/public.x/scripts/a.py")
    assert host_path_of("/skills/public.x/scripts", skill_folders, tmp_path) == "/stage/1/scripts"
    assert host_path_of("/work/a/b", skill_folders, tmp_path) == str(tmp_path / "a/b")
