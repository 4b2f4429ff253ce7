"""Config files: bases, circles, and files that are no config."""

import pytest

from fastamp.config import get_cfg
from fastamp.config.files import read_layers
from fastamp.utils.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """A function that writes a file below tmp_path and returns its path."""

    def write_file(name, content):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write_file


def merge(path):
    cfg = get_cfg()
    cfg.merge_from_file(path)
    return cfg


def test_a_base_is_relative_to_the_file_that_names_it(write, tmp_path, monkeypatch):
    write("base/root.yml", "SEED: 1\nSOLVER: {BASE_LR: 0.1, MAX_EPOCH: 3}")
    write("base/middle.yml", "_BASE_: root.yml\nSOLVER: {BASE_LR: 0.2}")
    child = write("recipes/child.yml", "_BASE_: ../base/middle.yml\nLOG_PERIOD: 7")
    for path in (child, str(child)):
        cfg = merge(path)
        assert (cfg.SEED, cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_EPOCH, cfg.LOG_PERIOD) == (1, 0.2, 3, 7)
    monkeypatch.chdir(tmp_path / "recipes")
    assert merge("child.yml").SOLVER.BASE_LR == 0.2


def test_a_list_of_bases_in_order_and_a_diamond(write):
    write("root.yml", "SEED: 1")
    write("a.yml", "_BASE_: root.yml\nLOG_PERIOD: 1\nSOLVER: {GAMMA: 0.5}")
    write("b.yml", "_BASE_: root.yml\nLOG_PERIOD: 2")
    cfg = merge(write("child.yml", "_BASE_: [a.yml, b.yml]\n"))
    assert (cfg.SEED, cfg.LOG_PERIOD, cfg.SOLVER.GAMMA) == (1, 2, 0.5)


def test_the_home_folder(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("base.yml", "SEED: 6")
    write("deep/er/child.yml", "_BASE_: ~/base.yml")
    assert merge("~/deep/er/child.yml").SEED == 6


def test_an_absolute_base(write):
    base = write("base.yml", "SEED: 6")
    assert merge(write("deep/child.yml", f"_BASE_: {base}")).SEED == 6


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_circle_shows_the_chain(write, length):
    files = [write(f"{i}.yml", f"_BASE_: {(i + 1) % length}.yml") for i in range(length)]
    with pytest.raises(ConfigError) as caught:
        merge(files[0])
    assert " -> ".join(map(str, [*files, files[0]])) in str(caught.value)


def test_a_circle_through_a_link(write, tmp_path):
    file = write("a.yml", "_BASE_: link.yml")
    (tmp_path / "link.yml").symlink_to(file)
    with pytest.raises(ConfigError, match="circle"):
        merge(file)


@pytest.mark.parametrize("content", [b"", b"\n", b"# only a comment\n", b"---\n", b"\xef\xbb\xbf", b"{}", b"~"])
def test_an_empty_file_merges_nothing(write, content):
    assert merge(write("empty.yml", content)) == get_cfg()


def test_a_byte_order_mark_and_line_ends_of_windows(write):
    assert merge(write("bom.yml", b"\xef\xbb\xbfSEED: 3\r\nSOLVER:\r\n  AMP: on\r\n")).SEED == 3


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.yml", "SEED: 1\nSOLVER: [1, 2\nX: 3\n", "line 3"),
        ("a.yml", "SEED: 1\n\tSOLVER: 2\n", "line 2"),
        ("a.yml", "- 1\n- 2\n", "expected a mapping of config keys, got list"),
        ("a.yml", "just text", "expected a mapping of config keys, got str"),
        ("a.yml", "42", "expected a mapping of config keys, got int"),
        ("a.yml", "SEED: 1\n---\nSEED: 2\n", "single document"),
        (
            "a.yml",
            "SEED: 1\nSOLVER: {GAMMA: 1}\nSEED: 2\n",
            "line 3: this is no valid YAML for a config: the key 'SEED'",
        ),
        ("a.yml", b"SEED: \xff\xfe\n", "UTF-8"),
        ("a.yml", "SEED: 1\n".encode("utf-16"), "UTF-8"),
        ("a.yml", b"SEED: \x00\n", "no valid YAML"),
        ("a.yml", "SEED: !!int x\n", "no valid YAML"),
        ("a.yml", "SEED: !!timestamp x\n", "no valid YAML"),
        ("a.yml", "SEED: 2024-13-45\n", "no valid YAML"),
        ("a.yml", "SEED: *nowhere\n", "line 1"),
        ("a.yml", "? [1, 2]\n: 3\n", "a.yml"),
        ("a.yml", "? {a: 1}\n: 3\n", "no valid YAML"),
        ("a.yml", "1: 2\n", "a config key is text, got 1 (int)"),
        ("a.yml", "on: 2\n", "a config key is text, got True (bool)"),
        ("a.yml", "&a SEED: &b [*b]\n", "values without end"),
        ("a.yml", "SOLVER: &a {OPT_ARGS: *a}\n", "values without end"),
        ("a.yml", "SOLVER: &a {AMP: *a}\n", "values without end"),
        ("a.yml", "SOLVER: {STEPS: &b [*b]}\n", "values without end"),
        ("a.yml", "SEED: " + "[" * 5000 + "\n", "no valid YAML"),
        ("a.yml", "SOLVER:\n", "SOLVER: expected a section, got nothing (null)"),
        ("a.yml", "_BASE_: 3\n", "_BASE_ must be a path or a list of paths, got 3"),
        ("a.yml", "_BASE_:\n", "_BASE_ must be a path"),
        ("a.yml", "_BASE_: ['']\n", "_BASE_ must be a path"),
        ("a.yml", "_BASE_: {a: b}\n", "_BASE_ must be a path"),
        ("a.yml", "_BASE_: gone.yml\n", "gone.yml (_BASE_ of "),
        ("a.yml", "_BASE_: .\n", "this is a folder"),
        ("a.yml", "_BASE_: evil.py\n", "evil.py (_BASE_ of "),
        ("a.yml", '_BASE_: "a\\0b"\n', "_BASE_ must be a path"),
        ("a.yml", "SOLVER: {_BASE_: b.yml}\n", "'SOLVER._BASE_' is no config key"),
        ("a.py", "cfg = {}\n", "Python files are not run"),
        ("a.PYC", b"\x00", "Python files are not run"),
    ],
)
def test_what_is_no_config_is_named(write, name, content, told):
    file = write(name, content)
    cfg = get_cfg()
    with pytest.raises(ConfigError) as caught:
        cfg.merge_from_file(file)
    assert told in str(caught.value)
    assert str(file) in str(caught.value)
    assert cfg == get_cfg()


def test_missing_file_and_folder(tmp_path, write):
    write("near.yml", "SEED: 1")
    with pytest.raises(ConfigError, match=r"gone\.yml: there is no such config file\n  there are: near\.yml"):
        merge(tmp_path / "gone.yml")
    with pytest.raises(ConfigError, match=r"nor is there a folder"):
        merge(tmp_path / "no" / "gone.yml")
    with pytest.raises(ConfigError, match=r"this is a folder"):
        merge(tmp_path)
    with pytest.raises(ConfigError, match=r"this is a folder"):
        merge("")
    with pytest.raises(ConfigError, match=r"cannot read this config file"):
        merge("a\0b.yml")


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch [{0}]",
        "!!python/object/new:os.system [touch {0}]",
        "!!python/name:os.system",
        "!!python/tuple [1, 2]",
        "!custom x",
    ],
)
def test_a_tag_is_refused_and_nothing_runs(write, tmp_path, tag):
    witness = tmp_path / "ran"
    file = write("evil.yml", f"SEED: 1\nOUTPUT_DIR: {tag.format(witness)}\n")
    with pytest.raises(ConfigError, match=r"evil\.yml, line 2: .*could not determine a constructor"):
        merge(file)
    assert not witness.exists()


def test_anchors_and_merge_keys_work(write):
    text = (
        "INPUT:\n  SIZE_TRAIN: &size [384, 128]\n  SIZE_TEST: *size\nTEST: {FLIP: &on {ENABLED: True}, ROC: {<<: *on}}"
    )
    cfg = merge(write("a.yml", text))
    assert cfg.INPUT.SIZE_TEST == (384, 128)
    assert cfg.TEST.ROC.ENABLED is True


def test_layers_are_pairs_of_path_and_mapping(write):
    base, child = write("base.yml", "SEED: 1"), write("child.yml", "_BASE_: base.yml\nSEED: 2")
    assert read_layers(child) == [(str(base), {"SEED": 1}), (str(child), {"SEED": 2})]
