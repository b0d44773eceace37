"""What tests of attempts share: orders for a program nobody runs."""

import pytest

from kdskills.jobs.attempts import AttemptOrder
from kdskills.jobs.model import Command, Placement, Scope, ServiceSpec, TaskSpec


@pytest.fixture
def make_order():
    """Return a maker of orders; fields of the order by name, others go to the command."""

    def make(argv=("true",), *, session=None, unsafe=False, service=False, limits=None, **fields):
        own = {name: fields.pop(name) for name in ("session_dir", "log_limit") if name in fields}
        fields.setdefault("timeout_s", None if service else 10.0)
        placement = {"engine": "bubblewrap", "skill_name": "x", "version_hash": "0", "unsafe_local": unsafe}
        spec = TaskSpec(
            scope=Scope(project="p", agent="a"),
            session_id=session,
            command=Command(argv=argv, **fields),
            placement=Placement(**placement, **({} if limits is None else {"limits": limits})),
            mode="service" if service else "batch",
            service=ServiceSpec() if service else None,
        )
        return AttemptOrder(**{"task_id": "t", "attempt": 1, "spec": spec, **own})

    return make
