"""Messages over a websocket."""

import asyncio
import json

import pytest
from websockets.asyncio.server import serve

from kdskills.remote.client.wire import WebsocketTransport
from kdskills.remote.ports import AppServerGone


async def served(handler):
    """Serve a handler on a free port of the loopback."""
    server = await serve(handler, "127.0.0.1", 0, max_size=None)
    return server, f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_frames_go_and_come_with_the_token():
    """Each message is one text frame, of any size; the token travels as a bearer."""
    headers = []

    async def echo(link):
        headers.append(link.request.headers.get("Authorization"))
        async for frame in link:
            assert isinstance(frame, str)
            await link.send(frame)

    server, url = await served(echo)
    async with server:
        transport = await WebsocketTransport.connect(url, token="s3cret")
        payload = json.dumps({"x": "ü" * 2_000_000}).encode()
        await transport.send(payload)
        assert await transport.receive() == payload
        await transport.close()
        plain = await WebsocketTransport.connect(url)
        await plain.close()
    assert headers == ["Bearer s3cret", None]


async def test_the_servers_end_is_the_end():
    """When the server closes, reading ends and sending says it is gone."""

    async def leave(link):
        await link.close(1011, "restarting")

    server, url = await served(leave)
    async with server:
        transport = await WebsocketTransport.connect(url)
        assert await transport.receive() is None
        assert "restarting" in transport.why_closed()
        with pytest.raises(AppServerGone):
            await transport.send(b"{}")
        await transport.close()
        await transport.close()


async def test_nobody_there_and_wrong_addresses_are_gone():
    """A closed port, a refused handshake and an address of another scheme are `AppServerGone`; no token is told."""

    async def never(link):
        await link.close()

    def refuse(link, request):
        return link.respond(401, "no")

    server = await serve(never, "127.0.0.1", 0, process_request=refuse)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(AppServerGone, match="no app-server at") as caught:
        await WebsocketTransport.connect(f"ws://user:pw@127.0.0.1:{port}/?q=1", token="s3cret")
    assert "s3cret" not in str(caught.value)
    assert "pw" not in str(caught.value)
    server.close()
    await server.wait_closed()
    with pytest.raises(AppServerGone):
        await WebsocketTransport.connect(f"ws://127.0.0.1:{port}")
    for url in ("http://127.0.0.1:1", "ws://", "nonsense"):
        with pytest.raises(AppServerGone, match="begins with ws://"):
            await WebsocketTransport.connect(url)


async def test_a_reader_that_is_cancelled_loses_nothing():
    """A cancelled `receive` leaves the frame for the next one."""

    async def later(link):
        await link.recv()
        await link.send("after")
        await link.wait_closed()

    server, url = await served(later)
    async with server:
        transport = await WebsocketTransport.connect(url)
        reading = asyncio.ensure_future(transport.receive())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await transport.send(b"go")
        assert await transport.receive() == b"after"
        await transport.close()
