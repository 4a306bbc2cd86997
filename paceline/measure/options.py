"""What `paceline tune`, `plan` and each verb of `bench` can be asked: a frozen dataclass each, whose fields
become the options of the command line (cli/options.py). Importing this loads nothing heavy: `--help` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.api.options import EngineOptions
from paceline.core.options import option, options_of

PROMPTS_HELP = "Your prompts (.jsonl as Spec-Bench has it, .jsonl.gz or .txt) instead of the shipped ones."
DRAFT_MODEL_HELP = "The smaller model of --method draft_model, or a head's folder."
ROWS_HELP = """Rows that take turns, separated by commas: plain, auto, auto-free (auto without a learned \
head), or a drafter; eagle/5 always drafts five tokens."""
ACCEPTANCE_HELP = """Of a row synthetic/K, whose drafts cost nothing: how often a drafted token is right, by \
its place, such as 0.8,0.7."""
FIT_HELP = """First look for the form of --draft-model that gains most: its dtype, and layers that it can do \
without."""
JSON_HELP = "Also write the report here, with machine, versions and command."
LIMIT_HELP = "At most this many prompts of each task."
TOKENS_HELP = "Most tokens of an answer."
SHAPE_HELP = """A model, a config.json, or a shape: llama-8b, llama-70b, smollm2-135m, qwen3-30b-a3b. No \
weights are read."""
SERVER_HELP = "Further options of `paceline serve`, in one text."
MAIN, LOAD, REQUESTS, REPORT, PEERS = "Options", "Load", "Requests", "Report", "Beside llama.cpp"
HARDWARE, DRAFTS, LAYOUT = "Hardware", "Drafts", "Several devices"


def same(name: str) -> Any:
    """The option of this name that LLM and the other verbs have."""
    ((known, _),) = options_of(EngineOptions, name)
    return field(default=known.default, metadata=known.metadata)


@dataclass(frozen=True, kw_only=True)
class Report:
    model: str = same("model")
    json: Path | None = option(None, MAIN, JSON_HELP)


@dataclass(frozen=True, kw_only=True)
class Loaded(Report):
    """Options of the verbs that load a model into their own process."""

    device: str = same("device")
    dtype: str = same("dtype")
    exact: bool = same("exact")
    tensor_parallel_size: int = same("tensor_parallel_size")
    pipeline_parallel_size: int = same("pipeline_parallel_size")
    load_format: str = same("load_format")


@dataclass(frozen=True, kw_only=True)
class Compare(Report):
    """Compare speeds: methods, precisions and peers, interleaved in one run.

    Every engine is a process of its own and gets the same token ids. An untimed plain run of ours says how
    long each answer is, then every engine writes exactly that many tokens, greedily. Tokens/s is decoding
    alone, from the first token on. Speedup and identity are against the same engine's plain decoding. Peers
    are installed by `make peers`; llama.cpp has two rows, its server's loop and its raw loop (llama_decode
    alone, what llama-bench reports).

    Example: paceline bench --methods none,ngram --peers llama.cpp:Q8_0,transformers --json report.json"""

    prompts: Path | None = option(None, MAIN, PROMPTS_HELP)
    methods: str = option("none,auto,ngram", MAIN, "Drafters, or auto; none is plain decoding.")
    dtypes: str = option("int8,float32", MAIN, "Of our own engine: int8, float32, int4; or none.")
    peers: str = option("none", MAIN, "all, none, llama.cpp, transformers, vllm; of one file llama.cpp:Q8_0.")
    draft_model: str | None = option(None, MAIN, DRAFT_MODEL_HELP)
    limit: int | None = option(None, MAIN, LIMIT_HELP, min=1)
    max_new_tokens: int = option(128, MAIN, TOKENS_HELP, min=1)
    repeats: int = option(3, MAIN, "Timed runs of every prompt; medians are reported.", min=1)
    concurrency: int = option(1, MAIN, "Above 1, that many prompts of a task run together.", min=1)
    plot: Path | None = option(None, MAIN, "Draw speedups and acceptance into this folder.")


@dataclass(frozen=True, kw_only=True)
class Decode(Loaded):
    """Decode prompt by prompt, row by row, on one loaded model, and compare every text with plain decoding's.

    Timed from a request's first token to its last. Engines keep what they learn from prompt to prompt, as in
    use. On a GPU texts are compared with --exact alone. A text that differs is exit status 1.

    Example: paceline bench decode --rows plain,auto,eagle/5 --every 3 --json docs/results/decode_cpu.json"""

    prompts: Path | None = option(None, MAIN, PROMPTS_HELP)
    limit: int | None = option(None, MAIN, LIMIT_HELP, min=1)
    every: int = option(1, MAIN, "Only every n-th prompt.", min=1)
    rows: str = option("plain,auto,auto-free,ngram", MAIN, ROWS_HELP)
    max_new_tokens: int = option(128, MAIN, TOKENS_HELP, min=1)
    seconds: float | None = option(None, MAIN, "Begin no further prompt after this long.", min=1)


@dataclass(frozen=True, kw_only=True)
class Batch(Loaded):
    """Tokens a second by the number of requests at once, as ratios to plain decoding in the same run.

    A wave is that many requests with prompts of their own, timed while all of them decode. Rows take turns
    with the same waves. Where the model is exact, a text that is not plain decoding's is exit status 1.

    With --cold every row is a fresh process, one after the other, and nothing is left out: loading is timed,
    and whole waves, prompts included, from the very first on. --peers vllm: plain, and with our EAGLE head.

    Example: paceline bench batch --cold --rows plain,auto --concurrency 1,4,16 --waves 12 --peers vllm"""

    prompts: Path | None = option(None, MAIN, PROMPTS_HELP)
    concurrency: str = option("1,2,4,8,16,32", MAIN, "Requests at once, separated by commas.")
    rows: str = option("plain,auto-free,auto,suffix/4", MAIN, ROWS_HELP)
    acceptance: str = option("0.8", MAIN, ACCEPTANCE_HELP)
    max_new_tokens: int = option(64, MAIN, "Tokens of each answer.", min=2)
    waves: int = option(4, MAIN, "Waves that count at each number of requests; small ones take more.", min=1)
    cold: bool = option(False, MAIN, "A fresh process for each row; everything from loading on counts.")
    peers: str = option("none", MAIN, "With --cold: vllm, where it is installed, or none.")
    max_num_batched_tokens: int = option(512, MAIN, "In one pass; with many, a wave begins together.", min=1)
    plot: Path | None = option(None, MAIN, "Also draw the curve into this folder.")


@dataclass(frozen=True, kw_only=True)
class Step(Loaded):
    """Time one pass by rows and context, beside the floor that memory and arithmetic set.

    The machine's limits are measured in the same run. Passes take turns and medians are reported: `ms` waits
    for each pass, as a step that needs its result does; `queued` is a pass among several in flight, where a
    GPU never waits for the host. Rows are one request's draft, or with --requests that many requests'.

    Example: paceline bench step --model llama-8b --load-format dummy --dtypes bfloat16,int4 --rows 1,16,64"""

    dtypes: str | None = option(None, MAIN, "Several for --dtype, separated by commas, which take turns.")
    rows: str = option("1,2,4,8,16,32", MAIN, "Rows of a pass for each request, separated by commas.")
    requests: int = option(1, MAIN, "Requests in the pass.", min=1)
    contexts: str = option("512", MAIN, "Cached tokens that each row sees, separated by commas.")
    repeats: int = option(15, MAIN, "Timed passes of each shape; medians are reported.", min=1)
    plot: Path | None = option(None, MAIN, "Also draw what checking more tokens costs into this folder.")


@dataclass(frozen=True, kw_only=True)
class Kernels(Report):
    """Time passes and kernels with 1 to 32 tokens, and say how far they are from the machine's limits.

    Limits are measured in the same run. A pass computes the logits of all its tokens; llama.cpp's are timed
    by its own clock while it reads prompts whose beginning it has cached, and compute the last token's only.
    A product runs over all layers, so that its weights come from memory. Attention is what a pass takes
    longer over the context than over none. A prompt of 512 tokens is timed as well."""

    dtypes: str = option("int8,float32,int4", MAIN, "Precisions, separated by commas.")
    peers: str = option("auto", MAIN, "llama.cpp, llama.cpp:Q8_0, none, or auto: Q8_0 if installed.")
    context: int = option(128, MAIN, "Cached tokens that every pass sees.", min=1)
    repeats: int = option(5, MAIN, "Timed runs of everything; medians are reported.", min=1)


@dataclass(frozen=True, kw_only=True)
class Quality(Report):
    """Perplexity of the same model in several precisions, on contexts of 512 tokens: lower is better.

    Weights and activations are rounded as they are when text is generated. The change is against float32."""

    dtypes: str = option("float32,int8,int4", MAIN, "Precisions, separated by commas.")
    text: Path | None = option(None, MAIN, "Your text file instead of the shipped one.")


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Put load on a running server and tell its latencies, throughput and goodput.

    Requests are sent when they are due (Poisson arrivals at each rate in turn), whether or not earlier ones
    have been answered; with --max-concurrency alone, that many are always in flight. Any server with OpenAI's
    protocol can be measured. Ctrl-C ends the load and reports what was measured. With --peers `paceline
    serve` and llama.cpp's server are started and take turns under the same load; exit status 1 if ours is
    behind at any level or a request fails.

    Examples:

      paceline bench serve --request-rate 1,2,4 --json load.json --plot plots

      paceline bench serve --peers Q8_0,Q4_0,Q4_0+ngram --max-concurrency 1,4,16"""

    base_url: str = option("http://127.0.0.1:8000", MAIN, "Where the server is, with or without /v1.")
    model: str | None = option(None, MAIN, "Its name at the server; left out: the first it has.", "-m")
    api_key: str | None = option(None, MAIN, "Sent as a bearer token.", envvar="OPENAI_API_KEY")
    endpoint: str = option("/v1/chat/completions", MAIN, "/v1/chat/completions or /v1/completions.")
    request_rate: str | None = option(None, LOAD, "Requests a second, with commas; inf: as may be.")
    max_concurrency: str | None = option(None, LOAD, "Most in flight, with commas; alone it paces the load.")
    num_prompts: int = option(32, LOAD, "Requests of each load.", min=1)
    burstiness: float = option(1.0, LOAD, "1: Poisson arrivals; less: in bursts; more: more even.")
    seed: int = option(0, LOAD, "Of arrivals and the order of prompts.")
    num_warmups: int = option(1, LOAD, "Requests beforehand, untimed.", min=0)
    prompts: Path | None = option(None, REQUESTS, PROMPTS_HELP)
    max_new_tokens: int = option(128, REQUESTS, TOKENS_HELP, min=1)
    ignore_eos: bool = option(False, REQUESTS, "Always that many tokens (vLLM's and Paceline's servers).")
    temperature: float = option(0.0, REQUESTS, "0 is greedy.", min=0)
    extra_body: str | None = option(None, REQUESTS, "JSON added to every body; null takes a field out.")
    timeout: float = option(600.0, REQUESTS, "Seconds after which a request has failed.")
    goodput: str = option("ttft:1000,tpot:100", REPORT, "Goals in ms: any of ttft, tpot, e2el; or none.")
    metric_percentiles: str = option("50,90,99", REPORT, "Separated by commas.")
    json: Path | None = option(None, REPORT, JSON_HELP)
    plot: Path | None = option(None, REPORT, "Also draw latency and throughput into this folder.")
    peers: str | None = option(None, PEERS, "llama.cpp's quantizations, with +ngram if it drafts.")
    rounds: int = option(3, PEERS, "Times that each server meets each level, always with new prompts.")
    server_options: str = option("", PEERS, SERVER_HELP)


@dataclass(frozen=True, kw_only=True)
class Soak(Report):
    """Keep a server busy and hurt it: load, clients that leave, engines that are killed, faults, a SIGTERM.

    Starts its own server. Exit status 1 if a request neither ended nor failed clearly, a block is still held
    at the end, memory kept growing, or the event loop was late by 50 ms.

    Examples:

      paceline bench soak kills --count 20 --clients 16

      paceline bench soak --faults 200 --seed 1

      paceline bench soak --faults 1000 --server-options '-tp 2'"""

    what: str = option("load", MAIN, "load, disconnects, kills, faults or sigterm.", is_argument=True)
    faults: int | None = option(None, MAIN, "That many random faults, of every kind.", min=1)
    seed: int = option(0, MAIN, "Of the faults.")
    clients: int = option(16, MAIN, "Clients that ask again and again.", min=1)
    seconds: float = option(60.0, MAIN, "Of load.", min=1)
    count: int = option(100, MAIN, "Clients that leave, or engines that are killed.", min=1)
    may_lag: bool = option(False, MAIN, "Do not fail for a late event loop: others use this machine, too.")
    server_options: str = option("", MAIN, SERVER_HELP)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Rewrite the tables of documents from the results they name.

    Between the lines <!-- table:NAME --> and <!-- end --> goes the table of docs/results/NAME.json, with the
    command and the machine it is from; <!-- table:NAME 2 --> is its second table. <!-- plan:{OPTIONS} --> is
    what `paceline plan` says of layouts, its options as JSON."""

    results: Path = option(Path("docs/results"), MAIN, "The folder of the results.")
    files: str = option("README.md,docs/results.md,docs/scale.md", MAIN, "Documents, with commas.")


@dataclass(frozen=True, kw_only=True)
class Tune(Loaded):
    """Measure which drafter gains most here, and with which K.

    Every K of every drafter is timed in turn with plain decoding, one greedy request at a time. How often a
    drafter is right at which depth and what asking it costs, with the cost of a pass over 1, 2, ... tokens,
    predicts the speedup for every K. What was learned is saved for this model, machine and number of threads;
    `auto` starts from it. Let nothing else run meanwhile: about two minutes with the default model.

    Examples:

      paceline tune --plot speedup.png

      paceline tune --prompts mine.jsonl --methods suffix,quantized -k 2 -k 4 --json tune.json"""

    prompts: Path | None = option(None, MAIN, PROMPTS_HELP)
    limit: int | None = option(None, MAIN, LIMIT_HELP + " Left out: about six in all.", min=1)
    methods: str = option("ngram,suffix,lookahead,early_exit,quantized", MAIN, "Drafters, with commas.")
    draft_model: str | None = option(None, MAIN, DRAFT_MODEL_HELP)
    fit_draft: bool = option(False, MAIN, FIT_HELP)
    k: tuple[int, ...] = option((), MAIN, "Tokens drafted a step; may be repeated.", "-k")
    max_tokens: int = option(32, MAIN, TOKENS_HELP, min=16)
    seconds: float = option(150, MAIN, "Begin no further prompt when the work would take longer.", min=1)
    plot: Path | None = option(None, MAIN, "Draw speedup over K into this PNG file: model and measurement.")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Work out on paper what drafting could gain.

    A pass reads all weights once, however many tokens it checks, and multiplies for each of them: while
    reading takes longer, tokens are checked for free. From that follow the price of a draft, the best K for
    each chance α of a drafted token, and the α from which it pays. --alpha and -k may be repeated.

    Examples:

      paceline plan llama-8b --hardware h200 --draft smollm2-135m --budget 1e18 --plot speedup.png

      paceline plan ./config.json --bandwidth 2000 --flops 300 --memory 80 --batch 8 --alpha 0.7 -k 4

    With --devices it compares layouts: tensor, pipeline and expert parallelism and replicas.

      paceline plan llama-70b --hardware h200 --devices 16 --nodes 2 --batch 64 --context 4096"""

    model: str = option("default", MAIN, SHAPE_HELP, is_argument=True)
    hardware: str | None = option(None, HARDWARE, "h200, h100, a100, rtx4090, l4, m2; this: measured.")
    bandwidth: float | None = option(None, HARDWARE, "GB/s it reads memory with.")
    flops: float | None = option(None, HARDWARE, "TFLOP/s it multiplies with, dense.")
    memory: float | None = option(None, HARDWARE, "GB of memory.")
    dtype: str = option("auto", MAIN, "Of the weights: auto (int8 on CPUs, else bfloat16), int8, int4, ...")
    kv_dtype: str = option("auto", MAIN, "Of K/V: auto (int8 where activations are), float32, bfloat16, ...")
    batch: int = option(1, MAIN, "Sequences that run together.", min=1)
    context: int | None = option(None, MAIN, "Tokens cached of each; left out: 1024 where it fits.", min=0)
    draft: str | None = option(None, DRAFTS, "A draft model; left out: drafts are free.")
    alpha: tuple[float, ...] = option((), DRAFTS, "Chance that a drafted token is accepted.")
    k: tuple[int, ...] = option((), DRAFTS, "Tokens drafted a step.", "-k")
    budget: float | None = option(None, DRAFTS, "FLOPs to train a drafter with, such as 1e18.")
    devices: int | None = option(None, LAYOUT, "Compare the layouts of so many devices.", min=1)
    nodes: int = option(1, LAYOUT, "Machines that they are in.", min=1)
    tensor_parallel_size: int | None = option(None, LAYOUT, "This one; left out: any.", "-tp", min=1)
    pipeline_parallel_size: int | None = option(None, LAYOUT, "This one; left out: any.", "-pp", min=1)
    enable_expert_parallel: bool = option(False, LAYOUT, "Whole experts on ranks; left out: either.")
    link: float | None = option(None, LAYOUT, "GB/s one way between devices of a node.")
    network: float | None = option(None, LAYOUT, "GB/s one way between nodes, for each device.")
    measured: float | None = option(None, LAYOUT, "ms that a pass over one token takes on one device.")
    plot: Path | None = option(None, MAIN, "Draw speedup over K into this PNG file.")
    json: bool = option(False, MAIN, "Print JSON on stdout instead of text.")
