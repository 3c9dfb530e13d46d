"""Terminal tables, progress lines and HTML pages that the commands share."""
