"""Names of FastReID: each one that FastReID's own tools, demo and projects import is called with its arguments."""

import argparse
import importlib
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from torch import nn

from fastamp.fastreid.config import CfgNode, get_cfg
from fastamp.fastreid.data.datasets.bases import ImageDataset
from fastamp.fastreid.engine import DefaultTrainer
from fastamp.fastreid.layers import classifier
from fastamp.fastreid.utils.events import EventStorage, get_event_storage
from fastamp.utils.errors import ConfigError, DataError

LIST = [
    tuple(line.split()[:2])
    for line in (Path(__file__).parent / "fastreid_imports.txt").read_text().splitlines()
    if not line.startswith("#")
]

BATCH = {"images": torch.zeros(2, 4)}


def load(module, name):
    """Do the same as ``from module import name``, below ``fastamp``."""
    return getattr(__import__(f"fastamp.{module}", fromlist=[name]), name)


@pytest.fixture
def cfg(demo, tmp_path):
    config = get_cfg()
    config.merge_from_list(tiny.tiny_options(tmp_path / "run"))
    return config


def identities():
    """Two queries and three gallery images: distances, identities and cameras."""
    distances = np.array([[0.1, 0.2, 0.3], [0.3, 0.1, 0.2]], dtype=np.float32)
    return distances, np.array([0, 1]), np.array([1, 0, 1]), np.array([0, 0]), np.array([1, 1, 1])


def call_registry(registry):
    @registry.register()
    class Component:
        pass

    assert registry.get("Component") is Component
    registry._components.pop("Component")


def call_configurable(configurable):
    @configurable(from_config=lambda cfg, scale=1: {"a": 2 * scale})
    def build(*, a, b=0):
        return a, b

    class Layer:
        @configurable
        def __init__(self, *, width):
            self.width = width

        @classmethod
        def from_config(cls, cfg):
            return {"width": cfg.WIDTH}

    cfg = CfgNode({"WIDTH": 5})
    assert build(cfg) == (2, 0) and build(cfg, scale=3, b=1) == (6, 1) and build(a=7) == (7, 0)
    assert Layer(cfg).width == 5 and Layer(width=6).width == 6


def call_train_loader(build, cfg):
    batch = next(iter(build(cfg)))
    assert {"images", "targets", "camids"} <= set(batch)
    dataset = Squares()
    batch = next(iter(build(cfg, train_set=dataset, sampler=list(range(40)))))
    assert batch["targets"].tolist() == [index % 4 for index in range(cfg.SOLVER.IMS_PER_BATCH)]


class Squares(torch.utils.data.Dataset):
    """Map-style dataset with four classes."""

    num_classes = 4

    def __len__(self):
        return 40

    def __getitem__(self, index):
        images = torch.full((3, 64, 32), float(index % 4))
        return {"images": images, "targets": index % 4, "camids": index % 3, "img_paths": f"{index}.jpg"}


def call_test_loader(build, cfg):
    loader, num_query = build(cfg, cfg.DATASETS.TESTS[0])
    assert len(loader) > 0 and num_query > 0
    loader, num_query = build(cfg, test_set=Squares(), num_query=8)
    assert sum(len(batch["targets"]) for batch in loader) == 40 and num_query == 8


def call_comm_dataset(CommDataset, image):
    item = CommDataset([(str(image), "a_7", "a_2"), (str(image), "a_3", "a_1")], None, True)[0]
    assert item["targets"] == 1 and item["camids"] == 1 and item["img_paths"] == str(image)
    assert CommDataset([(str(image), 7, 2)], None, False)[0]["targets"] == 7


def call_evaluate_rank(evaluate_rank, *last):
    cmc, all_ap, all_inp = evaluate_rank(*identities(), *last)
    assert cmc.dtype == np.float32 and cmc.tolist() == [0.0, 1.0, 1.0]
    assert np.allclose(all_ap, [0.5, (1 / 2 + 2 / 3) / 2]) and np.allclose(all_inp, [0.5, 2 / 3])


def call_aqe(aqe):
    query, gallery = aqe(torch.randn(3, 8), torch.randn(9, 8), 1, 3, 3.0)
    assert query.shape == (3, 8) and gallery.shape == (9, 8)


def call_evaluator(ReidEvaluator, cfg):
    evaluator = ReidEvaluator(cfg, 2, None)
    _, q_pids, g_pids, q_camids, g_camids = identities()
    features = torch.nn.functional.normalize(torch.randn(5, 8), dim=1)
    targets, camids = (torch.from_numpy(np.concatenate(both)) for both in ((q_pids, g_pids), (q_camids, g_camids)))
    evaluator.process({"targets": targets, "camids": camids, "images": torch.zeros(5, 3, 8, 4)}, features)
    assert {"mAP", "Rank-1", "mINP", "metric"} <= set(evaluator.evaluate())


def call_clas_evaluator(ClasEvaluator, cfg):
    evaluator = ClasEvaluator(cfg, None)
    evaluator.process({"targets": torch.tensor([0, 1])}, torch.tensor([[2.0, 1.0], [2.0, 1.0]]))
    assert evaluator.evaluate() == OrderedDict({"Acc@1": 50.0, "metric": 50.0})


def call_optimizer(build_optimizer, cfg):
    assert isinstance(build_optimizer(cfg, nn.Linear(2, 2)), torch.optim.Optimizer)


def call_lr_scheduler(build_lr_scheduler, cfg):
    options = "SCHED MultiStepLR STEPS [2] WARMUP_ITERS 4 BASE_LR 1.0 WARMUP_FACTOR 0.1 WARMUP_METHOD linear GAMMA 0.1"
    words = options.split()
    for key, value in zip(words[::2], words[1::2], strict=True):
        cfg.merge_from_list([f"SOLVER.{key}", value])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = build_lr_scheduler(cfg, optimizer, 4)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(4):
        schedulers["warmup_sched"].step()
        rates.append(optimizer.param_groups[0]["lr"])
    for _ in range(2):
        schedulers["lr_sched"].step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.325, 0.55, 0.775, 1.0, 1.0, 0.1])


def call_checkpointer(Checkpointer, tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer(model, str(tmp_path), save_to_disk=True, optimizer=optimizer)
    assert not checkpointer.has_checkpoint() and checkpointer.resume_or_load("", resume=True) == {}
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpointer.save("model_0001", epoch=1)
    other = nn.Linear(4, 2)
    other_optimizer = torch.optim.Adam(other.parameters())
    loaded = Checkpointer(other, str(tmp_path), optimizer=other_optimizer).resume_or_load("", resume=True)
    assert loaded["epoch"] == 1 and torch.equal(other.weight, model.weight)
    assert torch.equal(other_optimizer.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def call_loop_checkpointer(PeriodicCheckpointer, Checkpointer, tmp_path):
    periodic = PeriodicCheckpointer(Checkpointer(nn.Linear(2, 2), str(tmp_path)), 2, 3)
    for epoch in range(3):
        periodic.step(epoch, metric_dict={"metric": 1.0})
    assert {path.name for path in tmp_path.glob("*.pth")} == {"model_best.pth", "model_0001.pth", "model_final.pth"}


def call_path_manager(PathManager, tmp_path):
    folder = str(tmp_path / "a" / "b")
    PathManager.mkdirs(folder)
    with PathManager.open(f"{folder}/x.txt", "w") as file:
        file.write("x")
    assert PathManager.exists(folder) and PathManager.isdir(folder) and PathManager.isfile(f"{folder}/x.txt")
    assert PathManager.copy(f"{folder}/x.txt", f"{folder}/y.txt")
    assert sorted(PathManager.ls(folder)) == ["x.txt", "y.txt"]
    assert PathManager.get_local_path(folder) == folder
    PathManager.rm(f"{folder}/y.txt")
    with pytest.raises(ConfigError, match="URLs"):
        PathManager.open("https://host/model.pth")


def call_writers(CommonMetricPrinter, JSONWriter, tmp_path):
    with EventStorage(0) as storage:
        writers = [CommonMetricPrinter(2), JSONWriter(str(tmp_path / "metrics.json"))]
        for storage.iter in range(2):
            storage.put_scalar("total_loss", torch.tensor(1.0 + storage.iter))
            storage.put_scalar("lr", 0.1, smoothing_hint=False)
            for writer in writers:
                writer.write()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert rows == [
        {"iteration": 0, "total_loss": 1.0, "lr": 0.1},
        {"iteration": 1, "total_loss": 1.5, "lr": 0.1},
    ]


def call_storage(storage_class):
    with storage_class(3) as storage:
        assert get_event_storage() is storage and storage.iter == 3
        with storage.name_scope("a"):
            storage.put_scalars(x=1.0, y=2.0, smoothing_hint=True)
        storage.step()
        storage.put_scalar("a/x", 3.0)
    assert storage.latest() == {"a/x": (3.0, 4), "a/y": (2.0, 3)}
    assert storage.latest_with_smoothing_hint(2)["a/x"] == (2.0, 4)
    history = storage.history("a/x")
    assert (history.latest(), history.avg(2), history.median(1), history.global_avg()) == (3.0, 2.0, 3.0, 2.0)
    with pytest.raises(KeyError, match="no value"):
        storage.history("b")


def call_visualizer(Visualizer, tmp_path, image):
    pytest.importorskip("matplotlib")
    distances, q_pids, g_pids, q_camids, g_camids = identities()
    dataset = importlib.import_module("fastamp.fastreid.data.common").CommDataset(
        [
            (str(image), int(pid), int(camera))
            for pid, camera in zip([*q_pids, *g_pids], [*q_camids, *g_camids], strict=True)
        ],
        relabel=False,
    )
    visualizer = Visualizer(dataset)
    visualizer.get_model_output(np.array([0.5, 0.7]), distances, q_pids, g_pids, q_camids, g_camids)
    drawn = visualizer.vis_rank_list(str(tmp_path), True, 2, "descending", "ascending", 2)
    assert drawn.tolist() == [1, 0] and (tmp_path / "0.jpg").is_file() and (tmp_path / "1.jpg").is_file()
    fpr, tpr, pos, neg = visualizer.vis_roc_curve(str(tmp_path))
    assert (fpr[-1], tpr[-1], len(pos), len(neg)) == (1.0, 1.0, 3, 3)
    visualizer.save_roc_info(str(tmp_path), fpr, tpr, pos, neg)
    assert np.array_equal(visualizer.load_roc_info(tmp_path / "roc_info.npz")["fpr"], fpr)
    with pytest.raises(DataError, match="all_ap"):
        visualizer.get_model_output(np.ones(3), *identities())


def call_predictor(DefaultPredictor, cfg, tmp_path):
    trainer = DefaultTrainer(cfg)
    path = trainer.checkpointer.save("model_start")
    cfg.MODEL.WEIGHTS = str(path)
    features = DefaultPredictor(cfg)(torch.zeros(2, 3, 64, 32))
    assert features.shape == (2, tiny.WIDTH) and not features.requires_grad


def call_norm(get_norm):
    assert get_norm("", 8) is None
    norm = get_norm("BN", 8, bias_freeze=True)
    assert norm.num_features == 8 and not norm.bias.requires_grad and norm.weight.requires_grad


def call_any_softmax(any_softmax):
    weight, features, targets = torch.randn(5, 8), torch.randn(3, 8), torch.tensor([0, 4, 2])
    cosines = nn.functional.linear(*(nn.functional.normalize(each, dim=1) for each in (features, weight)))
    for name in ("CosSoftmax", "ArcSoftmax", "CircleSoftmax"):
        layer = getattr(classifier, name)(scale=16.0, margin=0.2)
        found = getattr(any_softmax, name)(5, 16.0, 0.2)(cosines, targets)
        assert torch.allclose(found, layer(features, weight, targets)[0], atol=1e-4)
    assert torch.equal(any_softmax.Linear(5, 2.0, 0.0)(cosines, targets), 2 * cosines)


def call_weight_init(weights_init_kaiming):
    layers = nn.Sequential(nn.Conv2d(3, 512, 3), nn.BatchNorm2d(512), nn.Linear(512, 100))
    layers.apply(weights_init_kaiming)
    assert layers[0].weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.05)
    assert layers[2].weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not layers[0].bias.any() and not layers[2].bias.any() and (layers[1].weight == 1).all()


def call_contiguous(ContiguousParams, model):
    with pytest.warns(UserWarning, match="ContiguousParams"):
        params = ContiguousParams(model.parameters())
    optimizer = torch.optim.SGD(params.contiguous(), lr=1.0)
    before = model.weight.clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    params.assert_buffer_is_valid()
    assert not torch.equal(model.weight, before)


def call_dist(build_dist):
    x, y = torch.randn(3, 8), torch.randn(5, 8)
    assert np.allclose(build_dist(x, y, "euclidean"), torch.cdist(x, y).square(), atol=1e-5)
    cosine = 1 - nn.functional.cosine_similarity(x[:, None], y, dim=2)
    assert np.allclose(build_dist(x, y, "cosine"), cosine, atol=1e-6)
    assert build_dist(x, y, "jaccard", k1=3, k2=2).shape == (3, 5)


def call_read_image(read_image, image):
    assert read_image(str(image)).mode == "RGB" and read_image(str(image), format="L").mode == "L"
    rgb, bgr = (np.asarray(read_image(str(image), name)) for name in ("RGB", "BGR"))
    assert np.array_equal(rgb[:, :, ::-1], bgr)


def call_trainer_base(TrainerBase):
    class Loop(TrainerBase):
        def run_step(self):
            self.storage.put_scalar("x", self.iter)

    loop = Loop()
    loop.train(0, 2, 3)
    assert loop.storage.latest()["x"] == (5.0, 5)


def call_loop(found):
    model = nn.Linear(4, 2)
    model.forward = lambda batch: {"loss_a": nn.functional.linear(batch["images"], model.weight).float().square().sum()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = found(model, [{"images": torch.ones(1, 4)}] * 4, optimizer, None)
    loop.train(1, 2, 2)
    history = loop.storage.history("total_loss").values()
    assert [iteration for _, iteration in history] == [2, 3] and history[1][0] < history[0][0]


def call_eval_hook(EvalHook):
    calls = []
    loop = importlib.import_module("fastamp.fastreid.engine").TrainerBase()
    loop.run_step = lambda: None
    loop.register_hooks([EvalHook(1, lambda: calls.append(1) or {})])
    loop.train(0, 2, 1)
    assert len(calls) == 2


def is_class(base):
    return lambda found: isinstance(found, type) and issubclass(found, base)


def check(name, found, cfg, model, tmp_path, image):
    """Call ``found``, the object that FastReID provides as ``name``, with FastReID's argument order."""
    from fastamp.fastreid.evaluation import DatasetEvaluator
    from fastamp.fastreid.utils.checkpoint import Checkpointer
    from fastamp.fastreid.utils.events import JSONWriter

    calls = {
        "AMPTrainer": lambda: call_loop(found),
        "Baseline": lambda: found(cfg).eval()({"images": torch.zeros(2, 3, 64, 32)}).shape == (2, 16),
        "CfgNode": lambda: found({"A": 1}).A == 1,
        "Checkpointer": lambda: call_checkpointer(found, tmp_path),
        "ClasEvaluator": lambda: call_clas_evaluator(found, cfg),
        "CommDataset": lambda: call_comm_dataset(found, image),
        "CommonMetricPrinter": lambda: call_writers(found, JSONWriter, tmp_path),
        "ContiguousParams": lambda: call_contiguous(found, model),
        "DatasetEvaluator": lambda: is_class(object)(found) and found().reset() is None,
        "DefaultPredictor": lambda: call_predictor(found, cfg, tmp_path),
        "DefaultTrainer": lambda: found is DefaultTrainer,
        "Distiller": lambda: is_class(nn.Module)(found),
        "EmbeddingHead": lambda: found(cfg).eval()(torch.zeros(2, 16, 4, 2)).shape == (2, 16),
        "EvalHook": lambda: call_eval_hook(found),
        "EventStorage": lambda: call_storage(found),
        "IBN": lambda: found(8, "BN")(torch.zeros(2, 8, 4, 4)).shape == (2, 8, 4, 4),
        "ImageDataset": lambda: found is ImageDataset,
        "JSONWriter": lambda: found(str(tmp_path / "metrics.json"), 20).close() is None,
        "PathManager": lambda: call_path_manager(found, tmp_path),
        "ReidEvaluator": lambda: call_evaluator(found, cfg),
        "SELayer": lambda: found(32, 16)(torch.zeros(2, 32, 4, 4)).shape == (2, 32, 4, 4),
        "SimpleTrainer": lambda: call_loop(found),
        "TensorboardXWriter": lambda: found(str(tmp_path), 20).close() is None,
        "ToTensor": lambda: found()(Image.new("RGB", (4, 8), (255, 0, 0))).tolist()[0][0] == [255.0] * 4,
        "TrainerBase": lambda: call_trainer_base(found),
        "Visualizer": lambda: call_visualizer(found, tmp_path, image),
        "_root": lambda: isinstance(found, str) and Path(found).is_dir(),
        "any_softmax": lambda: call_any_softmax(found),
        "aqe": lambda: call_aqe(found),
        "build_dist": lambda: call_dist(found),
        "build_lr_scheduler": lambda: call_lr_scheduler(found, cfg),
        "build_model": lambda: isinstance(found(cfg), nn.Module),
        "build_optimizer": lambda: call_optimizer(found, cfg),
        "build_reid_test_loader": lambda: call_test_loader(found, cfg),
        "build_reid_train_loader": lambda: call_train_loader(found, cfg),
        "build_transforms": lambda: found(cfg, False)(Image.new("RGB", (30, 70))).shape == (3, 64, 32),
        "comm": lambda: found.get_world_size() == 1 and found.gather([1], dst=0) == [[1]] and found.is_main_process(),
        "concat_all_gather": lambda: torch.equal(found(torch.ones(2, 3)), torch.ones(2, 3)),
        "configurable": lambda: call_configurable(found),
        "default_argument_parser": lambda: isinstance(found(), argparse.ArgumentParser),
        "default_setup": lambda: found(cfg, argparse.Namespace(eval_only=True, config_file="")),
        "eval_market1501": lambda: call_evaluate_rank(found, 50),
        "evaluate_rank": lambda: call_evaluate_rank(found),
        "flatten_results_dict": lambda: found({"a": {"b": 1}, "c": 2}) == {"a/b": 1, "c": 2},
        "get_cfg": lambda: isinstance(found(), CfgNode),
        "get_missing_parameters_message": lambda: "a.weight" in found(["a.weight"]),
        "get_norm": lambda: call_norm(found),
        "get_unexpected_parameters_message": lambda: "a.weight" in found(["a.weight"]),
        "hooks": lambda: found.PeriodicCheckpointer(Checkpointer(model), 1).period == 1,
        "inference_on_dataset": lambda: (
            found(First(), [{"images": torch.zeros(2, 4)}], Empty(), False) == {"metric": 0.0}
        ),
        "launch": lambda: found(lambda: None, 1, num_machines=1, machine_rank=0, dist_url="auto", args=()) is None,
        "print_csv_format": lambda: found(OrderedDict({"A": {"mAP": 1.0, "note": "x"}})) is None,
        "read_image": lambda: call_read_image(found, image),
        "setup_logger": lambda: found(str(tmp_path), 0, name="my_project").name == "my_project",
        "weights_init_kaiming": lambda: call_weight_init(found),
    }

    class First(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)

        def forward(self, batch):
            return super().forward(batch["images"])

    class Empty(DatasetEvaluator):
        def process(self, inputs, outputs):
            pass

        def evaluate(self):
            return {"metric": 0.0}

    if name.endswith("_REGISTRY"):
        return call_registry(found)
    return calls[name]()


def test_name_works_with_the_arguments_of_fastreid(cfg, tmp_path, subtests):
    names = [(module, name) for module, name in LIST if name != "*"]
    assert len(names) == 72
    for number, (module, name) in enumerate(names):
        with subtests.test(f"{module} {name}"):
            folder = tmp_path / str(number)
            folder.mkdir()
            image = folder / "image.png"
            Image.new("RGB", (32, 64), (200, 100, 50)).save(image)
            found = load(module, name)
            if (module, name) == ("fastreid.utils.checkpoint", "PeriodicCheckpointer"):
                call_loop_checkpointer(found, load("fastreid.utils.checkpoint", "Checkpointer"), folder)
            elif (module, name) == ("fastreid.engine.hooks", "PeriodicCheckpointer"):
                assert found(None, 3).period == 3
            else:
                assert check(name, found, cfg.clone(), nn.Linear(4, 2), folder, image) in (True, None)


def test_star_import_works(subtests):
    modules = sorted({module for module, name in LIST if name == "*"})
    assert modules
    for name in modules:
        with subtests.test(name):
            module = importlib.import_module(f"fastamp.{name}")
            assert all(hasattr(module, attribute) for attribute in module.__all__)


def test_unknown_name_is_an_attribute_error():
    module = importlib.import_module("fastamp.fastreid.data.common")
    with pytest.raises(AttributeError):
        module.missing_name  # noqa: B018
    with pytest.raises(AttributeError):
        importlib.import_module("fastamp.fastreid.evaluation").missing_name  # noqa: B018


@pytest.mark.parametrize("name", ["evaluate_rank"])
def test_cuhk03_protocol_error_names_the_config_key_to_set(name):
    with pytest.raises(ConfigError, match="TEST.PROTOCOL"):
        load("fastreid.evaluation", name)(*identities(), use_metric_cuhk03=True)
