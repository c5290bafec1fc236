import pytest

from papers import FIGURES, Lab


def lines(name):
    return {line.label: line for line in FIGURES[name].run(Lab()).lines}


def test_a_sequence_with_a_checkpoint_at_every_block_takes_what_the_paper_says():
    rows = lines("marconi-3b")
    assert rows["10,000 tokens, a checkpoint every 16"].ours == pytest.approx(17.4, abs=0.05)
    assert rows["over the KV of a Transformer of 32 layers"].ours == pytest.approx(3.3, abs=0.05)


def test_table_1_comes_out_but_for_the_last_term_of_the_ssm():
    for line in lines("marconi-table1").values():
        assert line.ours == pytest.approx(line.paper, rel=0.01), line.label
