"""The laws of training: what every training obeys, and a sentence for each law that one breaks.

The rows of phase `train` are series (`series.py`), which with the metadata are what is known of the
training of a model (`facts.py`). A law is a function of these facts, and says nothing where too
little is known. `table.py` has them all by name; `ranks.py` has those of several ranks. A run asks
while it trains, and `show` asks of its recording: the answers are the same.
"""
