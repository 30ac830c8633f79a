"""A small language model's trainer over meshes, and wrong in one interaction of axes.

`trainer(layout, fault)` has the fault in the layouts where all axes of `FAULTS[fault]`
are away from their first values, and is right in all others. The model is two layers;
each is a mean over earlier positions, dropout and a network of one hidden layer. The
trainer divides examples over "dp", positions over "cp", hidden units over "tp" and
layers over "pp", a pipeline that passes micro-batches on by `ppermute`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdist.verify import tap
from jdist.verify.evaluation.compilation import quick_to_compile

Layout = Mapping[str, Any]
Tree = Any

EXAMPLES, LENGTH, LAYERS, WORDS, WIDTH, INNER = 12, 4, 2, 7, 5, 6
KEPT, LIMIT, RATE, SCALE = 0.75, 0.1, 0.5, 128.0

AXES: dict[str, tuple[Any, ...]] = {
    "dp": (1, 2, 3), "tp": (1, 2), "cp": (1, 2), "pp": (1, 2), "micro": (1, 2, 3),
    "mask": (False, True), "tie": (False, True), "dropout": (False, True),
    "remat": (False, True), "clip": (False, True), "dtype": ("float32", "bfloat16"),
}  # fmt: skip
MODEL = ("mask", "tie", "dropout", "clip", "dtype")

FAULTS: dict[str, tuple[str, ...]] = {
    # One axis.
    "gradient summed twice": ("dp",),
    "bias on each shard": ("tp",),
    "positions of each shard from 0": ("cp",),
    "embedding of each stage": ("pp",),
    "micro-batches added in bfloat16": ("micro",),
    "inputs not differentiated": ("remat",),
    "loss scale not undone": ("dtype",),
    # Two axes.
    "last micro-batch lost": ("pp", "micro"),
    "mean of micro-batches' means": ("micro", "mask"),
    "tokens of one shard": ("cp", "mask"),
    "one mask for all shards": ("cp", "dropout"),
    "masks of each shard": ("tp", "dropout"),
    "masks of the first micro-batch": ("micro", "dropout"),
    "masks of the first layer": ("pp", "dropout"),
    "masks drawn anew": ("remat", "dropout"),
    "recomputed over one shard": ("remat", "cp"),
    "copies in the norm": ("tp", "clip"),
    "norm of each stage": ("pp", "clip"),
    "clipped before the sum": ("dp", "clip"),
    "each micro-batch clipped": ("micro", "clip"),
    "clipped before unscaling": ("dtype", "clip"),
    "unscaled at each micro-batch": ("dtype", "micro"),
    "positions in bfloat16": ("dtype", "cp"),
    "head of one shard": ("cp", "tie"),
    "tied gradient of one stage": ("pp", "tie"),
    # Three axes.
    "tied leaf twice in the norm": ("pp", "tie", "clip"),
    "tied gradient summed over tp": ("tp", "cp", "tie"),
    "token mask of the next micro-batch": ("pp", "micro", "mask"),
    "dropout mask of the next micro-batch": ("pp", "micro", "dropout"),
    "micro-batches' means on each replica": ("dp", "micro", "mask"),
    "recomputed with the first micro-batch's mask": ("remat", "micro", "dropout"),
    "recomputed with each shard's mask": ("remat", "tp", "dropout"),
    "first stage's norm before unscaling": ("pp", "dtype", "clip"),
}


def planted(layout: Layout, fault: str | None) -> bool:
    """Whether a fault is in the trainer of a layout."""
    axes = FAULTS[fault] if fault else ()
    return bool(axes) and all(layout[axis] != AXES[axis][0] for axis in axes)


def valid(layout: Layout) -> bool:
    """Whether eight devices suffice, and the examples divide."""
    devices = layout["dp"] * layout["tp"] * layout["cp"] * layout["pp"]
    return devices <= 8 and EXAMPLES // layout["dp"] % layout["micro"] == 0


# --- what is claimed ---


def problem(layout: Layout) -> tuple[Tree, Tree, jax.Array]:
    """Parameters, sequences of tokens, and their numbers of tokens."""
    own = iter(jax.random.split(jax.random.key(3), 9))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(own), shape, jnp.float32)

    params = {
        "embed": normal(WORDS, WIDTH) / 3,
        "up": normal(LAYERS, WIDTH, INNER) / 2,
        "down": normal(LAYERS, INNER, WIDTH) / 2,
        "bias": normal(LAYERS, WIDTH) / 4,
        "head": normal(WIDTH, WORDS) / 2,
    }
    if layout["tie"]:
        del params["head"]
    tokens = jax.random.randint(next(own), (EXAMPLES, LENGTH + 1), 0, WORDS, jnp.int32)
    lengths = jax.random.randint(next(own), (EXAMPLES, 1), 1, LENGTH + 1)
    if not layout["mask"]:
        lengths = jnp.full((EXAMPLES, 1), LENGTH)
    counted = (jnp.arange(LENGTH)[None] < lengths).astype(jnp.float32)
    batch = {
        "x": tokens[:, :-1],
        "y": tokens[:, 1:],
        "counted": counted,
        # Each sequence is the continuation of a long one.
        "first": jax.random.randint(next(own), (EXAMPLES,), 300, 1000, jnp.int32),
        "key": jax.random.split(next(own), EXAMPLES),
    }
    return params, batch, counted.sum(1)


def claim(layout: Layout) -> Any:
    """The losses of one device, and the update where gradients are clipped."""

    def losses(params: Tree, batch: Tree) -> jax.Array:
        positions = batch["first"][:, None] + jnp.arange(LENGTH, dtype=jnp.int32)[None]
        values = tap(embedded(params, batch["x"], positions), "embed")
        for number in range(LAYERS):
            values = mean_of_earlier(values, values, 0)
            if layout["dropout"]:
                values = dropped(values, layer_keys(batch["key"], number), 0)
            values = values + hidden(params, number, values, layout["dtype"])
            values = values + params["bias"][number][None, None]
            values = tap(values, f"layer[{number}]")
        each = token_losses(values @ head(params), batch["y"])
        return (each * batch["counted"]).sum(1) / batch["counted"].sum(1)

    def update(params: Tree, gradient: Tree, state: Any) -> tuple[Tree, Any]:
        squares = sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient))
        factor = jnp.minimum(1, LIMIT / jnp.sqrt(squares))
        return moved(params, jax.tree.map(lambda g: factor * g, gradient)), state

    return (losses, update) if layout["clip"] else losses


def embedded(params: Tree, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of the embedding, each times a wave of its position."""
    rows = params["embed"][tokens]
    waves = 0.5 ** jnp.arange(WIDTH, dtype=jnp.float32)
    angles = positions.astype(jnp.float32)[..., None] * waves[None, None]
    return rows * (1 + jnp.cos(angles) / 2)


def mean_of_earlier(values: jax.Array, whole: jax.Array, start: Any) -> jax.Array:
    """Values from position `start` on, each plus the mean up to it."""
    length = whole.shape[1]
    count = jnp.arange(1, length + 1, dtype=values.dtype)
    weights = jnp.tril(jnp.ones((length, length), values.dtype)) / count[:, None]
    own = lax.dynamic_slice_in_dim(weights, start, values.shape[1], 0)
    return values / 2 + jnp.einsum("ij,njw->niw", own, whole)


def dropped(values: jax.Array, keys: jax.Array, start: Any) -> jax.Array:
    """Positions from `start` on, each example with the mask of its key."""

    def kept(key: jax.Array) -> jax.Array:
        whole = jax.random.bernoulli(key, KEPT, (LENGTH, WIDTH))
        return lax.dynamic_slice_in_dim(whole, start, values.shape[1], 0)

    return jnp.where(jax.vmap(kept)(keys), values / KEPT, 0)


def layer_keys(keys: jax.Array, number: Any) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def hidden(params: Tree, number: int, values: jax.Array, dtype: str) -> jax.Array:
    """A network of one hidden layer, computed in a dtype."""
    up, down = (params[name][number].astype(dtype) for name in ("up", "down"))
    return (jnp.tanh(values.astype(dtype) @ up) @ down).astype(values.dtype)


def head(params: Tree) -> jax.Array:
    return params["head"] if "head" in params else params["embed"].T


def token_losses(scores: jax.Array, labels: jax.Array) -> jax.Array:
    own = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(scores, -1) - own


def moved(params: Tree, gradient: Tree) -> Tree:
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradient)


# --- the trainer ---


@jax.custom_vjp
def enters(values: jax.Array) -> jax.Array:
    """An identity, whose cotangents are summed over "tp"."""
    return values


@jax.custom_vjp
def leaves(values: jax.Array) -> jax.Array:
    """A sum over "tp", whose cotangent is that of each term."""
    return lax.psum(values, "tp")


enters.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "tp"),))
leaves.defvjp(lambda x: (lax.psum(x, "tp"), None), lambda _, g: (g,))


def recomputed(right: Callable[..., Any], other: Callable[..., Any]) -> Any:
    """A function whose backward pass recomputes, and differentiates, another one."""
    fn = jax.custom_vjp(right)

    def backward(saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
        params, values, keys, others = saved
        _, transposed = jax.vjp(lambda p, v: other(p, v, keys, others), params, values)
        none = np.zeros(keys.shape, jax.dtypes.float0)
        return *transposed(cotangent), none, none

    fn.defvjp(lambda *given: (right(*given), given), backward)
    return fn


def trainer(layout: Layout, fault: str | None = None) -> Callable[..., Any]:
    """The candidate of a layout: a gradient function, or a step where it clips."""
    own = _Trainer(layout, fault if planted(layout, fault) else None)
    sizes = [layout[name] for name in ("dp", "tp", "cp", "pp")]
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    specs = {
        "embed": P(),
        "up": P("pp", None, "tp"),
        "down": P("pp", "tp"),
        "bias": P("pp"),
        "head": P(),
    }
    if layout["tie"]:
        del specs["head"]
    tokens, clips = P("dp", "cp"), layout["clip"]
    of_batch = {"x": tokens, "y": tokens, "counted": tokens}
    of_batch |= {"first": P("dp"), "key": P("dp")}
    mesh = Mesh(devices, ("dp", "tp", "cp", "pp"))
    whole = jax.jit(
        jax.shard_map(
            own.step if clips else own.gradient,
            mesh=mesh,
            in_specs=(specs, of_batch),
            out_specs=specs if clips else (P(), specs),
            check_vma=False,
        ),
        # Those of the second step are the first one's.
        in_shardings=jax.tree.map(lambda s: NamedSharding(mesh, s), (specs, of_batch)),
        compiler_options=quick_to_compile(tiny=True),
    )
    if clips:
        return lambda params, state, batch: (whole(params, batch), state)
    return whole


@dataclass(frozen=True)
class _Trainer:
    """The functions that each device runs on its part.

    Attributes:
      layout: The layout.
      fault: The fault that is in it; None for the right trainer.
    """

    layout: Layout
    fault: str | None

    def step(self, params: Tree, batch: Tree) -> Tree:
        """The parameters after a step with the clipped gradient."""
        _, each = self.local(params, batch)
        if self.fault == "each micro-batch clipped":
            found = _added([self.clipped(self.summed(own)) for own in each])
        elif self.fault == "clipped before the sum":
            found = self.clipped(self.summed(self.added(each), ("cp",)))
            found = lax.psum(found, "dp")
        else:
            found = self.clipped(self.summed(self.added(each)))
        return moved(params, found)

    def gradient(self, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """The loss and the gradient of the whole batch."""
        loss, each = self.local(params, batch)
        return lax.psum(loss, ("dp", "cp", "pp")), self.summed(self.added(each))

    def local(self, params: Tree, batch: Tree) -> tuple[jax.Array, list[Tree]]:
        """This device's part of the loss, and of each micro-batch's gradient."""
        count = self.layout["micro"]
        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        shares = self.shares(parts["counted"]) * self.scale
        copies = jax.tree.map(lambda p: jnp.stack([p] * count), params)
        loss, found = jax.value_and_grad(self.loss)(copies, parts, shares)
        each = [jax.tree.map(lambda g, n=n: g[n], found) for n in range(count)]
        return loss / self.scale, each

    @property
    def scale(self) -> float:
        """The factor of the loss, so that small cotangents do not vanish."""
        return SCALE if self.layout["dtype"] == "bfloat16" else 1.0

    def shares(self, counted: jax.Array) -> jax.Array:
        """What each micro-batch's sum over tokens is multiplied by."""
        own, micro = counted.sum((1, 2)), self.layout["micro"]
        if self.fault == "mean of micro-batches' means":
            return 1 / (micro * lax.psum(own, ("dp", "cp")))
        if self.fault == "micro-batches' means on each replica":
            return 1 / (micro * self.layout["dp"] * lax.psum(own, "cp"))
        if self.fault == "tokens of one shard":
            total = self.layout["cp"] * lax.psum(own.sum(), "dp")
        else:
            total = lax.psum(own.sum(), ("dp", "cp"))
        return jnp.full(micro, 1 / total)

    def loss(self, copies: Tree, parts: Tree, shares: jax.Array) -> jax.Array:
        """This device's part of the loss: micro-batches go from stage to stage.

        Args:
          copies: The parameters, once for each micro-batch.
          parts: The micro-batches.
          shares: As `shares` returns.
        """
        micro, stages = self.layout["micro"], self.layout["pp"]
        stage = lax.axis_index("pp") if stages > 1 else 0
        clocks = micro + stages - 1
        if self.fault == "last micro-batch lost":
            clocks -= 1
        length = parts["x"].shape[2]

        def pass_on(carry: tuple[jax.Array, jax.Array], clock: jax.Array) -> Any:
            """One clock: each stage has a micro-batch, and the next one then has it."""
            values, total = carry
            number = clock - stage
            here = jnp.clip(number, 0, micro - 1)
            params, part, share = jax.tree.map(
                lambda x: x[here], (copies, parts, shares)
            )
            following = jnp.minimum(clock, micro - 1)
            if self.fault == "token mask of the next micro-batch":
                part["counted"] = parts["counted"][following]
            if self.fault == "dropout mask of the next micro-batch":
                part["key"] = parts["key"][following]
            if self.fault == "masks of the first micro-batch":
                part["key"] = parts["key"][0]
            enter = embedded(params, part["x"], self.positions(part["first"], length))
            values = jnp.where(stage == 0, enter, values)
            keys = self.keys(part["key"]), self.keys(parts["key"][0])
            for layer in range(LAYERS // stages):
                number_of_layer = layer + stage * (LAYERS // stages)
                values = self.layer(params, layer, number_of_layer, values, *keys)
            own = token_losses(values @ self.head(params), part["y"])
            own = (own * part["counted"]).sum() * share
            counts = (stage == stages - 1) & (number >= 0) & (number < micro)
            if stages > 1:
                values = lax.ppermute(values, "pp", [(0, 1)])
            return (values, total + jnp.where(counts, own, 0)), None

        values = jnp.zeros((parts["x"].shape[1], length, WIDTH), jnp.float32)
        # A loop compiles in a third of the time of its clocks one after the other.
        numbers = jnp.arange(clocks, dtype=jnp.int32)
        (_, total), _ = lax.scan(pass_on, (values, jnp.float32(0)), numbers)
        return total

    def positions(self, first: jax.Array, length: int) -> jax.Array:
        """The positions of this shard's tokens."""
        start = lax.axis_index("cp") * length
        if self.fault == "positions of each shard from 0":
            start = 0 * start
        found = (first + start)[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        if self.fault == "positions in bfloat16":
            return found.astype(jnp.bfloat16)
        return found

    def keys(self, keys: jax.Array) -> jax.Array:
        """The examples' keys of dropout."""
        if self.fault == "masks of each shard":
            return layer_keys(keys, lax.axis_index("tp"))
        return keys

    def head(self, params: Tree) -> jax.Array:
        """The matrix of the scores."""
        if self.fault == "head of one shard":
            own = lax.axis_index("cp") == 0
            return jnp.where(own, head(params), lax.stop_gradient(head(params)))
        return head(params)

    def layer(
        self,
        params: Tree,
        layer: int,
        number: Any,
        values: jax.Array,
        keys: jax.Array,
        first_keys: jax.Array,
    ) -> jax.Array:
        """A layer of this stage.

        Args:
          params: The stage's parameters.
          layer: The layer's place in the stage.
          number: Its place in the model.
          values: Its input.
          keys: The examples' keys.
          first_keys: Those of the first micro-batch.
        """
        number = layer if self.fault == "masks of the first layer" else number
        keys, first_keys = layer_keys(keys, number), layer_keys(first_keys, number)

        def right(
            params: Tree, values: jax.Array, keys: jax.Array, _: jax.Array
        ) -> jax.Array:
            return self.applied(params, layer, values, keys)

        def other(
            params: Tree, values: jax.Array, keys: jax.Array, first_keys: jax.Array
        ) -> jax.Array:
            """What a backward pass recomputes instead."""
            if self.fault == "inputs not differentiated":
                values = lax.stop_gradient(values)
            if self.fault == "masks drawn anew":
                keys = layer_keys(keys, 1)
            if self.fault == "recomputed with the first micro-batch's mask":
                keys = first_keys
            if self.fault == "recomputed with each shard's mask":
                keys = layer_keys(keys, lax.axis_index("tp"))
            gathers = self.fault != "recomputed over one shard"
            return self.applied(params, layer, values, keys, gathers)

        apply = jax.checkpoint(right) if self.layout["remat"] else right
        if self.fault and "remat" in FAULTS[self.fault]:
            apply = recomputed(right, other)
        return apply(params, values, keys, first_keys)

    def applied(
        self,
        params: Tree,
        layer: int,
        values: jax.Array,
        keys: jax.Array,
        gathers: bool = True,
    ) -> jax.Array:
        """The output of a layer, whose positions and hidden units are on many devices.

        Args:
          params: The stage's parameters.
          layer: The layer's place in the stage.
          values: Its input.
          keys: The examples' keys for it.
          gathers: Whether the mean is over all positions.
        """
        start = lax.axis_index("cp") * values.shape[1]
        if gathers:
            whole = lax.all_gather(values, "cp", axis=1, tiled=True)
            values = mean_of_earlier(values, whole, start)
        else:
            values = mean_of_earlier(values, values, 0)
        if self.layout["dropout"]:
            place = 0 if self.fault == "one mask for all shards" else start
            values = dropped(values, keys, place)
        outer = hidden(params, layer, enters(values), self.layout["dtype"])
        bias = params["bias"][layer][None, None]
        if self.fault == "bias on each shard":
            return values + leaves(outer + bias)
        return values + leaves(outer) + bias

    # --- from the micro-batches' gradients to the step ---

    def added(self, each: list[Tree]) -> Tree:
        """The sum over micro-batches."""
        if self.fault == "micro-batches added in bfloat16":
            low = [jax.tree.map(lambda g: g.astype(jnp.bfloat16), own) for own in each]
            return jax.tree.map(lambda g: g.astype(jnp.float32), _added(low))
        if self.fault == "unscaled at each micro-batch":
            total = each[0]
            for own in each[1:]:
                total = _added([jax.tree.map(lambda t: t / SCALE, total), own])
            return total
        return _added(each)

    def summed(self, gradient: Tree, over: tuple[str, ...] = ("dp", "cp")) -> Tree:
        """The sum over the devices, without the loss's factor."""
        undone = self.fault in ("loss scale not undone", "clipped before unscaling")
        scale = 1.0 if undone else self.scale
        found = {name: lax.psum(g / scale, over) for name, g in gradient.items()}
        if self.fault == "gradient summed twice":
            found = lax.psum(found, "dp")
        for name in {"embed", "head"} & set(found):
            own = found[name]
            if self.fault == "tied gradient of one stage":
                own = jnp.where(lax.axis_index("pp") == 0, own, 0)
            if self.fault != "embedding of each stage":
                own = lax.psum(own, "pp")
            if self.fault == "tied gradient summed over tp":
                own = lax.psum(own, "tp")
            found[name] = own
        return found

    def clipped(self, gradient: Tree) -> Tree:
        """The gradient, made as long as `LIMIT` if it is longer."""
        squares = {name: jnp.sum(g * g) for name, g in gradient.items()}
        divided = {"up", "down"}
        if self.fault == "copies in the norm":
            divided = set(squares)
        for name in divided:
            squares[name] = lax.psum(squares[name], "tp")
        staged = {"up", "down", "bias"}
        if self.fault == "norm of each stage":
            staged = set()
        if self.fault == "tied leaf twice in the norm":
            staged = set(squares)
        if self.fault == "first stage's norm before unscaling":
            factor = jnp.where(lax.axis_index("pp") == 0, SCALE**2, 1)
            squares |= {name: squares[name] * factor for name in staged}
        for name in staged:
            squares[name] = lax.psum(squares[name], "pp")
        factor = jnp.minimum(1, LIMIT / jnp.sqrt(sum(squares.values())))
        if self.fault == "clipped before unscaling":
            factor /= SCALE
        return jax.tree.map(lambda g: factor * g, gradient)


def _added(trees: list[Tree]) -> Tree:
    return jax.tree.map(lambda *own: sum(own[1:], start=own[0]), *trees)
