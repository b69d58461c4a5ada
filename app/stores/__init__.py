"""The stores: redis/ holds the journal and the records, objects/ the checkpoints, pages.py the hourly pages,
hub_cache.py tokenizers of the Hub."""
