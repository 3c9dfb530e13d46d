"""What a fault is: a corpus of faults, and a scoreboard of how often the comparison says so."""
