"""Config files: merging of base files, cyclic base files, and invalid files."""

import re

import pytest

from fastamp.config import get_cfg
from fastamp.config.files import read_layers
from fastamp.utils.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """Function that writes a file in tmp_path and returns its path."""

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


def test_base_path_is_relative_to_the_file_that_lists_it(write, tmp_path, monkeypatch):
    write("base/root.yml", "SEED: 1\nSOLVER: {BASE_LR: 0.1, MAX_EPOCH: 3}")
    write("base/middle.yml", "_BASE_: root.yml\nSOLVER: {BASE_LR: 0.2}")
    child = write("recipes/child.yml", "_BASE_: ../base/middle.yml\nLOG_PERIOD: 7")
    for path in (child, str(child)):
        cfg = merge(path)
        assert (cfg.SEED, cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_EPOCH, cfg.LOG_PERIOD) == (1, 0.2, 3, 7)
    monkeypatch.chdir(tmp_path / "recipes")
    assert merge("child.yml").SOLVER.BASE_LR == 0.2


def test_later_base_file_overrides_earlier_base_file(write):
    write("root.yml", "SEED: 1")
    write("a.yml", "_BASE_: root.yml\nLOG_PERIOD: 1\nSOLVER: {GAMMA: 0.5}")
    write("b.yml", "_BASE_: root.yml\nLOG_PERIOD: 2")
    cfg = merge(write("child.yml", "_BASE_: [a.yml, b.yml]\n"))
    assert (cfg.SEED, cfg.LOG_PERIOD, cfg.SOLVER.GAMMA) == (1, 2, 0.5)


def test_tilde_in_config_and_base_paths_is_expanded(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("base.yml", "SEED: 6")
    write("deep/er/child.yml", "_BASE_: ~/base.yml")
    assert merge("~/deep/er/child.yml").SEED == 6


def test_config_file_accepts_an_absolute_base_path(write):
    base = write("base.yml", "SEED: 6")
    assert merge(write("deep/child.yml", f"_BASE_: {base}")).SEED == 6


@pytest.mark.parametrize("length", [1, 2, 3])
def test_cyclic_base_error_shows_the_chain_of_files(write, length):
    files = [write(f"{i}.yml", f"_BASE_: {(i + 1) % length}.yml") for i in range(length)]
    with pytest.raises(ConfigError) as caught:
        merge(files[0])
    assert " -> ".join(map(str, [*files, files[0]])) in str(caught.value)


def test_cyclic_base_through_a_symbolic_link_raises(write, tmp_path):
    file = write("a.yml", "_BASE_: link.yml")
    (tmp_path / "link.yml").symlink_to(file)
    with pytest.raises(ConfigError, match=r"a\.yml -> .*link\.yml"):
        merge(file)


@pytest.mark.parametrize("content", [b"", b"\n", b"# only a comment\n", b"---\n", b"\xef\xbb\xbf", b"{}", b"~"])
def test_empty_config_file_changes_nothing(write, content):
    assert merge(write("empty.yml", content)) == get_cfg()


def test_config_file_with_byte_order_mark_and_windows_line_endings_is_accepted(write):
    assert merge(write("bom.yml", b"\xef\xbb\xbfSEED: 3\r\nSOLVER:\r\n  AMP: on\r\n")).SEED == 3


def test_invalid_config_file_error_names_the_file(write, subtests):
    cases = [
        ("a.yml", "SEED: 1\nSOLVER: [1, 2\nX: 3\n", "line 3"),
        ("a.yml", "SEED: 1\n\tSOLVER: 2\n", "line 2"),
        ("a.yml", "- 1\n- 2\n", "got list"),
        ("a.yml", "just text", "got str"),
        ("a.yml", "42", "got int"),
        ("a.yml", "SEED: 1\n---\nSEED: 2\n", "single document"),
        ("a.yml", "SEED: 1\nSOLVER: {GAMMA: 1}\nSEED: 2\n", "line 3: invalid YAML: duplicate key 'SEED'"),
        ("a.yml", b"SEED: \xff\xfe\n", "UTF-8"),
        ("a.yml", "SEED: 1\n".encode("utf-16"), "UTF-8"),
        ("a.yml", b"SEED: \x00\n", "invalid YAML"),
        ("a.yml", "SEED: !!int x\n", "invalid YAML"),
        ("a.yml", "SEED: !!timestamp x\n", "invalid YAML"),
        ("a.yml", "SEED: 2024-13-45\n", "invalid YAML"),
        ("a.yml", "SEED: *nowhere\n", "line 1"),
        ("a.yml", "? [1, 2]\n: 3\n", "a.yml"),
        ("a.yml", "? {a: 1}\n: 3\n", "invalid YAML"),
        ("a.yml", "1: 2\n", "got 1 (int)"),
        ("a.yml", "on: 2\n", "got True (bool)"),
        ("a.yml", "&a SEED: &b [*b]\n", "aliases"),
        ("a.yml", "SOLVER: &a {OPT_ARGS: *a}\n", "aliases"),
        ("a.yml", "SOLVER: &a {AMP: *a}\n", "aliases"),
        ("a.yml", "SOLVER: {STEPS: &b [*b]}\n", "aliases"),
        ("a.yml", "SEED: " + "[" * 5000 + "\n", "invalid YAML"),
        ("a.yml", "SOLVER:\n", "SOLVER: "),
        ("a.yml", "_BASE_: 3\n", "_BASE_: expected a path or a list of paths, got 3"),
        ("a.yml", "_BASE_:\n", "_BASE_: expected a path"),
        ("a.yml", "_BASE_: ['']\n", "_BASE_: expected a path"),
        ("a.yml", "_BASE_: {a: b}\n", "_BASE_: expected a path"),
        ("a.yml", "_BASE_: gone.yml\n", "gone.yml (_BASE_ of "),
        ("a.yml", "_BASE_: .\n", "folder"),
        ("a.yml", "_BASE_: evil.py\n", "evil.py (_BASE_ of "),
        ("a.yml", '_BASE_: "a\\0b"\n', "_BASE_: expected a path"),
        ("a.yml", "SOLVER: {_BASE_: b.yml}\n", "'SOLVER._BASE_'"),
        ("a.py", "cfg = {}\n", "Python file"),
        ("a.PYC", b"\x00", "Python file"),
    ]
    for name, content, shown in cases:
        with subtests.test(name=name, content=content[:40]):
            file = write(name, content)
            cfg = get_cfg()
            with pytest.raises(ConfigError) as caught:
                cfg.merge_from_file(file)
            assert shown in str(caught.value)
            assert str(file) in str(caught.value)
            assert cfg == get_cfg()


def test_missing_config_file_error_lists_config_files_in_the_folder(tmp_path, write):
    write("near.yml", "SEED: 1")
    with pytest.raises(ConfigError, match=r"gone\.yml: (.|\n)*near\.yml"):
        merge(tmp_path / "gone.yml")
    with pytest.raises(ConfigError, match=r"gone\.yml: (.|\n)*folder '.*no'"):
        merge(tmp_path / "no" / "gone.yml")
    for path in (tmp_path, "", "a\0b.yml"):
        with pytest.raises(ConfigError, match=re.escape(f"{path}: ")):
            merge(path)


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
def test_yaml_tags_are_rejected_without_executing_code(write, tmp_path, tag):
    created = tmp_path / "ran"
    file = write("evil.yml", f"SEED: 1\nOUTPUT_DIR: {tag.format(created)}\n")
    with pytest.raises(ConfigError, match=r"evil\.yml, line 2: .*tag"):
        merge(file)
    assert not created.exists()


def test_yaml_anchors_and_merge_keys_are_supported(write):
    text = (
        "INPUT:\n  SIZE_TRAIN: &size [384, 128]\n  SIZE_TEST: *size\nTEST: {FLIP: &on {ENABLED: True}, ROC: {<<: *on}}"
    )
    cfg = merge(write("a.yml", text))
    assert cfg.INPUT.SIZE_TEST == (384, 128)
    assert cfg.TEST.ROC.ENABLED is True


def test_read_layers_returns_base_file_before_child_file(write):
    base, child = write("base.yml", "SEED: 1"), write("child.yml", "_BASE_: base.yml\nSEED: 2")
    assert read_layers(child) == [(str(base), {"SEED": 1}), (str(child), {"SEED": 2})]
