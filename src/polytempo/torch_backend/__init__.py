"""The `torch.distributed` back end: `torch.distributed.init_process_group("polytempo")`.

    register.py        registers the back end, before or after torch is imported
    process_group.py   a process group of torch: rendezvous, point-to-point messages, collectives, shutdown
    work.py            the `Work` of a call, and its future; errors that are torch's and Polytempo's at once
    device_backends.py other back ends beside it, one for each device: `"cpu:polytempo,cuda:nccl"`

Every group of torch has links and a progress engine of its own. A call is handed to the progress thread and returns at once;
callbacks of its future run in a third thread, so that they may wait for other calls.

Not offered, each refused in one line, or by torch itself:

- sparse tensors: use `.to_dense()`; PREMUL_SUM, which is NCCL's own;
- `dist.monitored_barrier`, which torch keeps for gloo by name; a group's own `monitored_barrier` does the same;
- `dist.split_group`, which torch keeps for NCCL; a group's own `split_group` does the same;
- `shrink_group`, `merge_remote_group`, `_coalescing_manager` with a device, time estimates, symmetric memory: use
  `new_group`;
- messages from a rank to itself;
- `TORCH_DISTRIBUTED_DEBUG=DETAIL` adds nothing: calls are always compared with those of the other ranks.
"""
