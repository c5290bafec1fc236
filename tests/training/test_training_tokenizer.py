"""The tokenizer, and examples as the ids that the server makes of them."""

import random
from itertools import pairwise

import pytest

from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.encoding import PromptEncoder
from headwater.server.requests.messages import conversation
from training import tokenizer
from training.recipe import VOCABULARY
from training.tasks import KINDS, draw
from training.tasks.example import TEXT
from training.tasks.recall import SEGMENT
from training.tasks.split import SPLITS
from training.tasks.words import POOLS
from training.template import chat_template
from training.tokenizer import END_OF_TEXT, PROMPT_WEIGHT, TURN_END

TOKENIZER = tokenizer.load()
CONVERSATIONS = [kind for kind in KINDS if kind != TEXT]


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_prompt_is_encoded_as_the_server_does(kind: str) -> None:
    prompter = ChatPrompter(TOKENIZER, chat_template())
    rng = random.Random(4)
    for split in SPLITS:
        example = draw(rng, 512, split, (kind,))
        ids, _ = tokenizer.encode(example)
        for turn in example.turns:
            sent = conversation(example.messages[:turn], example.tools)
            prompt = prompter.prepare(sent).prompt
            assert list(prompt) == ids[: len(prompt)]


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_assistant_s_turns_and_nothing_else_are_learned(kind: str) -> None:
    example = draw(random.Random(5), 512, "train", (kind,))
    ids, weights = tokenizer.encode(example, TOKENIZER)
    assert len(ids) == len(weights)
    assert set(weights) == {1.0, PROMPT_WEIGHT}
    starts = [0, *(at for at in range(1, len(ids)) if weights[at] != weights[at - 1]), len(ids)]
    learned = [ids[a:b] for a, b in pairwise(starts) if weights[a] == 1.0]
    shown = [TOKENIZER.decode(run, skip_special_tokens=False) for run in learned]
    turns = [m for m in example.messages if m["role"] == "assistant"]
    assert len(shown) == len(turns)
    for text, message in zip(shown, turns, strict=True):
        assert text.endswith(TURN_END)
        if "tool_calls" in message:
            name = message["tool_calls"][0]["function"]["name"]
            assert text.startswith(f'<tool_call>\n{{"name": "{name}"')
        else:
            assert text.removesuffix(TURN_END) == " " + message["content"]


def test_text_is_learned_as_a_whole_and_ends() -> None:
    example = draw(random.Random(0), 256, "train", (TEXT,))
    ids, weights = tokenizer.encode(example)
    assert set(weights) == {1.0}
    assert ids[-1] == TOKENIZER.token_to_id(END_OF_TEXT)
    assert TOKENIZER.decode(ids) == example.messages[0]["content"]


def test_document_is_encoded_alike_on_its_own() -> None:
    rng = random.Random(6)
    for _ in range(6):
        example = draw(rng, 700, "train", ("single",))
        ids = tokenizer.encode(example)[0]
        for document in example.documents:
            own = TOKENIZER.encode(document, add_special_tokens=False).ids
            places = [at for at, first in enumerate(ids) if first == own[0] and ids[at : at + len(own)] == own]
            assert places


def test_tokens_and_marks() -> None:
    assert TOKENIZER.get_vocab_size() == VOCABULARY
    added = TOKENIZER.get_added_tokens_decoder().values()
    assert [token.content for token in added if token.special] == list(tokenizer.SPECIAL)
    assert SEGMENT in tokenizer.SPECIAL
    assert TOKENIZER.encode("a 417", add_special_tokens=False).tokens == ["a", "Ġ", "4", "1", "7"]
    assert PromptEncoder(TOKENIZER).encode(f"one{SEGMENT}two").ids[1] == TOKENIZER.token_to_id(SEGMENT)


def test_letters_of_codes_are_tokens_of_their_own() -> None:
    rng = random.Random(2)
    for example in (draw(rng, 512, "test", ("single",)) for _ in range(8)):
        for _, (answer,) in example.asked:
            if "-" in answer:
                assert TOKENIZER.encode(answer, add_special_tokens=False).tokens == list(answer)


@pytest.mark.parametrize("what", ["first", "last", "place", "river"])
def test_names_of_the_test_have_the_tokens_of_training_names(what: str) -> None:
    """Nearly all of them: what two syllables share with a word is sometimes another token."""
    tokens = {
        split: [TOKENIZER.encode(f" {name}", add_special_tokens=False).tokens for name in POOLS[what][split]]
        for split in SPLITS
    }
    known = {token for name in tokens["train"] for token in name}
    unknown = [name for name in tokens["test"] if not known.issuperset(name)]
    assert len(unknown) <= 0.06 * len(tokens["test"])
    assert sum(len(name) == 1 for name in tokens["train"]) <= 5  # a name that is one token could be learned by heart


def test_the_same_seed_gives_the_same_tokenizer() -> None:
    first, again, other = (tokenizer.train(vocab_size=600, seed=seed, examples=20) for seed in (1, 1, 2))
    assert first.to_str() == again.to_str()
    assert first.to_str() != other.to_str()
    assert first.get_vocab_size() == 600


def test_codes_and_whole_names_are_kept_from_training() -> None:
    small = tokenizer.train(vocab_size=1200, seed=1, examples=60)
    names = {
        f"Ġ{name}" for what in ("first", "last", "place") for name in (*POOLS[what]["train"], *POOLS[what]["test"])
    }
    assert len(names & set(small.get_vocab())) <= 2
