"""Lists of images, and images, that mean harm: they do not hang, fill the memory, or run a program."""

import io
import os
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.data.check import _inspect_image
from fastamp.data.datasets.base import ImageItem
from fastamp.data.datasets.custom import CsvDataset
from fastamp.data.decode import read_image
from fastamp.utils.errors import DataError, UserError, WeightsError


def csv_set(folder, text, name="a.csv"):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return CsvDataset(folder / name)


@pytest.mark.parametrize(
    "text, told",
    [
        ("path,pid\na.png,\x1b[2Jb\n", "line 2: control characters in pid: '\\\\x1b"),
        ("path,pid\na\0.png,b\n", "control characters|NUL"),
        ('path,pid\n"a\n.png",b\n', "line 3: control characters in path"),
        ("path,pid," + ",".join(map(str, range(10**5))) + "\n", "at most 65536 characters"),
        ("path,pid," + "a," * 10_000 + "\n", "duplicate"),
        ("path,pid\na.png," + "x" * 200_000 + "\n", "field larger than field limit"),
        ('path,pid\n"a.png,b\n' * 3, "cannot read the CSV file"),
    ],
)
def test_lists_that_mean_harm(tmp_path, text, told):
    with pytest.raises(DataError, match=told) as caught:
        csv_set(tmp_path, text)
    assert len(str(caught.value)) < 1000


def test_a_list_of_images_is_text_alone(tmp_path):
    """Formulas are names like others, and a path may lead anywhere, to be read."""
    found = csv_set(tmp_path, "path,pid\n../b.png,=1+1\n~no-such-user/a.png,@SUM(A1)\n/c.png,+cmd|' /C calc'!A0\n")
    assert [item.path for item in found.train] == [f"{tmp_path}/../b.png", f"{tmp_path}/~no-such-user/a.png", "/c.png"]


def test_devices_and_pipes_and_links_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/stdin"):
        if Path(path).is_file():
            continue  # what runs the tests may give them a file to read
        with pytest.raises(DataError, match="a pipe or a device"):
            read_image(str(path))
        assert "a pipe or a device" in _inspect_image(ImageItem(str(path), 0, 0)).fault
        with pytest.raises(DataError, match="a pipe or a device"):
            CsvDataset(path)
        with pytest.raises(WeightsError, match="a pipe or a device"):
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
    place = content.index(b"\xff\xc0")
    content[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def bmp(width, height):
    return (
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 70, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + b"\0" * 16
    )


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(marker) (w) file closefile\n%%EOF\n"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


@pytest.mark.parametrize(
    "content, told",
    [
        (png(60_000, 60_000), "pixels"),
        (jpeg(65_000, 65_000), "65000 x 65000 pixels, more than INPUT.MAX_PIXELS"),
        (bmp(2**20, 2**20), "pixels"),
        (EPS, "cannot identify"),
        (SVG, "cannot identify"),
    ],
    ids=["png", "jpeg", "bmp", "eps", "svg"],
)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_that_mean_harm(tmp_path, content, told, channels, recwarn):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(DataError, match=told):
        read_image(str(tmp_path / "a.jpg"), channels)
    assert _inspect_image(ImageItem(str(tmp_path / "a.jpg"), 0, 0)).fault


def test_a_damaged_png_does_not_end_the_process(tmp_path):
    """torchvision's decoder ended it with a segmentation fault."""
    rows = b"".join(b"\x09" + bytes(48) for _ in range(32))  # there is no filter 9
    content = png(16, 32)
    start, stop = content.index(b"IDAT") - 4, content.index(b"IEND") - 4
    data = zlib.compress(rows)
    chunk = struct.pack(">I", len(data)) + b"IDAT" + data + struct.pack(">I", zlib.crc32(b"IDAT" + data))
    (tmp_path / "a.png").write_bytes(content[:start] + chunk + content[stop:])
    for channels in (1, 3, 4):
        with pytest.raises(DataError, match=r"a\.png"):
            read_image(str(tmp_path / "a.png"), channels)
