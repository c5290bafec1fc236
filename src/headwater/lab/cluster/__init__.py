"""Simulated clusters: the lab's servers behind the router's code, and the routing rules of other projects.

`simulation.py` runs one, `worker.py` has its requests and workers, and `pulls.py` the pulls between them. `rivals.py`
has the rules of other projects, which a real router may use, too.
"""
