"""The system call filter, run by a small interpreter of our own."""

import errno
import json
import re
import struct
from pathlib import Path

import pytest

from kdskills.execution import seccomp
from kdskills.execution.seccomp import ALLOW, AUDIT_ARCH, ERRNO, KILL, RULES, assemble, program_bytes

ARCHES = ["x86_64", "aarch64"]


def run(arch, number, args=(), seen_arch=None):
    """Interpret the filter for one call, as the kernel would, and return its answer."""
    padded = [value & 0xFFFFFFFFFFFFFFFF for value in (*args, 0, 0, 0, 0, 0, 0)][:6]
    data = struct.pack("<IIQ6Q", number, seen_arch or AUDIT_ARCH[arch], 0, *padded)
    program = assemble(arch)
    at = accumulator = 0
    for _ in range(len(program)):
        step = program[at]
        at += 1
        match step.code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, step.k)
            case 0x15:
                at += step.jt if accumulator == step.k else step.jf
            case 0x35:
                at += step.jt if accumulator >= step.k else step.jf
            case 0x45:
                at += step.jt if accumulator & step.k else step.jf
            case 0x06:
                return step.k
    raise AssertionError("the program has no end")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.only is None], ids=lambda rule: rule.name)
def test_refused_calls(arch, rule):
    """Every unconditional rule answers with its error, on each architecture that has the call."""
    if rule.number(arch) is not None:
        assert run(arch, rule.number(arch)) == ERRNO | rule.error


@pytest.mark.parametrize("arch", ARCHES)
def test_ordinary_calls_pass(arch):
    """Every call number outside the table is allowed."""
    refused = {rule.number(arch) for rule in RULES}
    assert {run(arch, number) for number in range(470) if number not in refused} == {ALLOW}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("flag", seccomp.CLONE_NEW.values(), ids=seccomp.CLONE_NEW.keys())
def test_clone_makes_no_namespaces(arch, flag):
    """Threads and forks pass; any namespace flag among the others does not."""
    number = next(rule.number(arch) for rule in RULES if rule.name == "clone")
    assert run(arch, number, (0x3D0F00,)) == ALLOW
    assert run(arch, number, (17,)) == ALLOW
    assert run(arch, number, (flag | 17,)) == ERRNO | errno.EPERM
    assert run(arch, number, (flag | 17 | 1 << 40,)) == ERRNO | errno.EPERM


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["socket", "socketpair"])
def test_socket_families(arch, name):
    """UNIX, INET and INET6 pass; every other family is refused, high bits or not."""
    number = next(rule.number(arch) for rule in RULES if rule.name == name)
    allowed = {family for family in range(64) if run(arch, number, (family,)) == ALLOW}
    assert allowed == {1, 2, 10}
    assert run(arch, number, (40 | 1 << 33,)) == ERRNO | errno.EAFNOSUPPORT


@pytest.mark.parametrize("arch", ARCHES)
def test_terminal_injection_and_personality(arch):
    """TIOCSTI is refused whatever its high bits; only the plain personality may be set."""
    ioctl, personality = (next(r.number(arch) for r in RULES if r.name == n) for n in ("ioctl", "personality"))
    assert run(arch, ioctl, (0, 0x5413)) == ALLOW
    assert run(arch, ioctl, (0, 0x5412)) == ERRNO | errno.EPERM
    assert run(arch, ioctl, (0, 0x5412 | 1 << 35)) == ERRNO | errno.EPERM
    assert run(arch, personality, (0,)) == ALLOW
    assert run(arch, personality, (0x0040000,)) == ERRNO | errno.EPERM


def test_other_architectures():
    """Another architecture's calls kill; x32 calls do not exist."""
    assert run("x86_64", 1, seen_arch=0x40000003) == KILL
    assert run("x86_64", 1 | seccomp.X32_BIT) == ERRNO | errno.ENOSYS
    assert run("aarch64", 1, seen_arch=AUDIT_ARCH["x86_64"]) == KILL


@pytest.mark.parametrize("arch", ARCHES)
def test_the_program_is_well_formed(arch):
    """Jumps stay inside, every path ends in a return, the size fits the kernel's bound."""
    program = assemble(arch)
    assert len(program) <= 4096
    assert len(program_bytes(arch)) == 8 * len(program)
    for place, step in enumerate(program):
        if step.code & 0x07 == 0x05:
            assert max(step.jt, step.jf) + place + 1 < len(program)
            assert max(step.jt, step.jf) <= 255
    assert program[-1].code == 0x06


@pytest.mark.parametrize("arch", ARCHES)
def test_numbers_are_given_once(arch):
    """No call is in the table twice."""
    numbers = [rule.number(arch) for rule in RULES if rule.number(arch) is not None]
    assert sorted(set(numbers)) == sorted(numbers)


@pytest.mark.parametrize(
    ("arch", "header", "prefix"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "__NR_"),
        ("aarch64", "/usr/include/asm-generic/unistd.h", "__NR_|__NR3264_"),
    ],
)
def test_numbers_are_the_kernels(arch, header, prefix):
    """The table's numbers are those of the kernel's own headers, where they are installed."""
    path = Path(header)
    if not path.is_file():
        pytest.skip("no kernel headers here")
    known = dict(re.findall(rf"#define (?:{prefix})(\w+) (\d+)", path.read_text(encoding="utf-8")))
    wrong = {r.name: known[r.name] for r in RULES if r.name in known and r.number(arch) != int(known[r.name])}
    assert wrong == {}
    assert len([rule for rule in RULES if rule.name in known]) > 50


def docker_profile():
    """Return docker's seccomp profile of the same table (`runtime/images/seccomp.json`)."""
    plain = {}
    for rule in RULES:
        if rule.only is None:
            plain.setdefault(rule.error, []).append(rule.name)
    syscalls = [
        {"names": sorted(names), "action": "SCMP_ACT_ERRNO", "errnoRet": error}
        for error, names in sorted(plain.items())
    ]
    for rule in RULES:
        if rule.only is not None:
            syscalls += [
                {"names": [rule.name], "action": "SCMP_ACT_ERRNO", "errnoRet": rule.error, "args": [test]}
                for test in docker_tests(rule.only)
            ]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "archMap": [
            {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []},
            {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []},
        ],
        "syscalls": syscalls,
    }


def docker_tests(only):
    """Return one test per rule: libseccomp takes no two comparisons of one argument in one rule."""
    if only.test == "any_bit":
        return [docker_test(only.arg, "SCMP_CMP_MASKED_EQ", value, value) for value in only.values]
    if only.test == "in":
        return [docker_test(only.arg, "SCMP_CMP_MASKED_EQ", 0xFFFFFFFF, value) for value in only.values]
    highest = max(only.values)
    between = [value for value in range(highest) if value not in only.values]
    return [
        *(docker_test(only.arg, "SCMP_CMP_EQ", value, 0) for value in between),
        docker_test(only.arg, "SCMP_CMP_GT", highest, 0),
    ]


def docker_test(arg, op, value, second):
    """Return one comparison."""
    return {"index": arg, "op": op, "value": value, "valueTwo": second}


def test_dockers_profile_is_the_same_table(repo):
    """The shipped JSON is what the table gives; regenerate it with `docker_profile` when the table changes."""
    shipped = json.loads((repo / "runtime/images/seccomp.json").read_text(encoding="utf-8"))
    assert shipped == json.loads(json.dumps(docker_profile()))


def test_dockers_profile_names_every_rule():
    """Each rule appears in docker's profile, and no rule has two tests, which libseccomp would not take."""
    entries = docker_profile()["syscalls"]
    assert {name for entry in entries for name in entry["names"]} == {rule.name for rule in RULES}
    assert all(len(entry.get("args", [])) <= 1 for entry in entries)
