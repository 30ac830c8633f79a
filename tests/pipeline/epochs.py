"""Schedules of epochs and evaluations, and pipelines of them."""

from jdist import pipeline


def epoch_schedule(policy, n, m, replicas=None, update_every=None):
    """PipeDream's schedule; by default a flush follows every micro-batch."""
    if policy == "flush" and update_every is None:
        update_every = 1
    return pipeline.pipedream(
        n, m, policy=policy, replicas=replicas, update_every=update_every
    )


def asynchronous(
    stages,
    losses,
    places=None,
    *,
    policy="stashing",
    replicas=None,
    update_every=None,
    **options,
):
    """A pipeline with PipeDream's schedule, and a micro-batch for each worker."""
    n = len(stages)
    workers = n if replicas is None else sum(replicas)
    schedule = epoch_schedule(policy, n, workers, replicas, update_every)
    return pipeline.Pipeline(stages, losses, schedule, places, **options)


def forward_only(n, m):
    """Forward passes of m micro-batches through n stages, one per worker."""
    return pipeline.gpipe(n, m).forward_passes(m)


def paired(batches, weights):
    """Each batch with its weights, as `train_epoch` takes them."""
    return list(zip(batches, weights, strict=True))
