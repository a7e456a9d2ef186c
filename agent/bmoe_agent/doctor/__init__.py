"""What a good night needs of this phone, checked: `bmoe-agent doctor`.

In: the phone, its agent's home. Out: `Check`s with what was seen and the command that mends it; or a record of the phone's readable
nodes (`record.py`). Every check stands alone: one that breaks is `unknown` and the others go on.
"""
