"""Tiers below the arena: stores of states, KV and segments that outlive memory and the process. No torch, no model.

`part.py` is the format of stored parts, `names.py` has their names, `store.py` is the protocol of stores, and each
other file is one store.
"""
