"""Features of any project, judged from the command line."""

import json
import re

import evaluate_features
import numpy as np
import pytest
from judging import REFERENCE, random_set

from fastamp.evaluation import judge_features

VALUES = json.loads((REFERENCE / "values.json").read_text())


def save(path, **changes):
    """Write the first reference set with some arrays changed; None leaves one out."""
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
        (("TEST.RERANK", "on", "TEST.RERANK.FORM", "torchreid"), "tr_rerank"),
        (("TEST.RERANK", "on", "TEST.RERANK.FORM", "fastreid"), "fr_rerank_cosine(k1=20,k2=6,l=.3)"),
        (("TEST.RERANK", "on", "TEST.KNN_BACKEND", "faiss", "TEST.RERANK.FORM", "torchreid"), "tr_rerank"),
    ],
)
def test_json_holds_the_other_programs_numbers_and_nothing_else(capsys, features, opts, key):
    code, out, err = run(capsys, features, "--json", *opts)
    assert code == 0 and err == ""
    found, expected = json.loads(out), VALUES["g1_small_junk"][key]
    assert list(found) == ["mAP", "mINP", "Rank-1", "num_valid_queries"]
    assert found["mAP"] == pytest.approx(100 * expected["mAP"], abs=1e-4)
    assert found["mINP"] == pytest.approx(100 * expected["mINP"], abs=1e-4)
    assert found["Rank-1"] == pytest.approx(100 * expected["R1"], abs=1e-4)
    assert found["num_valid_queries"] == 40


def test_options_and_keys_in_any_order_and_per_query_results(capsys, features, tmp_path):
    out = tmp_path / "each.results"
    code, text, _ = run(capsys, features, "TEST.METRIC", "euclidean", "--per-query", str(out), "--json")
    assert code == 0 and json.loads(text)["num_valid_queries"] == 40
    saved, data = np.load(out), np.load(REFERENCE / "g1_small_junk.npz")
    np.testing.assert_allclose(saved["ap"], data["fr_euclidean_pystable_ap"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(saved["inp"], data["fr_euclidean_pystable_inp"], rtol=0, atol=1e-12)
    assert saved["valid"].all() and saved["valid"].shape == (40,)


def test_the_trapezoid_leaves_out_identity_minus_one(capsys, features):
    _, out, _ = run(capsys, features, "--json", "TEST.METRIC", "euclidean", "TEST.AP", "trapezoid")
    expected = VALUES["g1_small_junk"]["trapezoid_mAP_euclidean(pid -1 also removed)"]
    assert json.loads(out)["mAP"] == pytest.approx(100 * expected, abs=1e-6)


def test_the_table_says_the_protocol_and_writes_the_curve(capsys, features, tmp_path):
    code, out, _ = run(capsys, features, "TEST.ROC", "on", "TEST.RANKS", "20", "OUTPUT_DIR", str(tmp_path / "out"))
    assert code == 0
    for text in ("own camera are junk", "no re-ranking", "saved as float32", "| features", "Rank-20", "TAR@FAR=0.01"):
        assert text in out
    assert "40 queries, 200 gallery images, 0 queries without a match" in out and "in 95 % of resamples" in out
    assert f"wrote {tmp_path / 'out/roc.png'}" in out and (tmp_path / "out/roc.npz").exists()


def test_half_precision_and_whole_numbers_and_texts(capsys, tmp_path):
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


def test_cameras_may_be_left_out_where_there_are_none(capsys, tmp_path):
    path = save(tmp_path / "features.npz", query_camids=None, gallery_camids=None)
    assert run(capsys, path, "--json", "TEST.PROTOCOL", "no_camera")[0] == 0
    code, out, _ = run(capsys, path, "--json", "TEST.PROTOCOL", "vehicleid")
    assert code == 0 and json.loads(out)["num_valid_queries"] == 240


QUERY = np.zeros((40, 64), dtype=np.float32)
NONE = np.zeros(0, dtype=np.int64)
BAD = {
    "missing keys": ({"query_pids": None, "gallery_camids": None}, "has no query_pids, gallery_camids"),
    "another name": ({"query_features": None, "query_feature": QUERY}, "Did you mean 'query_feature'?"),
    "not finite": ({"query_features": QUERY + np.nan}, r"40 of 40 query features are NaN or infinite"),
    "empty": ({"query_features": QUERY[:0], "query_pids": NONE, "query_camids": NONE}, "query set is empty"),
    "shapes": ({"query_features": QUERY[:39]}, r"features \(39, 64\), 40 identities and 40 cameras do not fit"),
    "widths": ({"query_features": QUERY[:, :63]}, "63 wide, gallery features 64"),
    "dimensions": ({"query_features": QUERY[0]}, r"expected \(N, D\) numbers, one row an image; found \(64,\)"),
    "no numbers": ({"query_features": np.full((40, 64), "a")}, "expected .N, D. numbers"),
    "half a camera": ({"gallery_camids": np.full(200, 0.5)}, "gallery_camids: expected .N,. whole numbers or texts"),
    "objects": ({"query_pids": np.full(40, None)}, "is no npz file of plain arrays"),
    "no match": ({"gallery_pids": np.full(200, 12345)}, "none of the 40 queries has a match"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files(capsys, tmp_path, name):
    changes, message = BAD[name]
    code, out, err = run(capsys, save(tmp_path / "bad.npz", **changes), "--json")
    assert code == 2 and out == "" and "Traceback" not in err
    assert re.search(message, err), err


@pytest.mark.parametrize(
    "opts, message",
    [
        (["TEST.METRIC", "cosin"], "Did you mean 'cosine'"),
        (["TEST.RERANK.FORM", "zong"], "Did you mean 'zhong'"),
        (["TEST.PROTOCOL", "vehicleid", "TEST.RERANK", "on"], "TEST.RERANK.ENABLED needs one gallery"),
        (["--per-query", "no/such/folder.npz"], "--per-query: there is no folder no/such"),
        (["TEST.MEMORY_BUDGET_MB", "0"], "at least 1"),
    ],
)
def test_bad_options(capsys, features, opts, message):
    code, out, err = run(capsys, features, *opts)
    assert code == 2 and out == "" and message in err


def test_bad_paths(capsys, tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "cut.npz").write_bytes((REFERENCE / "g1_small_junk.npz").read_bytes()[:5000])
    for path, message in (
        (tmp_path / "none.npz", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "text.npz", "is no npz file"),
        (tmp_path / "cut.npz", "is no npz file"),
    ):
        code, out, err = run(capsys, str(path))
        assert code == 2 and out == "" and message in err


def test_what_training_evaluates_is_what_the_file_gives(capsys, tmp_path):
    queries, gallery, ids = random_set(0)
    expected = judge_features(queries, gallery, ids).metrics()
    path = tmp_path / "saved.npz"
    columns = {"features": (queries, gallery), "pids": (ids.query_pids, ids.gallery_pids)}
    columns["camids"] = (ids.query_camids, ids.gallery_camids)
    np.savez(
        path,
        **{
            f"{side}_{name}": pair[i].numpy()
            for name, pair in columns.items()
            for i, side in enumerate(("query", "gallery"))
        },
    )
    _, out, _ = run(capsys, str(path), "--json")
    assert json.loads(out)["mAP"] == expected["mAP"]
