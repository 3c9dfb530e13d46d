"""From two programs to the lines at fault, each of them tried.

programs -> recorded runs -> comparison -> trial with the reference's values -> answer
"""
