"""Streams and the consumer of commands: what is there is used, nothing that overlaps is made (spec service §3)."""

from __future__ import annotations

from typing import Final

from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import NotFoundError

from kdskills.app.settings import BusSettings
from kdskills.doors.nats.subjects import Kind, filters
from kdskills.errors import OperatorMustAct

STREAMS: Final[dict[Kind, str]] = {"cmd": "KDSKILLS_COMMANDS", "evt": "KDSKILLS_RESULTS"}
KEPT_S: Final = 7 * 24 * 3600
DUPLICATES_S: Final = 24 * 3600


class StreamsDisagree(OperatorMustAct):
    """The streams of the bus cover subjects in a way that no one consumer can read (spec service §3)."""

    code = "streams_disagree"


async def ensure_streams(js: JetStreamContext, version: str) -> dict[Kind, str]:
    """Return the names of the streams of commands and results, made where no stream has their subjects.

    Raises:
        StreamsDisagree: Two streams share the subjects of one kind.
    """
    return {kind: await _ensure(js, kind, version) for kind in STREAMS}


async def _ensure(js: JetStreamContext, kind: Kind, version: str) -> str:
    found = {await _covering(js, subject) for subject in filters(version, kind)}
    if found == {None}:
        config = StreamConfig(
            name=f"{STREAMS[kind]}_{version}",
            subjects=list(filters(version, kind)),
            retention=RetentionPolicy.LIMITS,
            max_age=KEPT_S,
            duplicate_window=DUPLICATES_S,
        )
        await js.add_stream(config)
        return str(config.name)
    if len(found) > 1:
        names = sorted(name or "none" for name in found)
        raise StreamsDisagree(f"the subjects of {kind} lie in different streams: {', '.join(names)}", streams=names)
    name = found.pop()
    assert name is not None
    return name


async def _covering(js: JetStreamContext, subject: str) -> str | None:
    try:
        return await js.find_stream_name_by_subject(subject)
    except NotFoundError:
        return None


async def command_consumer(js: JetStreamContext, settings: BusSettings) -> JetStreamContext.PullSubscription:
    """Return the one durable consumer of a version, shared by every gateway."""
    stream = await _covering(js, filters(settings.version, "cmd")[0])
    durable = f"kdskills-{settings.version}"
    config = ConsumerConfig(
        durable_name=durable,
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=settings.ack_wait_s,
        max_deliver=settings.max_deliver,
        max_ack_pending=20_000,
        filter_subjects=list(filters(settings.version, "cmd")),
    )
    assert stream is not None
    await js.add_consumer(stream, config)
    return await js.pull_subscribe_bind(durable, stream)
