"""Vision models of Hugging Face and Equimo."""
# pyright: reportMissingImports=false

from typing import Any

import jax

from experiments.bench.models.building import classify, integers, normal, toward
from experiments.bench.models.measure import Case

CLASSES, SIDE = 8, 32


def images() -> tuple[jax.Array, jax.Array]:
    """Pictures and labels."""
    return normal(3, SIDE, SIDE), integers(CLASSES)


def hugging_face(name: str, config: str, **settings: Any) -> Case:
    """A Flax model of transformers with random weights."""
    import transformers

    made = getattr(transformers, config)(**settings, num_labels=CLASSES)
    model = getattr(transformers, name)(made, seed=0, input_shape=(1, SIDE, SIDE, 3))
    params = model.params
    rest = {}
    if "batch_stats" in params:  # Frozen, as for fine-tuning.
        params, rest = params["params"], {"batch_stats": params["batch_stats"]}

    def loss(params, image, label):
        given = {"params": params, **rest} if rest else params
        return classify(model(image[None], params=given, train=False).logits[0], label)

    return Case(loss, params, images())


def equimo_model(name: str, **settings) -> Case:
    """A model of Equimo without dropout."""
    import equimo.models

    model = getattr(equimo.models, name)(
        in_channels=3, num_classes=CLASSES, key=jax.random.key(0), **settings
    )

    def loss(model, image, label):
        return classify(model(image, key=jax.random.key(0), inference=True), label)

    return Case(loss, model, images())


def pde_network(name: str, **settings) -> Case:
    """An architecture of pdequinox for fields over a plane."""
    import pdequinox

    model = getattr(pdequinox.arch, name)(2, 2, 2, key=jax.random.key(0), **settings)
    return Case(lambda m, field: toward(m(field)), model, (normal(2, 16, 16),))


VIT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "image_size": SIDE, "patch_size": 8,
}  # fmt: skip
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}

CASES = {
    "ViT, equimo": lambda: equimo_model(
        "VisionTransformer", img_size=SIDE, dim=64, patch_size=8, num_heads=[4], depths=[2]),
    "ConvNeXt, equimo": lambda: equimo_model("ConvNeXt", depths=[1, 1, 1, 1], dims=[16, 32, 32, 32]),
    "U-Net, pdequinox": lambda: pde_network("ClassicUNet", hidden_channels=8, num_levels=2),
    "Fourier operator, pdequinox": lambda: pde_network("ClassicFNO", num_modes=4, num_blocks=2),
    "ResNet, pdequinox": lambda: pde_network("ClassicResNet", hidden_channels=8, num_blocks=2),
    "FlaxViT, transformers": lambda: hugging_face("FlaxViTForImageClassification", "ViTConfig", **VIT),
    "FlaxBeit, transformers": lambda: hugging_face("FlaxBeitForImageClassification", "BeitConfig", **VIT),
    "FlaxDinov2, transformers": lambda: hugging_face(
        "FlaxDinov2ForImageClassification", "Dinov2Config", **VIT),
    "FlaxResNet, frozen BatchNorm, transformers": lambda: hugging_face(
        "FlaxResNetForImageClassification", "ResNetConfig", **RESNET),
    "FlaxRegNet, frozen BatchNorm, transformers": lambda: hugging_face(
        "FlaxRegNetForImageClassification", "RegNetConfig", embedding_size=16, hidden_sizes=[16, 32],
        depths=[1, 1], groups_width=8),
}  # fmt: skip
