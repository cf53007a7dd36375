"""What travels between the processes of a job: typed headers, and how tensors are cut into shards. Pure."""
