"""A name and a style that the system prompt sets and all answers keep."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from training.tasks import smalltalk
from training.tasks.budget import TURN, Count
from training.tasks.conversation import Turn, assembled, said
from training.tasks.example import ABSENT, PERSONA, SINGLE, Example
from training.tasks.memory import Talk
from training.tasks.questions import Questioner
from training.tasks.recall import FRAME, QUESTION, draw_library, laid_out
from training.tasks.split import wordings
from training.tasks.words import Drawer
from training.tasks.world import draw_facts

Styled: TypeAlias = Callable[[str, str, str], str]  # of the bare answer, its sentence and the style's word


@dataclass(frozen=True, slots=True)
class Style:
    told: dict[str, tuple[str, ...]]  # {W} stands for the style's word
    styled: Styled


def _ended(answer: str, _: str, word: str) -> str:
    return f"{answer.rstrip('.?!')}, {word}."


def _begun(answer: str, _: str, word: str) -> str:
    return f"{word.capitalize()}: {answer}"


STYLES = (
    Style(
        wordings(
            "[End|Close|Finish] [every|each] answer with [the word {W}|{W}].",
            "[Every|Each] answer [ends|closes] with the word {W}.",
        ),
        _ended,
    ),
    Style(
        wordings(
            "[Begin|Start|Open] [every|each] answer with [the word {W}|{W}].",
            "[Every|Each] answer [begins|starts] with the word {W}.",
        ),
        _begun,
    ),
    Style(
        wordings(
            "[Answer|Reply|Speak] in [full|whole|complete] sentences.",
            "[Give|Write] [full|whole|complete] sentences[| as answers].",
        ),
        lambda answer, sentence, _: sentence,
    ),
    Style(
        wordings(
            "[Answer|Reply] [with|only with] the bare [value|name].",
            "[Give|Write] only the bare [value|name][| as an answer].",
        ),
        lambda answer, sentence, _: answer,
    ),
)
NAMED = wordings(
    "You are {N}, [a|the] {J}.",
    "Your name is {N}[| and you are a {J}| and you work as a {J}].",
    "You [are called|are named] {N}[| and you are a {J}].",
)
WHO = wordings(
    "Who are you[|, please| again]?",
    "[What is your name|Tell me your name|How are you called][|, please| again]?",
    "[Whom|With whom] am I [speaking to|talking to|speaking with]?",
)
DOCUMENTED = 0.4  # of examples: questions about documents; in the others about what the user told


def draw(rng: random.Random, tokens: int, split: str, count: Count) -> Example:
    drawer = Drawer(rng, split)
    style, word, name = rng.choice(STYLES), drawer.draw("word"), drawer.draw("first")
    named = rng.choice(NAMED[split]).replace("{N}", name).replace("{J}", drawer.draw("job"))
    system = f"{named} {rng.choice(style.told[split]).replace('{W}', word)}"

    def styled(answer: str, sentence: str) -> str:
        return style.styled(answer, sentence, word)

    def introduced() -> Turn:
        return said(rng.choice(WHO[split]), styled(f"I am {name}.", f"I am {name}."), PERSONA)

    if rng.random() < DOCUMENTED and tokens >= 200:
        shown, texts, turns = _documented(drawer, tokens, count, styled)
        at = rng.randint(0, len(turns))
        turns.insert(at, introduced())
        if rng.random() < 0.5:
            system = f"{system}\n\n{shown}"
        else:
            turns[0] = said(shown + turns[0].user, turns[0].accepted[0], PERSONA)
        return assembled(PERSONA, system, turns, (tokens - TURN, count), documents=texts)
    return assembled(PERSONA, system, _talked(drawer, tokens, count, styled, introduced), (tokens, count))


def _documented(
    drawer: Drawer, tokens: int, count: Count, styled: Callable[[str, str], str]
) -> tuple[str, tuple[str, ...], list[Turn]]:
    number = min(6, max(2, tokens // 100))
    library = draw_library(drawer, tokens - number * (QUESTION + 12) - 2 * FRAME, False, count)
    weights: Mapping[str, float] = {SINGLE: 0.85, ABSENT: 0.15}
    questions = Questioner(drawer, library.world).draw(number, weights)
    shown = laid_out(drawer.rng, library.texts(), "Documents:\n\n")
    return shown, library.texts(), [said(q.text, styled(q.answer, q.sentence), PERSONA) for q in questions]


def _talked(
    drawer: Drawer,
    tokens: int,
    count: Count,
    styled: Callable[[str, str], str],
    introduced: Callable[[], Turn],
) -> list[Turn]:
    """Facts told and asked for, small talk, and who the assistant is."""
    rng = drawer.rng
    talk = Talk(drawer, [fact for group in draw_facts(drawer, tokens // 80, (1, 2), False) for fact in group])
    turns = [introduced()] if rng.random() < 0.5 else []
    left = tokens
    while left > 0:
        which = rng.random()
        turn: Turn | None = None
        if which < 0.15:
            turn = introduced()
        elif which < 0.5:
            turn = talk.tell()
        elif which < 0.85 and (asked := talk.ask()):
            turn = said(asked[0], styled(asked[1], asked[2]), PERSONA)
        turn = turn or smalltalk.draw(drawer)
        if turn.kind is None:  # what asks nothing keeps to the style, too
            answer = turn.answer["content"]
            turn = said(turn.user, styled(answer, answer))
        left -= count(turn.user) + count(turn.answer["content"]) + 2 * TURN
        turns.append(turn)
    return turns
