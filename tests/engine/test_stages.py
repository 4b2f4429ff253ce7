"""Stages: order, hooks, numbers, and exact continuation from each iteration of each stage."""

import json
import signal
from pathlib import Path

import preloaded
import pytest
import torch
from loops import make_net, make_trainer, same, values
from two_stages import ALL, HEAD, Batches, Run, StopAt, Stopped, train_in_parts

from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.engine import HookBase, Stage
from fastamp.engine.stages import Stages
from fastamp.utils.command_line import TrainingInterrupted
from fastamp.utils.errors import WeightsError

BEFORE = HEAD[0] * HEAD[1]
TOTAL = BEFORE + ALL[0] * ALL[1]


class Record(HookBase):
    """Hook that records where it is called."""

    def __init__(self, *, every_stage=False):
        self.every_stage, self.seen = every_stage, []

    def before_step(self):
        self.seen.append((self.trainer.stage_name, self.trainer.epoch, self.trainer.iter))


def steps(name, epochs, length):
    return [(name, number // length, number) for number in range(epochs * length)]


def test_stages_run_in_order_with_their_hooks(tmp_path):
    shared, of_last, of_first = Record(every_stage=True), Record(), Record()
    run = Run(tmp_path, hooks=(shared, of_last))
    run.stages.current.trainer.register_hooks([of_first])
    first = values(run.net)
    run.train()
    assert of_first.seen == steps("head", *HEAD) and of_last.seen == steps("training", *ALL)
    assert shared.seen == of_first.seen + of_last.seen
    assert not any(torch.equal(value, first[name]) for name, value in run.net.named_parameters())


def test_first_stage_trains_its_part_only(tmp_path):
    run = Run(tmp_path, hooks=(StopAt(BEFORE),))
    first = values(run.net)
    with pytest.raises(Stopped):
        run.train()
    changed = {name for name, value in run.net.named_parameters() if not torch.equal(value, first[name])}
    assert changed == {"head.weight", "head.bias"}


def test_writers_and_files_count_from_the_start_of_the_run(tmp_path):
    run = Run(tmp_path)
    run.train()
    assert [iteration for iteration, _ in run.rows] == [*range(1, BEFORE, 2), *range(BEFORE + 1, TOTAL, 2)]
    epochs = [metrics["epoch"] for _, metrics in run.rows]
    assert epochs == sorted(epochs) and epochs[-1] == HEAD[0] + ALL[0] - 1
    losses = [next(name for name in metrics if name.startswith("loss_")) for _, metrics in run.rows]
    assert losses == ["loss_head"] * (BEFORE // 2) + ["loss_cls"] * ((TOTAL - BEFORE) // 2)
    saved = {path.stem for path in tmp_path.glob("*.pth")}
    assert {"model_0001", "model_0003", "model_final", f"model_iter_{BEFORE + 1:07d}"} < saved
    assert read_checkpoint(tmp_path / "model_0001.pth")["trainer"]["stage"] == "head"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_interrupted_run_equals_the_whole_run(tmp_path, dtype):
    """Interrupted within an epoch and between epochs of both stages, and between the stages."""
    parts = train_in_parts(tmp_path / "parts", [2, HEAD[1], BEFORE, BEFORE + 5, BEFORE + 2 * ALL[1]], dtype)
    assert same(parts, Run(tmp_path / "whole", dtype).train())


@pytest.mark.integration
def test_two_ranks_interrupted_in_both_stages_equal_the_whole_run(tmp_path):
    done = preloaded.run(Path(__file__).parents[1] / "helpers/two_stages.py", tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [True, True]


@pytest.mark.parametrize("iteration", [1, BEFORE - 1])
def test_signal_in_the_first_stage_stops_within_it(tmp_path, iteration):
    class Send(HookBase):
        every_stage = True

        def before_step(self):
            if self.trainer.stage_name == "head" and self.trainer.iter == iteration:
                signal.raise_signal(signal.SIGTERM)

    run = Run(tmp_path / "run", hooks=(Send(),))
    with run.stop.watching(), pytest.raises(TrainingInterrupted):
        run.train()
    content = read_checkpoint(tmp_path / "run/model_interrupted.pth")["trainer"]
    assert (content["stage"], content["iteration"]) == ("head", iteration + 1)
    assert same(Run(tmp_path / "run").train(), Run(tmp_path / "whole").train())


def test_checkpoint_of_another_stage_is_refused(tmp_path):
    with pytest.raises(Stopped):
        Run(tmp_path, hooks=(StopAt(2),)).train()
    content = read_checkpoint(tmp_path / "model_iter_0000002.pth")
    content["trainer"]["stage"] = "prompts"
    torch.save(content, tmp_path / "model_iter_0000002.pth")
    with pytest.raises(WeightsError, match=r"prompts(.|\n)*SOLVER\.TRAINER"):
        Run(tmp_path).train()


def test_trainer_may_read_from_an_iterator_over_the_loader_of_its_stage():
    loader, net = Batches(3, 1), make_net()
    read = ({**batch, "number": number} for number, batch in enumerate(loader))
    trainer = make_trainer(net, [torch.optim.SGD(net.parameters(), lr=0.1)], read, torch.float32)
    trainer.set_data(3)
    stages = Stages([Stage("training", trainer, 2, loader)])
    trainer.start_iter = 4
    stages.train(stages.left()[0])
    assert (loader.start, trainer.iter) == (4, 5)
