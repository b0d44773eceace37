"""Quotas where commands really run: processor time is measured, and no more run than may."""

import pytest

from kdskills.jobs.model import TaskHead
from kdskills.storage.database import micros, utc_now
from kdskills.testing.work import labs

both = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))], indirect=True
)
SPIN = "python3 -c 'import time\nwhile time.process_time() < 0.3: pass'"


@both
async def test_processor_time_and_places(database):
    """A command that computes is charged for it, one that sleeps is not; two workers never run two of a project of one place."""
    async with labs("a", url=database, quotas={"running": 1}) as (lab,):
        for slot in range(2):
            lab.start(slot)
        heads = [await lab.client.submit(lab.task(lab.ledger.script(f"t{number}", 0.2))) for number in range(4)]
        for head in heads:
            assert (await lab.client.wait(TaskHead, lab.scope, head.id, 120)).status == "succeeded"
        assert lab.ledger.most_at_once() == 1
        work = await lab.client.work()

        def cpu_s() -> float:
            now = micros(utc_now())
            return work.database.ask(lambda link: work.quotas.usage(link, lab.scope, now, 10)).cpu_s_per_day

        before = cpu_s()
        head = await lab.client.submit(lab.task(SPIN))
        assert (await lab.client.wait(TaskHead, lab.scope, head.id, 120)).status == "succeeded"
        assert 0.3 <= cpu_s() - before < 30
