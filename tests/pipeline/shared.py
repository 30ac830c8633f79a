"""A model whose first and last stage share a table; and a part of it that is uneven."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, pipeline

TOKENS, WIDTH, EXAMPLES = 7, 4, 6
EMBED, MIDDLE, HEAD = 0, 1, 2


def embed(params, tokens):
    table = params["embed"]["table"]
    return table[tokens].mean(1) * params["scale"][None]


def middle(params, h):
    return jnp.tanh(h @ params["w"] + params["b"][None])


def head(params, h):
    return h @ params["w"]["table"].T


def losses(logits, batch):
    return -jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["next"][:, None], axis=1
    )[:, 0]


def stages(first=None, last=None):
    first = {"embed": "tokens"} if first is None else first
    last = {"w": "tokens"} if last is None else last
    return [
        pipeline.Stage(embed, ("tokens",), ("h",), tied=first),
        pipeline.Stage(middle, ("h",), ("m",)),
        pipeline.Stage(head, ("m",), ("y",), tied=last),
    ]


def params_of(seed=0, dtype=np.float64):
    """Of each stage; the table twice."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(dtype))

    table = normal(TOKENS, WIDTH)
    return [
        {"embed": {"table": table, "rows": jnp.int32(TOKENS)}, "scale": normal(WIDTH)},
        {"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)},
        {"w": {"table": table, "rows": jnp.int32(TOKENS)}},
    ]


def problem(seed=0):
    rng = np.random.default_rng(100 + seed)
    batch = {
        "tokens": rng.integers(0, TOKENS, (EXAMPLES, 3)),
        "next": rng.integers(0, TOKENS, EXAMPLES),
    }
    return batch, rng.uniform(0.1, 2, EXAMPLES)


def whole(own, batch, weights):
    """The loss of the model in one piece: of the table, and of each stage's own."""
    table, scale, inner = own
    h = embed({"embed": {"table": table}, "scale": scale}, batch["tokens"])
    y = head({"w": {"table": table}}, middle(inner, h))
    return (losses(y, batch) * weights).sum() / weights.sum()


def own_of(params):
    return params[0]["embed"]["table"], params[0]["scale"], params[1]


def schedule(replicas):
    """Three workers; or four, two of which have the last stage in turn."""
    if not replicas:
        return pipeline.one_f_one_b(3, 4)
    chain = [text for i in range(4) for text in (f"1F{i}", f"1B{i}")]
    programs = [
        [f"0F{i}" for i in range(4)] + [f"0B{i}" for i in range(4)],
        chain,
        ["2F0", "2B0", "2F2", "2B2"],
        ["2F1", "2B1", "2F3", "2B3"],
    ]
    return pipeline.Schedule.of(programs, placement=((0,), (1,), (2, 3)))


def made(places=None, replicas=False, **options):
    defaults = {"optimizer": optim.adam(lr=0.05), "max_norm": 0.25}
    return pipeline.Pipeline(
        stages(), losses, schedule(replicas), places, **(defaults | options)
    )


def trained(places, replicas, count=3):
    """Loss, norm and tables after so many steps; None for what is elsewhere."""
    pipe = made(places, replicas)
    state, found = pipe.init(params_of(dtype=np.float32)), []
    for step in range(count):
        batch, weights = problem(step)
        state, metrics = pipe.train_step(state, batch, weights.astype(np.float32))
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    return found, jax.tree.map(np.asarray, state.params)


def refused(places, rank):
    """The error where the last worker's table is another one."""
    params = params_of(seed=int(rank == 2))
    try:
        made(places).init(params)
    except ValueError as error:
        return str(error)
    return "no error"
