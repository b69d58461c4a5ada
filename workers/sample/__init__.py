"""Sampling requests: admitted fairly, run, streamed and cancelled."""
