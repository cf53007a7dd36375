"""The traceback of a script that ends with an error: the frames of the script, not of this library; and of CUDA's errors, on
which GPU and rank."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

import torch

from polytempo.errors import PeerError, UsageError

#: Begins the one line of a worker whose job has ended.
TOLD_TO_END = "polytempo: this worker ends: "
OURS = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def shown_frames(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """The traceback to show. An error that this library raised on purpose ends in the line that called the library: what
    lies below says nothing about the script. All other errors keep all their frames."""
    if not isinstance(error, UsageError | PeerError) or trace is None or _is_ours(trace.tb_frame):
        return trace
    error.__suppress_context__ = True  # an error inside the library that led to this one
    last, frame = trace, trace.tb_next
    while frame is not None:
        last = last if _is_ours(frame.tb_frame) else frame
        frame = frame.tb_next
    if last.tb_next is None or not _is_ours(last.tb_next.tb_frame):
        return trace
    last.tb_next = None
    return trace


def note_gpu(error: BaseException, rank: int) -> None:
    """Add to an error of CUDA the rank and the GPU, and for want of memory how much of it was free."""
    short = isinstance(error, torch.cuda.OutOfMemoryError)
    if not (short or (isinstance(error, RuntimeError) and "CUDA error" in str(error))) or not torch.cuda.is_initialized():
        return
    with suppress(RuntimeError):  # the GPU may be in no state to be asked
        place = torch.cuda.current_device()
        text = f"rank {rank} was on cuda:{place} ({torch.cuda.get_device_name(place)})"
        if short:
            free, total = torch.cuda.mem_get_info(place)
            text += f", where {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free now; other processes may use it, too"
        error.add_note(f"polytempo: {text}")


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)
