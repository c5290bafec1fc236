import pytest

from papers import FIGURES, Lab


def lines(name):
    return {line.label: line for line in FIGURES[name].run(Lab()).lines}


def test_sequence_with_checkpoint_at_every_block_has_the_papers_bytes():
    rows = lines("marconi-3b")
    assert rows["10,000 tokens, a checkpoint every 16"].ours == pytest.approx(17.4, abs=0.05)
    assert rows["over the KV of a Transformer of 32 layers"].ours == pytest.approx(3.3, abs=0.05)


def test_table_1_is_reproduced_except_the_last_ssm_term():
    for line in lines("marconi-table1").values():
        assert line.ours == pytest.approx(line.paper, rel=0.01), line.label
