"""Common prefix of two prompts, in whole units."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.plan import CacheLayout
from headwater.schedule.planner import common_tokens

LAYOUT = CacheLayout(1, page_size=2, unit_tokens=2, unit_bytes=3)
keys = st.binary(max_size=20).map(lambda key: bytes(byte % 2 for byte in key))


@given(keys, keys)
def test_whole_units_that_are_alike(a: bytes, b: bytes) -> None:
    units = 0
    while 3 * units + 3 <= min(len(a), len(b)) and a[3 * units : 3 * units + 3] == b[3 * units : 3 * units + 3]:
        units += 1
    assert common_tokens(a, b, LAYOUT) == 2 * units
