"""Names, things, codes, dates and numbers, disjoint between the splits and made of the same pieces."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import product

from training.tasks.split import SPLITS, belongs

FIRST_STARTS = (
    "Mar El Tor Bel Sa Ni Jo Ka Lu Ro Da Vi An Ol Fen Ha Ti Cor Re Wil Ber Cel Dor Em Fa Gre Is Je Le Mo Ned "
    "Pol Sim Tes"
)
FIRST_ENDS = "ma lin den la mon ra lis na vin bert co dia fred ger ka lo mira nor rin sa ta vo wen dor"
LAST_STARTS = (
    "Bar Col Dun Er Fal Gar Hol In Jar Kel Lam Mor Nor Or Pal Quin Ros Sten Tal Un Var Wes Yar Zel Bran Cray "
    "Ald Bram Hal Lan Mil Nel Pem Rad Sel Win"
)
LAST_ENDS = "by den ford gan hart kins ley man ner lock per ridge son stead ton vale wick worth more"
TOWN_STARTS = (
    "Os Al Brim Cal Dres Elm Fir Gol Hav Ing Jor Kil Len Mel Nes Pel Rav Sil Thorn Ub Vel Win Yes Ash Dal Tren"
)
TOWN_ENDS = "len borne dale field ham minster keld low mere nock dover port rath sand mouth wold gate"
RIVER_STARTS = "Am Bru Cla Dro Ev Fli Gly Hu Ir Lo Min Nar Or Pru Sha Tre Us Wen Yo Zu"
RIVER_ENDS = "da na la mer non ra sel ter va wy"
TOWNS = ("{}", "{}", "{}", "Port {}", "Lake {}", "{} Bay", "{} Hill")
FIRMS = ("{} Works", "{} Mill", "{} Press", "{} Foods", "{} Yard", "{} Glass")

JOB_FIELDS = "harbour school river garden bridge ship hotel market railway music forest museum night kitchen"
JOBS = "pilot cook guide guard clerk painter teacher driver doctor keeper builder singer nurse baker"
GOODS_KINDS = "copper wooden paper cotton silver leather stone woollen winter garden travel kitchen"
GOODS = "lamps boats chairs coats clocks bells knives baskets boots maps cups tents"
THING_KINDS = "brass red old small green broken painted heavy silver blue wooden long"
THINGS = "clock boat piano lamp bicycle mirror chest drum ladder telescope globe carpet violin kettle"
ROOM_KINDS = "north south upper lower blue back front long stone white round east"
ROOMS = "attic cellar hall kitchen tower stable study shed library gallery barn porch"
EVENT_KINDS = "harbour spring winter garden village music book night summer river glass paper"
EVENTS = "concert lecture regatta race auction supper market parade contest meeting show play"
SHADES = "dark pale bright deep soft warm dusty light"
COLOURS = "green blue red yellow brown purple grey orange pink white"
DRINK_KINDS = "cold hot black sweet iced spiced strong weak mint lemon"
DRINKS = "tea coffee milk cider cocoa juice soup water"
MONTHS = "January February March April May June July August September October November December"
CODE_LETTERS = "BFGHJKNPQRTWYZ"
NAMES = {"first", "last", "place", "river", "thing", "event"}  # of which no two in an example are alike
TRIES = 200


SYLLABLES: dict[str, tuple[str, str]] = {}  # of each made-up name


def _made(starts: str, ends: str) -> list[str]:
    made = {start + end: (start, end) for start, end in product(starts.split(), ends.split())}
    SYLLABLES.update(made)
    return list(made)


def _compounds(kinds: str, things: str, article: str = "") -> list[str]:
    return [f"{article}{kind} {thing}" for kind, thing in product(kinds.split(), things.split())]


def _by_split(pool: Iterable[str]) -> dict[str, tuple[str, ...]]:
    pool = list(pool)
    return {split: tuple(text for text in pool if belongs(text, split)) for split in SPLITS}


POOLS = {
    "first": _by_split(_made(FIRST_STARTS, FIRST_ENDS)),
    "last": _by_split(_made(LAST_STARTS, LAST_ENDS)),
    "place": _by_split(_made(TOWN_STARTS, TOWN_ENDS)),
    "river": _by_split(_made(RIVER_STARTS, RIVER_ENDS)),
    "job": _by_split(_compounds(JOB_FIELDS, JOBS)),
    "goods": _by_split(_compounds(GOODS_KINDS, GOODS)),
    "thing": _by_split(_compounds(THING_KINDS, THINGS, "the ")),
    "room": _by_split(_compounds(ROOM_KINDS, ROOMS, "the ")),
    "event": _by_split(_compounds(EVENT_KINDS, EVENTS, "the ")),
    "colour": _by_split(_compounds(SHADES, COLOURS)),
    "drink": _by_split(_compounds(DRINK_KINDS, DRINKS)),
    "date": _by_split(f"{day} {month}" for month, day in product(MONTHS.split(), range(1, 29))),
    "year": _by_split(str(year) for year in range(1700, 2000)),
    "word": _by_split(sorted({*THINGS.split(), *ROOMS.split(), *JOBS.split(), *EVENTS.split(), *DRINKS.split()})),
}


def _code(rng: random.Random) -> str:
    return f"{''.join(rng.choices(CODE_LETTERS, k=2))}-{rng.randint(100, 999)}"


NUMBERS: dict[str, Callable[[random.Random], str]] = {
    "code": _code,
    "number": lambda rng: str(rng.randint(1000, 9999)),
    "price": lambda rng: f"{rng.randint(11, 989)} crowns",
    "weight": lambda rng: f"{rng.randint(11, 989)} kilos",
    "small": lambda rng: str(rng.randint(2, 999)),
}


class Drawer:
    """Draws names and values of one split, none of them twice."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng, self.split = rng, split
        self._used: set[str] = set()

    def draw(self, what: str) -> str:
        """Draw a name or value: `what` is "person", "town", "firm", "street", or a key of POOLS or NUMBERS."""
        if what == "person":
            return f"{self._unused('first')} {self._any('last')}"  # families share a name
        if what == "town":
            return self.rng.choice(TOWNS).format(self._unused("place"))
        if what == "firm":
            return self.rng.choice(FIRMS).format(self._unused("last"))
        if what == "street":
            return f"{self._unused('place')} Street"
        return self._unused(what)

    def _unused(self, what: str) -> str:
        for _ in range(TRIES):
            text = self._any(what)
            if text not in self._used:
                self._used.add(text)
                return text
        if what in NAMES:
            raise ValueError(f"no new {what} name in {TRIES} draws, {len(self._used):,} names and values are taken")
        return text

    def _any(self, what: str) -> str:
        if what in POOLS:
            return self.rng.choice(POOLS[what][self.split])
        while not belongs(text := NUMBERS[what](self.rng), self.split):
            pass
        return text
