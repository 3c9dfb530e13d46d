"""Small programs rebuilt from public bug reports, each with what is right to say of it.

A case is a folder of `programs/`: `ref.py` and `port.py`, or `prog.py` for one program that takes
`ref` or `port`. A fault has a legal twin wherever the same words could be said of something legal.
"""
