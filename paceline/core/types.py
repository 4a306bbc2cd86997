"""The nouns. Everything else in the package is a verb on these.

p is the target, q the draft. Token ids are plain ints outside the model and int64 tensors inside.
Invariant of a request: `tokens` = prompt + emitted; KV is valid for `tokens[:num_cached]`; while decoding
exactly one token is uncached, and it is the root of the next tree. Only the engine's commit changes a
request.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from paceline.core.tree import Tree

if TYPE_CHECKING:
    import torch

    from paceline.core.errors import PacelineError
    from paceline.core.params import SamplingParams


Column = TypeVar("Column")
BLOCK_SIZE = 16  # tokens of a block of K/V
SCALE_BYTES = 16  # behind the integers of a head's key or value: their scales, float32, rows kept aligned


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end token, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"
    ERROR = "error"  # the request's constraints leave no token to choose


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Constraint(Protocol):
    """A grammar's state in one request. Advanced by commit; verify and drafters advance and roll back."""

    def allowed(self) -> torch.Tensor: ...  # bool [vocab]
    def advance(self, token: int) -> None: ...
    def rollback(self, num_tokens: int) -> None: ...


class TextStop(Protocol):
    """Turns emitted ids into text and sees stop strings."""

    has_stops: bool

    def push(self, token: int) -> bool: ...  # whether a stop string was completed by this token
    def extend(self, tokens: Sequence[int]) -> None: ...  # where there are no stop strings


class TokenLogprobs(NamedTuple):
    token: int
    logprob: float  # of the target's raw logits, before any sampling option
    top: tuple[tuple[int, float], ...]  # the k most likely (token, logprob), most likely first
    rank: int  # 1 for the most likely token


@dataclass(slots=True)
class Cached:
    """A sequence's share of a KV cache: its blocks, and how many of its tokens have valid K/V in them."""

    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # chained, of full blocks registered for reuse
    # Of a model with recurrent layers (runtime/states.py): slots of the state after the cached tokens, then
    # of those that the next pass leaves after its last known row and after each drafted one.
    states: list[int] = field(default_factory=list)
    snapshot: tuple[int, int] | None = None  # a known token of the next pass after which it is kept, where


@dataclass(slots=True, eq=False)
class Request:
    id: str
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    seed: int  # keys all noise; drawn from the system when the user gave none
    priority: int = 0  # lower runs first
    is_streamed: bool = False  # the text is read as it comes: a burst must not keep it for long
    arrival: int = 0
    stop_ids: frozenset[int] = frozenset()  # end tokens (unless ignored) and stop_token_ids
    banned_until_min: frozenset[int] = frozenset()  # ids that may not be chosen before min_tokens
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    text_stop: TextStop | None = None
    leader: Request | None = None  # with n > 1: the sibling whose prompt blocks this one shares
    cache: Cached = field(default_factory=Cached)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: PacelineError | None = None
    # verify rounds so far; keys the noise of drafts and rejections, which may visit a position twice
    num_rounds: int = 0
    num_preemptions: int = 0
    pick: Pick | None = None  # set when the engine takes it, where raw logits are enough to choose tokens
    num_prefix_hits: int = 0  # prompt tokens whose K/V were there already when it first ran
    scores: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens from the second on

    @property
    def is_seeded(self) -> bool:
        return self.params.seed is not None

    @property
    def is_sampled(self) -> bool:
        """Whether drafts are sampled from q; else what the target would choose is drafted."""
        return self.params.seed is None and not self.params.is_greedy

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log-probabilities are wanted and not there yet: each needs the logits of
        the token before it, so those must be computed and not found in a cache."""
        return 0 if self.params.prompt_logprobs is None else self.num_prompt - 1 - len(self.scores)

    @property
    def max_tokens(self) -> int:
        """Of its output; the context may hold less."""
        return sys.maxsize if self.params.max_tokens is None else self.params.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """What one request does in a pass, as the scheduler says."""

    request: Request
    num_new: int  # known tokens computed now
    draft_limit: int = 0  # most draft nodes that could be of use to it
    num_lookahead_tokens: int = 0  # draft nodes it may add: slots are reserved for them
    # All known tokens will be computed: the last is a root, and a token is chosen after it.
    is_caught_up: bool = field(init=False)
    # Of them the last before the root, or before the end of this part of the prompt: each gives the
    # log-probability of the token after it.
    num_scored: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        cached = self.request.cache.num_cached
        self.is_caught_up = self.num_new == len(self.request.tokens) - cached
        if self.request.num_unscored:
            end = min(cached + self.num_new, self.request.num_prompt - 1)
            self.num_scored = max(end - max(cached, len(self.request.scores)), 0)

    @property
    def num_tokens_with_spec(self) -> int:
        return self.request.cache.num_cached + self.num_new + self.num_lookahead_tokens


class Draft(NamedTuple):
    """A guess: a token tree whose node 0 is the request's last token."""

    tree: Tree
    source: str = ""  # the drafter: for statistics and colours
    # node -> [vocab] float64 probabilities its children were sampled from, in order, without replacement
    q: dict[int, torch.Tensor] | None = None
    # the drafter's guess that the whole path to a node is accepted; 1 for the root
    chances: tuple[float, ...] | None = None
    sources: tuple[str, ...] | None = None  # of each node, where several drafters have proposed

    def source_of(self, node: int) -> str:
        return self.source if self.sources is None else self.sources[node]

    def sources_of(self, nodes: Sequence[int]) -> tuple[str, ...]:
        return (self.source,) * len(nodes) if self.sources is None else tuple(map(self.source_of, nodes))

    def cut(self, nodes: Sequence[int]) -> Draft:
        """Of these nodes alone: the root first, and each after its parent."""
        if len(nodes) == len(self.tree.tokens):
            return self
        place = {node: i for i, node in enumerate(nodes)}
        parents = tuple(place.get(self.tree.parents[node], -1) for node in nodes)
        tree = Tree(tuple(self.tree.tokens[node] for node in nodes), parents)
        q = self.q and {place[node]: self.q[node] for node in nodes if node in self.q}
        chances = self.chances and tuple(self.chances[node] for node in nodes)
        return Draft(tree, self.source, q, chances, self.sources and tuple(self.sources[n] for n in nodes))

    @property
    def num_drafted(self) -> int:
        return len(self.tree.tokens) - 1


class Verdict(NamedTuple):
    """What came of checking a draft."""

    path: tuple[int, ...]  # accepted nodes, root first
    tokens: tuple[int, ...]  # accepted tokens, then the target's own next token: len(path) of them
    num_drafted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1


class Pick(NamedTuple):
    """Where raw logits are enough: argmax(logits / temperature + gumbel(seed, position)) after the cuts."""

    temperature: float  # 0: greedy
    seed: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Segment(NamedTuple):
    """One request's rows in a pass: known tokens as a chain, then maybe a tree hanging from the last one."""

    tokens: Sequence[int]
    cache: Cached
    parents: Sequence[int] | None = None  # local index of each row's parent, -1 for the first; None: a chain
    num_logits: int = 1  # logits are wanted for the last `num_logits` rows
    pick: Pick | None = None  # a device that can chooses the tokens there itself
    num_scored: int = 0  # rows right before those whose logits are wanted too


class ColumnsOf(NamedTuple, Generic[Column]):
    """Everything a forward pass reads, flat over requests."""

    # [T]; -1 - i: what the pass before picked at the i-th of its wanted rows, where passes run by themselves
    input_ids: Column
    positions: Column  # [T]
    slots: Column  # [T]: where each row's K/V is written
    parents: Column  # [T]: row of the parent within this pass, or -1 if it follows the cached prefix directly
    request_of: Column  # [T]: index into the next three
    starts: Column  # [R+1]: first row of each request
    block_tables: Column  # [R * max_blocks], padded with 0; as a tensor [R, max_blocks]
    prefix_lens: Column  # [R]: cached tokens each row of the request sees, before its ancestors in this pass
    rows: Column  # [L]: rows whose logits are wanted
    # [T], or nothing if no layer is recurrent: the slot of the state that a row goes on from, -1 for what the
    # row before it leaves, and the slot where it leaves its own, -1 for none
    states_in: Column
    states_out: Column


Columns = ColumnsOf[list[int]]


class Moves(NamedTuple):
    """K/V to be copied between slots before a pass. Everything is read before anything is written."""

    sources: list[int]
    targets: list[int]  # no slot twice


@dataclass(eq=False)
class Batch:
    """The columns as int64 in one piece of memory, cut apart when asked for: making a tensor costs more than
    the few numbers in it. Built by core/batch.py, never changed."""

    columns: Columns
    device: Any = "cpu"
    picks: Sequence[Pick] | None = None  # for each of the wanted rows; None where one of them needs more
    moves: Moves | None = None
    block_size = BLOCK_SIZE

    @cached_property
    def flat(self) -> array[int]:
        """Made when first asked for: a GPU reads the columns as they are."""
        flat = array("q")
        for column in self.columns:
            flat.fromlist(column)
        return flat

    @property
    def num_requests(self) -> int:
        return len(self.columns.prefix_lens)

    def addresses(self) -> list[int]:
        """Where each column lies."""
        sizes = [8 * len(column) for column in self.columns[:-1]]
        return list(accumulate(sizes, initial=self.flat.buffer_info()[0]))

    def tensors(self) -> ColumnsOf[torch.Tensor]:
        """As torch reads them, int64."""
        import torch

        whole = torch.tensor(self.flat, dtype=torch.int64, device=self.device)
        parts = ColumnsOf(*whole.split([len(column) for column in self.columns]))
        return parts._replace(block_tables=parts.block_tables.view(self.num_requests, -1))


class PassSizes(NamedTuple):
    """The largest passes that an engine will ask for, beside prompts."""

    requests: int  # of a batch
    nodes: int  # of a draft


class Output(NamedTuple):
    # [L, vocab]; float32, on a GPU of the pass's dtype; the next pass may overwrite them: copy what you keep
    logits: torch.Tensor
    hidden: Mapping[int, torch.Tensor]  # layer -> [T, hidden]: the residual stream after that many layers
    picked: Sequence[int] | None = None  # [L]: chosen on the device, -1 where the logits are not finite
    top: torch.Tensor | None = None  # [L, k] int64: the most likely tokens, if asked for, best first


class Needs(NamedTuple):
    """What a drafter asks of the target's pass."""

    hidden_layers: tuple[int, ...] = ()
    top_tokens: int = 0  # how many of the most likely tokens at each node of a draft
    verdicts: bool = True  # whether it learns from passes at all; not if it reads the requests' tokens alone


class Seen(NamedTuple):
    """What a pass showed about one request, after the commit: what a drafter may learn from. Its rows: known
    tokens, the last of them the root, then drafted nodes."""

    request: Request
    num_known: int  # rows of known tokens
    draft: Draft | None  # None: a part of the prompt, and nothing was judged
    verdict: Verdict | None
    top: torch.Tensor | None  # [nodes, k]: the most likely tokens at the root and each drafted node
    hidden: Mapping[int, torch.Tensor]  # layer -> [rows, hidden], as asked for


Answers = dict[int, list[tuple[int, Draft]]]  # by scheduled request: (number of the drafter, its draft)


class Round(NamedTuple):
    """One pass of a burst, as the device wrote it down."""

    drafts: list[Draft]  # what was checked, by request
    verdicts: list[Verdict | None]  # by request; None where the logits after the root are not finite
    # All that was drafted, also what was not checked: (source, draft). Empty: what was checked and no more.
    answers: tuple[tuple[str, Draft], ...] = ()
    seconds: float | None = None  # of the round, where the device has measured it
    head_seconds: float = 0.0  # of drafting with a learned head, within them
    num_read: int | None = None  # rows that a head has read; None: all that it was shown


class Burst(Protocol):
    """Passes that follow each other on a device without the host; a few are under way at a time."""

    def __len__(self) -> int: ...  # rounds sent so far
    @property
    def num_left(self) -> int: ...  # rounds that there is room for beside them
    def more(self) -> None: ...  # send another
    def round(self, number: int, roots: Sequence[int]) -> Round: ...  # waits; roots: last tokens before
    def hidden(self, number: int) -> Mapping[int, torch.Tensor]: ...  # layer -> [rows, hidden], not yet read
