"""Workers and their router, and events of caches in the form of vLLM's KV events. No torch.

Events: `digests.py` names cached blocks, `messages.py` is the form of messages, `ledger.py` and `stream.py` make them,
and `publisher.py` sends them. `picture.py` is a reader's copy of a cache's content, and `follower.py` keeps it up to
date.

Cluster: `router.py` is an engine for the server that has workers compute, which it knows by `links.py`; `cost.py` has
the rule that chooses, and `assigning.py` applies it. `worker.py` answers for an engine; both send each other the
messages of `wire.py`. `hosting.py` is one worker's process, and `ray_workers.py` has Ray start and end them, in a
cluster of Ray that `ray_cluster.py` joins; `upgrade.py` has the order in which all are replaced.

Sockets: `sockets.py` opens them, and `encryption.py` has the keys with which a cluster's messages are encrypted.
"""
