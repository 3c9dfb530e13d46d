"""What `show` says of a training: its series, laws, trouble, table and page."""
