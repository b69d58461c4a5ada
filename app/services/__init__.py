"""The API's behaviour without HTTP: validation, admission and long polls. Imports no Flask."""
