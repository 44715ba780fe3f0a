"""Command lines, right ones and wrong ones.

@name@ in an argument is the path of a small model or of a file that `commands` writes. Where the checkpoint is not the
matter, a line gets the arguments of `BASE` whose keys it does not set.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"
BASE = (
    "model.checkpoint=@chat@",
    "graph=eager",
    "device=cpu",
    "threads=1",
    "progress=false",
    "max_new_tokens=3",
)
IDS = "prompt_ids=[1,2,3]"
CHAT = "Hello\n/set temperature=0.8 seed=5\nAnd you?\n/retry\n/continue\n/system Be brief.\n/system\nAgain!\n"
SLASH = (
    "/help\n/set\n/set temprature=1\n/set temperature=-1\n/load nothing.json\n/no\nHi\n/save kept.json\n/clear\n/exit\n"
)


@dataclass(frozen=True)
class Line:
    """A command line.

    Attributes:
        arguments: without those of `BASE`.
        stdin: text of standard input.
        is_based: False leaves `BASE` out.
    """

    arguments: tuple[str, ...]
    stdin: str = ""
    is_based: bool = True

    @property
    def name(self) -> str:
        """The arguments and the beginning of standard input."""
        given = " ".join(repr(one) if " " in one or not one else one for one in self.arguments)
        return given + (f" <<< {self.stdin[:30]!r}" if self.stdin else "")

    @property
    def whole(self) -> tuple[str, ...]:
        """All arguments."""
        keys = {one.partition("=")[0] for one in self.arguments}
        base = [one for one in BASE if one.partition("=")[0] not in keys]
        return (*base, *self.arguments) if self.is_based else self.arguments


RIGHT = (
    "Hello!",
    "generate Hello!",
    "prompt=Hello chat=off",
    "prompt=Hello chat=on system=Brief",
    "prompt=Hello sampling=nucleus seed=7",
    "prompt=Hello sampling.temperature=1.5 sampling.top_k=5 seed=7 max_new_tokens=9",
    "prompt=Hello sampling.temperature=1 sampling.min_p=0.2 sampling.repetition_penalty=1.3 max_new_tokens=9",
    "prompt=Hello sampling.temperature=0.7 sampling.top_p=0.5 seed=-1",
    "prompt=Hello stop=[a,e] max_new_tokens=20",
    "prompt=<|end|> special_tokens=parse",
    "prompt=<|end|> special_tokens=text chat=off",
    "prompt=Hello task.logprobs=true",
    "prompt=Hello max_new_tokens=-1 context_length=32",
    "prompt=Hello outputs=false",
    "prompt=Hello debug=true",
    "prompt=Hello progress=true",
    "prompt=Hello dtype=bf16 kv_dtype=q8_0",
    "prompt=Hello dtype=torch.bfloat16 kv_dtype=F16",
    "prompt=Hello dtype=fp16",
    "prompt=Hello kv_dtype=q8_0,q4_0",
    "prompt=Hello kv_dtype=q5_0,bf16",
    "prompt=Hello quant=q4_k",
    "prompt=Hello quant=q8_0 quant.activations=int8",
    "prompt=Hello quant=q4_0 quant.activations=float graph=auto",
    "prompt=Hello graph=auto",
    "prompt=Hello graph=auto streaming=on",
    "prompt=Hello streaming=on streaming.source=disk streaming.mode=sync",
    "prompt=Hello streaming=on streaming.source=host streaming.layer_group_size=2",
    "prompt=Hello streaming=auto streaming.memory_budget=4800kB",
    "prompt=Hello streaming=auto streaming.memory_budget=1MiB streaming.prefetch=0 context_length=32 prefill_chunk=8",
    "prompt=Hello streaming=on trace=true",
    "prompt=Hello prefill_chunk=2 context_length=64",
    "prompt=Hello batching.cache_tokens=64 context_length=64",
    "prompt=Hello cache.save=kept.cache",
    "prompt=Hello model.num_hidden_layers=1",
    "prompt=Hello model.fallback=transformers",
    "prompt=Hello model.fallback=transformers model.attention=eager dtype=fp32",
    "prompt_file=@prompt.txt@",
    f"{IDS} model.checkpoint=@llama3@",
    f"{IDS} model.checkpoint=@golden_gemma3.gguf@",
    f"{IDS} model.checkpoint=@golden_bitnet_i2s.gguf@",
    f"{IDS} model.checkpoint=@golden_gptoss.gguf@",
    f"{IDS} model.checkpoint=@qwen3_moe@ streaming=on streaming.expert_cache=100kB",
    f"{IDS} model.checkpoint=@qwen3_5@",
    f"{IDS} model.checkpoint=@fallback_phi3@ model.fallback=transformers",
    "task.prompts_jsonl=@prompts.jsonl@",
    "task.prompts_jsonl=@prompts.jsonl@ task.output=answers.jsonl batch_size=2",
    "task.prompts_jsonl=@prompts.jsonl@ batch_size=3 task.logprobs=true context_length=64 batching.cache_tokens=64",
    "task=chat",
    "task=bench task.prompt_tokens=8 task.new_tokens=3 task.repeats=1",
    "task=bench task.prompt_tokens=8 task.new_tokens=3 task.repeats=2 task.batch=2 task.depth=4",
    "task=bench task.prompt_tokens=8 task.new_tokens=3 task.repeats=1 graph=auto streaming=on",
    "task=bench task.prompt_tokens=8 task.new_tokens=3 task.repeats=1 model.fallback=transformers",
    "task=microbench task.lengths=[8,16] task.repeats=1",
    "task=microbench task.lengths=[8] task.repeats=1 graph=auto",
    "task=verify task.tokens=12 task.new_tokens=3",
    "task=verify task.tokens=12 task.new_tokens=3 dtype=bf16",
    "task=verify task.tokens=12 task.new_tokens=3 model.checkpoint=@qwen3_moe@",
    "task=verify task.tokens=12 task.new_tokens=3 model.checkpoint=@golden_llama3.gguf@",
    "task=verify task.tokens=12 task.new_tokens=3 task.tolerance=1e-12 graph=auto",
    "task=perplexity task.text=@text.txt@ task.window=32",
    "task=perplexity task.text=@text.txt@ task.window=16 task.stride=4 task.path=decode",
    "task=perplexity task.text=@text.txt@ task.window=32 graph=auto task.path=decode kv_dtype=q8_0",
    "task=plan task.ram=16GiB",
    "task=plan task.ram=16GiB task.device_memory=24GiB task.link=25GB task.disk=3GB task.bandwidth=900GB",
    "task=plan task.ram=64GiB streaming=auto model=llama3_8b model.checkpoint=random: dtype=bf16",
    "task=plan task.ram=8GiB streaming=on model=llama3_8b model.checkpoint=random: quant=q4_k",
    "task=plan task.ram=64GiB task.device_memory=14GiB streaming=auto model=llama2_70b model.checkpoint=random:",
    "task=plan task.ram=64GiB task.device_memory=14GiB streaming=auto model=gpt_oss model.checkpoint=random:",
    "task=plan task.ram=64GiB task.device_memory=14GiB streaming=auto model=qwen3_moe model.checkpoint=random:",
    "task=plan task.ram=64GiB model=qwen3_next model.checkpoint=random: quant=q4_k batch_size=4 kv_dtype=q8_0",
    "task=plan task.ram=64GiB model=gemma4_e2b model.checkpoint=random: quant=q8_0 context_length=8192",
    "task=plan task.ram=4GiB model=llama3_8b model.checkpoint=random:",
    "task=pack quant=q4_k task.output=packed.gguf",
    "task=pack quant=q8_0 task.output=packed.gguf task.overwrite=true",
    "task=pack quant=stored task.output=packed.gguf model.checkpoint=@golden_qwen3@",
    "task=pack quant=mxfp4 task.output=packed.gguf model.checkpoint=@golden_gptoss@",
    "task=models",
    "-m prompt=Hello seed=1,2",
    "-m prompt=Hello dtype=fp32,bf16 max_new_tokens=2",
)
WRONG = (
    "promt=hi",
    "hello world",
    "one two",
    "caht",
    "chat bench",
    "task=plan bench",
    "model=foo",
    "model=llama_3",
    "dtype=foo",
    "dtype=fp32,bf16",
    "quant=q9",
    "quant=q4",
    "streaming=true",
    "streaming=maybe",
    "graph=fast",
    "sampling=hot",
    "task=talk",
    "experiment=none_such",
    "--prompt hi",
    "--cfg jobs",
    "--cfg",
    "--resolve",
    "--cfg job -m",
    "seed=[",
    "~prompt",
    "~outputs",
    "~foo",
    "~model",
    "-m seed=1,2 ~batching",
    "-sc query=bash",
    "-sc install=csh",
    "prompt_ids=1,2,3",
    "prompt_ids=[]",
    "prompt_ids=[1,a]",
    "prompt_ids=[[1],[2]]",
    "prompt_ids=[-1]",
    "prompt_ids=[99999]",
    "prompt=",
    f"prompt=Hello {IDS}",
    "prompt=Hello prompt_file=@prompt.txt@",
    "prompt_file=missing.txt",
    "prompt_file=@latin1.txt@",
    "stop=['']",
    "outputs=false -m seed=1,2",
    "-m outputs=true,false",
    "outputs=off hydra.run.dir=x",
    "outputs=false hydra.mode=MULTIRUN",
    "outputs=false trace=true streaming=on",
    "trace=true",
    "hydra.run.dir=/proc/nowhere",
    "-m promt=1,2",
    "dtype=fp32,foo -m",
    "seed=99999999999999999999",
    "chat=maybe",
    "special_tokens=no",
    "+task.foo=1",
    "++task.foo=1",
    "task.foo=1",
    "task=bench task.text=x",
    "max_new_tokens=abc",
    "max_new_tokens=0",
    "context_length=100000",
    "context_length=2 prompt=Hello",
    "device=tpu",
    "device=cuda",
    "device=cuda:7",
    "kv_dtype=q9",
    "kv_dtype=q8_0,q8_0,q8_0",
    "kv_dtype=fp8",
    "streaming.memory_budget=much",
    "streaming.memory_budget=14",
    "streaming.memory_budget=3XB",
    "streaming=auto streaming.memory_budget=20kB",
    "streaming.memory_budget=20kB",
    "streaming.prefetch=2",
    "streaming=on streaming.prefetch=9",
    "streaming=on streaming.mode=sync streaming.prefetch=1",
    "streaming=on streaming.source=tape",
    "streaming=on streaming.host_memory_budget=0",
    "sampling.top_k=5",
    "sampling.temperature=1 sampling.top_p=2",
    "sampling.temperature=nan",
    "sampling.temperature=inf",
    "batch_size=2 batching.max_sequences=3",
    "batching.cache_tokens=8 context_length=64",
    "threads=100000",
    "model.attention=sdpa",
    "model.fallback=vllm",
    "model.fallback=transformers streaming=on",
    "model.fallback=transformers kv_dtype=q8_0",
    "model.fallback=transformers quant=q4_k",
    "model.fallback=transformers cache.save=x",
    "model.fallback=transformers task=microbench",
    "model.checkpoint=/nowhere",
    "model.checkpoint=nowhere.gguf",
    "model.checkpoint=@cut.gguf@",
    "model.checkpoint=@text.txt@",
    "model.checkpoint=@empty@",
    "model.checkpoint=@damaged@",
    "model.checkpoint=@no_config@",
    "model.checkpoint=hf:no/such",
    "model.checkpoint=hf:nonsense",
    "model.checkpoint=pypi:nothing",
    "model.checkpoint=s3:x",
    "model.checkpoint=random:",
    f"{IDS} model.sha256=12",
    "model.checkpoint=@llama3@",
    "model.checkpoint=@llama3@ prompt=Hello",
    "model.checkpoint=@llama3@ task=chat",
    "model.checkpoint=@llama3@ task=perplexity task.text=@text.txt@",
    "model.checkpoint=@fallback_phi3@",
    f"{IDS} model.checkpoint=@llama3@ chat=on",
    f"{IDS} system=Hi",
    f"{IDS} model.num_hidden_layers=99",
    "prompt=Hello cache.load=missing.cache",
    "prompt=Hello cache.load=@text.txt@",
    "prompt=Hello cache.save=/proc/x",
    "task.prompts_jsonl=missing.jsonl",
    "task.prompts_jsonl=@bad.jsonl@",
    "task.prompts_jsonl=@bad_key.jsonl@",
    "task.prompts_jsonl=@text.txt@",
    "task.prompts_jsonl=@prompts.jsonl@ prompt=Hello",
    "task.output=x.jsonl",
    "task=perplexity",
    "task=perplexity task.text=missing.txt",
    "task=perplexity task.text=@text.txt@ task.window=8 task.stride=9",
    "task=perplexity task.text=@text.txt@ task.path=sideways",
    "task=pack",
    "task=pack quant=q4_k",
    "task=pack quant=q4_k task.output=x.gguf streaming=on",
    "task=pack quant=q4_k task.output=/proc/x.gguf",
    "task=pack quant=q4_k task.output=@prompt.txt@",
    "task=models task.remove=x",
    "task=models task.remove=x task.confirmed=true",
    "task=plan prompt=Hello",
    "task=plan task.ram=lots",
    "task=plan task.link=fast",
    "task=bench prompt=Hello",
    "task=bench task.prompt_tokens=0",
    "task=bench task.prompt_tokens=9999",
    "task=bench task.batch=2 batch_size=3",
    "task=verify task.tokens=0",
    "task=verify task.tokens=99999",
    "task=verify streaming=on task.tokens=8 task.new_tokens=2 task.cosine=2",
    "task=chat prompt=Hello",
    "task=chat chat=off",
)
BARE = (
    "--help",
    "-h",
    "--version",
    "--help task=bench",
    "--help task",
    "--help caht",
    "--help dtype=foo",
    "--help streaming=on",
    "--help sampling",
    "--help model",
    "--help quant=q4_k",
    "--hydra-help",
    "--info defaults",
    "--cfg job",
    "--cfg job model=gemma3 task=plan",
    "--cfg job --resolve streaming=on",
    "--cfg job --package task",
    "-sc install=bash",
    "-sc install=fish",
    "-sc install=zsh",
    "-sc uninstall=bash",
    "",
)


def lines() -> Iterator[Line]:
    """Yield all lines."""
    yield from (Line(tuple(text.split(" "))) for text in RIGHT)
    yield Line(("task=chat",), CHAT)
    yield Line(("task=chat", "sampling=nucleus", "graph=auto", "cache.save=chat.cache"), CHAT)
    yield Line(("task=chat", "model.fallback=transformers"), CHAT)
    yield Line(("task=chat",), SLASH)
    yield Line(("prompt=-",), "two\nlines")
    yield Line(("prompt=-", "chat=off"), "")
    yield Line(("task.prompts_jsonl=-",), '{"prompt_ids": [1, 2]}\n{"prompt": "Hi", "max_new_tokens": 2}\n')
    yield from (Line(tuple(text.split(" "))) for text in WRONG)
    yield Line(("one text", "another text"))
    yield Line(("model=smollm2 is what?",))
    yield from (Line(tuple(filter(None, text.split(" "))), is_based=False) for text in BARE)
    yield from wrong_values()


def wrong_values() -> Iterator[Line]:
    """Yield, for every setting, lines with a text and a negative number, whether or not it takes them."""
    groups = {"": "config", "model.": "model/smollm2", "streaming.": "streaming/on", "sampling.": "sampling/greedy"}
    for prefix, name in {**groups, "quant.": "quant/q4_k"}.items():
        before = ("streaming=on",) if prefix == "streaming." else ("prompt=Hello",)
        for key in _keys(name):
            yield from (Line((*before, f"{prefix}{key}={value}")) for value in ("some", "-7"))
    for path in sorted((CONF / "task").glob("*.yaml")):
        for key in _keys(f"task/{path.stem}"):
            yield from (Line((f"task={path.stem}", f"task.{key}={value}")) for value in ("some", "-7"))


def _keys(name: str) -> Iterator[str]:
    """Yield a file's keys, but for those that choose other files, Hydra's own, and the cache's place."""
    stated = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(stated, dict)
    for key, value in stated.items():
        if key in ("defaults", "hydra", "name", "files", "published", "random_config", "cache_dir"):
            continue
        yield from (f"{key!s}.{inner!s}" for inner in value) if isinstance(value, dict) else (str(key),)
