"""Tenants: their accounts and keys, and what each caller may see, do and use."""
