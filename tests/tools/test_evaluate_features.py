"""tools/evaluate_features.py: metrics of saved features."""

import json
import re
import zipfile

import evaluate_features
import numpy as np
import pytest
import torch
from naive_ranking import REFERENCE, protocol_of, random_set

from fastamp.config import get_cfg
from fastamp.evaluation import Identities, ReidEvaluator, compute_metrics

VALUES = json.loads((REFERENCE / "values.json").read_text())


def save(path, **changes):
    """Write the first reference set with some arrays changed; None removes an array."""
    data = np.load(REFERENCE / "g1_small_junk.npz")
    arrays = {}
    for side, letter in (("query", "q"), ("gallery", "g")):
        for column, short in (("features", "f"), ("pids", "p"), ("camids", "c")):
            arrays[f"{side}_{column}"] = data[letter + short]
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return str(path)


@pytest.fixture
def features(tmp_path):
    return save(tmp_path / "features.npz")


def run(capsys, *argv):
    code = evaluate_features.cli([*argv, "MODEL.DEVICE", "cpu"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "opts, key",
    [
        ((), "fr_cosine_pystable"),
        (("TEST.METRIC", "euclidean"), "fr_euclidean_pystable"),
        (("TEST.AQE", "on"), "fr_aqe_1_5_3"),
        (("TEST.AQE", "on", "TEST.AQE.QE_TIME", "2", "TEST.AQE.QE_K", "10"), "fr_aqe_2_10_3"),
        (("TEST.RERANK", "on", "TEST.RERANK.VARIANT", "torchreid"), "tr_rerank"),
        (("TEST.RERANK", "on", "TEST.RERANK.VARIANT", "fastreid"), "fr_rerank_cosine(k1=20,k2=6,l=.3)"),
        (("TEST.RERANK", "on", "TEST.KNN_BACKEND", "faiss", "TEST.RERANK.VARIANT", "torchreid"), "tr_rerank"),
    ],
)
def test_evaluate_features_prints_reference_metrics_as_json(capsys, features, opts, key):
    code, out, err = run(capsys, features, "--json", *opts)
    assert code == 0 and err == ""
    found, expected = json.loads(out), VALUES["g1_small_junk"][key]
    assert list(found) == ["mAP", "mINP", "Rank-1", "num_valid_queries"]
    assert found["mAP"] == pytest.approx(100 * expected["mAP"], abs=1e-4)
    assert found["mINP"] == pytest.approx(100 * expected["mINP"], abs=1e-4)
    assert found["Rank-1"] == pytest.approx(100 * expected["R1"], abs=1e-4)
    assert found["num_valid_queries"] == 40


def test_evaluate_features_writes_per_query_file_with_flags_after_key_value_pairs(capsys, features, tmp_path):
    out = tmp_path / "each.results"
    code, text, _ = run(capsys, features, "TEST.METRIC", "euclidean", "--per-query", str(out), "--json")
    assert code == 0 and json.loads(text)["num_valid_queries"] == 40
    saved, data = np.load(out), np.load(REFERENCE / "g1_small_junk.npz")
    np.testing.assert_allclose(saved["ap"], data["fr_euclidean_pystable_ap"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(saved["inp"], data["fr_euclidean_pystable_inp"], rtol=0, atol=1e-12)
    assert saved["valid"].all() and saved["valid"].shape == (40,)


def test_trapezoidal_ap_of_saved_features_excludes_identity_minus_1(capsys, features):
    _, out, _ = run(capsys, features, "--json", "TEST.METRIC", "euclidean", "TEST.AP_METHOD", "trapezoid")
    expected = VALUES["g1_small_junk"]["trapezoid_mAP_euclidean(pid -1 also removed)"]
    assert json.loads(out)["mAP"] == pytest.approx(100 * expected, abs=1e-6)


def test_evaluate_features_prints_table_with_protocol_and_writes_roc_curve(capsys, features, tmp_path):
    code, out, _ = run(capsys, features, "TEST.ROC", "on", "TEST.RANKS", "20", "OUTPUT_DIR", str(tmp_path / "out"))
    assert code == 0
    for text in ("Market-1501", "no re-ranking", "saved as float32", "| features", "Rank-20", "TAR@FAR=0.01"):
        assert text in out
    assert "40 queries, 200 gallery images, 0 queries without a match" in out
    assert (
        f"wrote {tmp_path / 'out/evaluation/features/roc.png'}" in out
        and (tmp_path / "out/evaluation/features/roc.npz").exists()
    )


def test_evaluate_features_accepts_float16_features_and_text_identities(capsys, tmp_path):
    data = np.load(REFERENCE / "g1_small_junk.npz")
    half = {f"{side}_features": data[short].astype(np.float16) for side, short in (("query", "qf"), ("gallery", "gf"))}
    _, expected, _ = run(
        capsys,
        save(tmp_path / "rounded.npz", **{name: array.astype(np.float32) for name, array in half.items()}),
        "--json",
    )
    named = {f"{s}_pids": np.array([f"person {pid}" for pid in data[f"{s[0]}p"]]) for s in ("query", "gallery")}
    named |= {f"{side}_camids": data[short].astype(float) for side, short in (("query", "qc"), ("gallery", "gc"))}
    _, found, _ = run(capsys, save(tmp_path / "half.npz", **half, **named), "--json")
    assert json.loads(found) == json.loads(expected)


def test_evaluate_features_needs_no_cameras_for_no_camera_and_vehicleid_protocols(capsys, tmp_path):
    path = save(tmp_path / "features.npz", query_camids=None, gallery_camids=None)
    assert run(capsys, path, "--json", "TEST.PROTOCOL", "no_camera")[0] == 0
    code, out, _ = run(capsys, path, "--json", "TEST.PROTOCOL", "vehicleid")
    assert code == 0 and json.loads(out)["num_valid_queries"] == 240


QUERY = np.zeros((40, 64), dtype=np.float32)
NONE = np.zeros(0, dtype=np.int64)
KEYS = [f"{side}_{name}" for side in ("query", "gallery") for name in ("features", "pids", "camids")]
BAD = {
    "missing keys": ({"query_pids": None, "gallery_camids": None}, "query_pids, gallery_camids"),
    "another name": ({"query_features": None, "query_feature": QUERY}, "'query_feature'"),
    "not finite": ({"query_features": QUERY + np.nan}, "query features.*40 of 40"),
    "empty": ({"query_features": QUERY[:0], "query_pids": NONE, "query_camids": NONE}, "query"),
    "shapes": ({"query_features": QUERY[:39]}, r"\(39, 64\)"),
    "widths": ({"query_features": QUERY[:, :63]}, "63"),
    "dimensions": ({"query_features": QUERY[0]}, r"query_features: .*\(64,\)"),
    "not numeric": ({"query_features": np.full((40, 64), "a")}, "query_features: "),
    "fractional cameras": ({"gallery_camids": np.full(200, 0.5)}, "gallery_camids: "),
    "no dimension": ({"query_pids": np.array(3)}, r"query_pids: .*\(\)"),
    "huge numbers": ({"query_pids": np.arange(40) * 1e300}, "query_pids: "),
    "infinite numbers": ({"query_pids": np.full(40, np.inf)}, "query_pids: "),
    "cameras missing": ({"query_camids": None}, r"query_camids(.|\n)*TEST.PROTOCOL to no_camera"),
    "no split": (dict.fromkeys(KEYS) | {"features": QUERY, "pids": NONE}, r"no split(.|\n)*found: features, pids\n"),
    "too large": ({"query_features": QUERY.astype(float) + 1e200, "gallery_features": np.ones((200, 64))}, "1e\\+200"),
    "objects": ({"query_pids": np.full(40, None)}, "bad.npz"),
    "no match": ({"gallery_pids": np.full(200, 12345)}, "40 queries"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_evaluate_features_exits_with_2_for_invalid_arrays(capsys, tmp_path, name):
    changes, message = BAD[name]
    code, out, err = run(capsys, save(tmp_path / "bad.npz", **changes), "--json")
    assert code == 2 and out == "" and "Traceback" not in err
    assert re.search(message, err), err


@pytest.mark.parametrize(
    "opts, message",
    [
        (["TEST.METRIC", "cosin"], "'cosine'"),
        (["TEST.RERANK.VARIANT", "zong"], "'zhong'"),
        (["TEST.PROTOCOL", "vehicleid", "TEST.RERANK", "on"], "TEST.RERANK.ENABLED"),
        (["--per-query", "no/such/folder.npz"], "no/such/folder.npz"),
        (["--per-query", "tests"], "--per-query"),
        (["--per-query", ""], "--per-query"),
        (["TEST.ROC", "on", "OUTPUT_DIR", "setup.py"], "setup.py"),
        (["TEST.PER_QUERY", "True"], "TEST.PER_QUERY"),
        (["TEST.FLIP.ENABLED", "True"], "TEST.FLIP.ENABLED"),
        (["TEST.AQE", "on", "TEST.AQE.ALPHA", "-12", "TEST.AQE.QE_K", "200"], "TEST.AQE.ALPHA"),
        (["TEST.METRIC"], "KEY VALUE"),
        (["TEST.MEMORY_BUDGET_MB", "0"], "TEST.MEMORY_BUDGET_MB"),
    ],
)
def test_evaluate_features_exits_with_2_for_invalid_options(capsys, features, opts, message):
    code, out, err = run(capsys, features, *opts)
    assert code == 2 and out == "" and message in err


def test_evaluate_features_exits_with_2_for_missing_or_damaged_files(capsys, tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    np.savez_compressed(tmp_path / "broken.npz", query_features=np.random.default_rng(0).standard_normal(2000))
    content = bytearray((tmp_path / "broken.npz").read_bytes())
    content[200:1200] = bytes(1000)
    (tmp_path / "broken.npz").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "members.npz", "w") as file:
        for side in ("query", "gallery"):
            for column in ("features", "pids", "camids"):
                file.writestr(f"{side}_{column}", "text")
    (tmp_path / "cut.npz").write_bytes((REFERENCE / "g1_small_junk.npz").read_bytes()[:5000])
    for path, message in (
        (tmp_path / "none.npz", "none.npz: No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "text.npz", "text.npz"),
        (tmp_path / "cut.npz", "cut.npz"),
        (tmp_path / "broken.npz", "broken.npz"),
        (tmp_path / "members.npz", "query_features"),
    ):
        code, out, err = run(capsys, str(path))
        assert code == 2 and out == "" and message in err


def write(path, features, *, names=str):
    """Write ``features``, (query features, gallery features, ids), to an npz file; ``names`` converts each identity."""
    queries, gallery, ids = features
    columns = {"features": (queries.numpy(), gallery.numpy())}
    columns["pids"] = [np.array([names(pid) for pid in side.tolist()]) for side in (ids.query_pids, ids.gallery_pids)]
    columns["camids"] = [side.numpy() for side in (ids.query_camids, ids.gallery_camids)]
    sides = ("query", "gallery")
    np.savez(path, **{f"{sides[i]}_{name}": pair[i] for name, pair in columns.items() for i in (0, 1)})
    return str(path)


def test_evaluate_features_computes_same_map_as_reid_evaluator(capsys, tmp_path):
    features = random_set(0)
    queries, gallery, ids = features
    evaluator = ReidEvaluator(get_cfg(), len(queries))
    columns = {
        "targets": torch.cat((ids.query_pids, ids.gallery_pids)),
        "camids": torch.cat((ids.query_camids, ids.gallery_camids)),
    }
    evaluator.process(columns, torch.cat((queries, gallery)))
    expected = evaluator.evaluate()
    for names in (int, str, "{:05d}".format, "person {}".format, lambda pid: f"é{pid}".encode("latin-1")):
        _, out, _ = run(capsys, write(tmp_path / "saved.npz", features, names=names), "--json")
        assert json.loads(out)["mAP"] == expected["mAP"]


def test_evaluate_features_excludes_missing_identities_stored_as_text(capsys, tmp_path):
    features = random_set(1)
    features[2].gallery_pids[:20] = -1
    features[2].query_pids[:2] = -1  # these queries have no match
    found = []
    for names in (int, str, lambda pid: "" if pid < 0 else f"person {pid}"):
        path = write(tmp_path / "saved.npz", features, names=names)
        found.append(json.loads(run(capsys, path, "--json", "TEST.AP_METHOD", "trapezoid")[1]))
    assert found[0] == found[1] == found[2] and found[0]["num_valid_queries"] == 28 and found[0]["mAP"] < 100


def test_evaluate_features_ranks_float64_features_in_float64(capsys, tmp_path):
    """The features differ by less than float32 resolution."""
    queries = np.ones((2, 4))
    gallery = np.ones((4, 4)) + 1e-12 * np.arange(4)[:, None] * np.array([1.0, -1, 0, 0])
    path = tmp_path / "fine.npz"
    ids = {"query_pids": [1, 2], "gallery_pids": [2, 2, 2, 1], "query_camids": [0, 0], "gallery_camids": [1] * 4}
    np.savez(path, query_features=queries, gallery_features=gallery[::-1], **ids)
    _, out, _ = run(capsys, str(path), "TEST.METRIC", "euclidean")
    assert "euclidean distance in float64" in out and "saved as float64" in out and "| 100.00" in out
    _, out, _ = run(capsys, str(path), "TEST.METRIC", "euclidean", "TEST.AQE", "on")
    assert "euclidean distance in float32" in out


def test_evaluate_features_warns_if_false_accept_rate_is_below_resolution(capsys, features, tmp_path):
    _, out, _ = run(capsys, features, "TEST.ROC", "on", "TEST.ROC.FAR", "[1e-7, 0.1]", "OUTPUT_DIR", str(tmp_path))
    assert "TEST.ROC.FAR" in out and "7706" in out


def clothes(as_text):
    """Return the arrays of a column for both sides of the first reference set, and as cameras of their own."""
    data = np.load(REFERENCE / "g1_small_junk.npz")
    random = np.random.default_rng(2)
    values = {
        side: random.integers(0, 3, len(data[letter + "p"])) for side, letter in (("query", "q"), ("gallery", "g"))
    }
    named = {f"{side}_clothes": column.astype(str) if as_text else column for side, column in values.items()}
    return named, values


@pytest.mark.parametrize("as_text", [False, True])
def test_protocols_read_their_columns_from_the_file(capsys, tmp_path, as_text):
    named, values = clothes(as_text)
    path = save(tmp_path / "features.npz", **named)
    code, out, err = run(capsys, path, "--json", "TEST.PROTOCOL", "cloth_changing")
    assert (code, err) == (0, "")
    arrays = dict(np.load(path))
    cameras = {f"{side}_camids": arrays[f"{side}_camids"] for side in ("query", "gallery")}
    ids = [torch.from_numpy(arrays[f"{side}_pids"]).long() for side in ("query", "gallery")]
    columns = {"clothes": tuple(torch.from_numpy(value) for value in values.values())}
    identities = Identities(*ids, *(torch.from_numpy(camera).long() for camera in cameras.values()), columns)
    features = (torch.from_numpy(arrays[f"{side}_features"]) for side in ("query", "gallery"))
    expected = compute_metrics(*features, identities, protocol_of("cloth_changing")).metrics()
    assert json.loads(out)["mAP"] == pytest.approx(expected["mAP"], abs=1e-9)
    code, out, _ = run(capsys, path, "TEST.GROUP_BY", "clothes")
    assert code == 0 and "group: 2" in out


def test_columns_of_an_extraction_are_found(capsys, tmp_path, features):
    arrays, (named, _) = dict(np.load(features)), clothes(as_text=True)
    path = tmp_path / "extraction.npz"
    joined = {
        name: np.concatenate([arrays[f"{side}_{name}"] for side in ("query", "gallery")])
        for name in ("features", "pids", "camids")
    }
    split = np.repeat(["query", "gallery"], [len(arrays["query_pids"]), len(arrays["gallery_pids"])])
    np.savez(path, split=split, **joined, **{"column.clothes": np.concatenate(list(named.values()))})
    code, found, _ = run(capsys, str(path), "--json", "TEST.PROTOCOL", "same_clothes")
    assert code == 0
    _, expected, _ = run(capsys, save(tmp_path / "plain.npz", **named), "--json", "TEST.PROTOCOL", "same_clothes")
    assert json.loads(found) == json.loads(expected)
    code, _, err = run(capsys, str(path), "TEST.GROUP_BY", "species")
    assert code == 2 and "available columns: camera, clothes" in err


@pytest.mark.parametrize("changes", [{"query_clothes": np.zeros(2)}, {"gallery_clothes": np.zeros((4, 2))}])
def test_column_of_another_shape_is_an_input_error(capsys, tmp_path, changes):
    path = save(tmp_path / "features.npz", **(clothes(False)[0] | changes))
    code, _, err = run(capsys, path, "TEST.PROTOCOL", "cloth_changing")
    assert code == 2 and f"{next(iter(changes))}: expected an array of numbers or text" in err
