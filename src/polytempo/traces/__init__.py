"""Recorded step times of a job: its step time made again from them, the cause of its stragglers, and other modes on it."""
