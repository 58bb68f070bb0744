"""The loader's benchmark measures what it says, on a small size."""

from equivalence.generators.tokenizers import folder
from tools.bench.loader import loader


def test_the_bench_prepares_the_same_batches_with_each_number_of_workers(capsys):
    ratios = loader(
        tokenizer=folder("nemotron-mini"),
        pack_length=256,
        global_batch_size=2,
        steps=2,
        workers=(0, 1),
        pace=0.1,
        repeats=1,
    )
    assert set(ratios) == {0, 1}
    assert all(ratio > 0 for ratio in ratios.values())
    out = capsys.readouterr().out
    assert "1,024 tokens in rows of 256" in out
    assert "1 workers" in out
