"""Tests of malicious config files: code, exponential expansion, devices and pipes."""

import os

import pytest

from fastamp.config import get_cfg
from fastamp.utils.errors import ConfigError

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


def test_loading_a_malicious_config_file_raises(here, subtests):
    for name in YAMLS:
        with subtests.test(name=name):
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


def test_config_that_is_not_a_regular_yaml_file_raises(here):
    os.mkfifo(here / "pipe.yml")
    for path in (here / "pipe.yml", "/dev/zero"):
        with pytest.raises(ConfigError, match="pipe.*device"):
            get_cfg().merge_from_file(path)
    for base in ("config.py", "/etc/passwd.py", "http://127.0.0.1/a.yml", "file:///etc/passwd", "/dev/zero"):
        (here / "child.yml").write_text(f"_BASE_: {base}\n")
        with pytest.raises(ConfigError, match=r"_BASE_.*child\.yml"):
            get_cfg().merge_from_file(here / "child.yml")


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_config_value_with_null_or_surrogate_character_raises(text):
    for key in ("OUTPUT_DIR", "DATASETS.NAMES", "SOLVER.OPT_ARGS.x"):
        with pytest.raises(ConfigError, match=key):
            get_cfg().merge_from_list([key, text])
