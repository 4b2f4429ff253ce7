"""Files that mean harm: nothing in them is run, and nothing is written outside OUTPUT_DIR."""

import ast
import io
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import amp_replay
import evaluate_features
import import_checkpoint
import numpy as np
import pytest
import tiny
import torch
import train_net
from PIL import Image

from fastamp.config import get_cfg
from fastamp.data.check import _look
from fastamp.data.datasets.base import ImageItem
from fastamp.data.datasets.cuhk03_files import new_split
from fastamp.data.datasets.own import CsvDataset
from fastamp.data.decode import read_image
from fastamp.data.store import ImageStore
from fastamp.utils.checkpoint import read_checkpoint
from fastamp.utils.errors import ConfigError, DataError, UserError, WeightsError
from fastamp.utils.files import folder_name
from fastamp.utils.logger import setup_logger
from fastamp.utils.printable import printable

ROOT = Path(__file__).parents[1]

# ---- what the sources must not do

FORBIDDEN = {
    "eval": "runs text", "exec": "runs text", "__import__": "imports by name", "os.system": "is a shell",
    "os.popen": "is a shell", "pickle.load": "runs code", "pickle.loads": "runs code", "pickle.Unpickler": "runs code",
    "yaml.unsafe_load": "runs code", "yaml.full_load": "makes objects", "torch.hub.load": "runs code",
    "tarfile.open": "may write anywhere", "shutil.unpack_archive": "may write anywhere",
}  # fmt: skip
REQUIRED = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
ALLOWED = {"projects/FastTune/autotuner/algorithms.py": "__import__"}  # of names that stand there


def faults(path):
    """Yield the calls in a source that could run what is in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name, words = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
        if name in FORBIDDEN:
            yield f"{path}:{node.lineno}: {name} {FORBIDDEN[name]}"
        if name in REQUIRED and words.get(REQUIRED[name][0]) != str(REQUIRED[name][1]):
            yield f"{path}:{node.lineno}: {name} without {REQUIRED[name][0]}={REQUIRED[name][1]}"
        if name.endswith("load_state_dict_from_url") and words.get("weights_only") != "True":
            yield f"{path}:{node.lineno}: {name} without weights_only=True"
        if words.get("shell", "False") != "False":
            yield f"{path}:{node.lineno}: {name} with a shell"
        if name == "yaml.load" and words.get("Loader") not in ("_Loader", "yaml.SafeLoader"):
            yield f"{path}:{node.lineno}: yaml.load without a safe loader"
        if name.endswith((".extractall", ".extract")):
            yield f"{path}:{node.lineno}: {name} may write anywhere"


def test_no_source_runs_what_is_in_a_file():
    sources = [path for folder in ("fastamp", "tools", "projects") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 100
    found = [fault for path in sources for fault in faults(path)]
    allowed = [f"{ROOT / path}:" for path in ALLOWED]
    left = [fault for fault in found if not fault.startswith(tuple(allowed)) or "__import__" not in fault]
    assert [fault for fault in left if "tools/benchmark" not in fault] == []


def test_that_check_can_fail(tmp_path):
    source = tmp_path / "a.py"
    source.write_text(
        "torch.load(p)\ntorch.load(p, weights_only=False)\nnp.load(p)\nyaml.load(t)\nyaml.load(t, Loader=yaml.Loader)\n"
        "subprocess.run(c, shell=True)\nos.system(c)\neval(t)\npickle.loads(b)\narchive.extractall(f)\n"
        "torch.load(p, weights_only=True)\nmodel.eval()\nyaml.load(t, Loader=yaml.SafeLoader)\n"
    )
    assert len(list(faults(source))) == 10


# ---- checkpoints that would run code


class Evil:
    """Unpickled, it makes a file named marker in the current folder."""

    def __init__(self, function=os.system, argument="touch marker"):
        self.made = function, (argument,)

    def __reduce__(self):
        return self.made


class Scalar:
    """Looks like a NumPy scalar, of a dtype that is a call."""

    def __reduce__(self):
        return np.float64(0).__reduce__()[0], (Evil(), b"\0" * 8)


def legacy(content, path):
    torch.save(content, path, _use_new_zipfile_serialization=False)


def old_tar(content, path):
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            data = pickle.dumps(content, protocol=2)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def hand_made_zip(content, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
        archive.writestr("archive/version", "3\n")


def plain_pickle(content, path):
    path.write_bytes(pickle.dumps(content))


CONTENTS = {
    "a value": {"model": Evil()},
    "deep": {"model": {"a": torch.ones(2)}, "trainer": {"hooks": [({"best": (1, [Evil()])},)]}},
    "eval": {"model": Evil(eval, "open('marker', 'w')")},
    "a scalar": {"model": {"a": torch.ones(2)}, "epoch": Scalar()},
    "a key": {"model": {"a": torch.ones(2)}, ("b", Evil()): 1},
}
WRITERS = {"zip": torch.save, "legacy": legacy, "tar": old_tar, "by hand": hand_made_zip, "pickle": plain_pickle}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_files_would_run_code(here):
    """The negative control: what refuses nothing runs it."""
    torch.save(CONTENTS["deep"], here / "evil.pth")
    torch.load(here / "evil.pth", weights_only=False)
    assert (here / "marker").exists()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("content", CONTENTS)
def test_checkpoints_that_would_run_code(here, content, writer):
    path = here / "evil.pth"
    if (content, writer) == ("a scalar", "zip") or True:
        WRITERS[writer](CONTENTS[content], path)
    with pytest.raises(WeightsError, match=r"evil\.pth"):
        read_checkpoint(path)
    assert not (here / "marker").exists()


def test_every_place_that_reads_a_checkpoint(demo, here, capfd):
    output = here / "output"
    output.mkdir()
    evil = output / "evil.pth"
    torch.save(CONTENTS["deep"], evil)
    (output / "last_checkpoint").write_text("evil.pth")
    (here / "teacher.yml").write_text("MODEL: {BACKBONE: {NAME: build_tiny_backbone, FEAT_DIM: 16}}")
    run = tiny.tiny_options(output)
    resnet = ("MODEL.BACKBONE.NAME", "build_resnet_backbone", "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512")
    resnet += ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(evil))
    teacher = ("MODEL.META_ARCHITECTURE", "Distiller", "KD.MODEL_CONFIG", "('teacher.yml',)", "KD.MODEL_WEIGHTS", f"('{evil}',)")
    commands = [
        (train_net.cli, [*run, "MODEL.WEIGHTS", str(evil)]),
        (train_net.cli, ["--eval-only", *run, "MODEL.WEIGHTS", str(evil)]),
        (train_net.cli, ["--resume", *run]),
        (train_net.cli, [*run, *resnet]),
        (train_net.cli, [*run, *teacher]),
        (import_checkpoint.cli, [str(evil), "out.pth"]),
    ]
    for command, argv in commands:
        assert command(argv) == 2
        stderr = capfd.readouterr().err
        assert "evil.pth" in stderr and "Traceback" not in stderr, stderr
    with pytest.raises(WeightsError):
        amp_replay.replay(str(evil))
    assert not (here / "marker").exists() and not (here / "out.pth").exists()


def test_a_compressed_checkpoint_is_not_unpacked(tmp_path):
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**8)
    with pytest.raises(WeightsError, match=r"bomb\.pth holds 100000000 bytes"):
        read_checkpoint(path)


def test_arrays_that_would_run_code(here, capfd):
    arrays = {name: np.array([Evil()], dtype=object) for name in ("query_features", "gallery_features", "query_pids")}
    np.savez(here / "evil.npz", **arrays)
    assert evaluate_features.cli([str(here / "evil.npz")]) == 2
    assert "evil.npz is damaged or no npz file of plain arrays" in capfd.readouterr().err
    # A header that claims 10^15 numbers.
    header = np.lib.format.magic(1, 0) + struct.pack("<H", 118)
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10**6,), }".replace(b"10**6", b"1000000000000000")
    with zipfile.ZipFile(here / "huge.npz", "w") as archive:
        archive.writestr("query_features.npy", header + text.ljust(117) + b"\n")
    assert evaluate_features.cli([str(here / "huge.npz")]) == 2
    assert "huge.npz" in capfd.readouterr().err
    assert not (here / "marker").exists()


def test_a_mat_file_that_is_a_pickle(here):
    (here / "evil.mat").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match=r"evil\.mat is damaged"):
        new_split(here / "evil.mat", [])
    assert not (here / "marker").exists()


def test_a_pickle_in_the_cache_of_images(here):
    Image.new("RGB", (4, 4), "red").save(here / "a.png")
    items, arguments = [ImageItem(str(here / "a.png"), "a", 0)], {"where": "disk", "folder": str(here / "cache")}
    store = ImageStore(items, (3, 4, 4), lambda number: read_image(items[number].path), **arguments)
    path = store.path
    store.close()
    del store
    path.write_bytes(pickle.dumps(Evil()))
    store = ImageStore(items, (3, 4, 4), lambda number: read_image(items[number].path), **arguments)
    assert store.images[0, 0].eq(255).all() and not (here / "marker").exists()


# ---- YAML

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(12)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} {{<<: [{', '.join(['*' + chr(97 + n)] * 9)}]}}\n" for n in range(12)
)
YAMLS = {
    "apply": "SEED: !!python/object/apply:os.system ['touch marker']\n",
    "new": "SEED: !!python/object/new:os.system ['touch marker']\n",
    "name": "SEED: !!python/name:os.system\n",
    "module": "SEED: !!python/module:antigravity\n",
    "aliases": BOMB + "SOLVER: *m\n",
    "merges": MERGES,
    "circle": "SOLVER: &a {STEPS: [*a]}\n",
    "depth": "SOLVER: " + "[" * 5000,
    "size": "SOLVER: [" + "1, " * 100_000 + "]\n",
}


@pytest.mark.parametrize("name", YAMLS)
def test_configs_that_mean_harm(here, name):
    file = here / "evil.yml"
    file.write_text(YAMLS[name])
    (here / "child.yml").write_text("_BASE_: evil.yml\n")
    for path in (file, here / "child.yml"):
        with pytest.raises(ConfigError, match=r"evil\.yml") as caught:
            get_cfg().merge_from_file(path)
        assert len(str(caught.value)) < 2000
    with pytest.raises(ConfigError) as caught:
        get_cfg().merge_from_list(["SOLVER.OPT_ARGS", "{a: 1,\n " + YAMLS[name].replace("\n", ",\n") + "}"])
    assert len(str(caught.value)) < 2000
    assert not (here / "marker").exists()


def test_a_config_is_a_file_on_disk(here):
    os.mkfifo(here / "pipe.yml")
    for path in (here / "pipe.yml", "/dev/zero"):
        with pytest.raises(ConfigError, match="a pipe or a device"):
            get_cfg().merge_from_file(path)
    for base in ("config.py", "/etc/passwd.py", "http://127.0.0.1/a.yml", "file:///etc/passwd", "/dev/zero"):
        (here / "child.yml").write_text(f"_BASE_: {base}\n")
        with pytest.raises(ConfigError, match=r"_BASE_ of .*child\.yml"):
            get_cfg().merge_from_file(here / "child.yml")


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_text_that_no_file_could_have_as_its_name(text):
    for key in ("OUTPUT_DIR", "DATASETS.NAMES", "SOLVER.OPT_ARGS.x"):
        with pytest.raises(ConfigError, match=key):
            get_cfg().merge_from_list([key, text])


# ---- lists of images, and images


def csv_set(folder, text, name="a.csv"):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return CsvDataset(folder / name)


@pytest.mark.parametrize(
    "text, told",
    [
        ("path,pid\na.png,\x1b[2Jb\n", "line 2: pid has control characters: '\\\\x1b"),
        ("path,pid\na\0.png,b\n", "control characters|NUL"),
        ('path,pid\n"a\n.png",b\n', "line 3: path has control characters"),
        ("path,pid," + ",".join(map(str, range(10**5))) + "\n", "that is no header"),
        ("path," * 10_000 + "\n", "twice"),
        ("path,pid\na.png," + "x" * 200_000 + "\n", "field larger than field limit"),
        ('path,pid\n"a.png,b\n' * 3, "cannot be read as a CSV"),
    ],
)
def test_lists_that_mean_harm(tmp_path, text, told):
    with pytest.raises(DataError, match=told) as caught:
        csv_set(tmp_path, text)
    assert len(str(caught.value)) < 1000


def test_a_list_of_images_is_text_alone(tmp_path):
    """Formulas are names like others, and a path may lead anywhere, to be read."""
    found = csv_set(tmp_path, "path,pid\n../b.png,=1+1\n~nobody/a.png,@SUM(A1)\n/c.png,+cmd|' /C calc'!A0\n")
    assert [item.path for item in found.train] == [f"{tmp_path}/../b.png", f"{tmp_path}/~nobody/a.png", "/c.png"]


def test_devices_and_pipes_and_links_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/stdin"):
        if Path(path).is_file():
            continue  # what runs the tests may give them a file to read
        with pytest.raises(DataError, match="a pipe or a device"):
            read_image(str(path))
        assert "a pipe or a device" in _look(ImageItem(str(path), 0, 0)).fault
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
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")


def jpeg(width, height):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    content = bytearray(stream.getvalue())
    place = content.index(b"\xff\xc0")
    content[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def bmp(width, height):
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 70, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + b"\0" * 16


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(marker) (w) file closefile\n%%EOF\n"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


@pytest.mark.parametrize(
    "content, told",
    [
        (png(60_000, 60_000), "pixels"),
        (jpeg(65_000, 65_000), "more than 178956970 pixels"),
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
    assert _look(ImageItem(str(tmp_path / "a.jpg"), 0, 0)).fault


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


# ---- where it writes, and what the terminal gets


@pytest.mark.parametrize("name", ["csv:/data/../../x.csv", "folder:../..", "..", ".", "", "a\\..\\b", "x" * 5000, "é" * 300])
def test_a_data_sets_name_is_one_folder(tmp_path, name):
    folder = tmp_path / "evaluation" / folder_name(name)
    folder.mkdir(parents=True)
    assert folder.resolve().parent == (tmp_path / "evaluation").resolve()


def test_other_names_have_other_folders():
    names = ["a/b", "a%2Fb", "a_b", "..", "%2E%2E", "x" * 5000, "x" * 5001, "Market1501", "csv:mine.csv"]
    assert len({folder_name(name) for name in names}) == len(names)
    assert folder_name("Market1501") == "Market1501"


def test_what_is_written_of_a_set_with_dots_in_its_name(demo, tmp_path, capfd):
    data = tmp_path / "deep" / "data"
    data.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (32, 64), (number * 60, 0, 0)).save(data / f"{number}.png")
    lines = [f"{n}.png,{n // 2},{n % 2},{('query', 'gallery')[n % 2]}" for n in range(4)]
    (data / "mine.csv").write_text("\n".join(["path,pid,camid,split", *lines]))
    name = f"csv:{data}/../../../../../../..{data}/mine.csv"
    output = tmp_path / "output"
    options = ("DATASETS.TESTS", name, "TEST.PER_QUERY", "True", "SOLVER.MAX_EPOCH", "1")
    assert train_net.cli(tiny.tiny_options(output, *options)) == 0
    assert [path.parents[2] for path in tmp_path.rglob("per_query.npz")] == [output]


def test_a_link_out_of_the_runs_folder(demo, tmp_path, capfd):
    output, precious = tmp_path / "output", tmp_path / "precious"
    output.mkdir()
    precious.write_text("mine")
    (output / "log.txt").symlink_to(precious)
    assert train_net.cli(tiny.tiny_options(output)) == 2
    assert "log.txt in it is a link to" in capfd.readouterr().err
    assert precious.read_text() == "mine"
    (output / "log.txt").unlink()
    for name in ("config.yaml", "metrics.json", "last_checkpoint", "model_final.pth"):
        (output / name).symlink_to(precious)
    assert train_net.cli(tiny.tiny_options(output, "SOLVER.MAX_EPOCH", "1")) == 0
    assert precious.read_text() == "mine"


def test_the_cache_in_memory_is_ours_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("fastamp.data.store._SHARED_MEMORY", tmp_path)
    folder = tmp_path / f"fastamp-cache-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    items = [ImageItem(str(tmp_path / "a.png"), "a", 0)]
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="DATALOADER.CACHE ram: .* is another user's"):
        ImageStore(items, (3, 4, 4), lambda number: read_image(items[0].path), where="ram")
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(DataError, match="others can write to"):
        ImageStore(items, (3, 4, 4), lambda number: read_image(items[0].path), where="ram")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_names_give_a_terminal_no_commands(tmp_path, capsys):
    assert printable("a\x1b[2Jb\r\u202ec\ud880\n\té") == "a\\x1b[2Jb\\r\\u202ec\\ud880\n\té"
    setup_logger(tmp_path)
    import logging

    logging.getLogger("fastamp").warning("reading %s", "\x1b]0;owned\x07 \udcff")
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text()):
        assert "reading \\x1b]0;owned\\x07 \\udcff" in text and "\x1b]" not in text
    with pytest.raises(SystemExit):
        train_net.cli(["--num-gpus", "x"])
    capsys.readouterr()
    assert train_net.cli(["--config-file", "\x1b[31mnone.yml"]) == 2
    assert "\\x1b[31mnone.yml" in capsys.readouterr().err
