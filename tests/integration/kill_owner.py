"""Program of `test_kill.py`: a kdskills that starts hostile payloads and is then killed, or the next start that reaps.

kill_owner.py run ENGINE STATE MARK MODE...      start one payload for every mode, say `ready`, wait
kill_owner.py reap ENGINE STATE                  reap and print the report as JSON
"""

import asyncio
import json
import sys
from pathlib import Path

from kdskills.execution import ExecRequest, ExecutionOptions, InputFile, Limits

PAYLOAD = Path(__file__).with_name("kill_payload.py")
MIB = 1 << 20
POOL = 2
LIMITS = Limits(wall_s=600, memory=96 * MIB, pids=24, work_size=8 * MIB, tmp_size=8 * MIB, fsize=8 * MIB)


def make(name, state):
    """Return the engine *name*, with run records below *state*."""
    options = {"state_dir": Path(state), "best_effort": frozenset({"memory", "pids"})}
    if name == "docker":
        from kdskills.builtin.executors.docker import DockerExecutor

        return DockerExecutor(ExecutionOptions(**options))
    if name == "subprocess":
        from kdskills.builtin.executors.subprocess import SubprocessExecutor

        return SubprocessExecutor(ExecutionOptions(allow_unisolated=True, **options))
    from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor

    return BubblewrapExecutor(ExecutionOptions(pool=POOL if name == "pool" else 0, **options))


async def start(engine, mark, mode):
    """Start one payload and wait until it has done what it is for."""
    request = ExecRequest(
        argv=("python3", "payload.py", mark, mode),
        inputs=(InputFile("payload.py", PAYLOAD.read_bytes()),),
        limits=LIMITS,
        network=("granted.invalid",) if mode == "deaf" and engine.name != "subprocess" else "none",
        profile="unsafe-local",
    )
    handle = await engine.start(request)
    for _ in range(3000):
        if b"ready" in handle.tail()[0]:
            return handle
        await asyncio.sleep(0.01)
    raise SystemExit(f"{mode} did not get ready: {handle.tail()}")


async def main(argv):
    """Do as the module says."""
    what, name, state, *rest = argv
    engine = make(name, state)
    if what == "reap":
        report = await engine.reap()
        json.dump({"ended": report.ended, "failed": report.failed}, sys.stdout)
        return
    mark, *modes = rest
    if name == "pool":
        await engine.run(ExecRequest(code="pass", limits=LIMITS))
        while engine.ready() < POOL:  # noqa: ASYNC110 - another thread fills it
            await asyncio.sleep(0.01)
    handles = [await start(engine, mark, mode) for mode in modes]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*(handle.wait() for handle in handles))


asyncio.run(main(sys.argv[1:]))
