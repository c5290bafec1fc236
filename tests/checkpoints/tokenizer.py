"""The random checkpoints' tokenizer, and the words that they answer with."""

from tokenizers import Tokenizer

from tests.checkpoints import words
from training.bpe import TURN_MARKS, byte_pairs

VOCAB, SEED = 2048, 20
CORPUS_LINES = 6000


def train(vocab_size: int = VOCAB, seed: int = SEED) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens: the same seed gives the same one."""
    return byte_pairs(vocab_size, words.lines(CORPUS_LINES, seed), TURN_MARKS)


def sayable(tokenizer: Tokenizer) -> list[int]:
    """Ids of tokens " word" such that any run of them encodes back to the same ids."""
    ids = []
    for token, i in tokenizer.get_vocab().items():
        word = token.removeprefix("Ġ")
        plain = word != token and word.isascii() and word.isalpha() and word.islower()
        if plain and tokenizer.encode(f" {word}", add_special_tokens=False).ids == [i]:
            ids.append(i)
    return sorted(ids)
