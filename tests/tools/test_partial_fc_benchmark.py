"""tools/benchmark/partial_fc.py with toy sizes."""

from argparse import Namespace

from command import load_script


def test_each_head_of_the_partial_fc_benchmark_takes_steps():
    module = load_script("tools/benchmark/partial_fc.py")
    args = Namespace(device="cpu", width=4, batch=3, warmup=1, steps=2, cpu_time=True)
    rates = module.sampling_rates(20, 5)
    assert list(rates.values()) == [None, 1.0, 0.1, 0.25]
    for rate in rates.values():
        row = module.measure(args, 20, rate)
        assert row["ms"] > 0 and row["MiB of centers and momentum"] == 2 * 20 * 4 * 4 / 2**20
