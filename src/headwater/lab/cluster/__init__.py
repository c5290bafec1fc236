"""Simulated clusters: the lab's servers behind the router's code, and the routing rules of other projects.

`simulation.py` runs one, each worker of which is a `worker.py`. `link.py` is a worker as the router sees it, and
`pulls.py` has the pulls between workers. `rivals.py` has the rules of other projects, which a real router may use, too.
"""
