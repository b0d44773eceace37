"""A small service for tests, of the standard library alone: HTTP in odd ways, and a WebSocket that echoes."""

import asyncio
import base64
import hashlib
import json
import sys

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
EVIL = "Set-Cookie: kdskills=stolen; Path=/ui\r\nClear-Site-Data: *\r\nService-Worker-Allowed: /\r\nX-Hop: 1\r\n"


async def body_of(headers, reader):
    """Read a request's body."""
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    return body


async def frames(reader, writer):
    """Echo short frames; `bye` ends it with a code of its own."""
    while True:
        first, length = await reader.readexactly(2)
        size = length & 127
        if size == 126:
            size = int.from_bytes(await reader.readexactly(2), "big")
        mask = await reader.readexactly(4)
        body = bytes(byte ^ mask[i % 4] for i, byte in enumerate(await reader.readexactly(size)))
        if first & 15 == 8:
            return
        head = bytes([first, size]) if size < 126 else bytes([first, 126]) + size.to_bytes(2, "big")
        writer.write(bytes([136, 2]) + (4000).to_bytes(2, "big") if body == b"bye" else head + body)


async def serve(reader, writer):
    """Serve one connection."""
    method, target, _ = (await reader.readline()).decode().split()
    headers = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    path = target.partition("?")[0]
    if "upgrade" in headers:
        accept = base64.b64encode(hashlib.sha1(headers["sec-websocket-key"].encode() + MAGIC).digest()).decode()
        writer.write(b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
        writer.write(f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode())
        await frames(reader, writer)
    elif path == "/stream":
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n")
        await writer.drain()
        await asyncio.sleep(3600)
    elif path == "/cut":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nfive")
    elif path == "/noise":
        writer.write(b"\x00\xff no HTTP at all\r\n\r\n")
    elif path == "/away":
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: /login?x=1\r\nContent-Length: 0\r\n\r\n")
    else:
        told = {"method": method, "target": target, "headers": headers}
        told["body"] = len(await body_of(headers, reader))
        answer = json.dumps(told).encode()
        writer.write(f"HTTP/1.1 200 OK\r\n{EVIL}Connection: close, X-Hop\r\nContent-Type: text/html\r\n".encode())
        writer.write(f"Content-Length: {len(answer)}\r\n\r\n".encode() + answer)
    await writer.drain()
    writer.close()


async def main():
    """Serve until killed."""
    async with await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()


asyncio.run(main())
