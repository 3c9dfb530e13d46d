"""What knows torch: sources of records and scopes. None of them knows where these go."""
