"""Files that lack learned tensors of the model, or have some that it would ignore."""

import pytest
import torch

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.load_state import load_model_state
from fastamp.cli import main
from fastamp.config import read_config
from fastamp.engine import DefaultTrainer
from fastamp.inference import Predictor
from fastamp.modeling import build_model
from fastamp.modeling.infer_config import infer_config, interpolation_keys
from fastamp.modeling.load import load_model
from fastamp.utils.errors import WeightsError

MODEL = (
    "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.BACKBONE.PRETRAIN",
    "False", "MODEL.HEADS.NUM_CLASSES", "4", "MODEL.HEADS.EMBEDDING_DIM", "16", "MODEL.HEADS.WITH_BNNECK", "True",
    "INPUT.SIZE_TRAIN", "(64, 32)",
    "INPUT.SIZE_TEST", "(64, 32)",
)  # fmt: skip
CASES = {
    "reduction": ("heads.bottleneck.0.weight",),
    "statistics": ("heads.bottleneck.1.running_mean", "heads.bottleneck.1.running_var"),
    "backbone": ("backbone.layer4.1.conv2.weight",),
}
EXEMPT = ("heads.weight", "backbone.bn1.num_batches_tracked")


def config(*opts):
    return read_config("", [*MODEL, *opts])


@pytest.fixture(scope="module")
def state():
    return build_model(config()).state_dict()


def write(path, state, without):
    torch.save({"model": {k: v for k, v in state.items() if k not in without}, "config": config().dump()}, path)
    return str(path)


@pytest.mark.parametrize("missing", CASES.values(), ids=CASES)
def test_evaluation_prediction_and_import_refuse_missing_learned_tensors(state, missing, tmp_path, capsys):
    path = write(tmp_path / "x.pth", state, missing)
    evaluated = config("MODEL.WEIGHTS", path)
    for load in (DefaultTrainer.load_model, load_model, lambda cfg: Predictor(path)):
        with pytest.raises(WeightsError) as error:
            load(evaluated)
        assert missing[0] in str(error.value) and "MODEL.WEIGHTS_ALLOW_MISSING" in str(error.value)
    allowed = config("MODEL.WEIGHTS", path, "MODEL.WEIGHTS_ALLOW_MISSING", "True")
    assert not load_model(allowed).model.training


@pytest.mark.integration
def test_import_refuses_missing_learned_tensors(state, tmp_path, capsys):
    missing = CASES["reduction"]
    path = write(tmp_path / "x.pth", state, missing)
    assert main(["import", path, str(tmp_path / "out.pth"), *MODEL]) == 2
    assert missing[0] in capsys.readouterr().err and not (tmp_path / "out.pth").exists()
    assert main(["import", path, str(tmp_path / "out.pth"), *MODEL, "MODEL.WEIGHTS_ALLOW_MISSING", "True"]) == 0


@pytest.mark.parametrize("missing", CASES.values(), ids=CASES)
def test_training_from_an_incomplete_file_warns(state, missing, tmp_path, caplog):
    Checkpointer(build_model(config())).load(write(tmp_path / "x.pth", state, missing))
    assert any(record.levelname == "WARNING" and missing[0] in record.getMessage() for record in caplog.records)


def test_classifier_and_counters_may_be_missing(state, tmp_path):
    load_model(config("MODEL.WEIGHTS", write(tmp_path / "x.pth", state, EXEMPT)))


def mgn_of_2020(cfg):
    """State dict with the names of FastReID's first MGN: reductions with batch norm and ReLU, and separate BNNecks."""
    renamed = {}
    for name, value in build_model(cfg).state_dict().items():
        branch, dot, rest = name.partition("_head.bottleneck.")
        if not dot:
            renamed[name] = value
        elif rest == "0.weight":
            renamed |= {f"{branch}_pool.0.weight": value, f"{branch}_pool.1.weight": torch.ones(len(value))}
        else:
            renamed[f"{branch}_head.bnneck.{rest.removeprefix('1.')}"] = value
    return renamed


def test_the_first_mgn_of_fastreid_is_refused():
    cfg = config("MODEL.META_ARCHITECTURE", "MGN", "MODEL.BACKBONE.DEPTH", "18x")
    state = mgn_of_2020(cfg)
    with pytest.raises(WeightsError, match="b1_pool"):
        load_model_state(build_model(cfg), state, source="mgn_2020.pth")


@pytest.mark.parametrize("name", ["heads.pool_layer.p", "global_pool.p"])
def test_a_learned_pooling_exponent_is_not_ignored(name, state, tmp_path):
    content = dict(state)
    if name == "global_pool.p":  # AGW's own program
        content = {
            key.replace("backbone.", "base.").removeprefix("heads.").replace("bottleneck.0.", "bottleneck."): value
            for key, value in build_model(config("MODEL.HEADS.EMBEDDING_DIM", "0")).state_dict().items()
        }
        content["classifier.weight"] = content.pop("weight")
    opts = ("MODEL.HEADS.EMBEDDING_DIM", "0") if name == "global_pool.p" else ()
    torch.save(content | {name: torch.tensor([2.5])}, tmp_path / "agw.pth")
    opts = (*opts, "MODEL.WEIGHTS", str(tmp_path / "agw.pth"), "MODEL.HEADS.POOL_LAYER")
    with pytest.raises(WeightsError, match="GeneralizedMeanPoolingP"):
        load_model(config(*opts, "GeneralizedMeanPooling"))
    model = load_model(config(*opts, "GeneralizedMeanPoolingP")).model
    assert model.heads.pool_layer.p.item() == 2.5


def test_resnets_below_base_are_not_those_of_transreid(state):
    resnet = {f"base.{k.removeprefix('backbone.')}": v for k, v in state.items() if k.startswith("backbone.")}
    resnet |= {f"bottleneck.{key}": torch.ones(512) for key in ("weight", "bias", "running_mean", "running_var")}
    resnet["classifier.weight"] = torch.ones(4, 512)
    keys = infer_config(resnet | {"global_pool.p": torch.ones(1)}, "strong baseline")
    assert keys["MODEL.BACKBONE.NAME"] == "build_resnet_backbone"
    assert not {"MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "MODEL.HEADS.EVAL_FEAT"} & keys.keys()
    assert keys["MODEL.HEADS.POOL_LAYER"] == "GeneralizedMeanPoolingP" and keys["MODEL.HEADS.WITH_BNNECK"] == "True"
    assert interpolation_keys(resnet) == {"INPUT.INTERPOLATION": "bilinear"}
    assert interpolation_keys({"base.patch_embed.proj.weight": torch.ones(1)}) == {
        "INPUT.INTERPOLATION_TEST": "bilinear"
    }
