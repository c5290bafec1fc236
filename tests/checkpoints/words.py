"""Text for the random checkpoints' tokenizer: seeded sentences, code-like lines and JSON over a made-up language."""

import json
import random
from collections.abc import Iterator

COMMON = """
a about above across after again against all along also always am among an and another any are as ask at away back be
because become been begin behind being best both bring but by call came can carry change clear close cold come could
cross current deep did do does done down dry each edge else end enough even ever every far fed few field fill find flow
for found from full gather gave get give go goes gone ground had half has have he held here high his hold how if in into
is it its join just keep kept know lake land last later lay lead learn left less let level lies light like line long
lost low made main make many map may me measure meet mere might mile more most mouth move much must my name narrow near
need never new next no nor not note now of off often old on once one only open or other our out over own part pass path
place point pool pour put quiet rain ran reach read rest ridge rise river rock run said same saw say see seen set she
short show side slope slow small snow so some soon source south spring stand start stay steep still stone stream such
take tell than that the their them then there these they this those though three through tide time to told too took
toward turn two under until up upon us use valley very was water way we well went were west what when where which while
who why wide will wind with within without work would yes yet you your
answer api argument array assistant boolean branch buffer bytes cache chat checkpoint class client code compute config
content copy count data debug decode default dict engine entry error event false field file float function hash header
history http import index input integer item json key keyword label layer length list loop match memory message method
model module null number object offset output page parameter parse path print process prompt property query queue
random range reply request response result return role schema search segment server session shape size state status step
string system table task text thread token tool total true tuple type update user value variable vector version weather
"""
ONSETS = "b br ch d dr f fl g gl h j k kl l m n p pr r s sh st t tr v w z"
RIMES = "a al an ar e el en er i il in o ol on or u um un ay ow"


def made_up(n: int, rng: random.Random) -> list[str]:
    """Distinct pronounceable words of two or three syllables."""
    onsets, rimes = ONSETS.split(), RIMES.split()
    words: dict[str, None] = {}
    while len(words) < n:
        syllables = rng.choices((2, 3), (3, 1))[0]
        words["".join(rng.choice(onsets) + rng.choice(rimes) for _ in range(syllables))] = None
    return list(words)


def lines(n: int, seed: int) -> Iterator[str]:
    """`n` lines of text in which early words are frequent and late ones rare."""
    rng = random.Random(seed)
    words = list(dict.fromkeys(COMMON.split())) + made_up(700, rng)
    frequency = [1.0 / (rank + 20) for rank in range(len(words))]
    shapes = (_sentence, _sentence, _call, _record)
    for i in range(n):
        yield shapes[i % len(shapes)](rng.choices(words, frequency, k=12), rng)


def _sentence(words: list[str], rng: random.Random) -> str:
    cut = rng.randint(4, 8)
    return f"{' '.join(words[:cut]).capitalize()}, {' '.join(words[cut:])}{rng.choice('.?!')}"


def _call(words: list[str], rng: random.Random) -> str:
    return (
        f"{words[0]}_{words[1]} = {words[2]}.{words[3]}({words[4]}, {rng.randint(0, 999)})  # {' '.join(words[5:])}\n"
    )


def _record(words: list[str], rng: random.Random) -> str:
    return json.dumps({words[0]: " ".join(words[1:7]), words[7]: rng.randint(0, 999), words[8]: words[9:]})
