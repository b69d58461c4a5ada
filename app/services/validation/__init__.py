"""Checks of a request before it is journalled. Each raises BadRequest naming the mistake."""
