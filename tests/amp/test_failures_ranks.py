"""Failures of distributed training: overflow on one rank, diverging ranks, compressed gradients.

Two gloo processes run all scenarios once; the tests read their records.
"""

import itertools
from pathlib import Path

import loops
import preloaded
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from fastamp.amp.checks import check_communication
from fastamp.utils.errors import TrainingError

pytestmark = pytest.mark.integration

HELPERS = Path(__file__).parents[1] / "helpers"
STEPS, BAD_STEP = 6, 2  # as in failing_ranks.py


@pytest.fixture
def ranks(made_once, compiled_models):
    """Run the scenarios on two ranks; return for each rank: scenario -> implementation -> list of (scale, model)."""
    with made_once("failing_ranks" + "_compiled" * compiled_models) as (folder, missing):
        if missing:
            start(folder)
    found = [torch.load(folder / f"rank{rank}.pth", weights_only=True) for rank in (0, 1)]
    assert [rank["graphs"] > 0 for rank in found] == [compiled_models] * 2
    return found


def start(folder):
    runs = [preloaded.start(HELPERS / "failing_ranks.py", folder, rank) for rank in (0, 1)]
    done = [run.finish() for run in runs]
    assert [process.returncode for process in done] == [0, 0], done


def histories(ranks, scenario, whose):
    return [rank[scenario][whose] for rank in ranks]


def scales(history):
    return [step["scale"] for step in history]


def skips(history):
    """Return one bool for each step after the first: True if the step did not change the weight of the head."""
    return [torch.equal(a["model"]["head.weight"], b["model"]["head.weight"]) for a, b in itertools.pairwise(history)]


def statistics(step):
    return [step["model"][f"body.1.running_{name}"] for name in ("mean", "var")]


# One overflowing batch, on one rank of two.


@pytest.mark.failure("overflow on one rank: statistics")
@pytest.mark.parametrize("dtype", loops.LOW)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_plain_pytorch_ddp_broadcasts_non_finite_statistics_from_rank_0(ranks, dtype, bad_rank):
    scenario = f"overflow on rank {bad_rank}, {dtype}"
    plain = histories(ranks, scenario, "plain")
    assert [loops.finite(statistics(history[BAD_STEP])) for history in plain] == [bad_rank != 0, bad_rank != 1]
    for rank, history in enumerate(plain):
        assert skips(history)[BAD_STEP - 1] and loops.finite([history[-1]["model"]["head.weight"]])
        # DDP broadcasts the statistics of rank 0 in the next step: an overflow on rank 0 reaches all ranks.
        assert loops.finite(statistics(history[-1])) == (bad_rank == 1)
        assert ranks[rank][scenario]["plain evaluation"].isnan().all() == (bad_rank == 0)


@pytest.mark.failure("overflow on one rank: statistics")
@pytest.mark.parametrize("dtype", loops.LOW)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_skipped_step_restores_running_statistics_on_all_ranks(ranks, dtype, bad_rank):
    for history in histories(ranks, f"overflow on rank {bad_rank}, {dtype}", "ours"):
        assert loops.same(history[BAD_STEP - 1]["model"], history[BAD_STEP]["model"])
        assert skips(history) == [step == BAD_STEP for step in range(1, STEPS)]
        assert all(loops.finite(statistics(step)) for step in history)
        moved = [not torch.equal(statistics(a)[0], statistics(b)[0]) for a, b in itertools.pairwise(history)]
        assert moved == [step != BAD_STEP for step in range(1, STEPS)]


# A head outside DDP becomes NaN on one rank.


@pytest.mark.failure("overflow on one rank: parameters")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_ranks_diverge_after_an_overflow_on_one_rank(ranks, dtype):
    first, second = histories(ranks, f"head outside, {dtype}", "plain")
    assert (scales(first)[-1], scales(second)[-1]) == (65536.0, 32768.0)
    assert loops.same(first[BAD_STEP - 1]["model"], second[BAD_STEP - 1]["model"])
    for name in ("net.body.0.weight", "net.head.weight", "second.weight"):  # also parameters inside DDP
        assert not torch.equal(first[-1]["model"][name], second[-1]["model"][name])


@pytest.mark.failure("overflow on one rank: parameters")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(ranks, dtype):
    first, second = histories(ranks, f"head outside, {dtype}", "ours")
    assert all(loops.same(a["model"], b["model"]) for a, b in zip(first, second, strict=True))
    equal = [loops.same(a["model"], b["model"]) for a, b in itertools.pairwise(first)]
    assert equal == [False, True, False, False, False]
    expected = [65536.0] * 3 + [32768.0] * 3 if dtype == torch.float16 else [1.0] * STEPS
    assert scales(first) == scales(second) == expected


# A DDP communication hook that compresses scaled gradients to float16.


@pytest.mark.failure("gradients compressed to float16")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_fp16_compress_hook_skips_most_steps_with_loss_scaling(ranks, dtype):
    scenario = f"compression, {dtype}"
    for rank in (0, 1):
        assert scales(ranks[rank][scenario]["plain fp16"])[-1] <= 4096.0  # at least 4 of 6 steps were skipped
        for whose in ("plain", "plain bf16"):
            assert scales(ranks[rank][scenario][whose]) == [65536.0] * STEPS


@pytest.mark.failure("gradients compressed to float16")
def test_fp16_compress_hook_with_loss_scaling_raises(ranks):
    for rank in (0, 1):
        message = ranks[rank]["compression, torch.float16"]["Fp16Hook"]
        assert isinstance(message, str) and "fp16_compress_hook" in message and "bf16_compress_hook" in message


@pytest.mark.failure("gradients compressed to float16")
@pytest.mark.parametrize("dtype, kind", [
    (torch.float16, "Bf16Hook"), (torch.bfloat16, "Bf16Hook"), (torch.bfloat16, "Fp16Hook"),
])  # fmt: skip
def test_training_with_accepted_compression_hook_matches_uncompressed_training(ranks, dtype, kind):
    first, second = histories(ranks, f"compression, {dtype}", kind)
    without, _ = histories(ranks, f"compression, {dtype}", "SimpleTrainer")
    assert skips(first) == [False] * (STEPS - 1)
    for name, tensor in first[-1]["model"].items():
        assert torch.equal(tensor, second[-1]["model"][name])
        torch.testing.assert_close(tensor, without[-1]["model"][name], rtol=0.02, atol=0.01)
    assert not loops.same(first[-1]["model"], without[-1]["model"])  # the negative control: compression has an effect


@pytest.mark.failure("gradients compressed to float16")
def test_fp16_compress_hook_of_nested_ddp_model_raises(ranks):
    assert isinstance(ranks[0]["compression, torch.float16"]["InnerFp16Hook"], str)


def parallel_with(hook):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0]._comm_hooks = [(hook, None)]
    return model


@pytest.mark.failure("gradients compressed to float16")
@pytest.mark.parametrize("name, hook, fails", [
    ("fp16", default_hooks.fp16_compress_hook, True),
    ("bf16", default_hooks.bf16_compress_hook, False),
    ("all-reduce", default_hooks.allreduce_hook, False),
    ("fp16 around PowerSGD", default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), True),
    ("bf16 around PowerSGD", default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook), False),
])  # fmt: skip
def test_check_communication_rejects_only_fp16_hooks_with_loss_scaling(name, hook, fails):
    check_communication(parallel_with(hook), scaled=False)
    if fails:
        with pytest.raises(TrainingError, match="fp16_compress_hook"):
            check_communication(parallel_with(hook), scaled=True)
    else:
        check_communication(parallel_with(hook), scaled=True)


# Parameters or losses that differ between ranks.


@pytest.mark.failure("parameters that differ between ranks")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_parameters_outside_ddp_diverge_silently(ranks, dtype):
    first, second = histories(ranks, f"divergence, {dtype}", "plain")
    assert not torch.equal(first[-1]["model"]["second.weight"], second[-1]["model"]["second.weight"])


@pytest.mark.failure("parameters that differ between ranks")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_parameters_that_differ_between_ranks_raise_after_the_epoch(ranks, dtype):
    for message in histories(ranks, f"divergence, {dtype}", "drift"):
        assert isinstance(message, str) and "second.weight" in message and "net." not in message


@pytest.mark.failure("parameters that differ between ranks")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_parameters_of_sharded_modules_may_differ_between_ranks(ranks, dtype):
    first, second = histories(ranks, f"divergence, {dtype}", "sharded")
    assert not torch.equal(first[-1]["model"]["second.weight"], second[-1]["model"]["second.weight"])


@pytest.mark.failure("parameters that differ between ranks")
def test_parameters_that_one_rank_does_not_have_raise(ranks):
    for message in histories(ranks, "additional layer", "message"):
        assert message.startswith("1 parameter differs between ranks, e.g. 1.weight:")


@pytest.mark.failure("losses that differ between ranks")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_trains_with_losses_that_differ_between_ranks(ranks, dtype):
    first, second = histories(ranks, f"divergence, {dtype}", "plain losses")
    assert skips(first) == [False] * (STEPS - 1) and loops.same(first[-1]["model"], second[-1]["model"])


@pytest.mark.failure("losses that differ between ranks")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_losses_that_differ_between_ranks_raise(ranks, dtype):
    for message in histories(ranks, f"divergence, {dtype}", "losses"):
        assert isinstance(message, str) and "rank 0: loss_cls" in message and "loss_extra" in message
