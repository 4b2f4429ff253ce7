"""Images inside larger files: FILE#START+COUNT."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from fastamp.cli import main
from fastamp.data.cache import ImageCache
from fastamp.data.datasets.items import ImageItem, PackedItems
from fastamp.data.decode import read_image
from fastamp.data.file_parts import file_of, read_bytes
from fastamp.data.missing_images import missing_files, unreadable_files
from fastamp.fastreid.data.data_utils import read_image as read_with_pil
from fastamp.utils.errors import DataError


def encoded(number, suffix="JPEG"):
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(256, size=(12, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, suffix)
    return stream.getvalue()


@pytest.fixture
def archive(tmp_path):
    """Return a file of five images, each behind a byte of a header, their paths in it, and their own files."""
    content, paths, files = b"", [], []
    for number in range(5):
        image = encoded(number, "PNG" if number == 3 else "JPEG")
        content += b"!"
        start = len(content)
        paths.append(f"{tmp_path}/all.tar#{start}+{len(image)}")
        content += image
        files.append(str(tmp_path / f"{number}.img"))
        (tmp_path / f"{number}.img").write_bytes(image)
    # Two ranges are joined.
    start, count = map(int, paths[1].rpartition("#")[2].split("+"))
    paths[1] = f"{tmp_path}/all.tar#{start}+10,{start + 10}+{count - 10}"
    (tmp_path / "all.tar").write_bytes(content)
    return tmp_path / "all.tar", paths, files


def test_bytes_of_a_file_are_an_image(archive):
    container, paths, files = archive
    for path, file in zip(paths, files, strict=True):
        assert read_bytes(path) == read_bytes(file) and file_of(path) == str(container) and file_of(file) == file
        for channels in (1, 3, 4):
            assert torch.equal(read_image(path, channels), read_image(file, channels))
        assert torch.equal(read_image(path, box=(1, 2, 5, 6)), read_image(file)[:, 2:6, 1:5])
        assert read_with_pil(path).tobytes() == read_with_pil(file).tobytes()


def test_file_names_with_a_hash_are_files(tmp_path):
    for name in ("a#1.jpg", "b#1+.jpg", "#1", "c#1+2.jpg"):
        (tmp_path / name).write_bytes(encoded(0))
        assert read_image(str(tmp_path / name)).shape == (3, 12, 8) and file_of(tmp_path / name) == str(tmp_path / name)


def test_ranges_outside_of_the_file_and_missing_files_are_data_errors(archive):
    container, paths, _ = archive
    size = container.stat().st_size
    beyond, huge, empty = f"{container}#0+{size + 1}", f"{container}#0+{10**17}", f"{container}#3+0"
    for path, message in ((beyond, f"of a file of {size} bytes"), (huge, "of a file of"), (empty, "is empty")):
        with pytest.raises(DataError, match=message):
            read_image(path)
    with pytest.raises(DataError, match="No such file"):
        read_image(f"{container}x#0+1")
    with pytest.raises(DataError, match=r"#3\+20"):
        read_image(f"{container}#3+20")
    items = PackedItems.of([(path, 0, 0) for path in (*paths, beyond, empty, f"{container}x#0+1")])
    assert missing_files(items).tolist() == [7]
    assert set(unreadable_files(items, excluded={7})) == {5, 6}


def test_cache_is_built_again_when_the_file_changes(archive, tmp_path):
    container, paths, files = archive

    def cached(names):
        items = [ImageItem(path, 0, 0) for path in names]
        cache = ImageCache(
            items, (3, 12, 8), lambda row: read_image(names[row]), where="disk", folder=str(tmp_path / "c")
        )
        cache.close()
        return cache

    first = cached(paths)
    assert torch.equal(first.images, cached(files).images) and cached(paths).path == first.path
    container.write_bytes(container.read_bytes() + b"!")
    assert cached(paths).path != first.path


def test_table_of_images_in_a_file_is_checked(archive, tmp_path, capsys):
    _, paths, _ = archive
    # Ranges that are joined contain a comma, which CSV files quote.
    lines = ["path,pid,camid,split", *(f'"{path}",{row % 2},{row},train' for row, path in enumerate(paths))]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    assert main(["check-data", f"csv:{tmp_path / 'list.csv'}", "--output", str(tmp_path / "out")]) == 0
    assert "8 x 12" in capsys.readouterr().out and list((tmp_path / "out").glob("*.png"))
