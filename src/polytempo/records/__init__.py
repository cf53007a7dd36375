"""The record of a job: events.jsonl and meta.json, written, read, replayed and checked."""
