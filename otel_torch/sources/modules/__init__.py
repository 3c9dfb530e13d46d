"""What torch calls: which modules contain which, what they are called, their hooks and calls."""
