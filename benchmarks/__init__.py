"""Benchmarks, each a question of `make bench`.

headwater comes before torch, as it does in a server: it sets what OpenMP reads when torch is imported. Otherwise
worker threads of the main thread stay beside those of an engine, all of them sleep at once when they have no work, and
a decode step of the embedded model takes 4.2 ms in place of 0.8.
"""

import headwater  # noqa: F401
