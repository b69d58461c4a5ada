"""Mutation tests: each guard is removed once, and a test must fail.

A guard without a failing test is no guard, or has no test.
"""
