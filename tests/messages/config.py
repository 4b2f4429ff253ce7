"""Messages of fastamp/config: files, keys, values and old releases."""

from collections.abc import Mapping

import numpy as np
import pytest
from messages import Recorder

from fastamp.config import CfgNode, check_is_config, describe_config, get_cfg, read_config
from fastamp.config.channels import per_channel
from fastamp.config.component_keys import component_keys, declared_keys
from fastamp.config.config import Key
from fastamp.config.sizes import fixed_input_size

SITES = ["fastamp/config"]


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    every_key(record)
    files(record)
    command_lines(record)
    python(record)


def every_key(record):
    """Set each key to a value that is out of bounds, or to a value of a wrong type if the key has no bounds."""
    for key, _ in get_cfg().keys_below():
        lowest = key.low if key.low is not None else key.above
        if lowest is not None:
            value = lowest - 1
        elif key.high is not None:
            value = key.high + 1
        else:
            value = f"({', '.join('1' * (key.length + 1))})" if key.length else "[1, "
        if not (isinstance(key.default, Mapping) or (isinstance(key.default, str) and not key.choices)):
            with record(f"{key.path} {value}"):
                get_cfg().merge_from_list([key.path, value])
    for value in ("maybe", "1.5", "None", "[1", "9" * 400):
        for path in ("SEED", "SOLVER.BASE_LR", "DETERMINISTIC", "OUTPUT_DIR", "SOLVER.STEPS", "MODEL.PIXEL_MEAN"):
            with record(f"{path} {value}"):
                get_cfg().merge_from_list([path, value])
    for section in ("SOLVER", "SOLVER.AMP", "TEST.RERANK", "MODEL.HEADS"):
        with record(f"{section} maybe"):
            get_cfg().merge_from_list([section, "maybe"])


def files(record):
    """Merge invalid config files."""
    contents = {
        "unknown.yml": "SOLVER: {BASE_LRR: 1}",
        "section.yml": "SOLVER: 3",
        "value.yml": "SOLVER: {BASE_LR: {X: 1}}",
        "below.yml": "SOLVER.BASE_LR.X: 1",
        "null.yml": "SOLVER:",
        "number.yml": "1: 2",
        "list.yml": "- 1",
        "tabs.yml": "SOLVER:\n\tBASE_LR: 1",
        "twice.yml": "SOLVER: {BASE_LR: 1, BASE_LR: 2}",
        "tag.yml": "SOLVER: !!python/object/apply:os.system [ls]",
        "circle.yml": "_BASE_: circle.yml",
        "bases.yml": "_BASE_: 3",
        "base_is_missing.yml": "_BASE_: Base.yml",
        "python_base.yml": "_BASE_: base.py",
        "bytes.yml": b"\xff\xfe\x00",
        "long.yml": "#" * 2_000_000,
        "bomb.yml": "a: &a [x, x]\nb: &b [*a, *a]\n" + "".join(
            f"{chr(c)}: &{chr(c)} [*{chr(c - 1)}, *{chr(c - 1)}]\n" for c in range(ord("c"), ord("z"))
        ),
        "recursive.yml": "a: &a [*a]",
        "date.yml": "SOLVER: {BASE_LR: 2020-13-45}",
        "v0_value.yml": "SOLVER: {MAX_ITER: many}",
        "v0_unsupported.yml": "SOLVER: {MAX_ITER: 100}\nMODEL: {LOSSES: {NAME: [HardCircle]}, HEADS: {NECK: x}}",
        "v0.yml": "MODEL: {META_ARCHITECTURE: Baseline, HEADS: {NAME: BNneckHead}, LOSSES: {NAME: [TripletLoss]}}\n"
        "SOLVER: {MAX_ITER: 100}\nINPUT: {DO_PAD: True}\nDATALOADER: {PK_SAMPLER: True}",
    }  # fmt: skip
    for name, content in contents.items():
        path = record.file(name, content)
        with record(f"merge_from_file {name}"):
            get_cfg().merge_from_file(path)
    mixed = record.file("mixed.yml", "_BASE_: v0.yml\nSOLVER: {EMA: {ENABLED: True}}")
    unreadable = record.root / "loop.yml"
    unreadable.symlink_to(unreadable)
    for path in (mixed, unreadable, record.root / "nowhere.yml", record.root, record.root / "config.py"):
        with record(f"merge_from_file {path}"):
            get_cfg().merge_from_file(path)


def command_lines(record):
    """Merge invalid KEY VALUE pairs, and run `fastamp config`."""
    for words in (
        ["SOLVER.BASE_LRR", "1"],
        ["SOLVERS.BASE_LR", "1"],
        ["SOLVER.BASE_LR"],
        ["SOLVER.BASE_LR=1"],
        ["SOLVER.BASE_LR 1"],
        ["SOLVER.BASE_LR", "=", "1"],
        ["INPUT.SIZE_TRAIN", "[64,", "32]"],
        ["INPUT.SIZE_TRAIN", "64", "32"],
        "SOLVER.BASE_LR 1",
        [("SOLVER.BASE_LR", 1)],
        ["--resume", "1"],
        ["MODEL.PIXEL_MEAN", "(1, 2)"],
        ["MODEL.BACKBONE.DEPTH", "\x00"],
        ["SOLVER.MAX_ITER", "100"],
        ["INPUT.DO_AUGMIX", "True"],
        ["SOLVER.BASE_LR", "None"],
        ["INPUT.CHANNELS", "2"],
        ["SOLVER.OPT_ARGS", "{'eps': 'a\0b'}"],
        ["SOLVER.OPT_ARGS", "{'betas': [[1]]}"],
    ):
        with record(f"merge_from_list {words}"):
            cfg = get_cfg()
            cfg.merge_from_list(words)
    saved = record.file("saved.yml", "SOLVER: {BASE_LR: 1.0}")
    record.fastamp("config", "diff", saved, record.root / "nowhere.yml")
    record.fastamp("config", "diff", saved, saved, output=True)
    record.fastamp("config", "diff", record.root, saved)
    record.fastamp("config", "convert", record.root / "v0.yml", "--output", saved)
    record.fastamp("config", "convert", record.root / "v0.yml", output=True)


def python(record):
    """Call methods of a config with invalid arguments."""
    cfg = get_cfg()
    frozen = get_cfg()
    frozen.freeze()
    own = CfgNode()
    with record("cfg.NAME"):
        cfg.NAME  # noqa: B018
    with record("cfg._name"):
        cfg._name  # noqa: B018
    with record("cfg.SOLVER.BASE_LRR = 1"):
        cfg.SOLVER.BASE_LRR = 1
    with record("cfg.SOLVER.BASE_LR = 'high'"):
        cfg.SOLVER.BASE_LR = "high"
    with record("cfg.SOLVER.BASE_LR = object()"):
        cfg.SOLVER.BASE_LR = np.zeros(3)
    with record("frozen.SOLVER.BASE_LR = 1"):
        frozen.SOLVER.BASE_LR = 1
    with record("cfg.merge_from_file(5)"):
        cfg.merge_from_file(5)
    with record("cfg.merge_from_list({'SEED': 1})"):
        cfg.merge_from_list({"SEED": 1})
    with record("cfg.with_values(['SEED', 1])"):
        cfg.with_values(["SEED", 1])
    with record("check_is_config('my.yml')"):
        check_is_config("my.yml")
    with record("frozen.merge_from_list([])"):
        frozen.merge_from_list([])
    with record("cfg._keys = {}"):
        cfg._keys = {}
    with record("merge_from_other_cfg(3)"):
        cfg.merge_from_other_cfg(3)
    with record("merge_from_other_cfg({1: 2})"):
        cfg.merge_from_other_cfg({1: 2})
    with record("merge_from_other_cfg({SOLVER: {1: 2}})"):
        cfg.merge_from_other_cfg({"SOLVER": {1: 2}})
    with record("define without a meaning"):
        cfg.define("X.Y", 1, "")
    with record("define below a value"):
        cfg.define("SOLVER.BASE_LR.X", 1, "meaning")
    with record("define twice"):
        cfg.define("SOLVER.BASE_LR", 1, "meaning")
    with record("load_cfg of a Python file"), open(record.file("file.py")) as file:
        CfgNode.load_cfg(file)
    with record("load_cfg of text"):
        CfgNode.load_cfg("a: [")
    with record("cfg.INPUT.NUM_CROPS = 4"):
        get_cfg().INPUT.NUM_CROPS = 4
    with record("an object as a value"):
        own.X = object()
    with record("a dotted name"):
        own["a.b"] = 1
    with record("describe_config"):
        describe_config("SOLVR")
    with record("KEYS twice"):
        cfg.add_keys([Key("SOLVER.BASE_LR", 1.0, "meaning")])
    source = 'from fastamp.config import Key\n\nKEYS = (Key("A.B", 1, "meaning"),)\n'
    for name in ("one", "two"):
        record.file(f"package/{name}/keys.py", source)
    with record("a key that two components declare"):
        component_keys(record.root / "package")
    with record("KEYS that need an import"):
        declared_keys(record.file("keys.py", "\nKEYS = (Key(NAME, 1),)\n"))
    with record("two means for three channels"):
        per_channel("MODEL.PIXEL_MEAN", (1, 2), channels=3)
    with record("a size that depends on the image"):
        cfg.INPUT.SIZE_TEST = (0,)
        fixed_input_size(cfg, is_train=False, needed_by="MODEL.HEADS.POOL_LAYER=Flatten")
    with record("a file of components that is missing"):
        read_config("", [], plugin="nowhere.py")
    with record("a project that does not exist"):
        read_config("", ["PROJECTS", "[FastAtr]"])
