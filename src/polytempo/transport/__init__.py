"""How bytes travel between the processes of a job. Knows nothing of servers or modes."""
