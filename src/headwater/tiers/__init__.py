"""Tiers below the arena: stores of states, KV and segments that outlive memory and the process. No torch, no model.

`part.py` is the format of what is stored, `names.py` the names under which it is, `store.py` the protocol of stores,
and each other file is one store.
"""
