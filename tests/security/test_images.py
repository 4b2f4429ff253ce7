"""Tests of malicious image lists and images, which must not cause hangs, exhaust memory or start programs."""

import io
import itertools
import os
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.data.datasets.base import ImageItem
from fastamp.data.datasets.custom import CsvDataset
from fastamp.data.decode import jpeg_header, read_image
from fastamp.data.image_summary import inspect_image
from fastamp.utils.errors import DataError, UserError, WeightsError


def csv_set(folder, text, name="a.csv"):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return CsvDataset(folder / name)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("path,pid\na.png,\x1b[2Jb\n", "line 2.*pid.*\\\\x1b"),
        ("path,pid\na\0.png,b\n", "control characters|NUL"),
        ('path,pid\n"a\n.png",b\n', "line 3.*path"),
        ("path,pid," + ",".join(map(str, range(10**5))) + "\n", "65536"),
        ("path,pid," + "a," * 10_000 + "\n", "duplicate"),
        ("path,pid\na.png," + "x" * 200_000 + "\n", "field limit"),
        ('path,pid\n"a.png,b\n' * 3, "cannot read the CSV file"),
    ],
)
def test_reading_a_malicious_csv_dataset_raises(tmp_path, text, expected):
    with pytest.raises(DataError, match=expected) as caught:
        csv_set(tmp_path, text)
    assert len(str(caught.value)) < 1000


def test_csv_dataset_values_are_read_as_plain_text(tmp_path):
    """Formulas are not evaluated. Paths may point anywhere, since images are only read."""
    found = csv_set(tmp_path, "path,pid\n../b.png,=1+1\n~no-such-user/a.png,@SUM(A1)\n/c.png,+cmd|' /C calc'!A0\n")
    assert [item.path for item in found.train] == [f"{tmp_path}/../b.png", f"{tmp_path}/~no-such-user/a.png", "/c.png"]


def test_reading_a_device_pipe_or_circular_link_raises_instead_of_hanging(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/stdin"):
        if Path(path).is_file():
            continue  # stdin may be a regular file
        with pytest.raises(DataError, match="pipe.*device"):
            read_image(str(path))
        assert "pipe" in inspect_image(ImageItem(str(path), 0, 0)).fault
        with pytest.raises(DataError, match="pipe.*device"):
            CsvDataset(path)
        with pytest.raises(WeightsError, match="pipe.*device"):
            read_checkpoint(path)
    with pytest.raises(DataError, match="loop: Too many levels"):
        read_image(str(tmp_path / "loop"))
    with pytest.raises(UserError):
        CsvDataset(tmp_path / "loop")


def png(width, height):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")
    )


def jpeg(width, height):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    content = bytearray(stream.getvalue())
    start = content.index(b"\xff\xc0")
    content[start + 5 : start + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def bmp(width, height):
    return (
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 70, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + b"\0" * 16
    )


def scans(count, side=64):
    """Return a progressive JPEG file that repeats its last scan, and declares a height and width of ``side``."""
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "JPEG", progressive=True)
    content = bytearray(stream.getvalue())
    start = content.index(b"\xff\xc2")
    content[start + 5 : start + 9] = struct.pack(">HH", side, side)
    last, end = content.rindex(b"\xff\xda"), len(content) - 2
    found = content.count(b"\xff\xda")
    return bytes(content[:end] + content[last:end] * (count - found) + content[end:])


def sequential_scans(count):
    """Return a JPEG file with a scan of one component, many times."""
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "JPEG")
    content = stream.getvalue()
    start = content.index(b"\xff\xda")
    tail = content[start + 2 + 12 : -2]
    return content[:start] + (b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + tail) * count + b"\xff\xd9"


def padded(where):
    """Return a JPEG file with 30 MB of fill bytes in its header."""
    content = jpeg(8, 8)
    return content[:where] + b"\xff" * 30_000_000 + content[where:]


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(marker) (w) file closefile\n%%EOF\n"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


def test_reading_a_malicious_image_raises(tmp_path, recwarn, subtests):
    cases = [
        (png(60_000, 60_000), "pixels"),
        (jpeg(65_000, 65_000), "65000 x 65000 (.*)INPUT.MAX_PIXELS"),
        (bmp(2**20, 2**20), "pixels"),
        (EPS, "cannot identify"),
        (SVG, "cannot identify"),
        (scans(101), "at least 101 scans"),
        (scans(4000), "at least 101 scans"),
        (scans(60, side=6000), "at least 60 scans"),
        (sequential_scans(4000), "at least 101 scans"),
        (padded(2), "bytes between"),
        (jpeg(8, 8)[:2] + b"\xff\xfe\0\2" * 1_000_000 + jpeg(8, 8)[2:], "segments"),
        (jpeg(8, 8)[:2] + b"\xff\x01" * 1_000_000 + jpeg(8, 8)[2:], "segments"),
    ]
    for (content, expected), channels in itertools.product(cases, [1, 3, 4]):
        with subtests.test(content=content[:20], expected=expected, channels=channels):
            (tmp_path / "a.jpg").write_bytes(content)
            with pytest.raises(DataError, match=expected):
                read_image(str(tmp_path / "a.jpg"), channels)
            assert inspect_image(ImageItem(str(tmp_path / "a.jpg"), 0, 0)).fault


def test_scans_fill_bytes_and_restarts_of_usual_files_are_read(tmp_path):
    """Markers in the metadata are not scans."""
    plain = jpeg(8, 8)
    comment = b"\xff\xfe\x01\x2c" + b"\xff\xda" * 149
    for content in (scans(100), plain[:2] + b"\xff" * 1000 + plain[2:], plain[:2] + comment + plain[2:]):
        (tmp_path / "a.jpg").write_bytes(content)
        for channels in (1, 3, 4):
            assert read_image(str(tmp_path / "a.jpg"), channels).shape[0] == channels
    assert jpeg_header(scans(12), "")[:3] == (64, 64, 12)
    assert jpeg_header(plain[:2] + b"\xff" * 1000 + plain[2:], "")[:3] == (8, 8, 1)
    assert jpeg_header(sequential_scans(3), "")[:3] == (64, 64, 3)
    assert jpeg_header(plain[:10], "")[:3] == (0, 0, 0)


def test_reading_a_damaged_png_raises_instead_of_crashing(tmp_path):
    """The decoder of torchvision crashes with a segmentation fault on this file."""
    rows = b"".join(b"\x09" + bytes(48) for _ in range(32))  # filter type 9 does not exist
    content = png(16, 32)
    start, stop = content.index(b"IDAT") - 4, content.index(b"IEND") - 4
    data = zlib.compress(rows)
    chunk = struct.pack(">I", len(data)) + b"IDAT" + data + struct.pack(">I", zlib.crc32(b"IDAT" + data))
    (tmp_path / "a.png").write_bytes(content[:start] + chunk + content[stop:])
    for channels in (1, 3, 4):
        with pytest.raises(DataError, match=r"a\.png"):
            read_image(str(tmp_path / "a.png"), channels)
