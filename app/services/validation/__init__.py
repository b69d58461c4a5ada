"""Validation of a request before it is journaled. Each check raises BadRequest and names the mistake."""
