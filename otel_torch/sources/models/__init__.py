"""Which models run, with the names and sites of their modules."""
