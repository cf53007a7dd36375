"""Do workers push the same gradients? Then they read the same batches, and all but one of them work for nothing."""

from __future__ import annotations

from polytempo.protocol.messages import Push


def advice(one: int, other: int, step: int) -> str:
    """For people."""
    return (
        f"warning: workers {min(one, other)} and {max(one, other)} pushed the same gradient in step {step}: do they read "
        "the same batches? share the data out with DataLoader(..., sampler=pt.DistributedSampler(dataset))"
    )


class DuplicateBatches:
    """Compares the digests that workers send with their first pushes; says once what it has found."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, int]] = {}  # by step and digest: the worker
        self._said = False

    def look_at(self, push: Push) -> str:
        """A push is here: what there is to say, if anything."""
        digest = push.measures.gradient_digest
        if not digest or self._said:
            return ""
        first = self._seen.setdefault(push.id.step, {}).setdefault(digest, push.id.worker)
        if first == push.id.worker:
            return ""
        self._said = True
        self._seen.clear()
        return advice(first, push.id.worker, push.id.step)
