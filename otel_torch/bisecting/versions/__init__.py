"""One program with two versions of what it uses: which change makes its numbers differ."""
