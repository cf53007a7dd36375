"""One order of events for a live job: the sequencer and what it keeps. Pure: messages and `now` in, orders out."""
