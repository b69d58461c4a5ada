"""What bodies look like. Types are checked here; ranges and ownership in app/services."""
