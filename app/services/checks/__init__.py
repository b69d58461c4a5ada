"""Whether a request can run, found out before it is journalled. Each check raises BadRequest naming what is wrong."""
