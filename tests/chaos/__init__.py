"""Attacks on recorded programs and on the commands, at random, and checks of what is promised.

`make chaos` runs attacks of the table in `attacks.py`, one at a time, until its time is over. What an
attack does depends only on its seed. `arena.py` runs programs, bare and recorded, and `promises.py`
compares them.
"""
