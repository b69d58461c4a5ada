"""What the leading worker does for the whole installation, one file a chore."""
