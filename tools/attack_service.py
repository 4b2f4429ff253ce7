#!/usr/bin/env python
"""Attack the HTTP service on this machine: overload, slow clients and hostile files together, besides good clients.

The service has random weights and a gallery, and listens at 127.0.0.1. Ten times as many requests as the queue has
places are sent at once, again and again. Slow clients send headers and bodies byte by byte, or do not read answers. The
hostile files are JPEG files with thousands of scans or megabytes of fill bytes, large images and truncated files, and
headers are malformed. Meanwhile, good clients send small JPEG files: each request must be answered before its deadline,
with status 200, or with 429, after which it is sent again.

Each minute, a line has the memory of the service with its processes, and the numbers of answers, missed deadlines and
errors. The exit code is 1 if a good request missed its deadline, a request was answered with status 500, or the service
did not stop. The seed 0 makes the same files in each run.
"""

import argparse
import asyncio
import io
import random
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import PIL.Image

sys.path.insert(0, str(Path(__file__).parent / "benchmark"))
from service import OVERLOAD, jpeg_files, start_service, write_model  # type: ignore[import-not-found]

_DEADLINE = 30.0
_QUEUE = 32
_GOOD_CLIENTS, _HOSTILE_CLIENTS, _SLOW_CLIENTS = 2, 4, 40
_ROUTES = ("/v1/features", "/v1/search", "/v1/gallery/items")


def hostile_files() -> list[bytes]:
    """Return files that take long to decode, or declare more than they have."""

    def encode(kind: str, side: int, **options: bool) -> bytes:
        stream = io.BytesIO()
        PIL.Image.new("RGB", (side, side)).save(stream, kind, **options)
        return stream.getvalue()

    progressive = bytearray(encode("JPEG", 64, progressive=True))
    last, end = progressive.rindex(b"\xff\xda"), len(progressive) - 2
    scans = bytes(progressive[:end] + progressive[last:end] * 4000 + progressive[end:])
    start = progressive.index(b"\xff\xc2")
    progressive[start + 5 : start + 9] = struct.pack(">HH", 4400, 4400)
    expensive = bytes(progressive[:end] + progressive[last:end] * 90 + progressive[end:])
    plain = encode("JPEG", 64)
    return [
        scans,
        expensive,
        plain[:2] + b"\xff" * 5_000_000 + plain[2:],
        plain[: len(plain) // 2],
        encode("PNG", 6000),
        encode("PNG", 9000),
        encode("WEBP", 2000),
        encode("GIF", 3000),
        random.Random(0).randbytes(100_000),
        b"",
    ]


class Attack:
    """Clients of a service at ``address``, until ``end`` in seconds of the monotonic clock."""

    def __init__(self, address: str, end: float) -> None:
        self.address, self.end = address, end
        self.host, port = address.removeprefix("http://").split(":")
        self.port = int(port)
        self.good = jpeg_files(64)
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0

    def tasks(self) -> list[Awaitable[None]]:
        """Return all clients."""
        return [
            *(self._good(number) for number in range(_GOOD_CLIENTS)),
            *(self._repeat(self._hostile) for _ in range(_HOSTILE_CLIENTS)),
            *(
                self._repeat(route)
                for route in (self._slow_header, self._slow_body, self._unread)
                for _ in range(_SLOW_CLIENTS)
            ),
            self._repeat(self._overload),
            self._repeat(self._malformed),
        ]

    async def _repeat(self, client: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self.end:
            try:
                await client()
            except (httpx.TransportError, OSError, asyncio.IncompleteReadError) as error:
                self.counts[f"closed ({client.__name__.strip('_')}): {type(error).__name__}"] += 1
                await asyncio.sleep(0.2)

    def _client(self, connections: int = 8) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=connections)
        return httpx.AsyncClient(base_url=self.address, timeout=_DEADLINE, verify=False, limits=limits)

    def _count(self, kind: str, status: int) -> None:
        self.counts[f"{kind} {status}"] += 1
        self.counts["errors"] += status == 500

    async def _good(self, number: int) -> None:
        async with self._client() as client:
            while time.monotonic() < self.end:
                files = [("images", ("a.jpg", self.good[number % len(self.good)]))]
                number += 1
                start, status = time.monotonic(), 429
                while status == 429 and time.monotonic() - start < _DEADLINE:
                    try:
                        status = (await client.post(_ROUTES[number % 2], files=files)).status_code
                    except httpx.TransportError:
                        status = 0
                    self._count("good", status)
                    await asyncio.sleep(0.05 if status == 429 else 0)
                passed = time.monotonic() - start
                self.slowest = max(self.slowest, passed)
                self.counts["missed deadlines"] += passed > _DEADLINE or status != 200

    async def _overload(self) -> None:
        count = OVERLOAD * _QUEUE

        async with self._client(count) as client:

            async def send(number: int) -> None:
                files = [("images", ("a.jpg", self.good[number % len(self.good)]))]
                try:
                    answer = await client.post(_ROUTES[number % 3], files=files)
                    self._count("overload", answer.status_code)
                except httpx.TransportError:
                    self.counts["overload closed"] += 1

            await asyncio.gather(*map(send, range(count)))

    async def _hostile(self) -> None:
        async with self._client() as client:
            for content in hostile_files():
                answer = await client.post("/v1/features", files=[("images", ("a.jpg", content))])
                self._count("hostile", answer.status_code)
                if time.monotonic() > self.end:
                    return

    async def _raw(self, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(content)
        await writer.drain()
        return reader, writer

    async def _slow(self, start: bytes) -> None:
        _, writer = await self._raw(start)
        try:
            while time.monotonic() < self.end:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(1)
        finally:
            writer.close()

    async def _slow_header(self) -> None:
        await self._slow(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")

    async def _slow_body(self) -> None:
        head = b"Content-Type: multipart/form-data; boundary=a\r\nContent-Length: 1000000\r\n\r\n"
        await self._slow(b"POST /v1/features HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head)

    async def _unread(self) -> None:
        _, writer = await self._raw(b"GET /docs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 200)
        await asyncio.sleep(min(20, max(0, self.end - time.monotonic())))
        writer.close()

    async def _malformed(self) -> None:
        for line in (
            b"Host: [::1",
            b"Host: 127.0.0.1\r\nOrigin: http://[",
            b"\xff\x00",
            b"Host: a\r\nContent-Length: -1",
        ):
            reader, writer = await self._raw(b"GET /v1/gallery HTTP/1.1\r\n" + line + b"\r\n\r\n")
            status = (await reader.readline()).split(b" ")
            self._count("malformed", int(status[1]) if len(status) > 1 else 0)
            writer.close()
        await asyncio.sleep(1)


def memory_of(process: "subprocess.Popen[str]") -> tuple[float, float]:
    """Return the memory (RSS) of a process, and of it with its descendants, in MB (Linux)."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
        except OSError:  # has ended
            continue
    family = {process.pid}
    for _ in range(4):
        family |= {pid for pid, parent in parents.items() if parent in family}

    def resident(pid: int) -> float:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS"))

    return resident(process.pid), sum(map(resident, family))


async def attack(process: "subprocess.Popen[str]", address: str, seconds: float) -> Attack:
    """Run all clients, and print a line per minute."""
    start = time.monotonic()
    clients = Attack(address, start + seconds)
    running = asyncio.gather(*clients.tasks())
    print(f"{'seconds':>8} {'service MB':>10} {'all MB':>8} {'good':>8} {'missed':>7} {'errors':>7} {'slowest s':>9}")
    while not running.done():
        await asyncio.wait([running], timeout=min(60, max(1, seconds / 4)))
        memory, family = memory_of(process)
        counts = clients.counts
        print(
            f"{time.monotonic() - start:8.0f} {memory:10.0f} {family:8.0f} {counts['good 200']:8d} "
            f"{counts['missed deadlines']:7d} {counts['errors']:7d} {clients.slowest:9.2f}",
            flush=True,
        )
    await running
    return clients


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="duration (default: %(default)g)")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        checkpoint = Path(name, "model.pth")
        write_model(checkpoint, "osnet")
        process, address = start_service(checkpoint, "--gallery", Path(name, "a.gallery"), "--queue", _QUEUE)
        try:
            clients = asyncio.run(attack(process, address, args.seconds))
            process.send_signal(signal.SIGTERM)
            print(process.communicate(timeout=90)[0].strip().splitlines()[-1])
        finally:
            process.kill()
    for kind, count in sorted(clients.counts.items()):
        print(f"{kind}: {count}")
    return int(bool(clients.counts["missed deadlines"] or clients.counts["errors"] or process.returncode))


if __name__ == "__main__":
    sys.exit(main())
