"""Flows, differential equations, graphs, operators, and other packages for science."""
# pyright: reportMissingImports=false

from functools import partial

import jax
import jax.numpy as jnp

from experiments.bench.models.building import integers, normal, toward, weights
from experiments.bench.models.measure import Case

KEY = jax.random.key(0)


def flow(name: str, **settings) -> Case:
    """The negative log-likelihood of a normalising flow; functions in it are constants."""
    import equinox as eqx
    import flowjax.flows
    import paramax
    from flowjax.distributions import Normal

    made = getattr(flowjax.flows, name)(
        KEY, base_dist=Normal(jnp.zeros(8)), flow_layers=3, **settings
    )
    params, static = eqx.partition(
        made, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable)
    )

    def loss(params, x):
        return -paramax.unwrap(eqx.combine(params, static)).log_prob(x)

    return Case(loss, params, (normal(8),))


def distrax_flow() -> Case:
    """Couplings of distrax, conditioned by Haiku networks."""
    import distrax
    import haiku as hk

    def affine(p):
        return distrax.ScalarAffine(p[..., 0], jnp.tanh(p[..., 1]))

    def log_prob(x):
        layers = []
        for i in range(4):
            mask = jnp.arange(8) % 2 == i % 2
            network = hk.Sequential([hk.nets.MLP([32, 16]), lambda h: h.reshape(8, 2)])
            layers.append(distrax.MaskedCoupling(mask, network, affine))
        base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x)

    model = hk.without_apply_rng(hk.transform(log_prob))
    x = normal(8)
    return Case(lambda p, x: -model.apply(p, x), model.init(KEY, x[0]), (x,))  # fmt: skip


def neural_ode(adjoint: str) -> Case:
    """A differential equation whose right-hand side is an MLP."""
    import diffrax
    import equinox as eqx

    def loss(mlp, x):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: mlp(y)), diffrax.Tsit5(), t0=0.0, t1=1.0, dt0=0.1, y0=x,
            adjoint=getattr(diffrax, adjoint)(),
        )  # fmt: skip
        return toward(solution.ys[-1])

    return Case(loss, eqx.nn.MLP(8, 8, 32, 2, key=KEY, activation=jnp.tanh), (normal(8),))


def equilibrium() -> Case:
    """A fixed point by optimistix, differentiated implicitly."""
    import optimistix

    def loss(p, x):
        solver = optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6)
        found = optimistix.fixed_point(
            lambda y, p: jnp.tanh(0.3 * p["w"] @ y + p["u"] @ x),
            solver,
            jnp.zeros(16),
            args=p,
            max_steps=64,
        )
        return toward(found.value)

    return Case(loss, weights(w=(16, 16), u=(16, 8)), (normal(8),))


def kan(layer: str, **settings) -> Case:
    """A Kolmogorov-Arnold network."""
    from jaxkan.models.KAN import KAN

    return Case(lambda m, x: toward(m(x[None])[0]), KAN([8, 16, 4], layer, settings), (normal(8),))


def penzai_mlp() -> Case:
    """Penzai's tree of named layers."""
    from penzai import pz
    from penzai.models import simple_mlp

    model = simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=KEY, feature_sizes=[32, 64, 8], activation_fn=jax.nn.relu
    )

    def loss(model, x):
        return toward(model(pz.nx.wrap(x).tag("features")).unwrap("features"))

    return Case(loss, pz.freeze_params(model), (normal(32),))


def graph(edges: int = 48, nodes: int = 16):
    """Node features and directed edges of a batch of graphs."""
    return normal(nodes, 8), integers(nodes, edges, 2)


def graph_network(kind: str) -> Case:
    """Layers of jraph with Haiku networks."""
    import haiku as hk
    import jraph

    def apply(x, edges):
        given = jraph.GraphsTuple(
            nodes=x, edges=jnp.ones((len(edges), 4)), senders=edges[:, 0], receivers=edges[:, 1],
            n_node=jnp.array([len(x)]), n_edge=jnp.array([len(edges)]), globals=jnp.ones((1, 4)),
        )  # fmt: skip
        if kind == "GAT":
            made = jraph.GAT(
                hk.Linear(16), lambda q, k, e: hk.Linear(1)(jnp.concatenate([q, k], -1)), None
            )
            return made(given._replace(edges=None)).nodes
        if kind == "GraphConvolution":
            return jraph.GraphConvolution(hk.Linear(16))(given).nodes

        def network(size):
            return jraph.concatenated_args(hk.nets.MLP([32, size]))

        return jraph.GraphNetwork(network(8), network(8), network(4))(given).nodes

    model = hk.without_apply_rng(hk.transform(apply))
    batch = graph()
    params = model.init(KEY, *(x[0] for x in batch))
    return Case(lambda p, *example: toward(model.apply(p, *example)), params, batch)


def equivariant(kind: str) -> Case:
    """Equivariant layers of e3nn on points."""
    import e3nn_jax as e3nn

    if kind == "Linear":
        module = e3nn.flax.Linear("8x0e + 4x1o")
        x = normal(12, 16 + 12)
        wrap = partial(e3nn.IrrepsArray, "16x0e + 4x1o")
    else:
        module = e3nn.flax.MultiLayerPerceptron([32, 32, 4], act=jax.nn.silu)
        x = normal(12, 8)
        wrap = lambda x: x  # noqa: E731
    params = module.init(KEY, wrap(x[0]))

    def loss(params, x):
        out = module.apply(params, wrap(x))
        return toward(getattr(out, "array", out))

    return Case(loss, params, (x,))


def probabilistic() -> Case:
    """The evidence lower bound of a numpyro guide, with a key for each record."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(8), 1).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-3), Trace_ELBO())
    x, y = normal(8), integers(2).astype(jnp.float32)
    state = svi.init(KEY, x[0], y[0])
    params = svi.get_params(state)
    keys = jax.random.split(KEY, len(x))

    def loss(params, x, y, key):
        return svi.loss.loss(key, params, svi.model, svi.guide, x, y)

    return Case(loss, params, (x, y, keys))


CASES = {
    "masked autoregressive flow, flowjax": partial(flow, "masked_autoregressive_flow"),
    "coupling flow, flowjax": partial(flow, "coupling_flow"),
    "block neural flow, flowjax": partial(flow, "block_neural_autoregressive_flow"),
    "coupling flow, distrax": distrax_flow,
    "neural ODE, diffrax": partial(neural_ode, "RecursiveCheckpointAdjoint"),
    "neural ODE, direct adjoint, diffrax": partial(neural_ode, "DirectAdjoint"),
    "deep equilibrium, optimistix": equilibrium,
    "KAN, splines, jaxkan": partial(kan, "spline", k=3, G=5),
    "KAN, Chebyshev, jaxkan": partial(kan, "chebyshev", D=5),
    "MLP, penzai": penzai_mlp,
    "graph network, jraph": partial(graph_network, "GraphNetwork"),
    "graph convolution, jraph": partial(graph_network, "GraphConvolution"),
    "graph attention, jraph": partial(graph_network, "GAT"),
    "equivariant linear layer, e3nn-jax": partial(equivariant, "Linear"),
    "MLP, e3nn-jax": partial(equivariant, "MLP"),
    "evidence lower bound, numpyro": probabilistic,
}
