"""Events of what a server's cache holds, in the form of vLLM's KV events, and their reader. No torch.

`digests.py` names what is held, `messages.py` is the form of messages, `ledger.py` and `stream.py` make them, and
`publisher.py` sends them, by the settings in `publishing.py`. `picture.py` is what a reader knows, and `follower.py`
keeps it up to date.
"""
