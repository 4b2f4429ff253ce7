"""projects/PartialReID: reconstruction, head, evaluator, datasets, recipes and the choice of the weight."""

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import preloaded
import pytest
import tiny
import torch
import torch.nn.functional as F
from PIL import Image

from fastamp.checkpoint.load_state import load_model_state
from fastamp.cli import main
from fastamp.config import get_cfg, read_config
from fastamp.config.projects import import_project
from fastamp.data.build import build_dataset
from fastamp.evaluation import Identities, Protocol, compute_metrics
from fastamp.inference import Predictor
from fastamp.layers.distance import FeatureDistances
from fastamp.modeling import build_model
from fastamp.utils.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "projects/PartialReID"
REFERENCE = Path(__file__).parents[1] / "reference"


@pytest.fixture(autouse=True, scope="module")
def remove_occluded_images(demo_root):
    """Remove the images that ``OccludedDemo`` writes next to the demo set, which is shared with other tests."""
    yield
    for folder in demo_root.glob("fastamp-demo-occluded-*"):
        shutil.rmtree(folder)


@pytest.fixture(scope="module", autouse=True)
def dsr(unregistered):
    """Module of the evaluator; importing the project registers its components."""
    import_project("PartialReID")
    from partialreid import dsr_evaluation

    return dsr_evaluation


@pytest.fixture(scope="module")
def reference():
    """Arrays of the reference program, and its feature maps."""
    arrays = {name: torch.from_numpy(array) for name, array in np.load(REFERENCE / "methods/dsr1.npz").items()}
    return arrays | {"maps": arrays["maps_times_8"].float() / 8}


@pytest.fixture(scope="module")
def unit(reference, dsr):
    """Occlusion unit with the weights of the reference."""
    from partialreid.dsr_head import OcclusionUnit

    unit = OcclusionUnit(160)
    unit.mask_layer.load_state_dict({"weight": reference["mask_weight"], "bias": reference["mask_bias"]})
    return unit.requires_grad_(False)


def stored(dsr, places, size=7):
    """Write places to a file in batches, in another order than that of the test set."""
    file = dsr.PlaceFile()
    for rows in torch.arange(len(places)).flip(0).split(size):
        file.append(rows, places[rows])
    file.finish()
    return file


def mixed(dsr, reference, unit, weight=0.5, gallery=None, **options):
    """Compute the distances of the reference's queries to the first ``gallery`` images."""
    n = int(reference["num_query"])
    features, places, _, scores = unit(reference["maps"][: None if gallery is None else n + gallery])
    cosine = FeatureDistances(features[:n], features[n:], metric="cosine", memory_budget_mb=1)
    return dsr.mixed_distances(cosine, scores[:n], stored(dsr, places), weight=weight, **options)


def identities_of(reference, gallery=None):
    n = int(reference["num_query"])
    pids, cams = (reference[name][: None if gallery is None else n + gallery] for name in ("pids", "cams"))
    return Identities(pids[:n], pids[n:], cams[:n], cams[n:])


def test_occlusion_unit_agrees_with_reference(reference, unit):
    foreground, places, mask, scores = unit(reference["maps"])
    assert places.shape[2] == 110
    for found, name in ((foreground, "foreground"), (mask, "mask"), (scores, "mask_normalized")):
        torch.testing.assert_close(found, reference[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(places[:1], reference["spatial_first"])


def test_distances_agree_with_reference(reference, unit, dsr):
    found = mixed(dsr, reference, unit, weight=1.0)
    out = torch.empty(found.shape)
    found.rows(0, len(out), out)
    torch.testing.assert_close(out, reference["dsr_dist"], rtol=1e-4, atol=1e-5)
    assert (out == dsr.FAR).sum(1).tolist() == [4] * 8
    found = mixed(dsr, reference, unit, weight=0.0)
    found.rows(0, len(out), out)
    torch.testing.assert_close(out, reference["global_dist"], rtol=1e-4, atol=1e-6)


@pytest.mark.integration
def test_results_with_and_without_reconstruction_agree_with_reference(reference, unit, dsr):
    expected = json.loads((REFERENCE / "methods/dsr1_results.json").read_text())
    n, features = 8, unit(reference["maps"])[0]
    found = mixed(dsr, reference, unit)
    rates = dsr.rank1_by_weight(found, identities_of(reference), Protocol())
    assert dsr.best_weight(rates) == 0.45
    for name, weight in (("dsr_True", 0.45), ("dsr_False", 0)):
        found = mixed(dsr, reference, unit, weight=weight)
        metrics = compute_metrics(
            features[:n], features[n:], identities_of(reference), Protocol(), distances=found
        ).metrics()
        assert {key: metrics[key] for key in expected[name]} == pytest.approx(expected[name], abs=1e-6)
        assert rates[round(100 * weight)] == pytest.approx(expected[name]["Rank-1"])


def test_rank1_by_weight_agrees_with_metrics(reference, unit, dsr):
    found = mixed(dsr, reference, unit)
    rates = dsr.rank1_by_weight(found, identities_of(reference), Protocol(), (0.0, 0.3, 1.0))
    n, features = 8, unit(reference["maps"])[0]
    for rate, weight in zip(rates, (0.0, 0.3, 1.0), strict=True):
        distances = dsr.MixedDistances(found.features, found.candidates, found.reconstruction, weight)
        result = compute_metrics(features[:n], features[n:], identities_of(reference), Protocol(), distances=distances)
        assert rate == pytest.approx(result.metrics()["Rank-1"])


@pytest.mark.parametrize(("gallery", "candidates"), [(9, 100), (20, 5), (3, 1)])
def test_distances_agree_with_naive_loop(reference, unit, dsr, gallery, candidates):
    found = mixed(dsr, reference, unit, weight=0.25, gallery=gallery, candidates=candidates)
    out = torch.empty(found.shape)
    found.rows(0, len(out), out)
    features, places, _, scores = (values.double() for values in unit(reference["maps"][: 8 + gallery]))
    for query in range(8):
        cosine = [1 - F.cosine_similarity(features[query], features[8 + image], dim=0) for image in range(gallery)]
        near = sorted(range(gallery), key=lambda image: cosine[image])[:candidates]
        for image in range(gallery):
            g, q = F.normalize(places[8 + image], dim=0), F.normalize(places[query], dim=0)
            x = torch.linalg.solve(g.T @ g + 0.001 * torch.eye(110, dtype=g.dtype), g.T @ q)
            distance = (scores[query] * (g @ x - q).norm(dim=0)).sum() if image in near else 100
            expected = 0.75 * cosine[image] + 0.25 * distance
            assert out[query, image].item() == pytest.approx(float(expected), rel=1e-4)


def test_block_size_does_not_change_distances(reference, unit, dsr):
    n, gallery = 8, 30
    features, places, _, scores = unit(reference["maps"][: n + gallery])
    outs = []
    for budget in (1e-6, 100):
        cosine = FeatureDistances(features[:n], features[n:], metric="cosine", memory_budget_mb=budget)
        outs.append(dsr.mixed_distances(cosine, scores[:n], stored(dsr, places), weight=0.5, candidates=7))
    torch.testing.assert_close(outs[0].reconstruction, outs[1].reconstruction)


def test_distance_of_an_image_to_itself_is_small_in_both_dtypes(reference, unit, dsr):
    from partialreid.dsr_distance import reconstruction_distances

    _, places, _, scores = unit(reference["maps"][:2])
    q = F.normalize(places, dim=1)
    found = {}
    for dtype in (torch.float32, torch.float64):
        found[dtype] = reconstruction_distances(q.to(dtype), scores.to(dtype), q[0].to(dtype))
        assert found[dtype].dtype == dtype and 0 <= found[dtype][0] < 0.05 < found[dtype][1] < 1
    torch.testing.assert_close(found[torch.float32].double(), found[torch.float64], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "places"), [((24, 8), 110), ((16, 8), 70), ((8, 4), 11), ((2, 2), 1)])
def test_number_of_places_follows_from_the_map(size, places, dsr):
    from partialreid.dsr_distance import pool_places

    found, first = pool_places(torch.rand(2, 3, *size))
    assert found.shape == (2, 3, places) and first == (size[0] // 2) * (size[1] // 2)


def test_too_small_map_is_a_config_error(dsr):
    from partialreid.dsr_distance import pool_places

    with pytest.raises(ConfigError, match="INPUT.SIZE_TRAIN"):
        pool_places(torch.rand(2, 3, 4, 1))


def test_images_of_different_sizes_are_a_config_error(dsr):
    file = dsr.PlaceFile()
    file.append(torch.tensor([0]), torch.rand(1, 4, 11))
    with pytest.raises(ConfigError, match="INPUT.SIZE_TEST"):
        file.append(torch.tensor([1]), torch.rand(1, 4, 9))


@pytest.mark.integration
def test_two_processes_give_the_scores_of_one(tmp_path):
    process = preloaded.run(Path(__file__).parents[1] / "helpers/dsr_ranks.py", tmp_path)
    assert process.returncode == 0, process.stderr
    one, two = (torch.load(tmp_path / f"{number}.pth", weights_only=True) for number in (1, 2))
    torch.testing.assert_close(two["distances"], one["distances"], rtol=0, atol=1e-6)
    assert two["metrics"] == one["metrics"] and two["rates"] == one["rates"]
    assert (one["distances"] < 2).sum(1).tolist() == [31] * 23
    assert one["metrics"]["dsr"]["oracle"]["Rank-1"] > one["metrics"]["dsr"]["global features"]["Rank-1"]


# ---- weights


BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
FASTREID_NAMES = {
    "current": (
        "heads.weight", *(f"heads.bottleneck.0.{name}" for name in BATCH_NORM),
        "heads.weight_occ", *(f"heads.bnneck_occ.0.{name}" for name in BATCH_NORM),
        "heads.occ_unit.mask_layer.weight", "heads.occ_unit.mask_layer.bias",
    ),
    "first": (
        "heads.classifier.weight", *(f"heads.bnneck.{name}" for name in BATCH_NORM),
        "heads.classifier_occ.weight", *(f"heads.bnneck_occ.{name}" for name in BATCH_NORM),
        "heads.occ_unit.mask_layer.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("release", FASTREID_NAMES)
def test_checkpoint_of_fastreid_matches_all_tensors(release, dsr):
    model = build_model(
        get_cfg().with_values(
            {
                "PROJECTS": ["PartialReID"], "MODEL.META_ARCHITECTURE": "PartialBaseline", "MODEL.DEVICE": "cpu",
                "MODEL.HEADS.NAME": "DSRHead", "MODEL.HEADS.NUM_CLASSES": 5, "MODEL.BACKBONE.DEPTH": "18x",
                "MODEL.BACKBONE.FEAT_DIM": 512, "MODEL.HEADS.WITH_BNNECK": True,
            }
        )
    )  # fmt: skip
    initial = model.state_dict()
    state = {name: torch.rand_like(value.float()) for name, value in initial.items() if name.startswith("backbone.")}
    for name in FASTREID_NAMES[release]:
        shape = () if "num_batches" in name else (5, 512) if "classifier" in name or "heads.weight" in name else 512
        state[name] = torch.rand((1, 512) if "mask_layer.weight" in name else 1 if "mask_layer" in name else shape)
    report = load_model_state(model, state, source="FastReID")
    assert report.missing == report.dropped == report.other_shape == []
    loaded = model.state_dict()
    for stem in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(
            loaded[f"heads.bnneck_occ.0.{stem}"], state[f"heads.bnneck_occ.{'0.' * (release == 'current')}{stem}"]
        )
    of_foreground = state["heads.weight_occ" if release == "current" else "heads.classifier_occ.weight"]
    assert torch.equal(loaded["heads.weight_occ"], of_foreground)
    assert release == "current" or loaded["heads.occ_unit.mask_layer.bias"] == 0


# ---- recipes, training and evaluation


def test_recipe_has_the_values_of_fastreid():
    expected = json.loads((REFERENCE / "fastreid_project_configs.json").read_text())
    cfg = read_config(str(FOLDER / "configs/partial_market.yml"))
    assert cfg.PROJECTS == ("PartialReID",)
    other = get_cfg().with_values({"PROJECTS": ["PartialReID"]})
    other.defrost()
    other.merge_from_other_cfg(
        type(other).load_cfg(json.dumps(expected["projects/PartialReID/configs/partial_market.yml"]))
    )
    assert cfg.dump() == other.dump()
    assert cfg.DATASETS.TESTS == ("PartialREID", "PartialiLIDS", "OccludedREID")
    assert read_config("PartialReID/demo").MODEL.HEADS.NAME == "DSRHead"


def tiny_recipe(folder, *opts):
    """Write a recipe that trains the tiny backbone for one epoch on the demo set."""
    options = tiny.tiny_options(
        folder / "run", "MODEL.META_ARCHITECTURE", "PartialBaseline", "MODEL.HEADS.NAME", "DSRHead",
        "DATASETS.NAMES", "DemoHeldOut", "DATASETS.TESTS", "DemoPartial", "SOLVER.MAX_EPOCH", "1", "TEST.DSR.WEIGHT",
        "0.25", *opts,
    )  # fmt: skip
    return read_config("", options, plugin="PartialReID")


@pytest.fixture(scope="module")
def run(demo_root, tmp_path_factory, dsr):
    """Folder of a run of one epoch."""
    folder = tmp_path_factory.mktemp("partial")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(demo_root))
        (folder / "tiny.yml").write_text(tiny_recipe(folder).dump())
        assert main(["train", str(folder / "tiny.yml")]) == 0
    return folder / "run"


def rows(run):
    return [json.loads(line) for line in (run / "metrics.json").read_text().splitlines()]


@pytest.mark.integration
def test_training_reports_the_losses_of_both_branches(run):
    (trained, *_) = [row for row in rows(run) if "total_loss" in row]
    assert {"loss_cls", "loss_cls_fore", "loss_triplet", "loss_triplet_fore"} <= set(trained)


@pytest.mark.integration
def test_run_is_evaluated_resumed_and_used_without_a_plugin(run, demo, capsys):
    assert main(["eval", str(run)]) == 0
    output = capsys.readouterr()
    assert "oracle (weight" in output.out + output.err and "DSR with weight 0.25" in output.out + output.err
    assert main(["train", str(run), "--resume", "SOLVER.MAX_EPOCH", "2"]) == 0
    image = next(demo.glob("*/query/*.jpg"))
    features = Predictor(run / "model_final.pth").features([image])
    assert features.shape == (1, tiny.WIDTH)


@pytest.mark.integration
def test_evaluation_without_reconstruction_ranks_by_the_features(run, demo, capsys):
    assert main(["eval", str(run), "TEST.DSR.ENABLED", "False"]) == 0
    output = capsys.readouterr()
    assert "DSR with weight" not in output.out + output.err


@pytest.mark.integration
@pytest.mark.parametrize(
    "opts",
    [
        ("TEST.METRIC", "euclidean"),
        ("TEST.RERANK.ENABLED", "True"),
        ("TEST.FLIP.ENABLED", "True"),
        ("TEST.PROTOCOL", "vehicleid"),
        ("MODEL.HEADS.EMBEDDING_DIM", "8"),
        ("MODEL.HEADS.NAME", "EmbeddingHead"),
        ("TEST.DSR.WEIGHT", "1.5"),
        ("DATASETS.PARTIAL.HELD_OUT", "0.99"),
        ("INPUT.SIZE_TRAIN", "(8, 8)"),
    ],
)
def test_unsupported_settings_are_config_errors(opts, run, demo, tmp_path, input_error):
    recipe = run.parent / "tiny.yml"
    command = ["train", str(recipe), "OUTPUT_DIR", str(tmp_path / "run"), *opts]
    if opts[0] == "INPUT.SIZE_TRAIN":
        command += ["INPUT.SIZE_TEST", "(8, 8)", "INPUT.PADDING.ENABLED", "False"]
    assert opts[0] in input_error(main, command)


@pytest.mark.integration
def test_other_model_with_this_evaluator_is_a_config_error(run, demo, tmp_path, capsys):
    opts = [
        "TEST.EVALUATOR",
        "DsrEvaluator",
        "MODEL.META_ARCHITECTURE",
        "Baseline",
        "MODEL.HEADS.NAME",
        "EmbeddingHead",
    ]
    assert main(["train", str(run.parent / "tiny.yml"), "OUTPUT_DIR", str(tmp_path / "run"), *opts]) == 2
    assert "PartialBaseline" in capsys.readouterr().err


@pytest.mark.integration
def test_weight_is_chosen_on_held_out_identities_and_stored(run, demo, tmp_path):
    choose_weight = runpy.run_path(str(FOLDER / "choose_weight.py"))
    checkpoint, weight, rates = choose_weight["choose"](str(run))
    assert (
        len(rates) == 101
        and rates[round(100 * weight)] == max(rates)
        and max(rates[: round(100 * weight)] or [0]) < max(rates)
    )
    assert choose_weight["choose"](str(run))[1:] == (weight, rates)
    for name in ("config.yaml", checkpoint.name):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    choose_weight["write_weight"](tmp_path / checkpoint.name, 0.37)
    assert read_config(str(tmp_path / "config.yaml")).TEST.DSR.WEIGHT == 0.37
    assert Predictor(tmp_path / checkpoint.name).cfg.TEST.DSR.WEIGHT == 0.37
    with pytest.raises(DataError, match="training"):
        choose_weight["check_held_out"](read_config("PartialReID/demo", ["DATASETS.NAMES", "Demo"]), "DemoHeldOut")
    with pytest.raises(DataError, match="DemoPartial"):
        choose_weight["choose"](str(run), name="Demo")
    with pytest.raises(ConfigError, match="reconstruction"):
        choose_weight["choose"](str(run), opts=["TEST.DSR.ENABLED", "False"])


def test_weight_of_a_run_without_the_project_is_a_config_error(run_folder):
    with pytest.raises(ConfigError, match="reconstruction"):
        runpy.run_path(str(FOLDER / "choose_weight.py"))["choose"](str(run_folder))


# ---- datasets


def partial_tree(root, folder, splits):
    for split in splits:
        (root / folder / split).mkdir(parents=True)
        for pid in (1, 2):
            for number in (1, 2):
                image = Image.effect_noise((32, 64), 90).convert("RGB")
                image.save(root / folder / split / f"{pid:03d}_{number:03d}.jpg")


@pytest.mark.parametrize(
    ("name", "folder", "splits"),
    [
        ("PartialREID", "Partial_REID", ("partial_body_images", "whole_body_images")),
        ("PartialiLIDS", "PartialiLIDS", ("query", "gallery")),
        ("OccludedREID", "OccludedREID", ("query", "gallery")),
    ],
)
def test_partial_datasets(name, folder, splits, tmp_path, elsewhere, datasets_root, input_error, capsys):
    cfg = get_cfg().with_values({"PROJECTS": ["PartialReID"]})
    with pytest.raises(DataError, match=folder):
        build_dataset(name, cfg)
    partial_tree(tmp_path, folder, splits)
    dataset = build_dataset(name, cfg)
    assert len(dataset.train) == 0
    assert [(item.pid, item.camid) for item in dataset.query] == [(1, 0), (1, 0), (2, 0), (2, 0)]
    assert {item.camid for item in dataset.gallery} == {1} and dataset.camera(1) == "gallery"
    # FastReID: a match with the number of the query is excluded.
    dataset = build_dataset(name, cfg.with_values({"DATASETS.PARTIAL.CAMERA": "number"}))
    assert [item.camid for item in dataset.query] == [item.camid for item in dataset.gallery] == [0, 1, 0, 1]
    assert dataset.camera(1) == "2"
    assert main(["check-data", name, "--plugin", "PartialReID"]) == 0
    assert "ERROR" not in capsys.readouterr().out
    for image in (tmp_path / folder / splits[0]).iterdir():
        image.rename(image.with_name(f"photo {image.name}"))
    assert "001_002.jpg (identity 1, image 2)" in input_error(main, ["check-data", name, "--plugin", "PartialReID"])


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Market1501HeldOut", "Market-1501-v15.09.15"),
        ("DukeMTMCHeldOut", "DukeMTMC-reID"),
        ("OccludedDukeHeldOut", "Occluded_Duke"),
    ],
)
def test_held_out_identities_of_other_datasets(name, folder, tmp_path, elsewhere, datasets_root):
    cfg = get_cfg().with_values({"PROJECTS": ["PartialReID"], "DATASETS.PARTIAL.HELD_OUT": 0.5})
    for split in ("bounding_box_train", "query", "bounding_box_test"):
        (tmp_path / folder / split).mkdir(parents=True)
        for pid in range(1, 9):
            for camera in (1, 1, 2):
                number = len(list((tmp_path / folder / split).iterdir()))
                image = tmp_path / folder / split / f"{pid:04d}_c{camera}s1_{number:06d}_01.jpg"
                Image.effect_noise((32, 64), 90).convert("RGB").save(image)
    dataset = build_dataset(name, cfg)
    trained, tested = ({Path(item.path).stem[:4] for item in items} for items in (dataset.train, dataset.gallery))
    assert len(trained) == len(tested) == 4 and not trained & tested
    assert {Path(item.path).stem[:4] for item in dataset.query} == tested and all(item.box for item in dataset.query)
    assert all("bounding_box_train" in item.path for item in (*dataset.train, *dataset.query, *dataset.gallery))


def test_held_out_identities_are_not_trained_and_their_queries_are_parts(demo):
    cfg = get_cfg().with_values({"PROJECTS": ["PartialReID"]})
    dataset, whole = build_dataset("DemoHeldOut", cfg), build_dataset("Demo", cfg)
    trained, tested = (
        {Path(item.path).name for item in items} for items in (dataset.train, [*dataset.query, *dataset.gallery])
    )
    assert not trained & tested and trained | tested == {Path(item.path).name for item in whole.train}
    assert all(item.box for item in dataset.query[::2]) and not any(item.box for item in dataset.gallery)
    assert all("occluded" in item.path for item in dataset.query[1::2])
    again = build_dataset("DemoHeldOut", cfg)
    assert [*again.query] == [*dataset.query]
    other = build_dataset("DemoHeldOut", cfg.with_values({"DATASETS.PARTIAL.SEED": 1}))
    assert [*other.query] != [*dataset.query]


def test_queries_of_the_demo_are_occluded(demo):
    cfg = get_cfg().with_values({"PROJECTS": ["PartialReID"]})
    whole, occluded = (build_dataset(name, cfg).query for name in ("Demo", "DemoOccluded"))
    assert [(item.pid, item.camid) for item in occluded] == [(item.pid, item.camid) for item in whole]
    for before, after in zip(whole, occluded, strict=True):
        with Image.open(before.path) as one, Image.open(after.path) as other:
            assert one.size == other.size
            changed = np.abs(np.asarray(one, np.int64) - np.asarray(other, np.int64)).max(2) > 40
        # JPEG changes few pixels by so much. The occlusion has 30 to 50 % of the area, with some similar pixels.
        assert 0.1 < changed.mean() < 0.55
    folder = Path(occluded[0].path).parents[1]
    first = Path(occluded[0].path).read_bytes()
    (folder / "demo.json").write_text("{}")  # as after an interrupted run
    assert Path(build_dataset("DemoOccluded", cfg).query[0].path).read_bytes() == first
    assert json.loads((folder / "demo.json").read_text())["seed"] == 0
    other = build_dataset("DemoOccluded", cfg.with_values({"DATASETS.PARTIAL.SEED": 1})).query[0]
    assert Path(other.path).read_bytes() != first


@pytest.mark.parametrize("side", ["lower", "left", "right", "upper"])
def test_one_side_is_occluded(side, monkeypatch, dsr):
    from partialreid import demo_occluded

    monkeypatch.setattr(demo_occluded, "SIDES", (side,) * 4)
    image, other = Image.new("RGB", (40, 80)), Image.new("RGB", (20, 30), "white")
    for seed in range(20):
        covered = np.asarray(demo_occluded.occlude(image, other, np.random.default_rng(seed)))[:, :, 0] > 0
        assert 0.28 < covered.mean() < 0.52
        rows, columns = covered.all(1), covered.all(0)
        expected = {"lower": rows[-1], "upper": rows[0], "left": columns[0], "right": columns[-1]}
        assert expected[side] and (rows if side in ("lower", "upper") else columns).mean() == covered.mean()
    assert not np.asarray(image).any()


def test_parts_are_inside_of_the_image(demo):
    queries = build_dataset("DemoPartial", get_cfg().with_values({"PROJECTS": ["PartialReID"]})).query
    for item in queries:
        left, top, right, bottom = item.box
        assert 0 <= left < right <= 32 and 0 <= top < bottom <= 64
        assert 0.39 < (right - left) * (bottom - top) / (32 * 64) < 0.71
