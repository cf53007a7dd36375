"""One worker trains as the script would: a small model, trained under a mode in virtual time, against a plain loop.

Both make the same steps of the same optimizer on the same batches. The values are float64, and the same up to rounding: a
mode may sum the gradients of several local steps before a server takes them.
"""

from __future__ import annotations

import copy
from functools import partial

from polytempo.proving.states import Broken
from polytempo.sync.spec import Spec
from polytempo.units import plain_number

#: Samples, those of a batch, features.
SAMPLES, BATCH, FEATURES = 96, 8, 5
#: Steps at most, and for each push; fewer pushes where these steps are above the most.
STEPS, PUSHES, MOST = 24, 3, 120
#: Values may differ by this part of the largest.
NEAR = 1e-12


def look_at_one_worker(spec: Spec) -> int:
    """Train with one worker, without and with momentum; the number of steps that were compared.

    Raises:
        Broken: The values differ from those of a plain loop.
        UsageError: The mode cannot train with one worker.
    """
    import torch  # a second or two, which no other check needs

    steps = min(max(STEPS, PUSHES * spec.period), MOST)
    momenta = (0.0,) if spec.capabilities.fetches else (0.0, 0.9)  # sums of local steps are no steps with momentum
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for momentum in momenta:
            _compare(spec, steps, momentum)
    finally:
        torch.set_num_threads(before)
    return steps * len(momenta)


def _compare(spec: Spec, steps: int, momentum: float) -> None:
    import torch
    from torch import nn

    from polytempo.simulate.cluster import Cluster
    from polytempo.simulate.replicas import Shards
    from polytempo.simulate.virtual_training import train_virtually

    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    loss = nn.functional.mse_loss
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=momentum)
    data = (inputs, targets)
    trained = train_virtually(
        model,
        (data, data),
        loss,
        sync=spec,
        cluster=Cluster(workers=1, batch=BATCH),
        optimizer=optimizer,
        metric=lambda output, target: float(loss(output, target)),
        evaluate_every=1e9,
        steps_each=steps,
    ).model
    plain, shards = copy.deepcopy(model), Shards(SAMPLES, 1, [BATCH], 0)
    stepper = optimizer(list(plain.parameters()))
    for step in range(steps):
        index = shards.batch(0, step)
        stepper.zero_grad()
        loss(plain(inputs[index]), targets[index]).backward()
        stepper.step()
    ours = torch.cat([p.detach().reshape(-1) for p in trained.parameters()])
    theirs = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    off = float((ours - theirs).abs().max() / theirs.abs().max())
    if not off <= NEAR:
        of = f"SGD with momentum {momentum:g}" if momentum else "plain SGD"
        raise Broken(
            f"after {steps} steps of {of} one worker is off a plain loop by {plain_number(off, 2)}; if that is meant, "
            "declare Promises(alone=False)",
            None,
            "alone",
        )
