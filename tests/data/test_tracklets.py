"""Frames of tracklets, the training sampler and the batches of a test set."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_config
from video_set import write_video

from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.data.build import build_dataset, find_training_problems
from fastamp.data.tracklets import (
    TrackletInferenceSampler,
    TrackletSampler,
    divide_into_clips,
    even_frames,
    random_frames,
    restricted_frames,
    select_test_frames,
    strided_frames,
    tracklet_keys,
)
from fastamp.engine import DefaultTrainer
from fastamp.evaluation import ReportOptions
from fastamp.inference import Predictor, visualize
from fastamp.inference.extract import extract
from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.tracklets import frames_by_tracklet, number_tracklets

REFERENCE = np.load(Path(__file__).parents[1] / "reference/methods/video1.npz")
CLIPS = json.loads((Path(__file__).parents[1] / "reference/methods/video1_clips.json").read_text())


def training_set(counts=((5, 1), (3, 9), (4, 4, 4), (2,), (7, 7))):
    """Return labels and tracklets; identity i has tracklets with ``counts[i]`` frames."""
    labels = [identity for identity, lengths in enumerate(counts) for count in lengths for _ in range(count)]
    frames = [count for lengths in counts for count in lengths]
    return labels, np.repeat(np.arange(len(frames)), frames)


def make(batch_size=24, num_instances=2, frames=4, seed=0, world_size=1, sampling="restricted", **options):
    labels, tracklets = training_set()
    sampler = TrackletSampler(
        labels=labels,
        camids=[0] * len(labels),
        tracklets=tracklets,
        frames=frames,
        sampling=sampling,
        batch_size=batch_size,
        num_instances=num_instances,
        seed=seed,
        world_size=world_size,
        **options,
    )
    return sampler, np.array(labels), tracklets


def take(sampler, epoch, count):
    return list(itertools.islice(sampler.epoch(epoch), count))


@pytest.mark.parametrize("frames", [4, 8, 15])
def test_even_frames_equal_those_of_torchreid(frames):
    for count, expected in zip(REFERENCE["lengths"].tolist(), REFERENCE[f"evenly_T{frames}"], strict=True):
        assert even_frames(count, frames).tolist() == expected.tolist()


def naive_even_frames(count, frames):
    indices = list(range(count))
    if count < frames:
        return indices + [count - 1] * (frames - count)
    kept = indices[: count - count % frames]
    return kept[:: count // frames]


def test_even_frames_equal_a_loop():
    for count, frames in itertools.product(range(1, 40), range(1, 12)):
        assert even_frames(count, frames).tolist() == naive_even_frames(count, frames)


def test_random_selections_are_ascending_and_in_range(subtests):
    for count in (1, 2, 4, 5, 30):
        for select in (random_frames, restricted_frames):
            with subtests.test(f"{count} {select.__name__}"):
                rng = np.random.default_rng(0)
                drawn = [select(count, 4, rng) for _ in range(200)]
                assert all(len(frames) == 4 and frames.min() >= 0 and frames.max() < count for frames in drawn)
                assert all((np.diff(frames) >= 0).all() for frames in drawn)
                assert {int(frame) for frames in drawn for frame in frames} == set(range(count))
                if count >= 4:
                    assert all(len(set(frames.tolist())) == 4 for frames in drawn)


def test_clips_equal_those_of_the_dense_sampling_of_cal():
    for count in REFERENCE["lengths"].tolist():
        clips = divide_into_clips(count, 64)
        found = [[*clip] if len(clip) <= 16 else [clip[0], clip[-1], len(clip)] for clip in clips]
        assert found == CLIPS[f"train_step64_len{count}"]
    assert divide_into_clips(130, 0) == [range(130)]


def test_strided_frames_have_the_stride_in_long_tracklets_only(subtests):
    for count in (1, 7, 8, 31, 32, 100):
        with subtests.test(count):
            rng = np.random.default_rng(0)
            drawn = np.array([strided_frames(count, 8, 4, rng) for _ in range(1000)])
            assert drawn.min() == 0 and drawn.max() == count - 1 and (np.diff(drawn) >= 0).all()
            if count >= 32:
                assert (np.diff(drawn) == 4).all() and set(drawn[:, 0].tolist()) == set(range(count - 28))
            elif count >= 8:
                assert (np.diff(drawn) >= 1).all()


def test_clips_are_drawn_like_tracklets():
    tracklets = np.repeat(np.arange(4), 10)
    options = {"labels": np.repeat([0, 0, 1, 1], 10), "camids": np.zeros(40, dtype=int), "batch_size": 8, "seed": 0}
    sampler = TrackletSampler(tracklets=tracklets, frames=2, num_instances=2, clip=3, sampling="stride", **options)
    assert [len(rows) for rows in sampler.tracklets] == [3, 3, 4] * 4 and sampler.images_per_epoch == 24
    assert np.concatenate(sampler.tracklets).tolist() == [*range(40)]
    for frames in np.array(take(sampler, 0, 400)).reshape(-1, 2):
        clip = frames % 10 // 3
        assert tracklets[frames[0]] == tracklets[frames[1]] and np.ptp(clip.clip(max=2)) == 0


def test_restricted_frames_come_from_equal_parts():
    rng = np.random.default_rng(0)
    for _ in range(100):
        assert (restricted_frames(12, 4, rng) // 3).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("sampling", ["restricted", "random", "even", "stride"])
def test_batch_has_p_identities_k_tracklets_and_t_frames(sampling):
    sampler, labels, tracklets = make(sampling=sampling)
    for batch in np.array(take(sampler, 0, 24 * 50)).reshape(-1, 3, 2, 4):
        assert all((tracklets[frames] == tracklets[frames[0]]).all() for group in batch for frames in group)
        assert all((np.diff(frames) >= 0).all() for group in batch for frames in group)
        assert len({int(labels[group].max()) for group in batch}) == 3
        assert all(len(set(labels[group].reshape(-1).tolist())) == 1 for group in batch)


def test_stream_depends_only_on_seed_and_epoch():
    stream = take(make()[0], 3, 500)
    assert stream == take(make()[0], 3, 500)
    assert stream != take(make()[0], 4, 500)
    assert stream != take(make(seed=1)[0], 3, 500)
    take(make(seed=-1)[0], 0, 1)


def test_ranks_divide_the_batch_of_one_process():
    assert take(make()[0], 0, 200) == take(make(world_size=3)[0], 0, 200)


def test_epoch_has_t_frames_of_each_tracklet():
    assert make()[0].images_per_epoch == 10 * 4
    assert make(batch_size=40, num_instances=5, frames=4)[0].images_per_epoch == 40


def test_tracklets_of_different_datasets_are_different():
    tracklets = np.array([0, 0, 0, 0, 1])
    assert [rows.tolist() for rows in frames_by_tracklet(tracklet_keys(tracklets, [0, 0, 1, 1, 1]))] == [
        [0, 1],
        [2, 3],
        [4],
    ]


@pytest.mark.parametrize(("batch_size", "world_size"), [(20, 1), (24, 2), (12, 1)])
def test_batch_size_must_be_a_multiple(batch_size, world_size):
    with pytest.raises(ConfigError, match=r"NUM_INSTANCE 2 x DATALOADER.TRACKLET.FRAMES 4.*\n.*multiple of (8|16)"):
        make(batch_size=batch_size, world_size=world_size)


def test_too_few_identities():
    with pytest.raises(DataError, match=r"needs 6\b"):
        make(batch_size=48)


def test_images_without_tracklet_are_tracklets_of_one_frame():
    assert number_tracklets(np.array([7, -1, 3, 7, -1])).tolist() == [0, 1, 2, 0, 3]
    assert [rows.tolist() for rows in frames_by_tracklet(np.array([7, -1, 3, 7, -1]))] == [[0, 3], [1], [2], [4]]
    assert number_tracklets(np.array([], dtype=np.int64)).tolist() == []


def test_selected_test_frames_are_grouped_and_keep_query_and_gallery_apart():
    #                     query         gallery
    tracklets = np.array([5, 4, 5, 5, 4, 5, 5, 6, 6, 6, 6, 6, -1])
    assert select_test_frames(tracklets, 0, 5).tolist() == [0, 2, 3, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert select_test_frames(tracklets, 2, 5).tolist() == [0, 2, 1, 4, 5, 6, 7, 9, 12]
    assert select_test_frames(tracklets, 1, 5).tolist() == [0, 1, 5, 7, 12]


def test_rank_and_batch_borders_never_cut_a_tracklet(subtests):
    for batch_size in (1, 4, 6, 100):
        for world_size in (1, 2, 3, 7):
            with subtests.test(f"{batch_size} {world_size}"):
                counts, num_query = [3, 1, 4, 2, 9, 2, 2, 1], 8
                tracklets = np.repeat([4, 8, 2, 4, 5, -1, 3, 9], counts)  # tracklet 4 is also in the gallery
                border = np.repeat(np.arange(8), counts)
                border[-5:-3] = [100, 101]
                seen = []
                for rank in range(world_size):
                    sampler = TrackletInferenceSampler(
                        tracklets=tracklets,
                        num_query=num_query,
                        batch_size=batch_size,
                        rank=rank,
                        world_size=world_size,
                    )
                    batches = [[index for _, _, index in batch] for batch in sampler]
                    assert len(batches) == len(sampler)
                    assert [index for batch in batches for index in batch] == list(sampler.indices)
                    for batch in batches:
                        assert len(batch) <= batch_size or len(set(border[batch])) == 1
                        assert not (set(border[batch]) & set(np.delete(border, batch)))
                        assert len({index < num_query for index in batch}) == 1
                    seen += sampler.indices
                assert seen == list(range(len(tracklets)))


def test_fewer_tracklets_than_processes():
    with pytest.raises(DataError, match="2 tracklets"):
        TrackletInferenceSampler(tracklets=np.array([0, 0, 1]), num_query=2, batch_size=4, world_size=3)


# ---- loaders


@pytest.fixture
def video(tmp_path):
    return write_video(tmp_path)


def config(file, *opts):
    return tiny_config(
        file.parent / "run",
        *("INPUT.SIZE_TRAIN", "(32, 16)", "INPUT.SIZE_TEST", "(32, 16)"),
        *("DATASETS.NAMES", f"csv:{file}", "DATASETS.TESTS", f"csv:{file}"),
        *("DATALOADER.SAMPLER_TRAIN", "TrackletSampler", "DATALOADER.NUM_INSTANCE", "2"),
        *("SOLVER.IMS_PER_BATCH", "16", *opts),
    )


def lines_changed(file, **columns):
    """Return a copy of the CSV file in which the function of a column's value and the line replaces the value."""
    names, *lines = [line.split(",") for line in file.read_text().split()]
    lines = [
        [columns[name](value, line) if name in columns else value for name, value in zip(names, line, strict=True)]
        for line in lines
    ]
    copy = file.with_name("changed.csv")
    copy.write_text("\n".join(",".join(line) for line in [names, *lines]) + "\n")
    return copy


def test_training_batch_has_frames_of_whole_tracklets(video):
    loader = build_reid_train_loader(config(video))
    assert loader.iters_per_epoch == 6 * 2 * 3 * 4 // 16
    for batch in itertools.islice(loader, 5):
        assert (batch["tracklet"].view(-1, 4) == batch["tracklet"].view(-1, 4)[:, :1]).all()
        assert len(set(batch["targets"].view(-1, 8)[:, 0].tolist())) == 2


@pytest.mark.parametrize(("frames", "expected"), [("0", 40), ("2", 16), ("1", 8), ("9", 40)])
def test_test_loader_loads_only_the_selected_frames(video, frames, expected):
    loader, num_query = build_reid_test_loader(config(video, "TEST.TRACKLET.FRAMES", frames), f"csv:{video}")
    assert len(loader.dataset) == expected and num_query == expected // 2
    rows = [row for batch in loader for row in batch["indices"].tolist()]
    assert rows == list(range(expected))


def test_interleaved_frames_of_a_csv_file_are_grouped(video):
    lines = video.read_text().splitlines()
    video.write_text("\n".join([lines[0], *sorted(lines[1:], key=lambda line: line.split("_")[3])]) + "\n")
    loader, _ = build_reid_test_loader(config(video), f"csv:{video}")
    tracklets = np.concatenate([batch["tracklet"] for batch in loader])
    assert (np.diff(number_tracklets(tracklets)) >= 0).all()
    assert [Path(item.path).stem[-1] for item in loader.dataset.items[:5]] == list("01234")


def test_missing_column_lists_the_available_ones(tmp_path):
    file = write_video(tmp_path, header="track")
    with pytest.raises(ConfigError, match=r"'tracklet'.*camera, track\b"):
        build_reid_train_loader(config(file))
    loader, num_query = build_reid_test_loader(config(file, "TEST.TRACKLET.FRAMES", "2"), f"csv:{file}")
    assert len(loader.dataset) == 40 and num_query == 20


@pytest.mark.parametrize(
    "build", [build_reid_train_loader, lambda cfg: build_reid_test_loader(cfg, *cfg.DATASETS.TESTS)]
)
@pytest.mark.parametrize(
    ("column", "kind"), [(lambda name, _: name[2:], "identities: [06]"), (lambda _, line: line[1], "cameras: 0")]
)
def test_tracklet_with_several_identities_or_cameras_is_named(video, build, column, kind):
    file = lines_changed(video, tracklet=column)
    with pytest.raises(DataError, match=rf"csv:.* {kind} and "):
        build(config(file))


def test_numbers_with_decimals_are_not_tracklets(video):
    file = lines_changed(video, tracklet=lambda name, _: name.replace("_", ".", 1).replace("_", ""))
    with pytest.raises(DataError, match="tracklet"):
        build_reid_train_loader(config(file))


def test_integer_tracklets_are_accepted(video):
    file = lines_changed(video, tracklet=lambda name, _: name.replace("_", ""))
    next(iter(build_reid_train_loader(config(file))))
    assert len(build_reid_test_loader(config(file, "TEST.TRACKLET.FRAMES", "1"), f"csv:{file}")[0].dataset) == 8


def test_missing_frame_is_named(video):
    (video.parent / "0_0_0_3.png").unlink()
    with pytest.raises(DataError, match="0_0_0_3.png"):
        build_reid_train_loader(config(video))


def test_check_data_reports_tracklets_with_several_cameras(video):
    file = lines_changed(video, tracklet=lambda name, line: line[1])
    problems = find_training_problems(build_dataset(f"csv:{file}"), config(file))
    assert sum("has several cameras" in problem for problem in problems) == 2


@pytest.mark.integration
@pytest.mark.parametrize("pool", ["none", "avg", "attention"])
def test_training_and_evaluation_on_tracklets(video, pool):
    cfg = config(video, "MODEL.HEADS.TEMPORAL_POOL", pool, "SOLVER.MAX_EPOCH", "2", "TEST.REPORT", "True")
    metrics = DefaultTrainer(cfg).train()
    assert (metrics["num_query"], metrics["num_gallery"], metrics["num_frames"]) == (4, 4, 40)
    assert 0 <= metrics["mAP"] <= 100
    page = (Path(cfg.OUTPUT_DIR) / "report.html").read_text()
    assert "4 queries, 4 gallery tracklets" in page
    assert sorted(set(re.findall(r"\d_1_0_\d\.png", page))) == [f"{pid}_1_0_0.png" for pid in range(6, 10)]


@pytest.mark.integration
@pytest.mark.parametrize("pool", ["none", "attention"])
def test_predictor_computes_the_feature_of_a_tracklet(video, pool):
    cfg = config(video, "MODEL.HEADS.TEMPORAL_POOL", pool, "SOLVER.MAX_EPOCH", "1")
    DefaultTrainer(cfg).train()
    predictor = Predictor(Path(cfg.OUTPUT_DIR) / "model_final.pth", device="cpu")
    batch = next(iter(build_reid_test_loader(cfg, f"csv:{video}")[0]))
    rows = (batch["tracklet"] == batch["tracklet"][0]).nonzero()[:, 0].tolist()
    with torch.inference_mode():
        expected = predictor.compute([batch])[rows].mean(0)
    frames = [batch["img_paths"][row] for row in rows]
    torch.testing.assert_close(predictor.tracklet_features(frames), expected)
    torch.testing.assert_close(predictor.tracklet_features(frames[:1]), predictor.features(frames[0])[0])
    with pytest.raises(DataError, match="at least one image"):
        predictor.tracklet_features([])


@pytest.mark.integration
def test_extraction_has_features_of_images_and_figures_use_first_frames(video, monkeypatch):
    cfg = config(video, "MODEL.HEADS.TEMPORAL_POOL", "attention", "SOLVER.MAX_EPOCH", "1")
    DefaultTrainer(cfg).train()
    predictor = Predictor(Path(cfg.OUTPUT_DIR) / "model_final.pth", device="cpu")
    extracted, _ = extract(predictor, f"csv:{video}", video.parent / "features.npz", splits=("query",))
    expected = predictor.features(list(extracted.images.paths))
    torch.testing.assert_close(torch.as_tensor(extracted.matrix), expected)

    seen = []
    monkeypatch.setattr(visualize, "similarity_map", lambda model, batch: seen.append(batch["indices"].tolist()))
    monkeypatch.setattr(visualize, "similarity_figure", lambda pairs, gallery: None)
    monkeypatch.setattr(visualize, "write", lambda *_, **__: None)
    options = ReportOptions(kinds=("random",), lists=4)
    visualize.draw_set(predictor, f"csv:{video}", {"grad-cam"}, options, video.parent)
    assert sorted(query for query, _ in seen) == [0, 5, 10, 15]
    assert {gallery for _, gallery in seen} <= {20, 25, 30, 35}


def test_equal_names_in_two_training_sets_are_different_tracklets(tmp_path):
    files = []
    for name in "ab":
        (tmp_path / name).mkdir()
        files.append(f"csv:{write_video(tmp_path / name)}")
    cfg = config(tmp_path / "a" / "video.csv", "DATASETS.NAMES", str(tuple(files)))
    loader = build_reid_train_loader(cfg)
    assert loader.iters_per_epoch == 2 * 36 * 4 // 16
    for batch in itertools.islice(loader, 10):
        assert all(len({Path(path).parent for path in batch["img_paths"][n : n + 4]}) == 1 for n in (0, 4, 8, 12))
