"""The drafter: takes committed tokens from verifiers, streams proposals back.

servicer.py   one stream per verifier: handshake, messages in, batches out
session.py    which sessions are open and what each has committed
scheduler.py  which sessions owe a draft, and the thread that makes drafts
service.py    the three together, as one server
"""
