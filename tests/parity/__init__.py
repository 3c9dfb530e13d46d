"""The comparison of two recordings, scored on programs whose faults are known."""
