"""Tenants: their accounts and keys, and each caller's permissions, limits and usage."""
