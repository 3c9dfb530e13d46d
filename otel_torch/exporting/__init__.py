"""Recordings in the formats of other tools: one file for each target, and the table of them."""
