"""Training metrics: means between flushes, one device-to-host copy per flush, and JSON lines."""

import json

import torch

from fastamp.utils.events import JSONWriter, MetricStore, tensorboard_tag


def test_metric_store_flush_returns_means_and_latest_values():
    store = MetricStore()
    store.average(loss=torch.tensor(1.0), time=2.0)
    store.average(loss=torch.tensor(4.0), time=4.0)
    store.latest(scale=8.0)
    store.latest(scale=4.0)
    assert store.flush() == {"loss": 2.5, "time": 3.0, "scale": 4.0}
    assert store.flush() == {}


def test_device_metrics_are_copied_to_the_host_only_in_flush(monkeypatch):
    store = MetricStore()

    def fail(self):
        raise AssertionError("copied before flush")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "item", fail)
        patch.setattr(torch.Tensor, "tolist", fail)
        patch.setattr(torch.Tensor, "__float__", fail)
        for _ in range(3):
            store.average(loss=torch.tensor(2.0, requires_grad=True) * 1.5)
    assert store.flush() == {"loss": 3.0}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_non_finite_metrics_are_written_as_null(tmp_path):
    writer = JSONWriter(tmp_path / "metrics.json")
    writer.write(1, {"loss": float("nan"), "scale": float("inf"), "lr": 0.5})
    writer.close()
    assert rows(tmp_path / "metrics.json") == [{"iteration": 1, "loss": None, "scale": None, "lr": 0.5}]


def test_metrics_file_of_a_resumed_run_contains_each_iteration_once(tmp_path):
    path = tmp_path / "metrics.json"
    writer = JSONWriter(path)
    for iteration in range(5):
        writer.write(iteration, {"x": iteration})
    writer.close()
    with path.open("ab") as file:
        file.write(b"\xff\0\xfe\n" + b'{"iteration": 5, "x"')  # corrupted and truncated lines
    writer = JSONWriter(path, start_iter=3)
    writer.write(3, {"x": 30})
    writer.close()
    assert [(r["iteration"], r["x"]) for r in rows(path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_new_run_overwrites_an_existing_metrics_file(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 0}\n')
    JSONWriter(path).close()
    assert path.read_text() == ""


def test_tensorboard_tags_are_grouped(subtests):
    cases = [
        ("total_loss", ("A",), "loss/total"),
        ("loss_cls", ("A",), "loss/cls"),
        ("loss_scale", ("A",), "precision/loss_scale"),
        ("lr", ("A",), "lr"),
        ("mine", ("A",), "mine"),
        ("A/mAP", ("A",), "eval/mAP"),
        ("A/baseline color/mAP", ("A",), "eval/baseline color/mAP"),
        ("A/mAP", ("B", "A"), "eval/A/mAP"),
        ("csv:a/b.csv/mAP", ("csv:a/b.csv",), "eval/mAP"),
        ("A/mAP", (), "A/mAP"),
    ]
    for name, datasets, tag in cases:
        with subtests.test(name=name, datasets=datasets, tag=tag):
            assert tensorboard_tag(name, datasets) == tag
