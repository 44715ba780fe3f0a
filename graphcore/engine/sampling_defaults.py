"""The sampling parameters of requests that do not set them, and where they come from.

    a request's own > the settings that were typed > the model's own > graphcore's for its kind of model

The model's own are those of its generation_config.json, or of the general.sampling.* keys of its GGUF file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from graphcore.arch.config.gguf_keys import as_float32
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.generation_config import FILE_NAME, read_generation_config
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.engine.arguments import is_whole, sampling_params
from graphcore.sampling_params import NEUTRAL, PARAMETERS, TRUNCATING, WHOLE_NUMBERS, SamplingParams, check_truncation

OF_CHATS = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
STATED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
NEUTRAL_TRUNCATION = {name: NEUTRAL[name] for name in TRUNCATING if name in STATED}
MOST_STATED = 1e9  # of any parameter
GGUF_KEYS = {  # of general.sampling; llama.cpp, gguf-py/gguf/constants.py
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True)
class SamplingDefaults:
    """The sampling parameters of requests that do not set them.

    Attributes:
        own: values of fields of `SamplingParams` that the model, or graphcore for its kind of model, has.
        source: what `own` is from, in words.
        typed: values that the settings have (`sampling.temperature=0.7`), which take precedence.
        max_new_tokens: most tokens of an answer, as the model's author has it; None if he says nothing.
        notes: lines about values that are ignored.
    """

    own: Mapping[str, Any] = field(default_factory=dict)
    source: str = "greedy"
    typed: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The values of a request that sets none; what is not here is neutral."""
        return {**({} if self.typed.get("temperature") == 0 else self.own), **self.typed}

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of a request that sets none itself."""
        return SamplingParams(**self.values)

    def params_with(self, given: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters of a request. If it sets temperature=0, the model's defaults do not apply.

        Args:
            given: the parameters that it sets; None leaves one to the defaults.

        Raises:
            ConfigError: a name is unknown, a value is out of range, or there is a top-k, top-p or min-p and no
                temperature above 0.
        """
        given = {name: value for name, value in given.items() if value is not None or name not in NEUTRAL}
        values = {**(self.typed if given.get("temperature") == 0 else self.values), **given}
        if "temperature" not in given and not values.get("temperature"):
            values.pop("temperature", None)  # greedy, but not by the request: a truncation that it asks for is refused
        return sampling_params(values)

    @property
    def words(self) -> str:
        """The values that are not neutral and whose they are: "temperature 0.7, top_k 20 (generation_config.json)"."""
        params = vars(self.params)
        if self.params.is_greedy:
            return f"greedy ({'as set' if 'temperature' in self.typed else self.source})"
        named = [name for name in params if name in ("temperature", *self.values) and params[name] != NEUTRAL[name]]
        parts = {
            "as set": [f"{name} {params[name]}" for name in named if name in self.typed],
            self.source: [f"{name} {params[name]}" for name in named if name not in self.typed],
        }
        return ", ".join(f"{', '.join(texts)} ({source})" for source, texts in parts.items() if texts)

    @property
    def record(self) -> dict[str, Any]:
        """The parameters of a request that sets none, by name, and `words`; without the seed, which is not theirs."""
        params = {name: value for name, value in asdict(self.params).items() if name != "seed"}
        return {**params, "logit_bias": dict(self.params.logit_bias), "words": self.words}


def sampling_defaults(
    checkpoint: Checkpoint, is_chat: bool, of_card: Mapping[str, Any], typed: Mapping[str, Any]
) -> SamplingDefaults:
    """Return the defaults of a model.

    Args:
        is_chat: True if the model has a chat template.
        of_card: what the model card recommends, for a model whose files say nothing.
        typed: values of the settings.

    Raises:
        ConfigError: a typed top-k, top-p or min-p has no effect, because the model is greedy.
    """
    stated, source = _stated_by(checkpoint)
    notes: list[str] = []
    own = _own_values(stated, source, notes)
    if "temperature" not in own:
        chosen, source = (OF_CHATS, "graphcore's values for chat models") if is_chat else ({}, "no chat template")
        own = {**chosen, **own}
        if of_card:
            own, source = {**own, **NEUTRAL_TRUNCATION, **of_card}, "the model card"
    most = stated.get("max_new_tokens")
    most = int(most) if is_whole(most) and most > 0 else None
    found = SamplingDefaults(own, source, typed, most, tuple(notes))
    check_truncation({**NEUTRAL, **found.values})
    return found


def _stated_by(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], str]:
    """Return what the model's author says, under the names of generation_config.json, and where."""
    if isinstance(checkpoint, GGUFCheckpoint):
        found = {name: _as_written(checkpoint.metadata.get(key)) for name, key in GGUF_KEYS.items()}
        return {name: value for name, value in found.items() if value is not None}, "the file's general.sampling"
    if checkpoint.layout != "hf" or not checkpoint.files:
        return {}, ""
    return read_generation_config(next(iter(checkpoint.files)).parent).settings, FILE_NAME


def _as_written(value: object) -> object:
    """Return a float32 as its shortest decimal, which its author wrote (0.2, not 0.20000000298); others as they are."""
    if not isinstance(value, float) or abs(value) > MOST_STATED or as_float32(value) != value:
        return value
    return float(str(np.float32(value)))


def gguf_values(checkpoint: Checkpoint, of_card: Mapping[str, Any]) -> dict[str, float]:
    """Return what the model's author says of sampling, by the keys of a GGUF file; whole numbers are ints.

    Args:
        of_card: what the model card recommends; it counts as in `sampling_defaults`, where the files say nothing.
    """
    own = _own_values(*_stated_by(checkpoint), [])
    values = own if "temperature" in own else {**own, **dict(_usable(of_card, "the model card", []))}
    return {GGUF_KEYS[name]: value for name, value in values.items()}


def _own_values(stated: Mapping[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    """Return the values that an author states, with a temperature if he says whether to sample.

    As in vLLM, a temperature, top-k, top-p or min-p says so, too; transformers samples only with do_sample=true. The
    temperature of an author who samples and gives none is 1, as in both.
    """
    own = dict(_usable(stated, source, notes))
    samples = stated.get("do_sample")
    if samples is True or (samples is not False and own.keys() & {"temperature", *TRUNCATING}):
        own = {"temperature": 1.0, **own}
    elif samples is False:
        own["temperature"] = 0.0
    return own if own.get("temperature") else {key: value for key, value in own.items() if key not in TRUNCATING}


def _usable(stated: Mapping[str, Any], source: str, notes: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the values that a request may have; of the others a note is made."""
    for name in STATED:
        value, bounds = stated.get(name), PARAMETERS[name]
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_in_bounds = is_number and bounds.least <= value <= min(bounds.most, MOST_STATED)
        if not is_in_bounds or (name in WHOLE_NUMBERS and value != int(value)):
            notes.append(f"{source}: {name}={value!r:.40} is ignored; it must be {bounds.allowed}")
        else:
            yield name, int(value) if name in WHOLE_NUMBERS else float(value)
