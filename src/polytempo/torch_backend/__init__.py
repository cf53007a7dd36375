"""The word "polytempo" for torch: `torch.distributed.init_process_group("polytempo")`.

    register.py   tells torch the word, before torch is loaded or after
    opening.py    from torch's store to links, when a group is made
    base.py       a process group of torch: its links, its names, its end
    messages.py   send, receive, and the barrier that names who is missing
    group.py      the collectives
    work.py       the handle of a call, and its future
    errors.py     what goes wrong, as torch's errors and as ours

Every group of torch has links and an engine of its own. A call is handed to the engine's progress thread and returns at
once; what hangs on its future runs in a thread that is neither the caller's nor the engine's: it may wait for other calls.

Not offered, each refused in one line, or by torch itself:

- sparse tensors: use `.to_dense()`; PREMUL_SUM, which is NCCL's own;
- one back end for each device (`"cpu:polytempo,cuda:nccl"`): a process group made in Python stands for the whole group, so
  torch would not make the second one. CUDA tensors are taken, and go through the memory of the host;
- `dist.monitored_barrier`, which torch keeps for gloo by name; a group's own `monitored_barrier` does the same;
- `split_group`, `shrink_group`, `merge_remote_group`, `_coalescing_manager` with a device, time estimates, symmetric
  memory: use `new_group`;
- messages from a rank to itself;
- `TORCH_DISTRIBUTED_DEBUG=DETAIL` adds nothing: calls are always compared with those of the other ranks.
"""
